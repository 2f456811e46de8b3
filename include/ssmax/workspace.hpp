/// @defgroup workspace Memory between calls (workspace.hpp)
/// @ingroup execution
/// Memory that you keep between calls, so that attention and its backward do not allocate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <utility>

#include "config.hpp"
#include "detail/checks/error.hpp"

/// @addtogroup workspace
/// @{
SSMAX_BEGIN_DATA

/// Memory that consecutive calls of attention reuse. Two calls must not use it at the same time. The
/// memory grows to the size that a call needs and stays. So later calls of at most this size do not allocate.
/// Exception: memory of the caller does not grow.
class Workspace {
 public:
  /// Makes a workspace without memory. The first call allocates.
  SSMAX_INLINE Workspace() = default;
  /// Uses memory of the caller, which must outlive the workspace, and never allocates. Throws std::invalid_argument
  /// unless the memory begins at a multiple of 64 bytes. A call that needs more memory throws std::invalid_argument.
  SSMAX_INLINE explicit Workspace(std::span<std::byte> memory)
      : memory_(memory.data()), size_(memory.size()), is_owner_(false) {
    const auto rest = static_cast<index_t>(reinterpret_cast<std::uintptr_t>(memory_) % 64);
    if (rest != 0)
      detail::fail_value("Workspace", "memory", "begins", rest, "bytes after a multiple of", index_t{64});
  }
  /// Frees the memory. Exception: memory of the caller stays.
  SSMAX_INLINE ~Workspace() { free(); }
  /// Deleted.
  Workspace(const Workspace&) = delete;
  /// Deleted.
  Workspace& operator=(const Workspace&) = delete;
  /// Takes the memory of `other`, which is then empty.
  SSMAX_INLINE Workspace(Workspace&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        is_owner_(std::exchange(other.is_owner_, true)) {}
  /// Frees its own memory and takes the memory of `other`.
  SSMAX_INLINE Workspace& operator=(Workspace&& other) noexcept {
    if (this == &other) return *this;
    free();
    memory_ = std::exchange(other.memory_, nullptr);
    size_ = std::exchange(other.size_, 0);
    is_owner_ = std::exchange(other.is_owner_, true);
    return *this;
  }

  /// Returns the number of bytes.
  [[nodiscard]] SSMAX_INLINE std::size_t size() const { return size_; }

  /// Returns at least `bytes` bytes, aligned to 64 bytes. Throws std::invalid_argument if index_t cannot hold the
  /// number, or if memory of the caller is too small. Throws std::bad_alloc if the memory is not available.
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

  /// @cond
  /// Does what `reserve` does. The memory then begins with the first `kept` bytes of the old memory.
  SSMAX_INLINE std::byte* grow(std::size_t bytes, std::size_t kept) {
    if (!is_owner_ || bytes <= size_ || kept == 0) return reserve(bytes);
    const Workspace old(std::move(*this));
    std::memcpy(reserve(bytes), old.memory_, kept);
    return memory_;
  }
  /// @endcond

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
