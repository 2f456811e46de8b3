// Declares the drivers of rows: softmax, its logarithm, the log of its sum, and gradients of rows that share
// n and c. The drivers are compiled once per element type. The callers apply masks, scalings and executors.
#pragma once

#include "../../storage.hpp"
#include "../kernels/dot.hpp"
#include "../kernels/row_gradients.hpp"
#include "../kernels/rows.hpp"
#include "../kernels/short_rows.hpp"

SSMAX_BEGIN_SHARED

/// The kernels of a softmax call, looked up once.
template <class T>
struct SoftmaxKernels {
  const RowKernels<T>& rows;
  const ShortRowKernels<T>& short_rows;
};

/// Upper bound of a vector's lanes.
inline constexpr index_t max_lone_rows = 16;

/// A row whose neighbours see other keys, with its multiplier c. Its result has `masked` zeros after the n weights.
template <class T>
struct LoneRow {
  const T* in;
  T* out;
  index_t n, masked;
  double c;
};

/// The kernels of a gradient call, looked up once.
template <class T>
struct SoftmaxGradientKernels {
  const RowKernels<T>& rows;
  const DotKernels<T>& dot;
  const RowGradientKernels<T>& gradients;
};

SSMAX_END

SSMAX_BEGIN_COMPILED

/// Writes out = softmax(c·in) for rows that see the same n keys. `alone` is true for a single row whose
/// neighbours see other keys.
template <class X, class Y>
void softmax_group(const shared::SoftmaxKernels<ComputeType<X>>& kernels, shared::StridedRows<const X> in,
                   shared::StridedRows<Y> out, index_t rows, index_t n, double c, bool alone);

/// Writes out = softmax(c·in) for at most a vector's lanes of short rows that see different keys.
template <class T>
void softmax_lone_rows(const shared::SoftmaxKernels<T>& kernels, const shared::LoneRow<T>* rows,
                       index_t count);

/// Writes out = c·in - ln Σ exp(c·in) for one row.
template <class X, class Y>
void log_softmax_row(const shared::RowKernels<ComputeType<X>>& kernels, const X* in, index_t n, double c,
                     Y* out);

/// Returns ln Σ exp(c·in) of one row. Returns -inf for a masked row and NaN for a poisoned row.
template <class X>
double logsumexp_row(const shared::RowKernels<ComputeType<X>>& kernels, const X* in, index_t n, double c);

/// Writes dlogits = c·y ⊙ (dout - ⟨dout, y⟩) with y = out. Returns the sum over the rows of dc = ⟨y ⊙ (dout -
/// ⟨dout, y⟩), logits⟩. Writes each row's dc to `dc`, unless `dc` is null. Exception: the dc of up to 16 short rows are
/// one sum in the compute type, which the first of these rows has, and the others have 0.
template <class X>
double softmax_gradient(const shared::SoftmaxGradientKernels<ComputeType<X>>& kernels,
                        const shared::GradientRows<X>& rows, double c, double* dc);

/// Writes dlogits = c·(dout - p·Σ dout) with out = log_softmax and p = exp(out). Returns and writes dc as
/// softmax_gradient does.
template <class X>
double log_softmax_gradient(const shared::SoftmaxGradientKernels<ComputeType<X>>& kernels,
                            const shared::GradientRows<X>& rows, double c, double* dc);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "backward.hpp"
#include "forward.hpp"
#endif
