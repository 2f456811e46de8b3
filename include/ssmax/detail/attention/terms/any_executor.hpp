// Hides the type of an executor, so that drivers are compiled once and not per executor type.
#pragma once

#include "../../../execution.hpp"

SSMAX_BEGIN_DETAIL

template <class F>
void call_one(const void* f, index_t index) {
  (*static_cast<const F*>(f))(index);
}

template <class E>
void run_calls(const void* executor, index_t n, void (*call)(const void* f, index_t index), const void* f) {
  static_cast<E*>(const_cast<void*>(executor))->run(n, [call, f](index_t index) { call(f, index); });
}

SSMAX_END

SSMAX_BEGIN_SHARED

/// A reference to an executor of any type. The executor must outlive it. The constructor compiles the call of
/// `run` in the unit that has the executor's definition.
class AnyExecutor {
 public:
  template <class E>
  SSMAX_INLINE explicit AnyExecutor(E& executor) : AnyExecutor(executor, detail::threads_of(executor)) {}
  /// Divides work for `concurrency` threads, whatever the executor's own number is.
  template <class E>
  SSMAX_INLINE AnyExecutor(E& executor, index_t concurrency)
      : executor_(&executor), run_(detail::run_calls<E>), concurrency_(concurrency) {}

  /// Returns the number of threads to divide work for: 1 to 4096.
  SSMAX_INLINE index_t concurrency() const { return concurrency_; }

  template <class F>
  SSMAX_INLINE void run(index_t n, const F& f) const {
    run_(executor_, n, detail::call_one<F>, &f);
  }

 private:
  const void* executor_;
  void (*run_)(const void* executor, index_t n, void (*call)(const void* f, index_t index), const void* f);
  index_t concurrency_;
};

SSMAX_END
