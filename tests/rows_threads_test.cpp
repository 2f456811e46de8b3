// Functions over rows with an executor: the same bits as without one, whoever makes the calls, for every
// mask; the sums that a scaling learns as well.

#include "allocation_count.hpp"
#include "row_calls.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace rows_threads_test {

using row_calls::Layout;
using ssmax::index_t;
using ssmax::View;

TEMPLATE_TEST_CASE("rows have the same bits for every executor", "[softmax][threads]", float, double,
                   ssmax::bfloat16) {
  using T = TestType;
  for_each_target([](const std::string& target) {
    for (const std::array<index_t, 4>& extents : std::vector<std::array<index_t, 4>>{{1, 1, 500, 3},
                                                                                     {2, 3, 65, 16},
                                                                                     {1, 2, 129, 40},
                                                                                     {1, 1, 70, 300},
                                                                                     {40, 9, 1, 7},
                                                                                     {1, 1, 1, 5000},
                                                                                     {3, 2, 3, 1},
                                                                                     {1, 1, 400, 8},
                                                                                     {0, 3, 4, 5},
                                                                                     {2, 0, 4, 5},
                                                                                     {1, 1, 0, 5},
                                                                                     {1, 1, 4, 0},
                                                                                     {1, 1, 2000, 33}}) {
      const auto [batch, heads, queries, keys] = extents;
      CAPTURE(target, batch, heads, queries, keys);
      row_calls::Problem<T, 4, 3> problem(Layout<4>(extents), Layout<3>({batch, heads, queries}));
      // Some rows have logits that are too large for a kernel of short rows, some rows are NaN.
      for (std::size_t row = 0, n = static_cast<std::size_t>(keys); row * n < problem.z.size(); ++row) {
        if (row % 67 == 62) problem.z[row * n] = T(std::numeric_limits<float>::quiet_NaN());
        if (row % 131 == 70) problem.z[row * n] = T(3e7f);
      }
      row_calls::check_executors(problem, ssmax::Full{});
      row_calls::check_executors(problem, ssmax::Causal{});
      row_calls::check_executors(problem, ssmax::SlidingWindow{5});
      // Groups that begin and end anywhere.
      const std::array<index_t, 4> query_ends{0, queries / 7, queries / 2, queries};
      const std::array<index_t, 4> key_ends{0, keys / 3, keys / 2, keys};
      row_calls::check_executors(problem, ssmax::Documents{query_ends, key_ends, false});
    }
  });
}

struct Count {
  index_t threads;
  index_t* calls;

  index_t concurrency() const { return threads; }
  template <class F>
  void run(index_t n, const F& f) const {
    *calls += n;
    for (index_t i = 0; i < n; ++i) f(i);
  }
};

TEST_CASE("calls of rows are shared, and short work is not", "[softmax][threads]") {
  const auto calls_of = [](index_t rows, index_t n, index_t threads) {
    std::vector<float> z(static_cast<std::size_t>(rows * n));
    index_t calls = 0;
    ssmax::softmax(View<const float, 2>(z.data(), {rows, n}), View<float, 2>(z.data(), {rows, n}),
                   ssmax::Softmax{}, ssmax::Full{}, Count{threads, &calls});
    return calls;
  };
  CHECK(calls_of(4096, 1024, 1) == 1);
  CHECK(calls_of(4096, 1024, 2) == 8);
  CHECK(calls_of(4096, 1024, 16) == 64);
  CHECK(calls_of(64, 16, 16) == 1);
  CHECK(calls_of(4096, 16, 16) == 4);
}

TEST_CASE("an exception of a scaling on another thread reaches the caller of softmax", "[softmax][threads]") {
  struct Throws {
    float operator()(const ssmax::Row&) const { throw std::runtime_error("scaling"); }
  };
  std::vector<float> z(2000 * 64);
  ssmax::ThreadPool pool(2);
  CHECK_THROWS_AS(ssmax::softmax(View<const float, 2>(z.data(), {2000, 64}),
                                 View<float, 2>(z.data(), {2000, 64}), Throws{}, ssmax::Full{}, pool),
                  std::runtime_error);
}

TEST_CASE("rows that threads share allocate only for gradients of parameters", "[softmax][threads]") {
  std::vector<float> y(2000 * 64, 0.5f), dz(y.size());
  std::array<float, 1> ds{};
  ssmax::ThreadPool pool(2);
  const View<const float, 2> in(y.data(), {2000, 64});
  const View<float, 2> to(dz.data(), {2000, 64});
  const ssmax::SSMax<float> scaling{0.5f};
  CHECK(allocations([&] { ssmax::softmax(in, to, scaling, ssmax::Full{}, pool); }) == 0);
  const ssmax::RowsBackward<float, 2> rows{.out = in, .dout = in, .logits = in, .dlogits = to};
  CHECK(allocations([&] { ssmax::softmax_backward(rows, scaling, ssmax::Full{}, pool); }) == 0);
  CHECK(allocations([&] { ssmax::softmax_backward(rows, scaling.gradient(ds), ssmax::Full{}); }) == 0);
  CHECK(allocations([&] { ssmax::softmax_backward(rows, scaling.gradient(ds), ssmax::Full{}, pool); }) == 1);
}

}  // namespace rows_threads_test
