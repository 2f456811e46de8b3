// Attention is bit-identical for every executor: any number of threads, any order of calls, with keys split between
// threads or not.

#include <atomic>
#include <thread>

#include "attention_problem.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace attention_problem::attention_threads_test {

using test_executors::Reverse;
using test_executors::Threads;

constexpr std::array<Shape, 9> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 1, 1, 1, 1},
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 61, 300, 9, 24},
    {1, 1, 1, 257, 257, 5, 3},
    {1, 1, 1, 1, 5000, 16, 8},  // few tasks: threads divide the keys
    {1, 4, 1, 4, 3100, 6, 5},
    {1, 1, 1, 20, 2100, 6, 5},
    {2, 2, 1, 50, 1500, 6, 24},
    {1, 2, 1, 70, 33, 6, 5},
}};

template <class T, class M, class C = ssmax::Identity>
void check_same(const Shape& shape, const M& mask, const C& score = {},
                const AttentionOptions<T>& options = {}) {
  static ThreadPool two(2), three(3), seven(7);
  const Problem<T> problem(shape);
  const SSMax<Compute<T>> scaling{Compute<T>(0.7)};
  for_each_target([&](const std::string& target) {
    INFO(target << ' ' << name_of(shape));
    const Output<T> expected = run(problem, scaling, mask, score, options);
    CHECK(run(problem, scaling, mask, score, options, two) == expected);
    CHECK(run(problem, scaling, mask, score, options, three) == expected);
    CHECK(run(problem, scaling, mask, score, options, seven) == expected);
    for (const index_t threads : {1, 2, 5, 64}) {
      CHECK(run(problem, scaling, mask, score, options, Reverse{threads}) == expected);
    }
  });
}

TEST_CASE("attention is bit-identical for every executor: full and causal", "[attention][threads][slow]") {
  for (const Shape& shape : shapes) {
    check_same<float>(shape, Full{});
    check_same<float>(shape, Causal{});
  }
  check_same<double>(shapes[2], Causal{});
  check_same<double>(shapes[4], Causal{});
  check_same<ssmax::half>(shapes[2], Causal{});
  check_same<ssmax::half>(shapes[4], Causal{});
}

TEST_CASE("attention is bit-identical for every executor: windows and predicates",
          "[attention][threads][slow]") {
  for (const Shape& shape : shapes) {
    check_same<float>(shape, SlidingWindow(1200, 1));
    check_same<float>(shape, SlidingWindow(20, 2));
    check_same<float>(shape, ssmax::Where(scattered));
  }
}

TEST_CASE("attention is bit-identical for every executor: scores, rope and sinks",
          "[attention][threads][slow]") {
  const std::vector<float> sinks{1, -2, 0, 3};
  const ssmax::Rope<float> rope({.width = 4}, 6000);
  for (const Shape& shape : shapes) {
    if (shape.d < 4) continue;
    check_same<float>(shape, Causal{}, ssmax::Softcap(3),
                      {.rope = &rope, .key_position = 100, .sinks = for_heads_of(shape, sinks)});
  }
}

TEST_CASE("attention is bit-identical for every executor: huge and infinite logits", "[attention][threads]") {
  static ThreadPool three(3);
  for (const Shape& shape : shapes) {
    Problem<float> problem(shape, 3);
    for (std::size_t i = 0; i < problem.v.size(); i += 1000) {
      problem.v[i] = infinity<float>;
    }
    const ssmax::Constant scaling{1e5};
    const Output<float> expected = run(problem, scaling, Causal{});
    INFO(name_of(shape));
    CHECK(run(problem, scaling, Causal{}, {}, three) == expected);
    CHECK(run(problem, scaling, Causal{}, {}, Reverse{5}) == expected);
  }
}

TEST_CASE("attention_partial is bit-identical for every executor", "[attention][threads]") {
  ThreadPool three(3);
  for (const Shape& s : shapes) {
    const Problem<float> problem(s);
    const auto partial = [&](auto&& executor) {
      Output<float> shift(s), sum(s);
      ssmax::attention({.q = problem.q_view(),
                        .k = problem.k_view(),
                        .v = problem.v_view(),
                        .state = {shift.lse_view(), sum.lse_view(), sum.out_view()},
                        .first_key = 100,
                        .all_keys = s.keys + 300},
                       SSMax<float>{}, Full{}, executor);
      return std::array{shift, sum};
    };
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(s));
      const auto expected = partial(ssmax::Serial{});
      CHECK(partial(three) == expected);
      CHECK(partial(Reverse{5}) == expected);
    });
  }
}

TEST_CASE("attention runs on threads of one call", "[attention][threads]") {
  for (const Shape& shape : {shapes[2], shapes[4], shapes[7]}) {
    const Problem<float> problem(shape);
    INFO(name_of(shape));
    CHECK(run(problem, SSMax<float>{}, Causal{}, {}, Threads{4}) == run(problem, SSMax<float>{}, Causal{}));
  }
}

TEST_CASE("attention uses an executor, except for empty inputs", "[attention][threads]") {
  index_t runs = 0;
  run(Problem<float>(shapes[2]), SSMax<float>{}, Causal{}, {}, Reverse{4, &runs});
  CHECK(runs > 0);
  runs = 0;
  run(Problem<float>({1, 2, 1, 0, 30, 8, 5}), SSMax<float>{}, Causal{}, {}, Reverse{4, &runs});
  CHECK(runs == 0);
}

TEST_CASE("attention runs inside the tasks of a pool", "[attention][threads]") {
  ThreadPool pool(3);
  std::vector<Problem<float>> problems;
  std::vector<Output<float>> expected, outputs;
  for (const Shape& shape : shapes) {
    problems.emplace_back(shape);
    expected.push_back(run(problems.back(), SSMax<float>{}, Causal{}));
    outputs.emplace_back(shape);
  }
  pool.run(static_cast<index_t>(shapes.size()), [&](index_t i) {
    const auto at = static_cast<std::size_t>(i);
    outputs[at] = run(problems[at], SSMax<float>{}, Causal{}, {}, pool);
  });
  CHECK(outputs == expected);
}

TEST_CASE("keys split between threads are counted once per thread, not per key chunk",
          "[attention][threads]") {
  const Problem<float> problem({1, 1, 1, 1, 20'000, 2, 2});
  std::atomic<index_t> calls = 0;
  const ssmax::Where mask([&calls](const ssmax::Query&, index_t key) {
    ++calls;
    return key % 2 == 0;
  });
  run(problem, SSMax<float>{}, mask);
  const index_t alone = calls.exchange(0);
  ThreadPool pool(2);
  run(problem, SSMax<float>{}, mask, {}, pool);
  CHECK(alone >= 20'000);
  CHECK(static_cast<double>(calls.load()) <
        2.1 * static_cast<double>(alone));  // each thread counts n, and the merging thread counts it again
}

/// A score that throws for one key of one query.
struct Throws {
  template <class T>
  T operator()(T z, const ssmax::Key& key) const {
    if (key.query.index == 2 && key.index == 20) throw std::domain_error("no such key");
    return z;
  }
  template <class T>
  T derivative(T, const ssmax::Key&) const {
    return T{1};
  }
};

TEST_CASE("an exception from a score reaches the caller", "[attention][threads]") {
  ThreadPool pool(3);
  for (const Shape& shape : {shapes[1], shapes[2], shapes[5]}) {
    const Problem<float> problem(shape);
    CHECK_THROWS_AS(run(problem, SSMax<float>{}, Full{}, Throws{}), std::domain_error);
    CHECK_THROWS_AS(run(problem, SSMax<float>{}, Full{}, Throws{}, {}, pool), std::domain_error);
  }
}

}  // namespace attention_problem::attention_threads_test
