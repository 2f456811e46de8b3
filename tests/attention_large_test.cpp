// Long sequences in little memory, and tensors whose offsets exceed 32 bits.

#include "allocation_count.hpp"
#include "attention_problem.hpp"
#include "placed.hpp"
#include "test.hpp"

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace attention_problem::attention_large_test {

// ---- 131072 positions -------------------------------------------------------------------------------------

constexpr index_t positions = 131'072, width = 64, left = 60;

/// Returns pseudo-random numbers in [-1, 1) from a fast generator.
std::vector<float> numbers(std::uint32_t state) {
  std::vector<float> result(static_cast<std::size_t>(positions * width));
  for (float& x : result) {
    state = state * 1'664'525 + 1'013'904'223;
    x = static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-31F;
  }
  return result;
}

/// Computes row i under the window in type R.
template <class R>
std::vector<R> row_of_window(index_t i, const std::vector<float>& q, const std::vector<float>& k,
                             const std::vector<float>& v) {
  const auto at = [](const std::vector<float>& values, index_t row, index_t c) {
    return static_cast<R>(values[static_cast<std::size_t>(row * width + c)]);
  };
  const index_t first = std::max<index_t>(0, i - left);
  const R c =
      static_cast<R>(0.5L * std::log(static_cast<Real>(i - first + 1)) / std::sqrt(static_cast<Real>(width)));
  std::vector<R> sums(static_cast<std::size_t>(width));
  R total = 0;
  for (index_t key = first; key <= i; ++key) {
    R dot = 0;
    for (index_t channel = 0; channel < width; ++channel) dot += at(q, i, channel) * at(k, key, channel);
    const R weight = std::exp(c * dot);
    total += weight;
    for (index_t channel = 0; channel < width; ++channel) {
      sums[static_cast<std::size_t>(channel)] += weight * at(v, key, channel);
    }
  }
  for (R& sum : sums) sum /= total;
  return sums;
}

TEST_CASE("attention over 131072 positions allocates about 1 MiB", "[attention][slow]") {
  const std::vector<float> q = numbers(1), k = numbers(2), v = numbers(3);
  std::vector<float> out(q.size());
  const std::array<index_t, 4> extents{1, 1, positions, width};
  ssmax::ThreadPool pool(2);
  const auto call = [&](auto&& executor) {
    const long long before = allocated_bytes();
    ssmax::attention({.q = {q.data(), extents},
                      .k = {k.data(), extents},
                      .v = {v.data(), extents},
                      .out = {out.data(), extents}},
                     SSMax<float>{0.5F}, SlidingWindow(left), executor);
    return allocated_bytes() - before;
  };
  CHECK(call(pool) <= (64LL << 20));
  const std::vector<float> expected = out;
  Rule<float> rule;
  for (const index_t i : {0, 1, 59, 60, 61, 1023, 1024, 65'535, 65'536, 131'000, 131'070, 131'071}) {
    const auto begin = out.begin() + i * width;
    rule.take(std::vector<float>(begin, begin + width), row_of_window<float>(i, q, k, v),
              row_of_window<Real>(i, q, k, v), width, "row " + std::to_string(i));
  }
  INFO(rule.where);
  CHECK(rule.excess <= 0);
  CHECK(call(ssmax::Serial{}) <=
        (1LL << 20) * 11 / 10);  // the bound that attention.hpp states for one thread
  CHECK(same_bits(out, expected));
}

TEST_CASE("one query on 131072 keys, split between threads", "[attention][slow]") {
  const std::vector<float> k = numbers(2), v = numbers(3);
  const std::vector<float> q(k.begin(), k.begin() + width);
  std::vector<float> out(static_cast<std::size_t>(width)), shared = out;
  const std::array<index_t, 4> one{1, 1, 1, width}, all{1, 1, positions, width};
  ssmax::ThreadPool pool(4);
  const long long before = allocated_bytes();
  ssmax::attention(
      {.q = {q.data(), one}, .k = {k.data(), all}, .v = {v.data(), all}, .out = {shared.data(), one}},
      SSMax<float>{0.5F}, Causal{}, pool);
  CHECK(allocated_bytes() - before <= (64LL << 20));
  ssmax::attention(
      {.q = {q.data(), one}, .k = {k.data(), all}, .v = {v.data(), all}, .out = {out.data(), one}},
      SSMax<float>{0.5F}, Causal{});
  CHECK(same_bits(shared, out));
}

// ---- Offsets beyond 2^31 ----------------------------------------------------------------------------------

#if __has_include(<sys/mman.h>)

/// Address space for more than 2^32 elements. Only touched pages take memory.
template <class T>
class Vast {
 public:
  explicit Vast(index_t count) : bytes_(static_cast<std::size_t>(count) * sizeof(T)) {
    memory_ =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  Vast(const Vast&) = delete;
  Vast& operator=(const Vast&) = delete;
  ~Vast() {
    if (is_there()) munmap(memory_, bytes_);
  }
  bool is_there() const { return memory_ != MAP_FAILED; }
  T* data() const { return static_cast<T*>(memory_); }

 private:
  std::size_t bytes_;
  void* memory_;
};

/// The last row of each tensor begins far beyond 2^31 elements: `dimension` has that stride.
template <class T>
void check_offsets(const Shape& s, std::size_t dimension) {
  const std::array<index_t, 4> rows{s.batch, s.heads, s.queries, s.keys};
  const index_t most = std::max(rows[dimension], dimension == 2 ? s.keys : 0);
  const index_t stride = (index_t{5} << 30) / std::max<index_t>(most - 1, 1) / 4096 * 4096;
  const Vast<T> memory(6 * (most + 1) * stride);
  if (!memory.is_there()) {
    WARN("no address space for this test");
    return;
  }
  // Tensors follow each other in memory. Rows are packed in the dimensions without the huge stride.
  T* next = memory.data();
  const auto vast = [&](index_t heads, index_t positions_of, index_t channels) {
    const std::array<index_t, 4> extents{s.batch, heads, positions_of, channels};
    std::array<index_t, 4> strides{heads * positions_of * channels, positions_of * channels, channels, 1};
    strides[dimension] = stride;
    const View<T, 4> view(next, extents, strides);
    next += (extents[dimension] + 1) * stride;
    return view;
  };
  const Problem<T> problem(s);
  const View<T, 4> q = vast(s.heads, s.queries, s.d), k = vast(s.kv_heads, s.keys, s.d),
                   v = vast(s.kv_heads, s.keys, s.dv), out = vast(s.heads, s.queries, s.dv);
  fill(q, problem.q);
  fill(k, problem.k);
  fill(v, problem.v);
  const Output<T> expected = run(problem, SSMax<float>{}, Causal{});
  ssmax::attention<Compute<T>>({.q = q, .k = k, .v = v, .out = out}, SSMax<float>{}, Causal{});
  CHECK(differences(out, expected.out) == 0);
}

TEST_CASE("element offsets beyond 32 bits", "[attention][slow]") {
  for_each_target([](const std::string& target) {
    for (const std::size_t dimension : {std::size_t{0}, std::size_t{1}, std::size_t{2}}) {
      for (const Shape& shape :
           {Shape{2, 2, 2, 3, 20, 8, 5}, Shape{2, 2, 2, 18, 20, 8, 16}, Shape{2, 2, 2, 20, 140, 4, 16}}) {
        INFO(target << " dimension " << dimension << ", " << name_of(shape));
        check_offsets<float>(shape, dimension);
        check_offsets<ssmax::half>(shape, dimension);
      }
    }
  });
}

TEST_CASE("matrices of masks and biases beyond 32 bits", "[attention][slow]") {
  const Shape s{1, 2, 1, 20, 30, 8, 5};
  const index_t stride = (index_t{5} << 30) / 20 / 4096 * 4096;
  const Vast<float> memory(2 * 21 * stride);
  if (!memory.is_there()) {
    WARN("no address space for this test");
    return;
  }
  const std::array<index_t, 4> extents{1, s.heads, s.queries, s.keys};
  std::vector<float> values =
      reference::normals<float>(static_cast<std::size_t>(s.heads * s.queries * s.keys), 3);
  for (std::size_t i = 0; i < values.size(); i += 3) values[i] = -infinity<float>;
  const View<float, 4> near(values.data(), extents),
      vast(memory.data(), extents, {0, 21 * stride, stride, 1});
  fill(vast, values);
  const Problem<float> problem(s);
  for_each_target([&](const std::string&) {
    CHECK(run(problem, SSMax<float>{}, ssmax::MatrixMask(vast), ssmax::Bias(vast)) ==
          run(problem, SSMax<float>{}, ssmax::MatrixMask(near), ssmax::Bias(near)));
  });
}

#endif

}  // namespace attention_problem::attention_large_test
