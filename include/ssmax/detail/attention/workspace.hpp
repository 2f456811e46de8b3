// A call's memory: one allocation, or a workspace that the caller keeps.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <utility>

#include "../../config.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {

/// Memory that calls of attention and decode may use one after the other, not at the same time. It grows to what a call
/// needs and keeps that: the next call of that size or less allocates nothing.
class Workspace {
 public:
  Workspace() = default;
  Workspace(Workspace&& other) noexcept
      : memory_(std::move(other.memory_)), size_(std::exchange(other.size_, 0)) {}
  Workspace& operator=(Workspace&& other) noexcept {
    memory_ = std::move(other.memory_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  [[nodiscard]] std::size_t size() const { return size_; }

  /// At least `bytes`, aligned to a cache line.
  std::byte* reserve(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new(bytes, alignment)));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, alignment); }
  };

  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_ = 0;
};

namespace detail {

/// Hands out aligned pieces of a block of memory, or, without one, counts what they would take.
class Carver {
 public:
  explicit Carver(std::byte* memory = nullptr) : memory_(memory) {}

  template <class U>
  U* take(index_t count) {
    const std::size_t at = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(U) + 63) / 64 * 64;
    return memory_ == nullptr ? nullptr : reinterpret_cast<U*>(memory_ + at);
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
