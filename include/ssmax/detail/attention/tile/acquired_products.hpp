// A thread's units of products, ready while they are needed.
#pragma once

#include "../../kernels/prefill.hpp"

SSMAX_BEGIN_DETAIL

/// While it lives, this thread's units are ready for the kernels' products.
template <class A, class E>
class AcquiredProducts {
 public:
  explicit AcquiredProducts(const PrefillKernels<A, E>& kernels) : kernels_(kernels) {
    if (kernels_.acquire != nullptr) kernels_.acquire();
  }
  AcquiredProducts(const AcquiredProducts&) = delete;
  AcquiredProducts& operator=(const AcquiredProducts&) = delete;
  ~AcquiredProducts() {
    if (kernels_.release != nullptr) kernels_.release();
  }

 private:
  const PrefillKernels<A, E>& kernels_;
};

SSMAX_END
