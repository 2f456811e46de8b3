// merge and finish: the order of merging, fully masked key ranges, NaN and infinity, states with strides.

#include "attention_problem.hpp"
#include "attention_state_problem.hpp"
#include "placed.hpp"
#include "test.hpp"

namespace attention_problem::state_problem::attention_merge_test {

/// The exact sums Σ exp(c·z) and Σ exp(c·z)·v of states.
template <class A>
struct Sums {
  std::vector<Real> sum, o;

  explicit Sums(const State<A>& like) : sum(like.sum.size()), o(like.o.size()) {}
  void add(const State<A>& state) {
    for (std::size_t i = 0; i < sum.size(); ++i) {
      sum[i] += Real(state.sum[i]) * std::exp2(Real(state.shift[i]));
    }
    for (std::size_t i = 0; i < o.size(); ++i) {
      o[i] += Real(state.o[i]) * std::exp2(Real(state.shift[i * sum.size() / o.size()]));
    }
  }
};

/// Counts errors above one rounding per merge, relative to Σ exp(c·z) and Σ exp(c·z)·|v|.
template <class A>
int count_above_bound(const State<A>& merged_state, const Sums<A>& exact, const Sums<A>& magnitude,
                      int merges) {
  Sums<A> ours(merged_state);
  ours.add(merged_state);
  // (1 + ε/2)^merges - 1: later merges round the results of earlier merges.
  const Real bound = std::expm1(static_cast<Real>(merges) * std::log1p(rounding<A>));
  int above = 0;
  for (std::size_t i = 0; i < ours.sum.size(); ++i) {
    if (!(std::abs(ours.sum[i] - exact.sum[i]) <= bound * exact.sum[i])) ++above;
  }
  for (std::size_t i = 0; i < ours.o.size(); ++i) {
    if (!(std::abs(ours.o[i] - exact.o[i]) <= bound * magnitude.o[i])) ++above;
  }
  return above;
}

template <class T>
void check_orders(double deviation) {
  for (const Shape& shape : shapes) {
    const Problem<T> problem(shape, deviation);
    Problem<T> absolute = problem;
    for (T& value : absolute.v) value = std::abs(value);
    const FourHeads<T> heads(shape.heads);
    constexpr index_t count = 7;
    for_each_target([&](const std::string& target) {
      std::vector<State<T>> parts;
      Sums<T> exact{State<T>(shape)}, magnitude = exact;
      for (index_t i = 0; i < count; ++i) {
        const index_t begin = i * shape.keys / count, end = (i + 1) * shape.keys / count;
        parts.push_back(partial(problem, begin, end, heads.scaling(), Causal{}));
        exact.add(parts.back());
        magnitude.add(partial(absolute, begin, end, heads.scaling(), Causal{}));
      }
      const auto forward = [&](index_t from, index_t to) {
        State<T> state = parts[static_cast<std::size_t>(from)];
        for (index_t i = from + 1; i < to; ++i) state = merged(state, parts[static_cast<std::size_t>(i)]);
        return state;
      };
      State<T> backward = parts.back();
      for (index_t i = count - 1; i-- > 0;) backward = merged(backward, parts[static_cast<std::size_t>(i)]);
      const State<T> tree =
          merged(merged(forward(0, 2), forward(2, 4)), merged(forward(4, 6), forward(6, 7)));
      INFO(target << ' ' << name_of(shape));
      CHECK(count_above_bound(forward(0, count), exact, magnitude, count - 1) == 0);
      CHECK(count_above_bound(backward, exact, magnitude, count - 1) == 0);
      CHECK(count_above_bound(tree, exact, magnitude, count - 1) == 0);
    });
  }
}

TEST_CASE("each merge adds at most one rounding of the sums, in any order", "[attention][state]") {
  check_orders<float>(1);
  check_orders<float>(3);
  check_orders<double>(1);
}

TEST_CASE("merge of two states is commutative", "[attention][state]") {
  for (const Shape& shape : shapes) {
    const Problem<float> problem(shape, 3);
    const FourHeads<float> heads(shape.heads);
    const index_t half_way = shape.keys / 2;
    const State<float> a = partial(problem, 0, half_way, heads.scaling(), Causal{});
    const State<float> b = partial(problem, half_way, shape.keys, heads.scaling(), Causal{});
    INFO(name_of(shape));
    CHECK(merged(a, b) == merged(b, a));
  }
}

TEST_CASE("merge of a span merges the states in order", "[attention][state]") {
  const Problem<float> problem(shapes[1]);
  const FourHeads<float> heads;
  State<float> a = partial(problem, 0, 100, heads.scaling(), Full{}),
               b = partial(problem, 100, 170, heads.scaling(), Full{}),
               c = partial(problem, 170, 300, heads.scaling(), Full{});
  const State<float> expected = merged(merged(a, b), c);
  const std::array<AttentionState<float>, 2> others{b.view(), c.view()};
  ssmax::merge<float>(a.view(), others);
  CHECK(a == expected);
  ssmax::merge<float>(a.view(), std::span<const AttentionState<float>>{});
  CHECK(a == expected);
}

TEST_CASE("merge of a span throws for one mismatched state before it changes a state", "[attention][state]") {
  const Problem<float> problem(shapes[1]);
  State<float> a = partial(problem, 0, 100, ssmax::Softmax{}, Full{}),
               b = partial(problem, 100, 300, ssmax::Softmax{}, Full{}), other({1, 1, 1, 1, 1, 1, 1});
  const State<float> before = a;
  const std::array<AttentionState<float>, 2> others{b.view(), other.view()};
  CHECK_THROWS_AS(ssmax::merge<float>(a.view(), others), std::invalid_argument);
  CHECK(a == before);
}

TEST_CASE("a state without values has shifts and sums", "[attention][state]") {
  for (const index_t queries : {3, 40}) {
    const Problem<float> problem({1, 2, 1, queries, 50, 8, 0}), same({1, 2, 1, queries, 50, 8, 4});
    const State<float> state = partial(problem, 0, 50, ssmax::Softmax{}, Full{}),
                       expected = partial(same, 0, 50, ssmax::Softmax{}, Full{});
    CHECK(same_bits(state.shift, expected.shift));
    CHECK(same_bits(state.sum, expected.sum));
  }
}

// ---- Fully masked ranges, NaN and infinity ----------------------------------------------------------------

TEST_CASE("keys that are masked for all queries give the neutral state", "[attention][state]") {
  for (const Shape& shape : shapes) {
    const FourHeads<float> heads(shape.heads);
    const Problem<float> problem(shape);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const State<float> all = partial(problem, 0, shape.keys, heads.scaling(), Full{});
      const std::vector<index_t> none(static_cast<std::size_t>(shape.batch));
      for (const State<float>& empty :
           {partial(problem, 1, 1, heads.scaling(), Full{}),
            partial(problem, 0, shape.keys, heads.scaling(), ssmax::KeyLengths{none})}) {
        CHECK(std::ranges::all_of(empty.shift, [](float x) { return x == -infinity<float>; }));
        CHECK(std::ranges::all_of(empty.sum, [](float x) { return x == 0; }));
        CHECK(std::ranges::all_of(empty.o, [](float x) { return x == 0; }));
        CHECK(merged(all, empty) == all);
        CHECK(merged(empty, all) == all);
        CHECK(merged(empty, empty) == empty);
        const Output<float> output = finished(empty);
        CHECK(std::ranges::all_of(output.out, [](float x) { return x == 0; }));
        CHECK(std::ranges::all_of(output.lse, [](float x) { return x == -infinity<float>; }));
        const Output<float> with_sinks = finished(empty, std::vector<float>(heads.s.size(), 1.5F));
        CHECK(std::ranges::all_of(with_sinks.out, [](float x) { return x == 0; }));
        CHECK(std::ranges::all_of(with_sinks.lse, [](float x) { return x == 1.5F; }));
      }
    });
  }
}

TEST_CASE("NaN in one state makes the merged result NaN", "[attention][state]") {
  for (const Shape& shape : {shapes[0], shapes[1]}) {
    Problem<float> problem(shape);
    std::fill_n(problem.k.begin() + 200 * shape.d, shape.d, nan<float>);
    const FourHeads<float> heads;
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const State<float> clean = partial(problem, 0, 150, heads.scaling(), Full{}),
                         spoiled = partial(problem, 150, 300, heads.scaling(), Full{});
      for (const State<float>& state : {merged(clean, spoiled), merged(spoiled, clean)}) {
        const Output<float> output = finished(state);
        // The heads of the first batch entry that read kv head 0.
        const auto rows = static_cast<std::size_t>(2 * shape.queries);
        CHECK(std::all_of(output.lse.begin(), output.lse.begin() + static_cast<index_t>(rows),
                          [](float x) { return std::isnan(x); }));
        CHECK(std::isnan(output.out.front()));
        CHECK(std::none_of(output.lse.begin() + static_cast<index_t>(rows), output.lse.end(),
                           [](float x) { return std::isnan(x); }));
      }
    });
  }
}

TEST_CASE("merge of states whose logits differ widely", "[attention][state][slow]") {
  for (const Shape& shape : {shapes[0], shapes[1]}) {
    for (const float factor : {30.0F, 3e3F, 1e7F}) {
      Problem<float> problem(shape);
      for (index_t h = 0; h < shape.batch * shape.kv_heads; ++h) {
        for (index_t i = 100 * shape.d; i < 200 * shape.d; ++i) {
          problem.k[static_cast<std::size_t>(h * shape.keys * shape.d + i)] *= factor;
        }
      }
      const Expected<float> expected = expect(problem, all_keys, one);
      for_each_target([&](const std::string& target) {
        Rules<float> rules;
        const ssmax::Softmax softmax;
        const State<float> a = partial(problem, 0, 100, softmax, Full{}),
                           b = partial(problem, 100, 200, softmax, Full{}),
                           c = partial(problem, 200, 300, softmax, Full{});
        const std::string name = name_of(shape) + "times " + std::to_string(factor);
        rules.take(finished(merged(merged(a, b), c)), expected, name);
        rules.take(finished(merged(c, merged(b, a))), expected, name);
        rules.check(target);
      });
    }
  }
}

TEST_CASE("finish can write into the state, and lse is optional", "[attention][state]") {
  const Problem<float> problem(shapes[1]);
  const FourHeads<float> heads;
  for_each_target([&](const std::string&) {
    State<float> state = partial(problem, 0, 300, heads.scaling(), Full{});
    const Output<float> expected = finished(state);
    ssmax::finish<float>(state.view(), state.view().o);
    CHECK(same_bits(state.o, expected.out));
  });
}

TEST_CASE("states with strides of their own", "[attention][state]") {
  const Shape& s = shapes[1];
  const Problem<float> problem(s);
  const FourHeads<float> heads;
  const State<float> a = partial(problem, 0, 100, heads.scaling(), Full{}),
                     b = partial(problem, 100, 300, heads.scaling(), Full{});
  // [batch, query, head, 2 + channels]: sum, shift and o of a row beside each other.
  const index_t pitch = s.dv + 2;
  std::vector<float> together(static_cast<std::size_t>(s.batch * s.queries * s.heads * pitch), -55.0F);
  const std::array<index_t, 4> strides{s.queries * s.heads * pitch, pitch, s.heads * pitch, 1};
  const View<float, 4> o(together.data(), {s.batch, s.heads, s.queries, s.dv}, strides);
  State<float> apart(s);
  const AttentionState<float> into{apart.view().shift, apart.view().sum, o};
  ssmax::attention({.q = problem.q_view(),
                    .k = problem.k_view(),
                    .v = problem.v_view(),
                    .state = into,
                    .all_keys = s.keys},
                   heads.scaling(), Full{});
  const State<float> whole = partial(problem, 0, 300, heads.scaling(), Full{});
  const auto same_o = [&](const State<float>& state) { return differences(o, state.o) == 0; };
  CHECK(same_o(whole));
  State<float> more = partial(problem, 0, 100, heads.scaling(), Full{});
  ssmax::merge<float>(into, more.view());
  CHECK(same_o(merged(whole, more)));
  CHECK(std::ranges::count(together, -55.0F) == 2 * s.batch * s.queries * s.heads);
}

}  // namespace attention_problem::state_problem::attention_merge_test
