// Defines AcquiredProducts, which configures this thread's units of products (AMX tiles) and releases them.
#pragma once

#include "../../kernels/prefill.hpp"

SSMAX_BEGIN_DETAIL

/// A guard: its constructor configures this thread's units for the kernels' products, its destructor releases the
/// units. Kernels without such units need no configuration.
template <class Compute, class Operand>
class AcquiredProducts {
 public:
  explicit AcquiredProducts(const PrefillKernels<Compute, Operand>& kernels) : kernels_(kernels) {
    if (kernels_.acquire != nullptr) kernels_.acquire();
  }
  AcquiredProducts(const AcquiredProducts&) = delete;
  AcquiredProducts& operator=(const AcquiredProducts&) = delete;
  ~AcquiredProducts() {
    if (kernels_.release != nullptr) kernels_.release();
  }

 private:
  const PrefillKernels<Compute, Operand>& kernels_;
};

SSMAX_END
