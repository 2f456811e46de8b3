// Functions over rows with an executor: the same bits as without one, whoever makes the calls, for every
// mask; the sums that a scaling learns as well.

#include <ssmax/detail/attention/terms/any_executor.hpp>

#include "allocation_count.hpp"
#include "reference.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace rows_threads_test {

using namespace ssmax;
using ssmax::shared::AnyExecutor;
using test_executors::Reverse;

struct Shape {
  index_t batch, heads, queries, keys;
  std::array<index_t, 4> extents() const { return {batch, heads, queries, keys}; }
  index_t rows() const { return batch * heads * queries; }
};

template <class T>
struct Result {
  using C = ssmax::detail::ComputeType<T>;

  std::vector<T> y, log_y, dz, log_dz;
  std::vector<C> lse, ds, db;

  explicit Result(const Shape& s)
      : y(static_cast<std::size_t>(s.rows() * s.keys)),
        log_y(y),
        dz(y),
        log_dz(y),
        lse(static_cast<std::size_t>(s.rows())),
        ds(static_cast<std::size_t>(s.heads)),
        db(ds) {}
};

/// Erased, the executor does not make each function be compiled once more.
template <class T, class M>
Result<T> run(const Shape& shape, const std::vector<T>& logits, const M& mask, const AnyExecutor& executor) {
  using C = ssmax::detail::ComputeType<T>;
  Result<T> result(shape);
  const std::vector<T> dout = reference::normals<T>(logits.size(), 3);
  std::vector<C> s, b;
  for (index_t h = 0; h < shape.heads; ++h) {
    s.push_back(static_cast<C>(0.3) + static_cast<C>(h));
    b.push_back(static_cast<C>(0.1) - static_cast<C>(h));
  }
  const ssmax::SSMax<C> scaling{s, b};
  const auto in = [&](const std::vector<T>& v) { return View<const T, 4>(v.data(), shape.extents()); };
  const auto to = [&](std::vector<T>& v) { return View<T, 4>(v.data(), shape.extents()); };
  ssmax::softmax(in(logits), to(result.y), scaling, mask, executor);
  ssmax::log_softmax(in(logits), to(result.log_y), scaling, mask, executor);
  ssmax::logsumexp(in(logits), View<C, 3>(result.lse.data(), {shape.batch, shape.heads, shape.queries}),
                   scaling, mask, executor);
  ssmax::softmax_backward<T, 4>(
      {.out = in(result.y), .dout = in(dout), .logits = in(logits), .dlogits = to(result.dz)},
      scaling.gradient(result.ds, result.db), mask, executor);
  ssmax::log_softmax_backward<T, 4>(
      {.out = in(result.log_y), .dout = in(dout), .logits = in(logits), .dlogits = to(result.log_dz)},
      scaling.gradient(result.ds, result.db), mask, executor);
  return result;
}

template <class T>
void compare(const Result<T>& a, const Result<T>& b) {
  CHECK(same_bits(a.y, b.y));
  CHECK(same_bits(a.log_y, b.log_y));
  CHECK(same_bits(a.lse, b.lse));
  CHECK(same_bits(a.dz, b.dz));
  CHECK(same_bits(a.log_dz, b.log_dz));
  CHECK(same_bits(a.ds, b.ds));
  CHECK(same_bits(a.db, b.db));
}

template <class T, class M>
void check_mask(const std::string& name, const Shape& shape, const std::vector<T>& logits, const M& mask) {
  INFO(name);
  ssmax::Serial serial;
  const Result<T> expected = run(shape, logits, mask, AnyExecutor(serial));
  for (const index_t threads : {2, 7, 100}) {
    INFO(threads << " threads, last call first");
    Reverse reverse{threads};
    compare(expected, run(shape, logits, mask, AnyExecutor(reverse)));
  }
  ssmax::ThreadPool pool(3);
  compare(expected, run(shape, logits, mask, AnyExecutor(pool)));
}

/// Rows in and out of the usual: some logits are too large for a kernel of short rows, some rows are NaN.
template <class T>
std::vector<T> draw_logits(const Shape& shape) {
  std::vector<T> logits = reference::normals<T>(static_cast<std::size_t>(shape.rows() * shape.keys), 1);
  for (index_t row = 0; row < shape.rows(); ++row) {
    const auto first = static_cast<std::size_t>(row * shape.keys);
    if (row % 67 == 62) logits[first] = T(std::numeric_limits<float>::quiet_NaN());
    if (row % 131 == 70) logits[first] = T(3e7f);
  }
  return logits;
}

TEMPLATE_TEST_CASE("rows have the same bits for every executor", "[softmax][threads]", float, double,
                   bfloat16) {
  using T = TestType;
  for_each_target([](const std::string& target) {
    for (const Shape& shape :
         {Shape{1, 1, 500, 3}, Shape{2, 3, 65, 16}, Shape{1, 2, 129, 40}, Shape{1, 1, 70, 300},
          Shape{40, 9, 1, 7}, Shape{1, 1, 1, 5000}, Shape{3, 2, 3, 1}, Shape{1, 1, 400, 8}, Shape{0, 3, 4, 5},
          Shape{2, 0, 4, 5}, Shape{1, 1, 0, 5}, Shape{1, 1, 4, 0}, Shape{1, 1, 2000, 33}}) {
      INFO(target << ", " << shape.batch << " x " << shape.heads << " x " << shape.queries << " x "
                  << shape.keys);
      const std::vector<T> logits = draw_logits<T>(shape);
      check_mask("Full", shape, logits, ssmax::Full{});
      check_mask("Causal", shape, logits, ssmax::Causal{});
      check_mask("SlidingWindow", shape, logits, ssmax::SlidingWindow{5});
      // Groups that begin and end anywhere.
      const std::array<index_t, 4> queries{0, shape.queries / 7, shape.queries / 2, shape.queries};
      const std::array<index_t, 4> keys{0, shape.keys / 3, shape.keys / 2, shape.keys};
      check_mask("Documents", shape, logits, ssmax::Documents{queries, keys, false});
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
