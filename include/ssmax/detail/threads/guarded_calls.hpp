// Calls whose exceptions wait: an exception may not leave a thread of an executor, and it may reach the
// caller of run only when no call runs any more.
//
// The exceptions are caught here, in code of the unit that calls run, and not by the threads that make the
// calls: a pool may have been made by a unit without exceptions.
#pragma once

#include "../../config.hpp"

#if defined(__cpp_exceptions)
#include <atomic>
#include <exception>
#endif

SSMAX_BEGIN_DETAIL

/// f, callable by many threads at once; keeps the first exception. Without exceptions, f and nothing else.
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

  /// operator() as a function and a pointer.
  static void call(void* guarded, index_t index) noexcept { (*static_cast<GuardedCalls*>(guarded))(index); }

  /// To be called when every call has ended and what it wrote can be seen.
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
