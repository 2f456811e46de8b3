// Cross-entropy is bit-identical for any number of threads and does not allocate.

#include <thread>

#include "allocation_count.hpp"
#include "cross_entropy_problem.hpp"
#include "target_scope.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace cross_entropy_problem::cross_entropy_threads_test {

using test_executors::Reverse;

/// An executor that runs every eighth call on the same thread.
struct Threads {
  index_t concurrency() const { return 8; }
  template <class F>
  void run(index_t n, const F& f) const {
    std::vector<std::thread> running;
    for (index_t first = 0; first < 8; ++first) {
      running.emplace_back([&f, first, n] {
        for (index_t i = first; i < n; i += 8) f(i);
      });
    }
    for (std::thread& thread : running) thread.join();
  }
};

TEMPLATE_TEST_CASE("cross_entropy is bit-identical for every executor", "[cross_entropy][threads][slow]",
                   float, half) {
  using T = TestType;
  ThreadPool two(2), three(3), seven(7);
  for_each_target([&](const std::string& name) {
    for (const auto& [rows, classes] :
         {std::array<index_t, 2>{1, 1}, {1, 5000}, {5, 3}, {3, 9001}, {301, 61}, {257, 300}, {20'011, 3}}) {
      Problem<T> problem(rows, classes, 31);
      for (index_t row = 2; row < rows; row += 5) problem.target(row) = ignored;
      INFO(name << ' ' << rows << " x " << classes);
      for (const Where where : {Where::apart, Where::in_place, Where::left_out}) {
        const Result<T> expected = problem.run(where);
        CHECK(problem.run(where, 0, true, two) == expected);
        CHECK(problem.run(where, 2, true, three) == expected);
        CHECK(problem.run(where, 0, false, seven) == expected);
        CHECK(problem.run(where, 0, true, Threads{}) == expected);
        for (const index_t threads : {1, 2, 64}) {
          CHECK(problem.run(where, 0, true, Reverse{threads}) == expected);
        }
      }
    }
  });
}

TEST_CASE("losses of any size are added in the same order", "[cross_entropy][threads]") {
  ThreadPool three(3);
  Problem<float> problem(20'011, 3, 33);
  for (index_t row = 0; row < problem.rows; ++row) {
    problem.logit(row, 0) += std::ldexp(1.f, static_cast<int>(row * 7919 % 60) - 20);
  }
  const Result<float> expected = problem.run(Where::apart);
  CHECK(problem.run(Where::apart, 0, true, three) == expected);
  CHECK(problem.run(Where::apart, 0, true, Reverse{5}) == expected);
  CHECK(problem.run(Where::left_out, 0, true, Threads{}).loss == expected.loss);
}

/// An executor that records the number of calls of each run.
struct Recording {
  std::vector<index_t>* runs;

  index_t concurrency() const { return 4; }
  template <class F>
  void run(index_t n, const F& f) const {
    runs->push_back(n);
    for (index_t i = 0; i < n; ++i) f(i);
  }
};

TEST_CASE("cross_entropy limits the number of tasks to the work", "[cross_entropy][threads][slow]") {
  const auto calls_of = [](index_t rows, index_t classes, index_t row_that_counts = 0) {
    std::vector<index_t> runs;
    Problem<float> problem(rows, classes);
    if (row_that_counts < 0) std::fill(problem.targets.begin(), problem.targets.end(), ignored);
    problem.run(Where::left_out, 0, true, Recording{&runs});
    return runs;
  };
  CHECK(calls_of(64, 32'000) == std::vector<index_t>{64});
  CHECK(calls_of(256, 20'000) == std::vector<index_t>{256});
  CHECK(calls_of(257, 20'000) == std::vector<index_t>{129});
  CHECK(calls_of(10, 10) == std::vector<index_t>{1});
  CHECK(calls_of(100'000, 10) == std::vector<index_t>{62});
  CHECK(calls_of(0, 10).empty());
  CHECK(calls_of(10, 10, -1).empty());
}

/// An executor that throws in the middle of a run.
struct Fails {
  index_t concurrency() const { return 1; }
  template <class F>
  void run(index_t n, const F& f) const {
    f(0);
    if (n > 1) throw std::domain_error("no more calls");
  }
};

TEST_CASE("an exception from the executor reaches the caller", "[cross_entropy][threads]") {
  const Problem<float> problem(4, 20'000);
  CHECK_THROWS_AS(problem.run(Where::apart, 0, true, Fails{}), std::domain_error);
}

TEST_CASE("cross_entropy does not allocate", "[cross_entropy][slow]") {
  ThreadPool pool(3);
  for_each_target([&](const std::string& name) {
    INFO(name);
    for (const index_t classes : {3, 300, 5000}) {
      Problem<half> problem(300, classes);
      std::vector<half> dlogits(problem.logits.size());
      const View<const half, 2> logits(problem.logits.data(), {300, classes});
      const View<half, 2> out(dlogits.data(), {300, classes});
      const long before = allocation_count();
      cross_entropy<half>(logits, problem.targets, out, {}, pool);
      cross_entropy<half>(logits, problem.targets);
      CHECK(allocation_count() == before);
    }
  });
}

}  // namespace cross_entropy_problem::cross_entropy_threads_test
