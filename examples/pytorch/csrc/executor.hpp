// PyTorch's threads as an executor of the library.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <ssmax/execution.hpp>

namespace ssmax_torch {

/// Makes calls by at::parallel_for: as many threads as torch.set_num_threads says, each of which takes the next
/// call once it is done with one.
struct TorchThreads {
  ssmax::index_t concurrency() const { return static_cast<ssmax::index_t>(torch::stable::get_num_threads()); }

  template <class F>
  void run(ssmax::index_t n, const F& f) const {
    if (n == 1) return f(ssmax::index_t{0});
    std::atomic<ssmax::index_t> next = 0;
    std::exception_ptr error;
    std::atomic_flag failed;
    const auto work = [&](std::int64_t, std::int64_t) {
      try {
        for (ssmax::index_t i = next++; i < n; i = next++) f(i);
      } catch (...) {  // must not leave a thread that is not the caller's
        if (!failed.test_and_set()) error = std::current_exception();
      }
    };
    torch::stable::parallel_for(0, std::min(n, concurrency()), 1, work);
    if (error) std::rethrow_exception(error);
  }
};

}  // namespace ssmax_torch
