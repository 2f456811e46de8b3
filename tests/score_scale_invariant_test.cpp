// The scale-invariant score: a factor and an offset of every logit, by the distance of query and key.

#include "attention_backward_problem.hpp"
#include "decode_problem.hpp"
#include "refusal.hpp"
#include "score_formulas.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::score_scale_invariant_test {

TEST_CASE("the formula, by table and beyond it", "[score]") {
  const auto at = [](const ScaleInvariant& score, auto z, index_t query, index_t key) {
    return score(z, Key{{}, 0, query, key});
  };
  const auto square = [](double t, double tau) { return 1 + 2 * std::log(1 + t / tau); };
  for (const index_t positions : {0, 1, 4, 4096}) {
    const ScaleInvariant score(10, positions), narrow(0.5, positions);
    CHECK(at(score, 3.0, 7, 7) == 3);
    for (const index_t t : {1, 3, 4, 90, 5000}) {
      const double a = square(static_cast<double>(t), 10);
      CHECK(at(score, 3.0, t, 0) == Approx(std::sqrt(a) * 3 + 1 - a).epsilon(1e-14));
      CHECK(at(score, 3.0F, 0, t) == Approx(std::sqrt(a) * 3 + 1 - a).epsilon(1e-6));
      const double b = square(static_cast<double>(t), 0.5);
      CHECK(at(narrow, -1.0, t, 0) == Approx(-std::sqrt(b) + 1 - b).epsilon(1e-14));
      CHECK(narrow.derivative(2.0, Key{{}, 0, t, 0}) == Approx(std::sqrt(b)).epsilon(1e-14));
    }
    CHECK(at(score, -std::numeric_limits<double>::infinity(), 9, 0) ==
          -std::numeric_limits<double>::infinity());
  }
  const ScaleInvariant score(10, 4);
  // Inside the table factors returns the table; beyond it, scratch.
  std::array<double, 8> wide{};
  std::array<float, 8> single{};
  CHECK(score.factors(-3, 7, wide.data()) != wide.data());
  CHECK(score.factors(-4, 1, wide.data()) == wide.data());
  CHECK(wide[0] == score.derivative(0.0, Key{{}, 0, 4, 0}));
  CHECK(score.factors(-3, 8, single.data()) == single.data());
  CHECK(single[7] == score.derivative(0.0F, Key{{}, 0, 0, 4}));
  CHECK(score.factors(3, 1, single.data()) != single.data());
  CHECK(score.factors(4, 1, single.data()) == single.data());
  check_refused({"ScaleInvariant", "tau", "0"}, [] { return ScaleInvariant(0); });
  check_refused({"ScaleInvariant", "tau", "nan"}, [] { return ScaleInvariant(std::nan("")); });
  check_refused({"ScaleInvariant", "positions", "-1"}, [] { return ScaleInvariant(10, -1); });
}

TEST_CASE("scale-invariant attention and its backward", "[attention][backward][score][bfloat16][slow]") {
  const ScaleInvariant score(10);
  const ScaleInvariant short_table(10, 100);  // the same formula, key by key beyond it
  // One head for each kv head: the queries of a vector stand side by side.
  constexpr Shape side_by_side{1, 3, 3, 80, 131, 8, 8};
  std::vector<Shape> shapes(every_driver.begin(), every_driver.end());
  shapes.push_back(side_by_side);
  for (const Shape& shape : shapes) {
    const Problem<float> single(shape);
    const Problem<double> twofold(shape);
    check(single, Causal{}, keys_before, score, Formula(Stretched{10}));
    check(single, Full{}, all_keys, short_table, Formula(Stretched{10}));
    check(twofold, Causal{}, keys_before, short_table, Formula(Stretched{10}));
    check(twofold, Full{}, all_keys, score, Formula(Stretched{10}));
    check(single, Causal{}, keys_before, Softcap{3} | score, Formula(Then<Capped, Stretched>{{3}, {10}}));
  }
  const Problem<ssmax::bfloat16> narrow(side_by_side);
  check_score<ssmax::bfloat16>(narrow, Causal{}, keys_before, score, Formula(Stretched{10}));
}

TEST_CASE("distances are those of the mask's positions", "[attention][backward][score]") {
  // Two documents that stand apart, the second after the first: positions restart.
  const Shape shape{1, 2, 1, 60, 60, 8, 6};
  const std::vector<index_t> begins{0, 23, 60};
  const Documents mask(begins, true);
  const auto begin_of = [](index_t at) { return at < 23 ? index_t{0} : index_t{23}; };
  const auto visible = [&](const Query& query, index_t key) {
    return key <= query.index && begin_of(key) == begin_of(query.index);
  };
  const Positions positions{
      .of_query = [&](const Query& query) { return query.index - begin_of(query.index); },
      .of_key = [&](const Query&, index_t key) { return key - begin_of(key); }};
  const Problem<float> problem(shape);
  check(problem, mask, visible, ScaleInvariant(10), Formula(Stretched{10, positions}), {}, positions);
}

TEST_CASE("decode's scores are scale-invariant, too", "[decode][score]") {
  const auto formula = [](Real z, index_t, index_t distance) {
    const Real square = 1 + 2 * std::log(1 + std::abs(static_cast<Real>(distance)) / 10);
    return std::sqrt(square) * z + 1 - square;
  };
  for (const decode_problem::Shape& shape : decode_problem::few_and_many) {
    const decode_problem::Data<float> data(shape, 2);
    const auto cache = decode_problem::filled<float>(data);
    decode_problem::check(data, cache, decode_problem::Expected<float>(data, {.score = formula}),
                          ssmax::Softmax{}, Causal{}, ScaleInvariant(10));
    decode_problem::check(data, cache, decode_problem::Expected<float>(data, {.score = formula}),
                          ssmax::Softmax{}, Causal{}, ScaleInvariant(10, 20));
  }
}

}  // namespace attention_problem::backward_problem::score_scale_invariant_test
