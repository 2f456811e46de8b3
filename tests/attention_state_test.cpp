// attention_partial, merge and finish: keys in any cut, merged in any order, are attention over all of them, with n of the
// whole row.

#include <algorithm>
#include <array>
#include <cmath>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "attention_problem.hpp"
#include "catch.hpp"

namespace attention_state_test {

using attention_problem::all_keys;
using attention_problem::AttentionOptions;
using attention_problem::Compute;
using attention_problem::expect;
using attention_problem::Expected;
using attention_problem::FourHeads;
using attention_problem::infinity;
using attention_problem::keys_before;
using attention_problem::Output;
using attention_problem::Problem;
using attention_problem::Real;
using attention_problem::rounding;
using attention_problem::Rules;
using attention_problem::run;
using attention_problem::Shape;
using ssmax::AttentionState;
using ssmax::Causal;
using ssmax::Full;
using ssmax::Identity;
using ssmax::index_t;
using ssmax::Query;
using ssmax::SlidingWindow;
using ssmax::View;

/// A state and its memory.
template <class A>
struct State {
  Shape shape;
  std::vector<A> shift, sum, o;

  explicit State(const Shape& s)
      : shape(s),
        shift(static_cast<std::size_t>(s.batch * s.heads * s.queries), A{-77}),
        sum(shift),
        o(shift.size() * static_cast<std::size_t>(s.dv), A{-77}) {}
  AttentionState<A> view() {
    const std::array<index_t, 3> rows{shape.batch, shape.heads, shape.queries};
    return {{shift.data(), rows}, {sum.data(), rows}, {o.data(), {rows[0], rows[1], rows[2], shape.dv}}};
  }
  bool operator==(const State& other) const {
    return same_bits(shift, other.shift) && same_bits(sum, other.sum) && same_bits(o, other.o);
  }
};

/// Attention over keys [begin, end) of the problem's.
template <class T, class S, class M, class C = Identity>
State<Compute<T>> partial(const Problem<T>& problem, index_t begin, index_t end, const S& scaling,
                          const M& mask, const C& score = {}, const AttentionOptions<T>& options = {}) {
  const Shape& s = problem.shape;
  State<Compute<T>> result(s);
  ssmax::attention_partial<T>({.q = problem.q_view(),
                               .k = {problem.k.data() + begin * s.d,
                                     {s.batch, s.kv_heads, end - begin, s.d},
                                     {s.kv_heads * s.keys * s.d, s.keys * s.d, s.d, 1}},
                               .v = {problem.v.data() + begin * s.dv,
                                     {s.batch, s.kv_heads, end - begin, s.dv},
                                     {s.kv_heads * s.keys * s.dv, s.keys * s.dv, s.dv, 1}},
                               .first_key = begin,
                               .keys = s.keys,
                               .state = result.view()},
                              scaling, mask, score, options);
  return result;
}

template <class A>
Output<A> finished(State<A> state, const std::vector<A>& sinks = {}) {
  const Shape& s = state.shape;
  Output<A> output(s);
  ssmax::finish<A>(state.view(), {output.out.data(), {s.batch, s.heads, s.queries, s.dv}},
                   {output.lse.data(), {s.batch, s.heads, s.queries}}, sinks);
  return output;
}

template <class A>
State<A> merged(State<A> a, State<A> b) {
  ssmax::merge<A>(a.view(), b.view());
  return a;
}

constexpr std::array<Shape, 6> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 61, 300, 9, 24},
    {1, 2, 1, 70, 33, 8, 9},
    {1, 2, 2, 3, 2100, 6, 3},
    {1, 1, 1, 20, 2100, 6, 3},
    {1, 1, 1, 2, 3, 5, 4},
}};

/// Where keys are cut, ends included: nowhere, at borders of blocks and beside them, anywhere, with empty parts.
std::vector<std::vector<index_t>> cuts(index_t keys) {
  std::vector<std::vector<index_t>> result{
      {0, keys}, {0, 0, 1, 1, keys - 1, keys, keys}, {0, keys / 2, keys}};
  for (const index_t step : {7, 128, 129, 1024}) {
    if (keys / step > 50) continue;
    result.push_back({});
    for (index_t at = 0; at < keys; at += step) result.back().push_back(at);
    result.back().push_back(keys);
  }
  return result;
}

/// Any cut, merged in order, is as good as the whole.
template <class T, class M, class Visible, class C = Identity, class Formula = reference::NoScore>
void check_cuts(const Shape& shape, const M& mask, const Visible& visible, const C& score = {},
                const Formula& formula = {}, const AttentionOptions<T>& options = {}) {
  const FourHeads<T> heads(shape.heads);
  const Problem<T> problem(shape);
  const Expected<T> expected = expect(problem, visible, heads.multiplier(), options, formula);
  const std::vector<T> sinks(options.sinks.begin(), options.sinks.end());
  for_each_target([&](const std::string& target) {
    Rules<T> rules;
    for (const std::vector<index_t>& cut : cuts(shape.keys)) {
      State<T> state = partial(problem, cut[0], cut[1], heads.scaling(), mask, score, options);
      for (std::size_t i = 1; i + 1 < cut.size(); ++i) {
        State<T> next = partial(problem, cut[i], cut[i + 1], heads.scaling(), mask, score, options);
        ssmax::merge<T>(state.view(), next.view());
      }
      rules.take(finished(state, sinks), expected,
                 name_of(shape) + "in " + std::to_string(cut.size() - 1) + " parts");
    }
    rules.check(target);
  });
}

bool is_picked(const Query& query, index_t key) {
  return query.index % 5 != 4 && (query.index * 7919 + key * 104729) % 7 < 3;
}

TEST_CASE("any cut of the keys gives the whole, with SSMax's n of the whole", "[attention][state][slow]") {
  for (const Shape& shape : shapes) {
    check_cuts<float>(shape, Full{}, all_keys);
    check_cuts<float>(shape, Causal{}, keys_before);
    check_cuts<double>(shape, Causal{}, keys_before);
  }
}

TEST_CASE("any cut: windows, predicates and documents", "[attention][state][slow]") {
  for (const Shape& shape : shapes) {
    check_cuts<float>(shape, SlidingWindow(20, 1), [](const Query& query, index_t key) {
      return key >= query.position() - 20 && key <= query.position() + 1;
    });
    check_cuts<float>(shape, ssmax::Where(is_picked), is_picked);
    const std::vector<index_t> queries{0, 1, shape.queries}, keys{0, 2, shape.keys};
    check_cuts<float>(shape, ssmax::Documents(queries, keys, false),
                      [](const Query& query, index_t key) { return (query.index < 1) == (key < 2); });
  }
}

TEST_CASE("any cut: rope, scores and sinks", "[attention][state]") {
  const std::vector<float> sinks{1, -2, 0, 3};
  const ssmax::Rope<float> rope({.width = 4, .theta = 100}, 2200);
  const std::vector<double> slopes = ssmax::Alibi::slopes(4);
  const auto formula = [&](auto z, const Query& query, index_t key) {
    using Z = decltype(z);
    return Z(3) * std::tanh(z / Z(3)) + static_cast<Z>(slopes[static_cast<std::size_t>(query.head)]) *
                                            static_cast<Z>(key - query.position());
  };
  for (const Shape& shape : shapes) {
    const auto heads = std::span(slopes).first(static_cast<std::size_t>(shape.heads));
    check_cuts<float>(
        shape, Causal{}, keys_before, ssmax::Softcap(3) | ssmax::Alibi(heads), formula,
        {.rope = &rope, .key_position = 50, .sinks = attention_problem::for_heads_of(shape, sinks)});
  }
}

TEST_CASE("a matrix speaks of all keys, not of the part", "[attention][state]") {
  for (const Shape& shape : shapes) {
    std::vector<char> storage(static_cast<std::size_t>(shape.queries * shape.keys));
    for (std::size_t i = 0; i < storage.size(); ++i) storage[i] = i * i % 13 < 6 ? 1 : 0;
    const bool* const bools = reinterpret_cast<const bool*>(storage.data());
    const View<const bool, 4> matrix(bools, {shape.batch, shape.heads, shape.queries, shape.keys},
                                     {0, 0, shape.keys, 1});
    check_cuts<float>(shape, ssmax::MaskMatrix(matrix),
                      [&](const Query& query, index_t key) { return bools[query.index * shape.keys + key]; });
  }
}

TEST_CASE("one part, finished, has the bits of attention", "[attention][state]") {
  const std::vector<float> of_four{1, -2, 0, 3};
  for (const Shape& shape : shapes) {
    const FourHeads<float> heads(shape.heads);
    const std::vector<float> sinks(of_four.begin(), of_four.begin() + shape.heads);
    const Problem<float> problem(shape);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const State<float> state = partial(problem, 0, shape.keys, heads.scaling(), Causal{});
      CHECK(finished(state) == run(problem, heads.scaling(), Causal{}));
      CHECK(finished(state, sinks) == run(problem, heads.scaling(), Causal{}, {.sinks = sinks}));
      // Options' sinks are not the part's.
      CHECK(partial(problem, 0, shape.keys, heads.scaling(), Causal{}, Identity{}, {.sinks = sinks}) ==
            state);
    });
  }
}

TEST_CASE("half and bfloat16 have states of float", "[attention][state]") {
  for (const Shape& shape : shapes) {
    const FourHeads<float> heads(shape.heads);
    const Problem<ssmax::half> narrow(shape);
    Problem<float> wide(shape);
    wide.q.assign(narrow.q.begin(), narrow.q.end());
    wide.k.assign(narrow.k.begin(), narrow.k.end());
    wide.v.assign(narrow.v.begin(), narrow.v.end());
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const index_t half_way = shape.keys / 2;
      CHECK(partial(narrow, half_way, shape.keys, heads.scaling(), Causal{}) ==
            partial(wide, half_way, shape.keys, heads.scaling(), Causal{}));
    });
  }
}

// ---- The order of merging ------------------------------------------------------------------------------------

/// Σ exp(c·z) and Σ exp(c·z)·v of states, exactly.
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

/// At most one rounding of a sum per merge, relative to Σ exp(c·z) and to Σ exp(c·z)·|v|.
template <class A>
int count_above_bound(const State<A>& merged_state, const Sums<A>& exact, const Sums<A>& magnitude,
                      int merges) {
  Sums<A> ours(merged_state);
  ours.add(merged_state);
  // (1 + ε/2)^merges - 1: later merges round what earlier ones have added.
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

TEST_CASE("each merge costs one rounding of the sums, in any order", "[attention][state]") {
  check_orders<float>(1);
  check_orders<float>(3);
  check_orders<double>(1);
}

TEST_CASE("merging two states does not depend on which is first", "[attention][state]") {
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

TEST_CASE("a span of states is merged in its order", "[attention][state]") {
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

TEST_CASE("a span with a state that does not fit is not merged at all", "[attention][state]") {
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

// ---- Nothing seen, and what is not finite --------------------------------------------------------------------

TEST_CASE("a part that nobody sees is the neutral state", "[attention][state]") {
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

TEST_CASE("NaN in one part is NaN in the whole", "[attention][state]") {
  for (const Shape& shape : {shapes[0], shapes[1]}) {
    Problem<float> problem(shape);
    std::fill_n(problem.k.begin() + 200 * shape.d, shape.d, attention_problem::nan<float>);
    const FourHeads<float> heads;
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const State<float> clean = partial(problem, 0, 150, heads.scaling(), Full{}),
                         spoiled = partial(problem, 150, 300, heads.scaling(), Full{});
      for (const State<float>& state : {merged(clean, spoiled), merged(spoiled, clean)}) {
        const Output<float> output = finished(state);
        // Of the first batch entry, the heads that read kv head 0.
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

TEST_CASE("parts with logits far apart", "[attention][state][slow]") {
  for (const Shape& shape : {shapes[0], shapes[1]}) {
    for (const float factor : {30.0F, 3e3F, 1e7F}) {
      Problem<float> problem(shape);
      for (index_t h = 0; h < shape.batch * shape.kv_heads; ++h) {
        for (index_t i = 100 * shape.d; i < 200 * shape.d; ++i) {
          problem.k[static_cast<std::size_t>(h * shape.keys * shape.d + i)] *= factor;
        }
      }
      const Expected<float> expected = expect(problem, all_keys, attention_problem::one);
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

TEST_CASE("finish may write over the state, and need not give the lse", "[attention][state]") {
  const Problem<float> problem(shapes[1]);
  const FourHeads<float> heads;
  for_each_target([&](const std::string& target) {
    INFO(target);
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
  ssmax::attention_partial<float>(
      {.q = problem.q_view(), .k = problem.k_view(), .v = problem.v_view(), .keys = s.keys, .state = into},
      heads.scaling(), Full{});
  const State<float> whole = partial(problem, 0, 300, heads.scaling(), Full{});
  const auto same_o = [&](const State<float>& state) {
    std::size_t at = 0;
    bool same = true;
    for (index_t batch = 0; batch < s.batch; ++batch) {
      for (index_t h = 0; h < s.heads; ++h) {
        for (index_t i = 0; i < s.queries; ++i) {
          for (index_t c = 0; c < s.dv; ++c) same = same && same_bits(o(batch, h, i, c), state.o[at++]);
        }
      }
    }
    return same;
  };
  CHECK(same_o(whole));
  State<float> more = partial(problem, 0, 100, heads.scaling(), Full{});
  ssmax::merge<float>(into, more.view());
  CHECK(same_o(merged(whole, more)));
  CHECK(std::ranges::count(together, -55.0F) == 2 * s.batch * s.queries * s.heads);
}

}  // namespace attention_state_test
