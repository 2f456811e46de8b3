// Query ranges and key ranges: continued states and summed gradients agree with one call.

#include "attention_backward_problem.hpp"
#include "attention_state_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::attention_parts_test {

using state_problem::finished;
using state_problem::State;

/// Returns rows [begin, end) of [batch, heads, positions, channels] or [batch, heads, positions].
template <class X, int Rank>
View<X, Rank> rows(const View<X, Rank>& view, index_t begin, index_t end) {
  std::array<index_t, Rank> extents, strides;
  for (int i = 0; i < Rank; ++i) {
    extents[static_cast<std::size_t>(i)] = i == 2 ? end - begin : view.extent(i);
    strides[static_cast<std::size_t>(i)] = view.stride(i);
  }
  return {view.data_handle() + begin * view.stride(2), extents, strides};
}

template <class A>
ssmax::AttentionState<A> rows(const ssmax::AttentionState<A>& state, index_t begin, index_t end) {
  return {rows(state.shift, begin, end), rows(state.sum, begin, end), rows(state.o, begin, end)};
}

/// Computes the state of each query range in turn, continued over the key ranges.
template <class T, class M, class C>
State<Compute<T>> in_parts(const Problem<T>& problem, std::vector<index_t> queries, std::vector<index_t> keys,
                           const SSMax<float>& scaling, const M& mask, const C& score,
                           const AttentionOptions<T>& options) {
  State<Compute<T>> state(problem.shape);
  for (std::size_t i = 0; i + 1 < queries.size(); ++i) {
    for (std::size_t j = 0; j + 1 < keys.size(); ++j) {
      ssmax::attention<Compute<T>>(with({.q = rows(problem.q_view(), queries[i], queries[i + 1]),
                                         .k = rows(problem.k_view(), keys[j], keys[j + 1]),
                                         .v = rows(problem.v_view(), keys[j], keys[j + 1]),
                                         .state = rows(state.view(), queries[i], queries[i + 1]),
                                         .continues = j > 0,
                                         .first_key = keys[j],
                                         .all_keys = problem.shape.keys,
                                         .first_query = queries[i],
                                         .all_queries = problem.shape.queries},
                                        options),
                                   scaling, mask, score);
    }
  }
  return state;
}

template <class T, class M, class C>
void check_continued(const Problem<T>& problem, const M& mask, const C& score) {
  const Shape& s = problem.shape;
  const std::vector<float> strength{0.4f, 0.5f}, bias{0.1f, -0.2f};
  const ssmax::Rope<Compute<T>> rope({.width = s.d}, 8192);
  const AttentionOptions<T> options{.rope = &rope};
  const SSMax<float> scaling{strength, bias};
  const Output<T> whole = run<T>(problem, scaling, mask, score, options);
  const auto parts = in_parts<T>(problem, {0, 40, 41 + 17, s.queries}, {0, 1024, 1024, 3072, s.keys}, scaling,
                                 mask, score, options);
  CHECK(finished(parts) == whole);
}

const std::vector<double> slopes = Alibi::slopes(2);
const std::array<index_t, 4> documents{0, 900, 2000, 3300};

TEST_CASE("query ranges continued over whole key chunks are bit-identical to one call",
          "[attention][state]") {
  for_each_target([](const std::string&) {
    const Problem<float> few({1, 2, 1, 120, 3300, 8, 5});
    check_continued(few, Causal{}, Identity{});
    check_continued(few, Full{}, Softcap{5});
    check_continued(few, SlidingWindow{1500}, Alibi(slopes));
    const Problem<double> all({2, 2, 2, 3300, 3300, 4, 3});
    check_continued(all, Documents(documents, true), Identity{});
  });
}

TEST_CASE("a state of few queries can be continued", "[attention][state]") {
  for_each_target([](const std::string&) {
    const Problem<float> problem({1, 2, 1, 8, 2500, 8, 5});
    const Output<float> whole = run<float>(problem, SSMax<float>{0.4f}, Causal{});
    const auto parts =
        in_parts<float>(problem, {0, 3, 8}, {0, 2048, 2500}, SSMax<float>{0.4f}, Causal{}, Identity{}, {});
    CHECK(finished(parts) == whole);
  });
}

TEST_CASE("query ranges are bit-identical to one call on the bf16 path", "[attention][state][bfloat16]") {
  const Problem<bfloat16> problem({1, 2, 1, 120, 300, 8, 5});
  for_each_target_of<bfloat16>([&](const std::string&) {
    const auto states = [&](std::vector<index_t> queries) {
      return in_parts<bfloat16>(problem, std::move(queries), {0, 300}, SSMax<float>{0.4f}, Causal{},
                                Identity{}, {});
    };
    CHECK(states({0, 40, 58, 120}) == states({0, 120}));
  });
}

// ---- backward ---------------------------------------------------------------------------------------------

using reference::largest_difference;

struct Learnt {
  std::vector<double> ds, db;
};

template <class M, class C>
void check_added_up(const Problem<double>& problem, const M& mask, const C& score) {
  const Shape& s = problem.shape;
  const std::vector<double> strength{0.4, 0.5}, bias{0.1, -0.2}, sinks{0.5, -1};
  const ssmax::Rope<double> rope({.width = s.d}, 8192);
  const AttentionOptions<double> options{.rope = &rope, .sinks = sinks};
  const SSMax<double> scaling{strength, bias};
  const Output<double> output = run<double>(problem, scaling, mask, score, options);
  Learnt whole{std::vector<double>(2), std::vector<double>(2)}, sum = whole;
  const Result<double> expected =
      backward<double>(problem, output, scaling.gradient(whole.ds, whole.db), mask, score, options);

  Result<double> added(problem, 2);
  for (auto* gradient : {&added.dq, &added.dk, &added.dv}) std::fill(gradient->begin(), gradient->end(), 0);
  Result<double> part(problem, 2);
  const auto gradient = [&](Result<double>& of) {
    return std::array<View<double, 4>, 3>{View<double, 4>{of.dq.data(), {s.batch, s.heads, s.queries, s.d}},
                                          View<double, 4>{of.dk.data(), {s.batch, s.kv_heads, s.keys, s.d}},
                                          View<double, 4>{of.dv.data(), {s.batch, s.kv_heads, s.keys, s.dv}}};
  };
  const View<const double, 4> out{output.out.data(), {s.batch, s.heads, s.queries, s.dv}},
      dout{problem.dout.data(), {s.batch, s.heads, s.queries, s.dv}};
  const View<const double, 3> lse{output.lse.data(), {s.batch, s.heads, s.queries}},
      dlse{problem.dlse.data(), {s.batch, s.heads, s.queries}};
  const std::vector<index_t> queries{0, 70, s.queries}, keys{0, 300, 300, s.keys};
  for (std::size_t i = 0; i + 1 < queries.size(); ++i) {
    for (std::size_t j = 0; j + 1 < keys.size(); ++j) {
      const auto of_queries = [&](const auto& view) { return rows(view, queries[i], queries[i + 1]); };
      const auto of_keys = [&](const auto& view) { return rows(view, keys[j], keys[j + 1]); };
      const auto [dq, dk, dv] = gradient(part);
      ssmax::attention_backward<double>(
          backward_with({.q = of_queries(problem.q_view()),
                         .k = of_keys(problem.k_view()),
                         .v = of_keys(problem.v_view()),
                         .out = of_queries(out),
                         .lse = of_queries(lse),
                         .first_key = keys[j],
                         .all_keys = s.keys,
                         .first_query = queries[i],
                         .all_queries = s.queries},
                        options),
          {.dout = of_queries(dout),
           .dlse = of_queries(dlse),
           .dq = of_queries(dq),
           .dk = of_keys(dk),
           .dv = of_keys(dv),
           .dsinks = j == 0 ? std::span<double>(added.dsinks) : std::span<double>{}},
          scaling.gradient(sum.ds, sum.db), mask, score);
      const auto add = [](const View<double, 4>& to, const View<double, 4>& from) {
        reference::for_each_index(to.extents(), [&](auto... at) { to(at...) += from(at...); });
      };
      const auto [to_dq, to_dk, to_dv] = gradient(added);
      add(of_queries(to_dq), of_queries(dq));
      add(of_keys(to_dk), of_keys(dk));
      add(of_keys(to_dv), of_keys(dv));
    }
  }
  CHECK(largest_difference(added.dq, expected.dq) < 1e-12);
  CHECK(largest_difference(added.dk, expected.dk) < 1e-12);
  CHECK(largest_difference(added.dv, expected.dv) < 1e-12);
  CHECK(largest_difference(added.dsinks, expected.dsinks) < 1e-11);
  CHECK(largest_difference(sum.ds, whole.ds) < 1e-10);
  CHECK(largest_difference(sum.db, whole.db) < 1e-10);
}

TEST_CASE("gradients of query ranges and key ranges sum to the gradients of one call",
          "[attention][backward]") {
  for_each_target([](const std::string&) {
    const Problem<double> problem({2, 2, 1, 310, 600, 8, 5});
    check_added_up(problem, Causal{}, Identity{});
    check_added_up(problem, SlidingWindow{250, 10}, Softcap{5});
    const Problem<double> square({1, 2, 2, 500, 500, 6, 3});
    const std::array<index_t, 4> ends{0, 100, 320, 500};
    check_added_up(square, Documents(ends, true), Identity{});
  });
}

TEST_CASE("backward throws for query ranges and key ranges outside the whole problem",
          "[attention][backward][errors]") {
  const Problem<double> problem({1, 1, 1, 4, 6, 2, 2}, 1, Dlse::left_out);
  const Output<double> output = run<double>(problem, ssmax::Softmax{}, Full{});
  Result<double> result(problem);
  const auto call = [&](index_t first_key, index_t keys, index_t first_query, index_t queries) {
    BackwardArguments<double> arguments = backward_arguments_of(problem, output);
    arguments.first_key = first_key, arguments.all_keys = keys;
    arguments.first_query = first_query, arguments.all_queries = queries;
    ssmax::attention_backward<double>(arguments, gradients_to(problem, result));
  };
  CHECK_NOTHROW(call(1, 7, 2, 6));
  CHECK_NOTHROW(call(1, 0, 2, 0));
  check_refused_with_words({"first_key", "-1"}, [&] { call(-1, 7, 0, 0); });
  check_refused_with_words({"first_key", "-1"}, [&] { call(-1, 0, 0, 0); });
  check_refused_with_words({"first_key", "2", "7"}, [&] { call(2, 7, 0, 0); });
  check_refused_with_words({"first_query", "-1"}, [&] { call(0, 0, -1, 0); });
  check_refused_with_words({"first_query", "3", "6"}, [&] { call(0, 0, 3, 6); });
}

}  // namespace attention_problem::backward_problem::attention_parts_test
