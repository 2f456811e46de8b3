// Catches the exceptions of an executor's calls and rethrows the first one when all calls have ended. An
// exception must not leave a thread of an executor, and must not reach the caller of `run` while calls are
// running.
//
// The unit that calls `run` compiles the catch clause. The threads cannot catch: a unit without exceptions
// may have made their pool.
#pragma once

#include "../../config.hpp"

#if defined(__cpp_exceptions)
#include <atomic>
#include <exception>
#endif

SSMAX_BEGIN_DETAIL

/// A wrapper of `f` that many threads may call at once and that keeps the first exception. Without exceptions
/// it only calls `f`.
template <class F>
class GuardedCalls {
 public:
  explicit GuardedCalls(const F& f) : f_(f) {}

  void operator()(index_t index) noexcept {
#if defined(__cpp_exceptions)
    try {
      f_(index);
    } catch (...) {
      if (!thrown_.test_and_set(std::memory_order_relaxed)) exception_ = std::current_exception();
    }
#else
    f_(index);
#endif
  }

  /// Calls the object that `guarded` points to.
  static void call(void* guarded, index_t index) noexcept { (*static_cast<GuardedCalls*>(guarded))(index); }

  /// Rethrows the kept exception. Requires that all calls have ended and that their writes are visible.
  void rethrow() {
#if defined(__cpp_exceptions)
    if (exception_) std::rethrow_exception(exception_);
#endif
  }

 private:
  const F& f_;
#if defined(__cpp_exceptions)
  std::atomic_flag thrown_;
  std::exception_ptr exception_;
#endif
};

SSMAX_END
