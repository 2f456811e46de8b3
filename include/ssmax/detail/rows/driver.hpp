// The drivers of rows: softmax, its logarithm, the log of its sum, and gradients of rows that share n and c.
// Compiled once for each element type; masks, scalings and executors are left to the callers.
#pragma once

#include "../../storage.hpp"
#include "../kernels/dot.hpp"
#include "../kernels/row_gradients.hpp"
#include "../kernels/rows.hpp"
#include "../kernels/short_rows.hpp"

SSMAX_BEGIN_SHARED

/// The kernels that a call of softmax needs, looked up once.
template <class T>
struct SoftmaxKernels {
  const RowKernels<T>& rows;
  const ShortRowKernels<T>& short_rows;
};

/// Those of a gradient.
template <class T>
struct SoftmaxGradientKernels {
  const RowKernels<T>& rows;
  const DotKernels<T>& dot;
  const RowGradientKernels<T>& gradients;
};

/// `rows` rows of n elements, each array with a stride from row to row of its own.
template <class X>
struct GradientRows {
  const X *out, *dout, *logits;  // logits null where no dc is wanted
  X* dlogits;                    // may be out or dout
  index_t out_stride, dout_stride, logits_stride, dlogits_stride;
  index_t rows, n;
};

SSMAX_END

SSMAX_BEGIN_COMPILED

/// out = softmax(c·in) of rows that see the same n keys. `alone`: it is one row, whose neighbours
/// see other keys.
template <class X, class Y>
void softmax_group(const shared::SoftmaxKernels<shared::Compute<X>>& kernels, const X* in, index_t in_stride,
                   Y* out, index_t out_stride, index_t rows, index_t n, double c, bool alone);

/// out = c·in - ln Σ exp(c·in) of one row.
template <class X, class Y>
void log_softmax_row(const shared::RowKernels<shared::Compute<X>>& kernels, const X* in, index_t n, double c,
                     Y* out);

/// ln Σ exp(c·in) of one row: -inf for a masked row, NaN for a poisoned one.
template <class X>
double logsumexp_row(const shared::RowKernels<shared::Compute<X>>& kernels, const X* in, index_t n, double c);

/// dlogits = c·y ⊙ (dout - ⟨dout, y⟩), y = out. Returns the sum over the rows of
/// dc = ⟨y ⊙ (dout - ⟨dout, y⟩), logits⟩; `dc`, unless null, gets each row's.
template <class X>
double softmax_gradient(const shared::SoftmaxGradientKernels<shared::Compute<X>>& kernels,
                        const shared::GradientRows<X>& rows, double c, double* dc);

/// The same for out = log_softmax: dlogits = c·(dout - p·Σ dout), p = exp(out).
template <class X>
double log_softmax_gradient(const shared::SoftmaxGradientKernels<shared::Compute<X>>& kernels,
                            const shared::GradientRows<X>& rows, double c, double* dc);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "backward.hpp"
#include "forward.hpp"
#endif
