/// @defgroup workspace Memory between calls (workspace.hpp)
/// @ingroup execution
/// Memory that the caller keeps from call to call, so that calls of attention, its backward
/// and decode allocate nothing.
#pragma once

#include <cstddef>
#include <limits>
#include <new>
#include <utility>

#include "config.hpp"
#include "detail/checks/error.hpp"

/// @addtogroup workspace
/// @{
SSMAX_BEGIN_DATA

/// Memory that calls of attention and decode may use one after the other, not at the same time. It grows to
/// what a call needs and keeps that: the next call of that size or less allocates nothing.
class Workspace {
 public:
  /// Without memory until the first call.
  SSMAX_INLINE Workspace() = default;
  /// Frees the memory.
  SSMAX_INLINE ~Workspace() { free(); }
  /// Not copied.
  Workspace(const Workspace&) = delete;
  /// Not copied.
  Workspace& operator=(const Workspace&) = delete;
  /// Takes the memory of other, which is left without.
  SSMAX_INLINE Workspace(Workspace&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  /// Frees its own memory and takes that of other.
  SSMAX_INLINE Workspace& operator=(Workspace&& other) noexcept {
    if (this == &other) return *this;
    free();
    memory_ = std::exchange(other.memory_, nullptr);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  /// Bytes that it holds.
  [[nodiscard]] SSMAX_INLINE std::size_t size() const { return size_; }

  /// At least `bytes`, aligned to a cache line. Throws std::invalid_argument where they are more than index_t
  /// counts, std::bad_alloc where they cannot be had.
  SSMAX_INLINE std::byte* reserve(std::size_t bytes) {
    constexpr auto most = static_cast<std::size_t>(std::numeric_limits<index_t>::max() / 64 * 64);
    if (bytes > most) detail::fail_format("ssmax: a call needs memory of more than %zu bytes", most);
    if (bytes > size_) {
      free();
      memory_ = static_cast<std::byte*>(::operator new(bytes, alignment));
      size_ = bytes;
    }
    return memory_;
  }

 private:
  static constexpr std::align_val_t alignment{64};

  SSMAX_INLINE void free() {
    if (memory_ != nullptr) ::operator delete(memory_, alignment);
    memory_ = nullptr;
    size_ = 0;
  }

  std::byte* memory_ = nullptr;
  std::size_t size_ = 0;
};

SSMAX_END
/// @}
