// A unit of ssmax::compiled: holds the drivers of rows.

#include "../rows/cross_entropy.hpp"
#include "../rows/driver.hpp"

SSMAX_BEGIN_COMPILED

using namespace shared;

#define SSMAX_INSTANTIATE(X, Y)                                                                            \
  template void softmax_group(const SoftmaxKernels<ComputeType<X>>&, StridedRows<const X>, StridedRows<Y>, \
                              index_t, index_t, double, bool);                                             \
  template void log_softmax_row(const RowKernels<ComputeType<X>>&, const X*, index_t, double, Y*);
SSMAX_INSTANTIATE(float, float)
SSMAX_INSTANTIATE(float, half)
SSMAX_INSTANTIATE(float, bfloat16)
SSMAX_INSTANTIATE(half, float)
SSMAX_INSTANTIATE(half, half)
SSMAX_INSTANTIATE(half, bfloat16)
SSMAX_INSTANTIATE(bfloat16, float)
SSMAX_INSTANTIATE(bfloat16, half)
SSMAX_INSTANTIATE(bfloat16, bfloat16)
SSMAX_INSTANTIATE(double, double)
#undef SSMAX_INSTANTIATE

template void softmax_lone_rows(const SoftmaxKernels<float>&, const LoneRow<float>*, index_t);
template void softmax_lone_rows(const SoftmaxKernels<double>&, const LoneRow<double>*, index_t);

#define SSMAX_INSTANTIATE(X)                                                                                \
  template double logsumexp_row(const RowKernels<ComputeType<X>>&, const X*, index_t, double);              \
  template double softmax_gradient(const SoftmaxGradientKernels<ComputeType<X>>&, const GradientRows<X>&,   \
                                   double, double*);                                                        \
  template double log_softmax_gradient(const SoftmaxGradientKernels<ComputeType<X>>&,                       \
                                       const GradientRows<X>&, double, double*);                            \
  template double cross_entropy_row(const RowKernels<ComputeType<X>>&, const X*, index_t, index_t, double,  \
                                    X*);                                                                    \
  template double weighted_cross_entropy_row(const RowKernels<ComputeType<X>>&, const X*, index_t, index_t, \
                                             const LossTerms&, double, X*);
SSMAX_INSTANTIATE(float)
SSMAX_INSTANTIATE(half)
SSMAX_INSTANTIATE(bfloat16)
SSMAX_INSTANTIATE(double)
#undef SSMAX_INSTANTIATE

SSMAX_END
