// AnyKeys, which stands for a source of keys of any type, so that drivers are compiled once for each element
// type; and the sources that attention makes itself.
#pragma once

#include "../../../key_source.hpp"
#include "../../../view.hpp"
#include "../../checks/views.hpp"

SSMAX_BEGIN_DETAIL

template <class S>
index_t length_of(const void* source, index_t batch) {
  return static_cast<const S*>(source)->length(batch);
}
template <class S>
KeyRange stored_in(const void* source, index_t batch) {
  return static_cast<const S*>(source)->stored(batch);
}
template <class S>
KeyStretch<typename S::Element> stretch_of(const void* source, index_t batch, index_t kv_head, index_t key) {
  return static_cast<const S*>(source)->stretch(batch, kv_head, key);
}

SSMAX_END

SSMAX_BEGIN_SHARED

/// Refers to a source of keys, which must outlive it. Its members are compiled by the unit that knows
/// the source's type.
template <class X>
class AnyKeys {
 public:
  template <class S>
  SSMAX_INLINE explicit AnyKeys(const S& source)
      : source_(&source),
        shape_(source.shape()),
        length_(detail::length_of<S>),
        stored_(detail::stored_in<S>),
        stretch_(detail::stretch_of<S>) {}

  SSMAX_INLINE const KeySourceShape& shape() const { return shape_; }
  SSMAX_INLINE index_t length(index_t batch) const { return length_(source_, batch); }
  SSMAX_INLINE KeyRange stored(index_t batch) const { return stored_(source_, batch); }
  SSMAX_INLINE KeyStretch<X> stretch(index_t batch, index_t kv_head, index_t key) const {
    return stretch_(source_, batch, kv_head, key);
  }

 private:
  const void* source_;
  KeySourceShape shape_;
  index_t (*length_)(const void* source, index_t batch);
  KeyRange (*stored_)(const void* source, index_t batch);
  KeyStretch<X> (*stretch_)(const void* source, index_t batch, index_t kv_head, index_t key);
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Keys [first, first + k.extent(2)) of `keys`, in views [batch, kv_heads, key, channel].
template <class X>
struct KeyShare {
  using Element = X;

  View<const X, 4> k, v;
  index_t keys = 0;
  index_t first = 0;

  KeySourceShape shape() const { return {k.extent(0), k.extent(1), k.extent(3), v.extent(3)}; }
  index_t length(index_t) const { return keys; }
  KeyRange stored(index_t) const { return {first, first + k.extent(2)}; }
  KeyStretch<X> stretch(index_t batch, index_t kv_head, index_t key) const {
    const index_t row = key - first;
    return {.k = row_of(k, batch, kv_head, row),
            .k_stride = k.stride(2),
            .v = row_of(v, batch, kv_head, row),
            .v_stride = v.stride(2),
            .count = k.extent(2) - row};
  }
};

/// Calls f(first key, stretch) for the stretches that make up the range, in the order of the keys. The last
/// one is cut where the range ends.
template <class X, class F>
void for_each_stretch(const AnyKeys<X>& keys, index_t batch, index_t kv_head, KeyRange range, const F& f) {
  while (range.begin < range.end) {
    KeyStretch<X> stretch = keys.stretch(batch, kv_head, range.begin);
    SSMAX_ASSERT(stretch.count > 0);
    stretch.count = std::min(stretch.count, range.size());
    f(range.begin, stretch);
    range.begin += stretch.count;
  }
}

SSMAX_END
