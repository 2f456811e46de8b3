/// @defgroup workspace Memory between calls (workspace.hpp)
/// @ingroup execution
/// Memory that the caller keeps from call to call, so that calls of attention, its backward
/// and decode allocate nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <span>
#include <utility>

#include "config.hpp"
#include "detail/checks/error.hpp"

/// @addtogroup workspace
/// @{
SSMAX_BEGIN_DATA

/// Memory that calls of attention and decode may use one after the other, not at the same time. It grows to
/// what a call needs and keeps that: the next call of that size or less allocates nothing. Exception: memory of the
/// caller does not grow.
class Workspace {
 public:
  /// Without memory until the first call.
  SSMAX_INLINE Workspace() = default;
  /// Uses memory of the caller, which must outlive the workspace, and never allocates. Throws std::invalid_argument
  /// unless the memory begins at a multiple of 64 bytes. A call that needs more throws std::invalid_argument.
  SSMAX_INLINE explicit Workspace(std::span<std::byte> memory)
      : memory_(memory.data()), size_(memory.size()), is_owner_(false) {
    const auto rest = static_cast<index_t>(reinterpret_cast<std::uintptr_t>(memory_) % 64);
    if (rest != 0)
      detail::fail_value("Workspace", "memory", "begins", rest, "bytes after a multiple of", index_t{64});
  }
  /// Frees the memory, unless it is the caller's.
  SSMAX_INLINE ~Workspace() { free(); }
  /// Not copied.
  Workspace(const Workspace&) = delete;
  /// Not copied.
  Workspace& operator=(const Workspace&) = delete;
  /// Takes the memory of other, which is left without.
  SSMAX_INLINE Workspace(Workspace&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        is_owner_(std::exchange(other.is_owner_, true)) {}
  /// Frees its own memory and takes that of other.
  SSMAX_INLINE Workspace& operator=(Workspace&& other) noexcept {
    if (this == &other) return *this;
    free();
    memory_ = std::exchange(other.memory_, nullptr);
    size_ = std::exchange(other.size_, 0);
    is_owner_ = std::exchange(other.is_owner_, true);
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
      if (!is_owner_)
        detail::fail_format("ssmax: a call needs memory of %zu bytes, the workspace has %zu", bytes, size_);
      free();
      memory_ = static_cast<std::byte*>(::operator new(bytes, alignment));
      size_ = bytes;
    }
    return memory_;
  }

 private:
  static constexpr std::align_val_t alignment{64};

  SSMAX_INLINE void free() {
    if (is_owner_ && memory_ != nullptr) ::operator delete(memory_, alignment);
    memory_ = nullptr;
    size_ = 0;
  }

  std::byte* memory_ = nullptr;
  std::size_t size_ = 0;
  bool is_owner_ = true;
};

SSMAX_END
/// @}
