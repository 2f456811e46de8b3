// Allocates memory and fills it with random numbers for all benchmarks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ssmax_bench {

using index_t = std::ptrdiff_t;

// An array of floats. It uses huge pages where the system offers them. With 4 KiB pages the physical placement differs in
// every run, and decides how well a block fits a physically indexed cache.
//
// Arrays of one benchmark have different values of `stagger`. The addresses of element i of two arrays
// then differ in the low twelve bits. With equal bits a load may wait for an unrelated store.
class Buffer {
 public:
  explicit Buffer(index_t size, int stagger = 0)
      : size_(size), memory_(allocate(static_cast<std::size_t>(size) * sizeof(float) + max_stagger_bytes)) {
    data_ =
        memory_.get() + stagger * stagger_floats % (max_stagger_bytes / static_cast<index_t>(sizeof(float)));
    for (index_t i = 0; i < size; ++i) data_[i] = 0.0F;
  }

  float* data() const { return data_; }
  index_t size() const { return size_; }

 private:
  static constexpr index_t max_stagger_bytes = 4096;
  static constexpr index_t stagger_floats = 9 * 16;  // nine cache lines

  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };

  static float* allocate(std::size_t bytes) {
    constexpr std::size_t page = std::size_t{2} << 20;
    const std::size_t alignment = bytes >= page ? page : 4096;
    const std::size_t padded = (bytes + alignment - 1) / alignment * alignment;
    void* memory = std::aligned_alloc(alignment, padded);
    if (memory == nullptr) std::abort();
#if defined(__linux__)
    if (alignment == page) madvise(memory, padded, MADV_HUGEPAGE);
#endif
    return static_cast<float*>(memory);
  }

  index_t size_;
  std::unique_ptr<float, Free> memory_;
  float* data_ = nullptr;
};

// Writes standard normal numbers, like the logits of an untrained model. No probability underflows, even with SSMax.
inline void fill_normal(Buffer& buffer, std::uint32_t seed) {
  std::minstd_rand generator(seed);
  std::normal_distribution<float> normal;
  for (index_t i = 0; i < buffer.size(); ++i) buffer.data()[i] = normal(generator);
}

}  // namespace ssmax_bench
