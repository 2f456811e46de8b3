// Splits rows of q and k for the products of the bf16 path.
//
// A rotated row is not exact in bfloat16. Rounding the row would add an error of up to 2^-8 to each term of its logits,
// and SSMax multiplies logits by 4 to 10. So the bf16 path splits a rotated row into two parts, x = high + low. The
// two parts hold 16 bits of x. With the option rounded_rotation, a rotated row has one part. The channels of the
// product are:
//
// | keys | channels of q | channels of k |
// |---|---|---|
// | without rope | q | k |
// | rotated in the call | high, low, high | high, high, low |
// | rotated and rounded when a cache stored the keys | high, low | k, k |
#pragma once

#include <algorithm>

#include "../../kernels/prefill.hpp"
#include "load.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the number of parts of a row of q or k.
template <class Compute>
index_t logit_parts(const Problem<Compute>& problem) {
  if (!problem.has_rope() || problem.rounded_rotation) return 1;
  return problem.rotates_keys() ? 3 : 2;
}

/// Returns the number of channels of a part of width d: the products take pairs of channels, so an odd width has one
/// more channel, which is 0.
SSMAX_INLINE constexpr index_t part_width(index_t d) { return round_up(d, 2); }

/// Returns the number of channels that the product of q and k sums over. On the bf16 path the number is rounded up
/// to a multiple of `unit`.
template <class Operand, class Compute>
index_t product_depth(const Problem<Compute>& problem, index_t unit) {
  if constexpr (std::same_as<Operand, Compute>) return problem.width();
  return round_up(part_width(problem.width()) * logit_parts(problem), unit);
}

/// Splits in[n] = high + low, each rounded to nearest. Requires scratch[n].
inline void split_row(const float* in, index_t n, bfloat16* high, bfloat16* low, float* scratch) {
  narrow(in, n, high);
  widen(high, n, scratch);
  for (index_t i = 0; i < n; ++i) scratch[i] = in[i] - scratch[i];
  narrow(scratch, n, low);
}

/// Writes 0 to the channels of `parts` parts of width d that hold no number, and to the channels up to `depth`.
inline void pad_parts(bfloat16* row, index_t d, index_t parts, index_t depth) {
  if (parts * d == depth) return;
  const index_t w = part_width(d);
  for (index_t part = 0; part < parts; ++part)
    std::fill(row + part * w + d, row + (part + 1) * w, bfloat16{});
  std::fill(row + parts * w, row + depth, bfloat16{});
}

/// Writes the parts of a query, padded with 0 to `depth`. Requires widened_row[2 · d].
template <class Compute>
void load_query_parts(const Problem<Compute>& problem, const Variant<Compute>& variant, const QueryRow& of,
                      index_t depth, Compute* widened_row, bfloat16* out) {
  const index_t d = problem.width(), w = part_width(d), parts = logit_parts(problem);
  pad_parts(out, d, parts, depth);
  if (!problem.has_rope()) {
    std::copy_n(problem.q.template stored_as<bfloat16>(of.entry(), of.query.head, of.row()), d, out);
    return;
  }
  const Compute* row = load_query(problem, variant, of, widened_row);
  if (parts == 1) return narrow(row, d, out);
  split_row(row, d, out, out + w, widened_row + d);
  if (parts == 3) std::copy_n(out, d, out + 2 * w);
}

/// Writes the parts of keys, padded with 0 to rows.stride. Prefetches keys of 8 bits `ahead` keys later, unless
/// `ahead` is 0. Requires widened_row[2 · d].
template <class Compute>
void load_key_parts(const Problem<Compute>& problem, const Variant<Compute>& variant, const QueryShape& shape,
                    const HeadKeys& keys, Compute* widened_row, StridedRows<bfloat16> rows, index_t ahead) {
  const index_t d = problem.width(), w = part_width(d), parts = logit_parts(problem);
  const bool dequantizes = !problem.rotates_keys() && problem.keys.k_kind() == ElementKind::quantized;
  for_each_run(problem.keys, keys, [&](index_t key, const AnyKeyRun& run) {
    if (dequantizes) {
      problem.keys.dequantize_k(run, bytes_ahead(ahead, run.k_stride, problem.keys.k_size()), rows);
      if (parts == 1 && d == rows.stride) {
        rows.first = rows[run.count];
        return;
      }
    }
    for (index_t i = 0; i < run.count; ++i, rows.first = rows[1]) {
      bfloat16* const out = rows.first;
      if (problem.rotates_keys()) {
        load_keys(problem, variant, shape, {keys.batch, keys.kv_head, {key + i, key + i + 1}},
                  {widened_row, d});
        if (parts == 1) {
          narrow(widened_row, d, out);
        } else {
          split_row(widened_row, d, out, out + 2 * w, widened_row + d);
          std::copy_n(out, d, out + w);
        }
      } else {
        const bfloat16* const row =
            dequantizes ? out : static_cast<const bfloat16*>(run.k) + i * run.k_stride;
        for (index_t part = dequantizes ? 1 : 0; part < parts; ++part) std::copy_n(row, d, out + part * w);
      }
      pad_parts(out, d, parts, rows.stride);
    }
  });
}

SSMAX_END
