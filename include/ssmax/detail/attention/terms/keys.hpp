// Defines AnyKeys, a reference to a source of keys of any type, and ViewKeys, the source that attention makes from
// views. AnyKeys hides the types of source and storage, so that drivers are compiled once per compute type Compute.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../../key_source.hpp"
#include "../../../sequence_lengths.hpp"
#include "../../../view.hpp"
#include "stored_products.hpp"

SSMAX_BEGIN_SHARED

/// The memory of the keys, and of the values, of a source.
struct SourceMemory {
  std::span<const std::byte> k, v;
};

SSMAX_END

SSMAX_BEGIN_DETAIL

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
  if constexpr (std::same_as<decltype(run), const AnyKeyRun>) {
    return run;
  } else {
    return {run.k,
            run.k_stride,
            run.v,
            run.v_stride,
            run.count,
            {run.k_scales, run.k_scales_stride, run.k_channel_scales},
            {run.v_scales, run.v_scales_stride, run.v_channel_scales}};
  }
}

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
KeyRange forgotten_in(const void* source, index_t batch) {
  return static_cast<const S*>(source)->forgotten(batch);
}

template <class S>
SourceMemory memory_in(const void* source) {
  const auto [k, v] = static_cast<const S*>(source)->memory();
  return {std::as_bytes(k), std::as_bytes(v)};
}

/// Returns the bytes from a row to the row `keys` later, modulo 2^64: the stride of a single key may be any number.
inline index_t bytes_ahead(index_t keys, index_t stride, index_t size) {
  return static_cast<index_t>(static_cast<std::uintptr_t>(keys) * static_cast<std::uintptr_t>(stride) *
                              static_cast<std::uintptr_t>(size));
}

SSMAX_END

SSMAX_BEGIN_SHARED

template <class Compute>
struct Problem;
template <class Compute>
struct Result;
template <class Compute>
struct WorkList;

SSMAX_END

SSMAX_BEGIN_COMPILED

/// Finds the groups of sequences of a list whose first keys lie in the same memory (shared_keys.hpp). `memory` has the
/// bytes of SharedKeys. A unit compiles it for sources with shared keys alone.
template <class Compute>
void find_shared_keys(shared::WorkList<Compute>& list, const shared::Problem<Compute>& problem,
                      const shared::Result<Compute>& result, bool explains, std::byte* memory);

SSMAX_END

SSMAX_BEGIN_SHARED

/// Keys in views [batch, kv_heads, key, channel]: keys [first, first + k.extent(2)) of `keys`.
template <class Compute>
struct ViewKeys {
  Rows k{}, v{};
  const StoredType<Compute>*k_type = nullptr, *v_type = nullptr;
  index_t keys = 0;
  index_t first = 0;
  SequenceLengths lengths{};  // if given, each sequence is a batch entry with keys of its own, all stored

  SSMAX_INLINE KeySourceShape shape() const {
    return {lengths.is_given() ? lengths.count() : k.extent(0), k.extent(1), k.extent(3), v.extent(3)};
  }
  SSMAX_INLINE index_t length(index_t batch) const {
    return lengths.is_given() ? lengths.key_rows(batch).count : keys;
  }
  SSMAX_INLINE KeyRange stored(index_t batch) const {
    if (lengths.is_given()) return {0, length(batch)};
    return {first, first + k.extent(2)};
  }
  SSMAX_INLINE AnyKeyRun run(index_t batch, index_t kv_head, index_t key) const {
    const SequenceRows rows = lengths.is_given() ? lengths.key_rows(batch) : SequenceRows{batch, -first, 0};
    const index_t row = rows.first + key, end = lengths.is_given() ? rows.first + rows.count : k.extent(2);
    return {k.row(rows.entry, kv_head, row), k.stride(2), v.row(rows.entry, kv_head, row), v.stride(2),
            end - row};
  }
};

/// A reference to a source of keys. The source must outlive the reference. The constructor's translation unit
/// compiles the functions that the pointers refer to.
template <class Compute>
class AnyKeys {
 public:
  /// Makes an empty reference.
  SSMAX_INLINE AnyKeys() = default;
  SSMAX_INLINE explicit AnyKeys(const ViewKeys<Compute>& views)
      : AnyKeys(views, views.k_type, views.v_type) {}
  template <class S>
  SSMAX_INLINE explicit AnyKeys(const S& source)
      : AnyKeys(source, &detail::stored_type<Compute, detail::SourceKey<S>, true>,
                &detail::stored_type<Compute, detail::SourceValue<S>, true>) {}

  /// Refers to a source whose runs have elements of these types.
  template <class S>
  SSMAX_INLINE AnyKeys(const S& source, const StoredType<Compute>* k_type, const StoredType<Compute>* v_type)
      : source_(&source),
        shape_(source.shape()),
        k_type_(k_type),
        v_type_(v_type),
        k_kind_(k_type->kind),
        v_kind_(v_type->kind),
        head_distance_(detail::SourceRows::head_distance(source)),
        length_(detail::length_of<S>),
        stored_(detail::stored_in<S>),
        run_(detail::run_of<S>) {
    if constexpr (!std::same_as<decltype(source.run(0, 0, 0)), AnyKeyRun>)
      find_rows_ = detail::find_rows_of<S>;
    if constexpr (detail::has_shares_keys<S>) {
      if (source.shares_keys()) find_shared_keys_ = compiled::find_shared_keys<Compute>;
    }
    if constexpr (detail::has_forgotten<S>) forgotten_ = detail::forgotten_in<S>;
    if constexpr (detail::has_layout<S>) layout_ = source.layout();
    if constexpr (requires { source.memory(); }) memory_ = detail::memory_in<S>;
  }

  SSMAX_INLINE const KeySourceShape& shape() const { return shape_; }
  /// Sets the width of the values to 0: a call then reads keys alone.
  SSMAX_INLINE void leave_out_values() { shape_.value_width = 0; }
  /// Returns the storage types of keys and values.
  SSMAX_INLINE const StoredType<Compute>& k_type() const { return *k_type_; }
  SSMAX_INLINE const StoredType<Compute>& v_type() const { return *v_type_; }
  SSMAX_INLINE ElementKind k_kind() const { return k_kind_; }
  SSMAX_INLINE ElementKind v_kind() const { return v_kind_; }
  /// Returns what finds the keys that several sequences have in the same memory, or null if no sequences have.
  SSMAX_INLINE auto find_shared_keys() const { return find_shared_keys_; }
  /// Returns the number of the source's layout, or 0.
  SSMAX_INLINE std::uint64_t layout() const { return layout_; }
  SSMAX_INLINE const detail::HeadDistance& head_distance() const { return head_distance_; }
  /// Returns the elements of a key, of a value.
  SSMAX_INLINE index_t k_row() const { return shape_.width / k_type_->group; }
  SSMAX_INLINE index_t v_row() const { return shape_.value_width / v_type_->group; }
  /// Returns the bytes of an element of the keys, of the values.
  SSMAX_INLINE index_t k_size() const { return k_type_->size; }
  SSMAX_INLINE index_t v_size() const { return v_type_->size; }
  SSMAX_INLINE bool are_both(ElementKind kind) const { return k_kind_ == kind && v_kind_ == kind; }
  SSMAX_INLINE index_t length(index_t batch) const { return length_(source_, batch); }
  SSMAX_INLINE KeyRange stored(index_t batch) const { return stored_(source_, batch); }
  /// Returns positions within `stored` whose keys are no longer stored.
  SSMAX_INLINE KeyRange forgotten(index_t batch) const {
    return forgotten_ == nullptr ? KeyRange{} : forgotten_(source_, batch);
  }
  /// Returns the memory of keys and values, if the source tells it.
  SSMAX_INLINE SourceMemory memory() const { return memory_ == nullptr ? SourceMemory{} : memory_(source_); }
  SSMAX_INLINE AnyKeyRun run(index_t batch, index_t kv_head, index_t key) const {
    return run_(source_, batch, kv_head, key);
  }
  /// Writes the addresses of the keys and values of a range.
  SSMAX_INLINE void find_rows(index_t batch, index_t kv_head, KeyRange keys, const std::byte** k_rows,
                              const std::byte** v_rows) const {
    if (keys.size() <= 0) return;
    if (find_rows_ != nullptr) return find_rows_(source_, batch, kv_head, keys, k_rows, v_rows);
    while (keys.begin < keys.end) {
      const AnyKeyRun run = run_(source_, batch, kv_head, keys.begin);
      const index_t count = run.count < keys.size() ? run.count : keys.size();
      for (index_t i = 0; i < count; ++i) {
        *k_rows++ = static_cast<const std::byte*>(run.k) + i * run.k_stride * k_size();
        *v_rows++ = static_cast<const std::byte*>(run.v) + i * run.v_stride * v_size();
      }
      keys.begin += count;
    }
  }
  /// Returns row i of a run's keys: in place if the row is stored as Compute, else converted in scratch.
  SSMAX_INLINE const Compute* load_k(const AnyKeyRun& run, index_t i, Compute* scratch) const {
    if (k_kind_ == ElementKind::compute) return static_cast<const Compute*>(run.k) + i * run.k_stride;
    k_type_->load(run.k, run.k_stride, run.k_factors, {i, i + 1}, shape_.width, scratch, 0);
    return scratch;
  }
  /// Writes the keys or values of a run, converted, to `out`.
  SSMAX_INLINE void copy_k(const AnyKeyRun& run, StridedRows<Compute> out) const {
    k_type_->load(run.k, run.k_stride, run.k_factors, {0, run.count}, shape_.width, out.first, out.stride);
  }
  SSMAX_INLINE void copy_v(const AnyKeyRun& run, StridedRows<Compute> out) const {
    v_type_->load(run.v, run.v_stride, run.v_factors, {0, run.count}, shape_.value_width, out.first,
                  out.stride);
  }
  /// Writes the keys or values of a run to `out`, as bfloat16: element times factors, rounded once. Prefetches the rows
  /// `ahead` bytes later, unless `ahead` is 0. Requires a quantized type.
  SSMAX_INLINE void dequantize_k(const AnyKeyRun& run, index_t ahead, StridedRows<bfloat16> out) const {
    k_type_->dequantize({run.k, run.k_stride, run.count, shape_.width, ahead}, run.k_factors, out);
  }
  SSMAX_INLINE void dequantize_v(const AnyKeyRun& run, index_t ahead, StridedRows<bfloat16> out) const {
    v_type_->dequantize({run.v, run.v_stride, run.count, shape_.value_width, ahead}, run.v_factors, out);
  }

 private:
  const void* source_ = nullptr;
  KeySourceShape shape_{};
  const StoredType<Compute>*k_type_ = nullptr, *v_type_ = nullptr;
  ElementKind k_kind_ = ElementKind::compute, v_kind_ = ElementKind::compute;
  detail::HeadDistance head_distance_{};
  std::uint64_t layout_ = 0;
  void (*find_shared_keys_)(WorkList<Compute>& list, const Problem<Compute>& problem,
                            const Result<Compute>& result, bool explains, std::byte* memory) = nullptr;
  index_t (*length_)(const void* source, index_t batch) = nullptr;
  KeyRange (*stored_)(const void* source, index_t batch) = nullptr;
  AnyKeyRun (*run_)(const void* source, index_t batch, index_t kv_head, index_t key) = nullptr;
  void (*find_rows_)(const void* source, index_t batch, index_t kv_head, KeyRange keys,
                     const std::byte** k_rows,
                     const std::byte** v_rows) = nullptr;               // null: runs without types
  KeyRange (*forgotten_)(const void* source, index_t batch) = nullptr;  // null: no position
  SourceMemory (*memory_)(const void* source) = nullptr;                // null: not known
};

SSMAX_END

SSMAX_BEGIN_DETAIL

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
