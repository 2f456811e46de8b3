// Rows that are appended to a KvCache, and what it holds.
#pragma once

#include <array>
#include <ssmax/kv_cache.hpp>
#include <vector>

#include "reference.hpp"
#include "same_bits.hpp"

namespace kv_cache_rows {

using namespace ssmax;
using reference::for_each_index;
using reference::Real;
using reference::worse;

template <class X>
using Compute = ssmax::ComputeType<X>;

/// [batch, heads, positions, channels], contiguous.
template <class U>
struct Rows {
  std::array<index_t, 4> extents;
  std::vector<U> values;

  Rows(index_t batch, index_t heads, index_t positions, index_t channels, unsigned seed)
      : extents{batch, heads, positions, channels},
        values(reference::normals<U>(static_cast<std::size_t>(batch * heads * positions * channels), seed)) {}

  View<const U, 4> view() const { return {values.data(), extents}; }
  View<U, 4> view() { return {values.data(), extents}; }
};

/// Key and value of a position of a sequence, as far as it is held.
template <class X>
X key(const KvCache<X>& cache, index_t b, index_t h, index_t position, index_t c) {
  return cache.run(b, h, position).k[c];
}
template <class X>
X value(const KvCache<X>& cache, index_t b, index_t h, index_t position, index_t c) {
  return cache.run(b, h, position).v[c];
}

/// Whether position start + i of each sequence holds row i of k and v, rounded to the cache's storage.
template <class X, class U>
bool holds(const KvCache<X>& cache, index_t start, View<const U, 4> k, View<const U, 4> v) {
  const index_t batch = k.extent(0), heads = k.extent(1), positions = k.extent(2);
  bool same = true;
  for_each_index({batch, heads, positions, k.extent(3)}, [&](index_t b, index_t h, index_t i, index_t c) {
    same = same && same_bits(key(cache, b, h, start + i, c), X(k(b, h, i, c)));
  });
  for_each_index({batch, heads, positions, v.extent(3)}, [&](index_t b, index_t h, index_t i, index_t c) {
    same = same && same_bits(value(cache, b, h, start + i, c), X(v(b, h, i, c)));
  });
  return same;
}

/// Everything that can be seen of a cache.
template <class X>
struct Contents {
  std::vector<index_t> lengths;
  std::vector<X> k, v;

  explicit Contents(const KvCache<X>& cache) {
    for (index_t b = 0; b < cache.options().batch; ++b) lengths.push_back(cache.length(b));
    const auto [keys, values] = cache.memory();
    k.assign(keys.begin(), keys.end());
    v.assign(values.begin(), values.end());
  }
  bool operator==(const Contents& other) const {
    return lengths == other.lengths && same_bits(k, other.k) && same_bits(v, other.v);
  }
};

}  // namespace kv_cache_rows
