// Memory that the caller keeps from call to call, so that calls of attention, its backward and decode allocate nothing.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include "config.hpp"
#include "detail/checks/error.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {

/// Memory that calls of attention and decode may use one after the other, not at the same time. It grows to what a call
/// needs and keeps that: the next call of that size or less allocates nothing.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  Workspace(Workspace&& other) noexcept
      : memory_(std::move(other.memory_)), size_(std::exchange(other.size_, 0)) {}
  Workspace& operator=(Workspace&& other) noexcept {
    memory_ = std::move(other.memory_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  [[nodiscard]] std::size_t size() const { return size_; }

  /// At least `bytes`, aligned to a cache line. Throws std::invalid_argument where they are more than index_t counts,
  /// std::bad_alloc where they cannot be had.
  std::byte* reserve(std::size_t bytes) {
    constexpr auto most = static_cast<std::size_t>(std::numeric_limits<index_t>::max() / 64 * 64);
    if (bytes > most) detail::fail_format("ssmax: a call needs memory of more than %zu bytes", most);
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

}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
