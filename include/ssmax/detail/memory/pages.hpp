// Allocates memory for large arrays that are read sequentially.
#pragma once

#include <cstddef>
#include <new>

#include "../../config.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

SSMAX_BEGIN_DETAIL

/// A standard allocator that aligns to cache lines. Arrays of at least 2 MiB request huge pages where the
/// system offers them. Reason: with 4 KiB pages the hardware prefetcher stops at every page. With huge pages,
/// 200 MB are read at 28 instead of 19 GB/s (Zen 4).
template <class X>
struct HugePages {
  using value_type = X;

  HugePages() = default;
  template <class Y>
  HugePages(const HugePages<Y>&) {}

  X* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(X);
    void* memory = ::operator new(padded(bytes), alignment(bytes));
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (bytes >= huge) madvise(memory, padded(bytes), MADV_HUGEPAGE);
#endif
    return static_cast<X*>(memory);
  }
  void deallocate(X* memory, std::size_t count) { ::operator delete(memory, alignment(count * sizeof(X))); }

  bool operator==(const HugePages&) const = default;

 private:
  static constexpr std::size_t huge = std::size_t{2} << 20;

  static std::align_val_t alignment(std::size_t bytes) { return std::align_val_t{bytes >= huge ? huge : 64}; }
  static std::size_t padded(std::size_t bytes) {
    return bytes >= huge ? (bytes + huge - 1) / huge * huge : bytes;
  }
};

SSMAX_END
