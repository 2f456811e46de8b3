// Memory for an object that is constructed later, or never.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

#include "../../config.hpp"

SSMAX_BEGIN_DETAIL

/// A std::optional whose memory is not set to 0 first. Compilers set the memory of std::optional, which takes a tenth
/// of the time of the driver of a small call.
template <class T>
class Slot {
 public:
  Slot() noexcept {}  // not defaulted: value initialization would set the memory
  ~Slot() { clear(); }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  /// Destroys the object, if the slot has one, and constructs another.
  template <class... Arguments>
  T& emplace(Arguments&&... arguments) {
    clear();
    object_ = ::new (static_cast<void*>(memory_)) T{std::forward<Arguments>(arguments)...};
    return *object_;
  }
  explicit operator bool() const { return object_ != nullptr; }
  T& operator*() { return *object_; }
  T* operator->() { return object_; }

 private:
  void clear() {
    if (object_ != nullptr) object_->~T();
    object_ = nullptr;
  }

  T* object_ = nullptr;
  alignas(T) std::byte memory_[sizeof(T)];
};

SSMAX_END
