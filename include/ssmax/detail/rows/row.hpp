// Computes one row of any length, storage type and multiplier: softmax, its logarithm, and the log of its
// sum.
//
// A row is divided into blocks that fit the first-level cache. Each block is read for its maximum and then,
// from the cache, for its exponentials. Each block has its own shift. Exact powers of two bring all blocks to
// one shift.
//
// A row's result is computed in one of two ways:
//
// | way | steps | used for |
// |---|---|---|
// | store | writes exponentials to `out` or a buffer and multiplies them there | all other rows |
// | recompute | keeps only the sum in a first pass, computes exponentials again in a second | rows listed below |
//
// Recomputed rows have more than one block. They are in place (their logits must outlive the first pass),
// have more than 1024 blocks, or have a result of a storage type other than T.
//
// Rows of one block each are computed one after another or, while they stay in the cache, overlapped.
//
// Rejected alternatives for results larger than the caches: docs/measured.md.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "../kernels/rows.hpp"
#include "../memory/conversion.hpp"
#include "fill.hpp"
#include "fused.hpp"

SSMAX_BEGIN_DETAIL

/// Rows whose logits and results together take more bytes than this are assumed to come from memory. It is
/// half of the 32 MiB of last-level cache that eight cores of Zen 3 or 4 share.
inline constexpr index_t far_bytes = index_t{16} << 20;

/// Rows of at most this many elements are assumed to stay in the second-level cache with their result (1 MiB
/// of float).
inline constexpr index_t longest_near_row = 131'072;

/// Elements per block: 16 KiB of float in and 16 KiB out, each half of a first-level cache.
inline constexpr index_t row_block = 4096;

template <class T>
Scale<T> split_scale(double c) {
  const double product = c * std::numbers::log2e;
  const T high = static_cast<T>(product);
  if constexpr (sizeof(T) == sizeof(double)) {
    // Adds the rounding error of the product, and the missing part of the constant log2(e):
    // 1.4426950408889634 is 2.04e-17 too small.
    constexpr double log2e_low = 2.0355273740931033e-17;
    return {high, fused(c, std::numbers::log2e, -product) + c * log2e_low};
  }
  return {high, static_cast<T>(product - static_cast<double>(high))};
}

/// The factors of c = direction · c'. Kernels read blocks of direction·z, which is an exact product. They
/// multiply by c' > 0, which T represents with bits to spare. direction has the sign of c.
///
/// | size of c | size of direction |
/// |---|---|
/// | above 2^64 | 2^64 |
/// | 2^-64 to 2^64 | 1 |
/// | below 2^-64 | 2^-64 |
///
/// Exception: a c' that T cannot distinguish from 0 or from infinity becomes the smallest or the largest c'.
/// No two logits of T are close enough to show the difference.
template <class T>
struct Multiplier {
  static constexpr double step = 0x1p64;

  T direction = 1;
  Scale<T> scale;

  explicit Multiplier(double c) {
    if (c >= 1 / step && c <= step) {
      scale = split_scale<T>(c);
      return;
    }
    const double unit = unit_of(c);
    direction = static_cast<T>(c < 0 ? -unit : unit);
    scale = split_scale<T>(std::clamp(std::abs(c) / unit, static_cast<double>(std::numeric_limits<T>::min()),
                                      static_cast<double>(std::numeric_limits<T>::max()) / 4));
  }

  /// Returns the size of direction for a c.
  static double unit_of(double c) {
    const double size = std::abs(c);
    return size > step ? step : size < 1 / step ? 1 / step : 1;
  }

  /// Returns true if direction is 1: the blocks are the logits themselves.
  bool is_plain() const { return direction == 1; }
};

enum class RowKind {
  regular,
  masked,       // all logits are -inf: every probability is 0
  poisoned,     // NaN, or +inf with c >= 0: every probability is NaN
  out_of_range  // needs rebasing: logits too large for an exact shift
};

/// The sum of a row: Σ exp(c·z) = 2^shift · sum. `origin` is the logit with the largest c·z, in the form of
/// the source's blocks. RowSource::logit returns the original logit.
template <class T>
struct RowSum {
  RowKind kind = RowKind::masked;
  T origin = -std::numeric_limits<T>::infinity();
  double shift = 0;
  double sum = 0;

  /// Adds the sum of a block.
  void add(T block_origin, double block_shift, double block_sum) {
    if (kind == RowKind::masked) {
      *this = {RowKind::regular, block_origin, block_shift, block_sum};
      return;
    }
    origin = std::max(origin, block_origin);
    if (block_shift > shift) {
      sum = std::ldexp(sum, static_cast<int>(shift - block_shift)) + block_sum;
      shift = block_shift;
    } else {
      sum += std::ldexp(block_sum, static_cast<int>(block_shift - shift));
    }
  }
};

/// A row of logits as blocks of direction·z for the kernels (see Multiplier).
///
/// After rebasing, the blocks are direction·(z - origin). No logit has a larger c·z than the origin. The
/// difference is exact for all logits whose weights count. Reason: only rows with |c·z·log2(e)| >= 2^20 are
/// rebased, and there these logits are within a factor of 2 of the origin.
template <class T, class X>
class RowSource {
 public:
  RowSource(const RowKernels<T>& kernels, const X* in, index_t n, double c)
      : kernels_(kernels), in_(in), n_(n), c_(c), multiplier_(c) {}

  index_t size() const { return n_; }
  Scale<T> scale() const { return multiplier_.scale; }
  double c() const { return c_; }
  bool is_plain() const { return multiplier_.is_plain() || rebased_; }
  bool rebased() const { return rebased_; }
  T origin() const { return origin_; }

  const T* block(index_t begin, index_t count, T* scratch) const {
    return turned(begin, count, multiplier_.direction, scratch);
  }

  /// Finds the origin. Returns the kind of the row: `regular` if it has an origin.
  RowKind rebase(T* scratch) {
    constexpr T inf = std::numeric_limits<T>::infinity();
    const T sign = c_ < 0 ? T{-1} : T{1};
    T top = -inf;
    for (index_t begin = 0; begin < n_; begin += row_block) {
      const index_t count = std::min(row_block, n_ - begin);
      const Extremum<T> found = kernels_.max(turned(begin, count, sign, scratch), count);
      if (found.has_nan || found.value == inf) return RowKind::poisoned;
      top = std::max(top, found.value);
    }
    if (top == -inf) return RowKind::masked;
    origin_ = sign * top;
    rebased_ = true;
    return RowKind::regular;
  }

  /// Returns true if the blocks are contiguous in the caller's own memory.
  bool in_place() const { return std::same_as<X, T> && multiplier_.is_plain() && !rebased_; }

  /// Returns the logit z whose block element is `value`, the largest of the row.
  T logit(T value) const { return rebased_ ? origin_ : value / multiplier_.direction; }

 private:
  const T* turned(index_t begin, index_t count, T factor, T* scratch) const {
    const T* z = widened<T>(in_ + begin, count, scratch);
    if (factor == 1 && !rebased_) return z;
    kernels_.affine(z, count, origin_, factor, T{0}, scratch);
    return scratch;
  }

  const RowKernels<T>& kernels_;
  const X* in_;
  index_t n_;
  double c_;
  Multiplier<T> multiplier_;
  bool rebased_ = false;
  T origin_{0};
};

/// Computes the first pass. With a stage, stores the exponentials of the block at `begin` to stage + begin,
/// with the shift shifts[begin / row_block]. Without a stage, keeps only the sum.
template <class T, class Source>
RowSum<T> sum_row(const RowKernels<T>& kernels, const Source& source, T* scratch, T* stage, T* shifts) {
  RowSum<T> total;
  bool left_out = false;  // skipped a block with very low logits; times direction they may be -inf
  const index_t n = source.size();
  const T* z = source.block(0, std::min(row_block, n), scratch);
  Extremum<T> top = kernels.max(z, std::min(row_block, n));
  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin), next_count = std::min(row_block, n - begin - count);
    if (top.has_nan) return {.kind = RowKind::poisoned};
    const bool masked = top.value == -std::numeric_limits<T>::infinity();
    const T product = top.value * source.scale().high;
    if (!masked && !(product < largest_shift<T>)) return {.kind = RowKind::out_of_range};
    const bool counts = product > -largest_shift<T>;  // else weights are 0 under any shift of other blocks
    left_out = left_out || !(counts || (masked && source.is_plain()));
    // A row of one block may be in place. Returns before the exponentials overwrite its logits.
    if (left_out && n <= row_block && !source.rebased()) return {.kind = RowKind::out_of_range};
    const T shift = counts ? round_shift(product) : T{0};
    // Computes the next block's maximum among this block's exponentials, if the next block has the same
    // length and is in the cache. From memory, one stream at a time is faster, as in softmax_block_rows.
    const bool ready = source.in_place() && next_count == count && n <= longest_near_row;
    OverlappedWork<T> overlapped{.next = ready ? z + count : nullptr};
    const T sum = kernels.exp_store(z, count, source.scale(), shift,
                                    stage == nullptr ? scratch : stage + begin, overlapped);
    if (stage != nullptr)
      shifts[begin / row_block] = counts ? shift : -2 * largest_shift<T>;  // a factor of 0
    if (counts) total.add(top.value, static_cast<double>(shift), static_cast<double>(sum));
    if (next_count > 0) {
      z = source.block(begin + count, next_count, scratch);
      top = ready ? overlapped.next_top : kernels.max(z, next_count);
    }
  }
  // A block may be skipped only if the shift of the other blocks is higher by at least 2^11. This is further
  // than exponentials reach.
  const bool others_above =
      total.kind == RowKind::regular && total.shift >= 2048 - static_cast<double>(largest_shift<T>);
  if (left_out && !others_above) return {.kind = RowKind::out_of_range};
  return total;
}

template <class T, class Source>
RowSum<T> sum_row_rebasing(const RowKernels<T>& kernels, Source& source, T* scratch, T* stage, T* shifts) {
  if (!std::isfinite(source.c())) return {.kind = RowKind::poisoned};
  const RowSum<T> total = sum_row(kernels, source, scratch, stage, shifts);
  if (total.kind != RowKind::out_of_range) return total;
  const RowKind kind = source.rebase(scratch);
  if (kind != RowKind::regular) return {.kind = kind};
  return sum_row(kernels, source, scratch, stage, shifts);
}

/// The exponentials of a row. The first pass sums the exponentials, and for_each_block then passes them on
/// block by block.
template <class T, class X, class Y>
class ExponentialRow {
 public:
  /// If `out` is null, computes only the sum.
  ExponentialRow(const RowKernels<T>& kernels, const X* in, index_t n, double c, Y* out)
      : kernels_(kernels), source_(kernels, in, n, c), out_(out) {
    const bool in_place = static_cast<const void*>(in) == static_cast<const void*>(out);
    if constexpr (std::same_as<Y, T>) {
      if (n <= row_block || (!in_place && n <= row_block * max_blocks)) stage_ = out;
    } else {
      if (n <= row_block && out != nullptr) stage_ = staged_;
    }
    total_ = sum_row_rebasing(kernels, source_, scratch_, stage_, shifts_);
  }

  const RowSource<T, X>& source() const { return source_; }
  const RowSum<T>& total() const { return total_; }

  /// Calls f(begin, count, e, shift, to) for every block. The elements e, times 2^shift, are the exponentials
  /// whose sum is total().sum. f writes the block's results to `to`, which may be e.
  template <class F>
  void for_each_block(const F& f) {
    const index_t n = source_.size();
    for (index_t begin = 0; begin < n; begin += row_block) {
      const index_t count = std::min(row_block, n - begin);
      T* to = staging<T>(out_ + begin, staged_);
      if (stage_ != nullptr) {
        const auto shift = static_cast<double>(shifts_[begin / row_block]) - total_.shift;
        f(begin, count, stage_ + begin, static_cast<int>(shift), to);
      } else {
        OverlappedWork<T> nothing{};
        kernels_.exp_store(source_.block(begin, count, scratch_), count, source_.scale(),
                           static_cast<T>(total_.shift), to, nothing);
        f(begin, count, to, 0, to);
      }
      narrow_to<T>(out_ + begin, count, to);
    }
  }

 private:
  static constexpr index_t max_blocks = 1024;

  const RowKernels<T>& kernels_;
  RowSource<T, X> source_;
  Y* out_;
  T* stage_ = nullptr;  // exponentials of the whole row, or null if they are not kept
  RowSum<T> total_;
  T scratch_[row_block], staged_[row_block];
  T shifts_[max_blocks];
};

/// Writes out = softmax(c·in) for one row.
template <class T, class X, class Y>
void softmax_row(const RowKernels<T>& kernels, const X* in, index_t n, double c, Y* out) {
  ExponentialRow<T, X, Y> row(kernels, in, n, c, out);
  const RowSum<T>& total = row.total();
  if (total.kind == RowKind::masked) return fill_row(out, n, 0.0f);
  if (total.kind != RowKind::regular) return fill_row(out, n, std::numeric_limits<float>::quiet_NaN());
  if (n == 1) return fill_row(out, n, 1.0f);  // e · (1 / e) may differ from 1 by an ulp
  const double factor = 1.0 / total.sum;
  row.for_each_block([&](index_t, index_t count, const T* e, int shift, T* to) {
    kernels.multiply(e, count, static_cast<T>(std::ldexp(factor, shift)), to);
  });
}

/// Computes rows of one block each, with n > 1 elements and one plain c. Exception: softmax_row computes rows
/// that are not regular.
///
/// With `overlaps`, the next row's maximum and the previous row's product are computed between the
/// exponentials of a row. No row then waits for a reduction. From memory, the hardware prefetcher follows one row at a
/// time, and overlapped rows are slower. Measured: docs/measured.md.
template <class T>
void softmax_block_rows(const RowKernels<T>& kernels, StridedRows<const T> from, StridedRows<T> to,
                        index_t rows, index_t n, double c, bool overlaps) {
  const Scale<T> scale = Multiplier<T>(c).scale;
  const T* in = from.first;
  T* out = to.first;
  OverlappedWork<T> overlapped{.next_top = kernels.max(in, n)};
  for (index_t r = 0; r < rows; ++r, in += from.stride, out += to.stride) {
    const bool is_last = r + 1 == rows;
    const Extremum<T> top = overlapped.next_top;
    const T product = top.value * scale.high;
    const bool regular = !top.has_nan && std::abs(product) < largest_shift<T>;
    if (regular) {
      overlapped.next = overlaps && !is_last ? in + from.stride : nullptr;
      const T sum = kernels.exp_store(in, n, scale, round_shift(product), out, overlapped);
      if (overlaps) {
        overlapped.waiting = out;
        overlapped.factor = T{1} / sum;
        continue;
      }
      kernels.multiply(out, n, T{1} / sum, out);
    } else {
      softmax_row<T>(kernels, in, n, c, out);
    }
    if (!is_last) overlapped.next_top = kernels.max(in + from.stride, n);
  }
  if (overlapped.waiting != nullptr)
    kernels.multiply(overlapped.waiting, n, overlapped.factor, overlapped.waiting);
}

/// Returns ln Σ exp(c·z) - c·logit, at least 0, for a logit of the row. The difference is formed before
/// either term is rounded. Requires a regular sum.
template <class T, class X>
double log_sum_above(const RowSource<T, X>& source, const RowSum<T>& total, T logit) {
  // Both terms may be large and nearly equal. So ln 2 has two parts, the product has two parts, and their
  // difference is rounded once.
  constexpr double ln2_low = 2.3190468138462996e-17;
  const double c = source.c(), z = static_cast<double>(logit), origin = static_cast<double>(source.origin());
  const double product = source.rebased() ? c * (z - origin) : c * z;
  const bool rounds = !source.rebased() && std::isfinite(product);  // a class at -inf has a loss of +inf
  const double lost = rounds ? fused(c, z, -product) : 0.0;
  const double distance = fused(total.shift, std::numbers::ln2, -product);
  return std::max(distance + (total.shift * ln2_low - lost) + std::log(total.sum), 0.0);
}

/// The logarithm of a row's sum, ln Σ exp(c·(z - origin)). `origin` is the logit with the largest c·z.
template <class T>
struct RowLogSum {
  RowKind kind;
  T origin;
  double log_sum;
};

template <class T, class X>
RowLogSum<T> log_sum_row(const RowKernels<T>& kernels, const X* in, index_t n, double c, T* scratch) {
  RowSource<T, X> source(kernels, in, n, c);
  const RowSum<T> total = sum_row_rebasing<T>(kernels, source, scratch, nullptr, nullptr);
  if (total.kind != RowKind::regular) return {total.kind, T{0}, 0.0};
  const T origin = source.logit(total.origin);
  return {total.kind, origin, n == 1 ? 0.0 : log_sum_above(source, total, origin)};
}

/// Writes out = c·(in - origin) - log_sum for a block, for a c of any size.
template <class T>
void log_block(const RowKernels<T>& kernels, const T* in, index_t count, double c, const RowLogSum<T>& total,
               T* out) {
  const auto near_c = static_cast<T>(c);
  if (Multiplier<T>::unit_of(c) == 1) {
    kernels.affine(in, count, total.origin, near_c, static_cast<T>(-total.log_sum), out);
    return;
  }
  // Computes in double, because T may not represent c. With a small c, the difference of two logits may
  // overflow although its product with c does not. So the logits are halved first.
  const double half = std::abs(c) < 1 ? 0.5 : 1.0;
  for (index_t i = 0; i < count; ++i) {
    const double distance = static_cast<double>(in[i]) * half - static_cast<double>(total.origin) * half;
    const bool masked = in[i] == -std::numeric_limits<T>::infinity();
    out[i] = masked ? in[i] : static_cast<T>(std::min(c / half * distance, 0.0) - total.log_sum);
  }
}

SSMAX_END
