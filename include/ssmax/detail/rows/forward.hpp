// Computes softmax for rows that share n and c, and the logarithms of single rows (driver.hpp).
#pragma once

#include "driver.hpp"
#include "fill.hpp"
#include "fused.hpp"
#include "row.hpp"

SSMAX_BEGIN_COMPILED

template <class X, class Y>
void softmax_group(const shared::SoftmaxKernels<ComputeType<X>>& tables, shared::StridedRows<const X> in,
                   shared::StridedRows<Y> out, index_t rows, index_t n, double c, bool alone) {
  using namespace detail;
  using T = ComputeType<X>;
  const RowKernels<T>& kernels = tables.rows;
  const ShortRowKernels<T>& short_rows = tables.short_rows;
  const Multiplier<T> multiplier(c);
  if constexpr (std::same_as<X, T> && std::same_as<Y, T>) {
    const bool is_block = n > (alone ? 1 : short_rows.longest) && n <= row_block;
    if (is_block && multiplier.is_plain()) {
      // A kernel of one lane waits for its exponentials, so overlap helps it wherever the rows are stored.
      const bool near = kernels.width == 1 || 2 * rows * n * static_cast<index_t>(sizeof(T)) <= far_bytes;
      return softmax_block_rows<T>(kernels, in, out, rows, n, c, near && rows > 1);
    }
  }
  while (rows > 0) {
    index_t done = 0;
    if constexpr (std::same_as<X, T> && std::same_as<Y, T>) {
      const Scale<T> scale = multiplier.scale;
      if (!alone && n <= short_rows.longest && multiplier.is_plain()) {
        const bool packs = n < kernels.width && (n & (n - 1)) == 0 && in.stride == n && out.stride == n;
        if (packs) {
          done = short_rows.packed(in.first, out.first, rows, n, scale);
        } else if (n > 1) {
          done = short_rows.group(in.first, in.stride, out.first, out.stride, rows, n, scale);
        }
      }
    }
    in.first = in[done];
    out.first = out[done];
    rows -= done;
    // Computes the rows that the short kernels skipped, at most one vector of rows. The short kernels then
    // continue.
    for (index_t r = std::min<index_t>(rows, kernels.width); r > 0; --r, --rows) {
      softmax_row<T>(kernels, in.first, n, c, out.first);
      in.first = in[1];
      out.first = out[1];
    }
  }
}

template <class T>
void softmax_lone_rows(const shared::SoftmaxKernels<T>& tables, const shared::LoneRow<T>* rows,
                       index_t count) {
  using namespace detail;
  RaggedRow<T> ragged[max_lone_rows] = {};
  bool plain[max_lone_rows] = {}, all_plain = true;
  double c = 1;
  Multiplier<T> multiplier(c);
  for (index_t r = 0; r < count; ++r) {
    // A single key has the weight 1 under any finite c, also under one that is not plain.
    const double of_row = rows[r].n == 1 && std::isfinite(rows[r].c) ? 1.0 : rows[r].c;
    if (of_row != c) {
      c = of_row;
      multiplier = Multiplier<T>(c);
    }
    plain[r] = multiplier.is_plain() && std::isfinite(c);
    all_plain = all_plain && plain[r];
    ragged[r] = {rows[r].in, rows[r].out, rows[r].n, rows[r].masked, multiplier.scale};
  }
  if (all_plain && tables.short_rows.ragged(ragged, count)) return;
  // Computes each row alone, so that a row's bits do not depend on the rows that need the general path.
  for (index_t r = 0; r < count; ++r) {
    if (plain[r] && tables.short_rows.ragged(ragged + r, 1)) continue;
    softmax_row<T>(tables.rows, rows[r].in, rows[r].n, rows[r].c, rows[r].out);
    fill_row(rows[r].out + rows[r].n, rows[r].masked, 0.0f);
  }
}

template <class X, class Y>
void log_softmax_row(const shared::RowKernels<ComputeType<X>>& kernels, const X* in, index_t n, double c,
                     Y* out) {
  using namespace detail;
  using T = ComputeType<X>;
  T scratch[row_block], staged[row_block];
  const RowLogSum<T> total = log_sum_row<T, X>(kernels, in, n, c, scratch);
  if (total.kind == RowKind::masked) return fill_row(out, n, -std::numeric_limits<float>::infinity());
  if (total.kind != RowKind::regular) return fill_row(out, n, std::numeric_limits<float>::quiet_NaN());
  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin);
    T* to = staging<T>(out + begin, staged);
    log_block(kernels, widened<T>(in + begin, count, scratch), count, c, total, to);
    narrow_to<T>(out + begin, count, to);
  }
}

template <class X>
double logsumexp_row(const shared::RowKernels<ComputeType<X>>& kernels, const X* in, index_t n, double c) {
  using namespace detail;
  using T = ComputeType<X>;
  T scratch[row_block];
  const RowLogSum<T> total = log_sum_row<T, X>(kernels, in, n, c, scratch);
  if (total.kind == RowKind::masked) return -std::numeric_limits<double>::infinity();
  if (total.kind != RowKind::regular) return std::numeric_limits<double>::quiet_NaN();
  return fused(c, static_cast<double>(total.origin), total.log_sum);
}

SSMAX_END
