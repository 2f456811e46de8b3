// Statistics in states: a state over all keys, and a chain of states, are bit-identical to one call. Merged states differ
// by the rounding of the sums.

#include "attention_problem.hpp"
#include "attention_state_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace attention_problem::state_problem::row_statistics_state_test {

/// The statistics of each query.
template <class A>
struct Rows {
  std::vector<A> largest, smallest, squares, entropy;

  explicit Rows(const Shape& s)
      : largest(static_cast<std::size_t>(s.batch * s.heads * s.queries), A(-77)),
        smallest(largest),
        squares(largest),
        entropy(largest) {}
  RowStatistics<A> view(const Shape& s) {
    const std::array<index_t, 3> rows{s.batch, s.heads, s.queries};
    return {{largest.data(), rows}, {smallest.data(), rows}, {squares.data(), rows}, {entropy.data(), rows}};
  }
  bool operator==(const Rows& other) const {
    return same_bits(largest, other.largest) && same_bits(smallest, other.smallest) &&
           same_bits(squares, other.squares) && same_bits(entropy, other.entropy);
  }
};

/// A state with statistics.
template <class A>
struct StateWithStatistics {
  State<A> sums;
  std::vector<A> largest, smallest, distances, squares;

  explicit StateWithStatistics(const Shape& s)
      : sums(s), largest(sums.shift), smallest(largest), distances(largest), squares(largest) {}
  AttentionState<A> view() {
    const Shape& s = sums.shape;
    const std::array<index_t, 3> rows{s.batch, s.heads, s.queries};
    AttentionState<A> state = sums.view();
    state.largest = {largest.data(), rows};
    state.smallest = {smallest.data(), rows};
    state.distances = {distances.data(), rows};
    state.squares = {squares.data(), rows};
    return state;
  }
};

/// What finish writes, or one call.
template <class A>
struct Results {
  Output<A> output;
  Rows<A> rows;

  explicit Results(const Shape& s) : output(s), rows(s) {}
  bool operator==(const Results& other) const { return output == other.output && rows == other.rows; }
};

/// Runs attention with a state over keys [begin, end). Continues from the state if `continues` is true.
template <class T, class S, class M>
void attend(StateWithStatistics<Compute<T>>& state, const Problem<T>& x, index_t begin, index_t end,
            bool continues, const S& scaling, const M& mask) {
  const Shape& s = x.shape;
  attention<Compute<T>>({.q = x.q_view(),
                         .k = {x.k.data() + begin * s.d,
                               {s.batch, s.kv_heads, end - begin, s.d},
                               {s.kv_heads * s.keys * s.d, s.keys * s.d, s.d, 1}},
                         .v = {x.v.data() + begin * s.dv,
                               {s.batch, s.kv_heads, end - begin, s.dv},
                               {s.kv_heads * s.keys * s.dv, s.keys * s.dv, s.dv, 1}},
                         .state = state.view(),
                         .continues = continues,
                         .first_key = begin,
                         .all_keys = s.keys},
                        scaling, mask);
}

template <class A>
Results<A> finished(StateWithStatistics<A> state, const std::vector<A>& sinks = {}) {
  const Shape& s = state.sums.shape;
  Results<A> result(s);
  finish<A>(state.view(), {result.output.out.data(), {s.batch, s.heads, s.queries, s.dv}},
            result.output.lse_view(), sinks, result.rows.view(s));
  return result;
}

/// Returns one call over all keys, with out in the compute type.
template <class T, class S, class M>
Results<Compute<T>> whole(const Problem<T>& x, const S& scaling, const M& mask,
                          const std::vector<Compute<T>>& sinks = {}) {
  using A = Compute<T>;
  const Shape& s = x.shape;
  Results<A> result(s);
  attention<A>({.q = x.q_view(),
                .k = x.k_view(),
                .v = x.v_view(),
                .out = result.output.out_view(),
                .lse = result.output.lse_view(),
                .sinks = sinks,
                .statistics = result.rows.view(s)},
               scaling, mask);
  return result;
}

TEMPLATE_TEST_CASE(
    "statistics of a state over all keys, and of a chain of states, are bit-identical to one call",
    "[attention][state][bfloat16]", float, double, bfloat16) {
  using T = TestType;
  using A = Compute<T>;
  for (const Shape& shape : shapes) {
    const FourHeads<A> heads(shape.heads);  // also multipliers of 0 and below 0
    const std::vector<A> some{1, -2, 0, 3}, sinks(some.begin(), some.begin() + shape.heads);
    const Problem<T> x(shape);
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      StateWithStatistics<A> state(shape), chain(shape);
      attend(state, x, 0, shape.keys, false, heads.scaling(), Causal{});
      CHECK(finished(state) == whole(x, heads.scaling(), Causal{}));
      CHECK(finished(state, sinks) == whole(x, heads.scaling(), Causal{}, sinks));
      for (index_t begin = 0; begin < shape.keys; begin += 1024)
        attend(chain, x, begin, std::min(begin + 1024, shape.keys), begin > 0, heads.scaling(), Causal{});
      CHECK(finished(chain) == whole(x, heads.scaling(), Causal{}));
    });
  }
}

TEMPLATE_TEST_CASE("statistics of merged states differ by roundings", "[attention][state][bfloat16]", float,
                   double, bfloat16) {
  using T = TestType;
  using A = Compute<T>;
  const Real epsilon = std::numeric_limits<A>::epsilon();
  for (const Shape& shape : shapes) {
    const FourHeads<A> heads(shape.heads);
    const Problem<T> x(shape, 2);
    const auto check_mask = [&](const auto& mask) {
      const Results<A> expected = whole(x, heads.scaling(), mask);
      for (const index_t step : {index_t{1}, index_t{7}, shape.keys / 2, index_t{128}}) {
        if (step < 1 || shape.keys / step > 50) continue;
        for (const bool is_backward : {false, true}) {
          StateWithStatistics<A> all(shape);
          const index_t parts = (shape.keys + step - 1) / step;
          for (index_t i = 0; i < parts; ++i) {
            const index_t begin = step * (is_backward ? parts - 1 - i : i);
            StateWithStatistics<A> next(shape);
            attend(i == 0 ? all : next, x, begin, std::min(begin + step, shape.keys), false, heads.scaling(),
                   mask);
            if (i > 0) merge(all.view(), next.view());
          }
          const Rows<A> rows = finished(all).rows;
          CHECK(same_bits(rows.largest, expected.rows.largest));
          CHECK(same_bits(rows.smallest, expected.rows.smallest));
          // Weights of bfloat16 depend on the shift under which they were rounded.
          const Real rounded = std::same_as<T, bfloat16> ? rounded_weights : 0,
                     bound = static_cast<Real>(2 * parts + 40) * epsilon + 2 * rounded;
          Real worst_squares = 0, worst_entropy = 0;
          for (std::size_t i = 0; i < rows.squares.size(); ++i) {
            const Real squares = expected.rows.squares[i], entropy = expected.rows.entropy[i];
            worst_squares = std::max(worst_squares, std::abs(rows.squares[i] - squares) - bound * squares);
            worst_entropy =
                std::max(worst_entropy, std::abs(rows.entropy[i] - entropy) - 2 * bound * (1 + entropy));
          }
          INFO(parts << " parts");
          CHECK(worst_squares <= 0);
          CHECK(worst_entropy <= 0);
        }
      }
    };
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      check_mask(Causal{});
      check_mask(Causal{} & Where(scattered));
    });
  }
}

TEST_CASE("statistics of states: NaN in one part, and parts without visible keys", "[attention][state]") {
  Problem<float> x({1, 2, 2, 3, 300, 8, 4});
  x.k[150 * 8] = nan<float>;  // of head 0
  for_each_target([&](const std::string& target) {
    INFO(target);
    StateWithStatistics<float> first(x.shape), second(x.shape), hidden(x.shape);
    attend(first, x, 0, 100, false, Softmax{}, Full{});
    attend(second, x, 100, 300, false, Softmax{}, Full{});
    const Rows<float> before = finished(first).rows;
    attend(hidden, x, 0, 100, false, Softmax{}, SlidingWindow(20));
    for (std::size_t i = 0; i < 6; ++i) {
      CHECK(hidden.largest[i] == -infinity<float>);
      CHECK(hidden.smallest[i] == infinity<float>);
      CHECK(hidden.distances[i] == 0);
      CHECK(hidden.squares[i] == 0);
    }
    merge(first.view(), hidden.view());
    CHECK(finished(first).rows == before);
    merge(first.view(), second.view());
    const Rows<float> rows = finished(first).rows;
    for (const auto* numbers : {&rows.largest, &rows.smallest, &rows.squares, &rows.entropy}) {
      for (std::size_t i = 0; i < 6; ++i) CHECK(std::isnan((*numbers)[i]) == (i < 3));
    }
  });
}

TEST_CASE("statistics of states: wrong arguments are refused", "[attention][state][errors]") {
  const Problem<float> x({1, 2, 2, 3, 30, 8, 4});
  StateWithStatistics<float> a(x.shape), b(x.shape);
  attend(a, x, 0, 30, false, Softmax{}, Full{});
  attend(b, x, 0, 30, false, Softmax{}, Full{});
  const auto refused_call = [&](std::initializer_list<std::string_view> words, const auto& change) {
    AttentionArguments<float> call{
        .q = x.q_view(), .k = x.k_view(), .v = x.v_view(), .state = a.view(), .all_keys = 30};
    change(call);
    check_refused(words, [&] { attention(call); });
  };
  refused_call({"state.distances has extent 0", "state.o has 1"},
               [](auto& call) { call.state.distances = {}; });
  refused_call({"state.largest", "overlaps state.squares"},
               [](auto& call) { call.state.squares = call.state.largest; });
  refused_call({"state.smallest", "overlaps q"}, [&](auto& call) {
    call.state.smallest = {const_cast<float*>(x.q.data()), {1, 2, 3}};
  });
  std::vector<float> numbers(6);
  refused_call({"statistics.entropy has rows 3", "finish writes it"}, [&](auto& call) {
    call.statistics.entropy = {numbers.data(), {1, 2, 3}};
  });
  check_refused({"ssmax::merge: into has statistics, other has not"},
                [&] { merge(a.view(), b.sums.view()); });
  check_refused({"ssmax::merge: other has statistics, into has not"},
                [&] { merge(a.sums.view(), b.view()); });
  check_refused({"into.largest", "overlaps other.squares"}, [&] {
    AttentionState<float> other = b.view();
    other.squares = a.view().largest;
    merge(a.view(), other);
  });
  const auto refused_finish = [&](std::initializer_list<std::string_view> words,
                                  const AttentionState<float>& state,
                                  const RowStatistics<float>& statistics) {
    std::vector<float> out(24);
    check_refused(words, [&] { finish(state, {out.data(), {1, 2, 3, 4}}, {}, {}, statistics); });
  };
  refused_finish({"ssmax::finish: statistics.entropy has rows 3", "the state has no statistics"},
                 a.sums.view(), {.entropy = {numbers.data(), {1, 2, 3}}});
  refused_finish({"statistics.largest has extent 2 in dimension 2", "state.sum", "3"}, a.view(),
                 {.largest = {numbers.data(), {1, 2, 2}}});
  refused_finish({"statistics.largest", "overlaps state.smallest"}, a.view(), {.largest = a.view().smallest});
  refused_finish({"statistics.largest", "overlaps statistics.entropy"}, a.view(),
                 {.largest = {numbers.data(), {1, 2, 3}}, .entropy = {numbers.data(), {1, 2, 3}}});
}

TEST_CASE("statistics of a state without rows are written to views without numbers", "[attention][state]") {
  StateWithStatistics<float> state({1, 2, 2, 0, 30, 8, 4});
  float number = 5;
  const std::array<index_t, 3> rows{1, 2, 0};
  REQUIRE(state.view().largest.data_handle() == nullptr);
  for (float* to : {static_cast<float*>(nullptr), &number})
    finish(state.view(), {to, {1, 2, 0, 4}}, {}, {}, {{to, rows}, {to, rows}, {to, rows}, {to, rows}});
  CHECK(number == 5);
  AttentionState<float> without =
      state.view();  // views of statistics at a pointer, where those of `state` are null
  const View<float, 3> given(&number, {1, 2, 0});
  without.largest = without.smallest = without.distances = without.squares = given;
  merge(state.view(), without);
  merge(without, state.view());
  CHECK(number == 5);
}

}  // namespace attention_problem::state_problem::row_statistics_state_test
