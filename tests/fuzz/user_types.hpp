// Masks and scores of the user's: what the library cannot know. Some have members that are named as those of
// its own fast paths are, and mean something else.
#pragma once

#include <cmath>
#include <ssmax/mask.hpp>
#include <ssmax/score.hpp>

namespace fuzz {

using ssmax::index_t;
using ssmax::Key;
using ssmax::KeyRange;
using ssmax::Query;
using ssmax::QueryShape;

// ---- Masks ------------------------------------------------------------------------------------------------

/// Ranges that begin before the first key, end after the last, or before they begin.
struct OwnRange {
  KeyRange keys(const Query& q) const {
    const index_t turn = (q.index + q.head + 2 * q.batch) % 4;
    if (turn == 0) return {-3, q.shape.keys / 2 + 1};
    if (turn == 1) return {q.shape.keys / 3, q.shape.keys + 5};
    if (turn == 2) return {q.shape.keys - 1, 1};
    return {1, q.index + 2};
  }
};

/// Causal, with positions of its own.
struct OwnPositions {
  KeyRange keys(const Query& q) const { return {0, q.index + q.shape.keys - q.shape.queries + 1}; }
  index_t query_position(const Query& q) const { return 2 * q.index + 3; }
  index_t key_position(const Query&, index_t key) const { return 2 * key + key % 3; }
};

struct OwnPredicate : OwnRange {
  bool sees(const Query& q, index_t key) const { return (key + q.index + q.head) % 3 != 0; }
};

struct OwnPositionsAndPredicate : OwnPositions {
  bool sees(const Query& q, index_t key) const { return OwnPredicate{}.sees(q, key); }
};

// ---- Scores -----------------------------------------------------------------------------------------------

/// z' = 0.75·z + 0.5·tanh(z) + the same number for each query, key and head. R is what z is computed in.
template <class R>
R own_score(R z, index_t head, index_t query, index_t key, index_t distance) {
  using std::tanh;
  const auto added = static_cast<R>(0.125 * static_cast<double>((3 * head + 5 * query + 7 * key) % 11) +
                                    0.0625 * static_cast<double>(distance % 8));
  return R(0.75) * z + R(0.5) * tanh(z) + added;
}
template <class R>
R own_derivative(R z) {
  using std::tanh;
  const R t = tanh(z);
  return R(0.75) + R(0.5) * (R(1) - t * t);
}

struct OwnScore {
  template <std::floating_point T>
  T operator()(T z, const Key& key) const {
    return own_score(z, key.query.head, key.query.index, key.index, key.key_position - key.query_position);
  }
  template <std::floating_point T>
  T derivative(T z, const Key&) const {
    return own_derivative(z);
  }
};

/// Scores whose other members mean nothing to the library: their formula is OwnScore's.
struct NamedSlope : OwnScore {
  double slope(index_t degrees) const { return 1000.0 * static_cast<double>(degrees) + 7; }
};
struct NamedRow : OwnScore {
  int row(const Query&) const { return 3; }
};
struct NamedRowOfInt : OwnScore {
  const float* row(int) const { return nullptr; }
};
struct NamedApply : OwnScore {
  template <class T>
  void apply(T* z, index_t n, int times = 3) const {
    for (index_t i = 0; i < n; ++i) z[i] = static_cast<T>(times);
  }
};
struct NamedParts : OwnScore {
  ssmax::Identity first() const { return {}; }
  ssmax::Identity second() const { return {}; }
};
struct DerivedAlibi : ssmax::Alibi {
  using ssmax::Alibi::Alibi;
  template <std::floating_point T>
  T operator()(T z, const Key& key) const {
    return OwnScore{}(z, key);
  }
  template <std::floating_point T>
  T derivative(T z, const Key& key) const {
    return OwnScore{}.derivative(z, key);
  }
};

}  // namespace fuzz
