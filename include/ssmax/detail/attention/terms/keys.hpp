// Defines AnyKeys, a reference to a source of keys of any type, and KeyShare, the source that attention makes from
// views. AnyKeys hides the types of source and storage, so that drivers are compiled once per compute type Compute.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../../key_source.hpp"
#include "../../../sequence_lengths.hpp"
#include "../../../view.hpp"
#include "../../kernels/convert.hpp"
#include "../../kernels/decode.hpp"
#include "../../kernels/rows.hpp"
#include "tensors.hpp"

SSMAX_BEGIN_SHARED

/// The factors of the keys, or of the values, of a run. A number is element · factor of the row · factor of the
/// channel.
struct StoredFactors {
  const float* rows = nullptr;      // null: each is 1
  index_t rows_stride = 1;          // floats from one factor to the next, or 0
  const float* channels = nullptr;  // the same for all rows of the run. null: each is 1
};

/// A run of keys that lie contiguous in memory (KeyRun of any storage type). Strides count elements.
struct AnyKeyRun {
  const void* k = nullptr;
  index_t k_stride = 0;
  const void* v = nullptr;
  index_t v_stride = 0, count = 0;
  StoredFactors k_factors{}, v_factors{};
};

/// The products of few queries with keys and values in their storage type (kernels/decode.hpp). `factors` are those of
/// the keys or values, if the type has a factor per row. With factors of channels, `logits` requires
/// scratch[rows][q.stride], and `accumulate` requires scratch[rows][v.width].
template <class Compute>
struct StoredProducts {
  void (*logits)(StridedRows<const Compute> q, index_t rows, const KeyRows<void>& k,
                 const StoredFactors& factors, Compute* scratch, StridedRows<Compute> s) = nullptr;
  void (*accumulate)(StridedRows<const Compute> s, index_t rows, const KeyRows<void>& v,
                     const StoredFactors& factors, Compute* scratch, StridedRows<Compute> o) = nullptr;
  /// Does what `accumulate` does, with 0 for numbers that are not finite, factors included. copies[257][v.width] is
  /// scratch. Null for types without factors.
  void (*accumulate_finite)(StridedRows<const Compute> s, index_t rows, const KeyRows<void>& v,
                            const StoredFactors& factors, Compute* copies, Compute* scratch,
                            StridedRows<Compute> o) = nullptr;
  /// Rows at any addresses, without factors.
  void (*listed_logits)(StridedRows<const Compute> q, index_t rows, const ListedRows<void>& k,
                        StridedRows<Compute> s) = nullptr;
  void (*accumulate_listed)(StridedRows<const Compute> s, index_t rows, const ListedRows<void>& v,
                            StridedRows<Compute> o) = nullptr;
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Calls f(first key, factors, count) with contiguous factors of rows: in place if the stride is 1, else with copies of
/// up to 256 factors.
template <class F>
void for_contiguous_factors(const StoredFactors& factors, index_t keys, const F& f) {
  const float* rows = factors.rows;
  const index_t stride = rows == nullptr ? 0 : factors.rows_stride;
  if (stride == 1) return f(index_t{0}, rows, keys);
  constexpr index_t most = 256;
  float copies[most];
  if (stride == 0) std::fill_n(copies, std::min(most, keys), rows == nullptr ? 1 : *rows);
  for (index_t key = 0; key < keys; key += most) {
    const index_t count = std::min(most, keys - key);
    for (index_t i = 0; stride != 0 && i < count; ++i) copies[i] = rows[(key + i) * stride];
    f(key, static_cast<const float*>(copies), count);
  }
}

template <class S>
index_t length_of(const void* source, index_t batch) {
  return static_cast<index_t>(static_cast<const S*>(source)->length(batch));
}
template <class S>
KeyRange stored_in(const void* source, index_t batch) {
  return static_cast<const S*>(source)->stored(batch);
}
template <class S>
AnyKeyRun run_of(const void* source, index_t batch, index_t kv_head, index_t key) {
  const auto run = static_cast<const S*>(source)->run(batch, kv_head, key);
  return {run.k,
          run.k_stride,
          run.v,
          run.v_stride,
          run.count,
          {run.k_scales, run.k_scales_stride, run.k_channel_scales},
          {run.v_scales, run.v_scales_stride, run.v_channel_scales}};
}

/// Writes the addresses of the keys and values of a range.
template <class S>
void find_rows_of(const void* source, index_t batch, index_t kv_head, KeyRange keys, const std::byte** k_rows,
                  const std::byte** v_rows) {
  if constexpr (SourceRows::has_find_rows<S>) {
    SourceRows::find_rows(*static_cast<const S*>(source), batch, kv_head, keys.begin, keys.size(),
                          {k_rows, v_rows});
  } else {
    while (keys.begin < keys.end) {
      const auto run = static_cast<const S*>(source)->run(batch, kv_head, keys.begin);
      const index_t count = std::min(static_cast<index_t>(run.count), keys.size());
      for (index_t i = 0; i < count; ++i) {
        *k_rows++ = reinterpret_cast<const std::byte*>(run.k + i * run.k_stride);
        *v_rows++ = reinterpret_cast<const std::byte*>(run.v + i * run.v_stride);
      }
      keys.begin += count;
    }
  }
}

template <class S>
bool shares_keys([[maybe_unused]] const S& source) {
  if constexpr (has_shares_keys<S>) {
    return source.shares_keys();
  } else {
    return false;
  }
}

/// Returns the bytes from a row to the row `keys` later, modulo 2^64: the stride of a single key may be any number.
inline index_t bytes_ahead(index_t keys, index_t stride, index_t size) {
  return static_cast<index_t>(static_cast<std::uintptr_t>(keys) * static_cast<std::uintptr_t>(stride) *
                              static_cast<std::uintptr_t>(size));
}

/// Multiplies a row by the factors of its channels.
template <class X, class Compute>
void multiply_channels(Compute* row, const float* factors, index_t n) {
  if constexpr (EightBitStorage<X>) {
    kernels<EightBitKernels<X>>().multiply(row, factors, n, row);
  } else {
    for (index_t i = 0; i < n; ++i) row[i] *= static_cast<Compute>(factors[i]);
  }
}

/// Writes rows [range) of keys or values, converted and multiplied by their factors, to `out`.
template <class Compute, class X>
void load_stored(const void* rows, index_t stride, [[maybe_unused]] const StoredFactors& factors,
                 KeyRange range, index_t n, Compute* out, index_t out_stride) {
  for (index_t i = range.begin; i < range.end; ++i, out += out_stride) {
    const Compute* numbers = widened(static_cast<const X*>(rows) + i * stride, n, out);
    if (numbers != out) std::copy_n(numbers, n, out);
    if constexpr (ScaledStorage<X>) {
      SSMAX_ASSERT(factors.rows != nullptr || factors.channels != nullptr);
      if (factors.rows != nullptr) {
        const auto factor = static_cast<Compute>(factors.rows[i * factors.rows_stride]);
        kernels<RowKernels<Compute>>().multiply(out, n, factor, out);
      }
      if (factors.channels != nullptr) multiply_channels<X>(out, factors.channels, n);
    }
  }
}

/// Writes keys or values to `out`, dequantized and rounded to bfloat16.
template <class X>
void dequantize_stored(const KeyRows<void>& rows, [[maybe_unused]] const StoredFactors& factors,
                       StridedRows<bfloat16> out) {
  const auto dequantize = kernels<DequantizeKernels<X>>().dequantize;
  const KeyRows<X> in = rows.as<X>();
  if constexpr (ScaledStorage<X>) {
    for_contiguous_factors(factors, in.count, [&](index_t first, const float* some, index_t count) {
      dequantize(in.part(first, count), some, factors.channels, {out[first], out.stride});
    });
  } else {
    dequantize(in, nullptr, nullptr, out);
  }
}

/// Returns dequantize_stored of a quantized type, else null.
template <class X>
constexpr auto dequantize_if_quantized() -> decltype(&dequantize_stored<Int8>) {
  if constexpr (QuantizedStorage<X>) {
    return dequantize_stored<X>;
  } else {
    return nullptr;
  }
}

SSMAX_END

SSMAX_BEGIN_SHARED

/// A reference to a source of keys. The source must outlive the reference. The constructor's translation unit
/// compiles the functions that the pointers refer to.
template <class Compute>
class AnyKeys {
 public:
  template <class S>
  SSMAX_INLINE explicit AnyKeys(const S& source)
      : source_(&source),
        shape_(source.shape()),
        k_kind_(element_kind<Compute, detail::SourceKey<S>>),
        v_kind_(element_kind<Compute, detail::SourceValue<S>>),
        shares_keys_(detail::shares_keys(source)),
        head_distance_(detail::SourceRows::head_distance(source)),
        k_row_(shape_.width / detail::group_of<detail::SourceKey<S>>),
        v_row_(shape_.value_width / detail::group_of<detail::SourceValue<S>>),
        k_size_(sizeof(detail::SourceKey<S>)),
        v_size_(sizeof(detail::SourceValue<S>)),
        length_(detail::length_of<S>),
        stored_(detail::stored_in<S>),
        run_(detail::run_of<S>),
        find_rows_(detail::find_rows_of<S>),
        load_k_(detail::load_stored<Compute, detail::SourceKey<S>>),
        load_v_(detail::load_stored<Compute, detail::SourceValue<S>>),
        dequantize_k_(detail::dequantize_if_quantized<detail::SourceKey<S>>()),
        dequantize_v_(detail::dequantize_if_quantized<detail::SourceValue<S>>()) {}

  SSMAX_INLINE const KeySourceShape& shape() const { return shape_; }
  SSMAX_INLINE ElementKind k_kind() const { return k_kind_; }
  SSMAX_INLINE ElementKind v_kind() const { return v_kind_; }
  /// Returns whether several sequences may have keys in the same memory.
  SSMAX_INLINE bool shares_keys() const { return shares_keys_; }
  SSMAX_INLINE const detail::HeadDistance& head_distance() const { return head_distance_; }
  /// Returns the elements of a key, of a value.
  SSMAX_INLINE index_t k_row() const { return k_row_; }
  SSMAX_INLINE index_t v_row() const { return v_row_; }
  /// Returns the bytes of an element of the keys, of the values.
  SSMAX_INLINE index_t k_size() const { return k_size_; }
  SSMAX_INLINE index_t v_size() const { return v_size_; }
  SSMAX_INLINE bool are_both(ElementKind kind) const { return k_kind_ == kind && v_kind_ == kind; }
  SSMAX_INLINE index_t length(index_t batch) const { return length_(source_, batch); }
  SSMAX_INLINE KeyRange stored(index_t batch) const { return stored_(source_, batch); }
  SSMAX_INLINE AnyKeyRun run(index_t batch, index_t kv_head, index_t key) const {
    return run_(source_, batch, kv_head, key);
  }
  /// Writes the addresses of the keys and values of a range, with one call for all runs.
  SSMAX_INLINE void find_rows(index_t batch, index_t kv_head, KeyRange keys, const std::byte** k_rows,
                              const std::byte** v_rows) const {
    find_rows_(source_, batch, kv_head, keys, k_rows, v_rows);
  }
  /// Returns row i of a run's keys: in place if the row is stored as Compute, else converted in scratch.
  SSMAX_INLINE const Compute* load_k(const AnyKeyRun& run, index_t i, Compute* scratch) const {
    if (k_kind_ == ElementKind::compute) return static_cast<const Compute*>(run.k) + i * run.k_stride;
    load_k_(run.k, run.k_stride, run.k_factors, {i, i + 1}, shape_.width, scratch, 0);
    return scratch;
  }
  /// Writes the keys or values of a run, converted, to `out`.
  SSMAX_INLINE void copy_k(const AnyKeyRun& run, StridedRows<Compute> out) const {
    load_k_(run.k, run.k_stride, run.k_factors, {0, run.count}, shape_.width, out.first, out.stride);
  }
  SSMAX_INLINE void copy_v(const AnyKeyRun& run, StridedRows<Compute> out) const {
    load_v_(run.v, run.v_stride, run.v_factors, {0, run.count}, shape_.value_width, out.first, out.stride);
  }
  /// Writes the keys or values of a run to `out`, as bfloat16: element times factors, rounded once. Prefetches the rows
  /// `ahead` bytes later, unless `ahead` is 0. Requires a quantized type.
  SSMAX_INLINE void dequantize_k(const AnyKeyRun& run, index_t ahead, StridedRows<bfloat16> out) const {
    dequantize_k_({run.k, run.k_stride, run.count, shape_.width, ahead}, run.k_factors, out);
  }
  SSMAX_INLINE void dequantize_v(const AnyKeyRun& run, index_t ahead, StridedRows<bfloat16> out) const {
    dequantize_v_({run.v, run.v_stride, run.count, shape_.value_width, ahead}, run.v_factors, out);
  }

 private:
  using Load = decltype(&detail::load_stored<Compute, Compute>);
  using Dequantize = decltype(&detail::dequantize_stored<Int8>);

  const void* source_;
  KeySourceShape shape_;
  ElementKind k_kind_, v_kind_;
  bool shares_keys_;
  detail::HeadDistance head_distance_;
  index_t k_row_, v_row_;    // elements of a row
  index_t k_size_, v_size_;  // bytes of an element
  index_t (*length_)(const void* source, index_t batch);
  KeyRange (*stored_)(const void* source, index_t batch);
  AnyKeyRun (*run_)(const void* source, index_t batch, index_t kv_head, index_t key);
  void (*find_rows_)(const void* source, index_t batch, index_t kv_head, KeyRange keys,
                     const std::byte** k_rows, const std::byte** v_rows);
  Load load_k_, load_v_;
  Dequantize dequantize_k_, dequantize_v_;  // null unless the elements have 8 bits
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// A source of keys [first, first + k.extent(2)) of `keys`, in views [batch, kv_heads, key, channel].
template <class K, class V = K>
struct KeyShare {
  using Element = K;
  using ValueElement = V;

  View<const K, 4> k;
  View<const V, 4> v;
  index_t keys = 0;
  index_t first = 0;
  SequenceLengths lengths{};  // if given, each sequence is a batch entry with keys of its own, all stored

  KeySourceShape shape() const {
    return {lengths.is_given() ? lengths.count() : k.extent(0), k.extent(1), k.extent(3), v.extent(3)};
  }
  index_t length(index_t batch) const { return lengths.is_given() ? lengths.key_rows(batch).count : keys; }
  KeyRange stored(index_t batch) const {
    if (lengths.is_given()) return {0, length(batch)};
    return {first, first + k.extent(2)};
  }
  KeyRun<K, V> run(index_t batch, index_t kv_head, index_t key) const {
    const SequenceRows rows = lengths.is_given() ? lengths.key_rows(batch) : SequenceRows{batch, -first, 0};
    const index_t row = rows.first + key, end = lengths.is_given() ? rows.first + rows.count : k.extent(2);
    return {.k = row_of(k, rows.entry, kv_head, row),
            .k_stride = k.stride(2),
            .v = row_of(v, rows.entry, kv_head, row),
            .v_stride = v.stride(2),
            .count = end - row};
  }
};

/// Keys [range) of a kv head, of one sequence.
struct HeadKeys {
  index_t batch, kv_head;
  KeyRange range;
};

/// Calls f(first key, run) for the runs of the range, in the order of the keys. The last run is cut at the end of
/// the range.
template <class Compute, class F>
void for_each_run(const AnyKeys<Compute>& source, const HeadKeys& keys, const F& f) {
  KeyRange range = keys.range;
  while (range.begin < range.end) {
    AnyKeyRun run = source.run(keys.batch, keys.kv_head, range.begin);
    SSMAX_ASSERT(run.count > 0);
    run.count = std::min(run.count, range.size());
    f(range.begin, run);
    range.begin += run.count;
  }
}

/// Returns the values [first, first + count) of a run. The keys stay those of the whole run.
template <class Compute>
AnyKeyRun values_of(const AnyKeys<Compute>& keys, AnyKeyRun run, index_t first, index_t count) {
  run.v = static_cast<const std::byte*>(run.v) + first * run.v_stride * keys.v_size();
  if (run.v_factors.rows != nullptr) run.v_factors.rows += first * run.v_factors.rows_stride;
  run.count = count;
  return run;
}

SSMAX_END
