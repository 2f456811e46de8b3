// Scaled sinks: c multiplies a sink like the logit of a key, and the sink adds to the gradient of c.

#include "attention_backward_problem.hpp"
#include "decode_problem.hpp"
#include "score_formulas.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::attention_scaled_sinks_test {

/// Checks forward and backward against the definition on every target.
template <class T, class M, class C = Identity>
void check(const Shape& shape, const M& mask, const Visible& visible, const std::vector<Compute<T>>& sinks,
           const C& score = {}, const Formula& formula = {}) {
  using A = Compute<T>;
  const Problem<T> problem(shape);
  const FourHeads<A> heads(shape.heads);
  const AttentionOptions<T> options{.sinks = sinks, .scaled_sinks = true};
  auto definition = define(problem, visible, heads.multiplier(), options, formula, {});
  definition.scaled_sinks = true;
  const attention_problem::Expected<T> expected{
      reference::attend(inputs_of<Real>(problem, options, {}), definition),
      reference::attend(inputs_of<A>(problem, options, {}), definition)};
  const Expectation<T> gradients = expect(problem, definition, options);
  for_each_target([&](const std::string& target) {
    attention_problem::Rules<T> rules;
    rules.take(run(problem, heads.scaling(), mask, score, options), expected, name_of(shape));
    rules.check(target);

    std::vector<A> ds(4), db(4);
    Rules<T> backward;
    const auto got = backward.run(problem, gradients, heads.scaling().gradient(ds, db), mask, score, options);
    backward.take(
        ds, got, [&](const auto& g) { return per_head(g, shape, ln); }, "ds");
    backward.take(
        db, got, [&](const auto& g) { return per_head(g, shape, unweighted); }, "db");
    backward.check(target);
  });
}

TEST_CASE("a scaled sink is a logit and adds to the gradient of c", "[attention][backward][sinks][slow]") {
  for (const Shape& shape : every_driver) {
    check<float>(shape, Causal{}, keys_before, {0.5F, -3, 2, 0});
    check<double>(shape, Full{}, all_keys, {0.5, -infinity<double>, 2, 7});
    check<float>(shape, Causal{}, keys_before, {0.5F, -3, 2, 1}, Softcap{3}, Formula(Capped{3}));
  }
}

TEST_CASE("a scaled sink has the weight of a key with the same logit and value 0",
          "[attention][decode][sinks]") {
  // One additional key with logit 0.75 and value 0. c is the same for both n.
  const Shape shape{1, 2, 2, 20, 30, 4, 3}, larger{1, 2, 2, 20, 31, 4, 3};
  const Problem<double> problem(shape);
  Problem<double> with_key(larger);
  with_key.q = problem.q;
  for (std::size_t row = 0; row < 40; ++row)
    with_key.q[row * 4] = 1;  // so that q·k below is the same for all
  Problem<double> without_key = problem;
  without_key.q = with_key.q;
  for (std::size_t head = 0; head < 2; ++head) {
    for (std::size_t key = 0; key < 31; ++key) {
      for (std::size_t i = 0; i < 4; ++i) {
        with_key.k[(head * 31 + key) * 4 + i] =
            key == 30 ? (i == 0 ? 1.5 : 0) : problem.k[(head * 30 + key) * 4 + i];
      }
      for (std::size_t i = 0; i < 3; ++i) {
        with_key.v[(head * 31 + key) * 3 + i] = key == 30 ? 0 : problem.v[(head * 30 + key) * 3 + i];
      }
    }
  }
  const std::vector<double> sinks{0.75, 0.75}, s{1.3, -0.4};
  const auto c = [&](const ssmax::Row& row) { return s[static_cast<std::size_t>(row.head)]; };
  const auto as_sink = run(without_key, c, Full{}, {.sinks = sinks, .scaled_sinks = true});
  const auto as_key = run(with_key, c, Full{});
  for (std::size_t i = 0; i < as_key.out.size(); ++i)
    CHECK(as_sink.out[i] == Approx(as_key.out[i]).epsilon(1e-13));
  for (std::size_t i = 0; i < as_key.lse.size(); ++i)
    CHECK(as_sink.lse[i] == Approx(as_key.lse[i]).epsilon(1e-13));

  // Decode has the same sinks.
  const decode_problem::Shape sequences{2, 1, 3, 8, 5, {70, 33}};
  const decode_problem::Data<float> data(sequences);
  const auto cache = decode_problem::filled<float>(data);
  const std::vector<float> of_decode{0.5F, -1};
  const std::vector<float> times_3{1.5F, -3};
  const auto scaled =
      run(data, cache, ssmax::Constant{3}, Causal{}, Identity{}, {.sinks = of_decode, .scaled_sinks = true});
  const auto plain = run(data, cache, ssmax::Constant{3}, Causal{}, Identity{}, {.sinks = times_3});
  CHECK(same_bits(scaled.out, plain.out));
  CHECK(same_bits(scaled.lse, plain.lse));
}

TEST_CASE("states over key ranges count a scaled sink once", "[attention][backward][sinks]") {
  const Shape shape{1, 2, 1, 20, 50, 8, 6};
  const Problem<double> problem(shape);
  const std::vector<double> sinks{0.5, 2}, s{0.9, -0.4};
  const AttentionOptions<double> options{.sinks = sinks, .scaled_sinks = true};
  const auto output = run(problem, SSMax<double>{s}, Causal{}, options);
  std::vector<double> ds(2), ds_of_parts(2);
  backward(problem, output, SSMax<double>{s}.gradient(ds), Causal{}, Identity{}, options);
  Result<double> result(problem);
  for (const index_t first : {0, 25}) {
    const View<const double, 4> k(problem.k.data() + first * 8, {1, 1, 25, 8}),
        v(problem.v.data() + first * 6, {1, 1, 25, 6});
    ssmax::attention_backward<double>(backward_with({.q = problem.q_view(),
                                                     .k = k,
                                                     .v = v,
                                                     .out = output.out_view(),
                                                     .lse = output.lse_view(),
                                                     .first_key = first,
                                                     .all_keys = 50},
                                                    options),
                                      {.dout = problem.dout_view(),
                                       .dlse = problem.dlse_view(),
                                       .dq = {result.dq.data(), {1, 2, 20, 8}},
                                       .dk = {result.dk.data(), {1, 1, 25, 8}},
                                       .dv = {result.dv.data(), {1, 1, 25, 6}}},
                                      SSMax<double>{s}.gradient(ds_of_parts), Causal{});
  }
  for (std::size_t head = 0; head < 2; ++head) CHECK(ds_of_parts[head] == Approx(ds[head]).epsilon(1e-12));
}

}  // namespace attention_problem::backward_problem::attention_scaled_sinks_test
