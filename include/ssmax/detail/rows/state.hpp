// Defines the state of a query's softmax, merges two states, and normalizes a state to a result. In a state,
// Σ exp(c·z) = 2^shift · sum and Σ exp(c·z)·v = 2^shift · o.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "../../config.hpp"

SSMAX_BEGIN_SHARED

/// The statistics in the states of some queries, for logits x in units of log2 and weights w = 2^(x - shift).
template <class Compute>
struct TileStatistics {
  Compute *largest = nullptr, *smallest = nullptr;   // bounds of x
  Compute *distances = nullptr, *squares = nullptr;  // Σ w·(x - shift), Σ w²

  SSMAX_INLINE bool is_given() const { return largest != nullptr; }
  SSMAX_INLINE TileStatistics from(index_t lane) const {
    if (!is_given()) return {};
    return {largest + lane, smallest + lane, distances + lane, squares + lane};
  }
  /// Sets the statistics of the first query to those of no keys.
  SSMAX_INLINE void reset() const {
    *largest = -std::numeric_limits<Compute>::infinity();
    *smallest = std::numeric_limits<Compute>::infinity();
    *distances = *squares = 0;
  }
};

/// The states of some queries after some keys. shift and sum are [queries], o is [queries · channels].
template <class Compute>
struct SoftmaxState {
  Compute *shift, *sum, *o;
  TileStatistics<Compute> statistics{};  // if asked for
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// The layout of states in contiguous memory, tile after tile. A tile is shift [rows], sum [rows], o and, if asked for,
/// statistics [4][rows]. o is [rows][channels] or, in lanes, [channels][rows].
struct StateLayout {
  index_t tiles = 1, rows = 0, channels = 0;
  bool in_lanes = false, has_statistics = false;

  /// Returns the number of numbers.
  constexpr index_t size() const { return tiles * tile_size(); }
  /// Returns the states of query i and of those after it in its tile.
  template <class Compute>
  SoftmaxState<Compute> at(Compute* states, index_t i) const {
    const index_t tiles_before = i < rows ? 0 : i / rows;  // a division takes longer than the branch
    Compute* tile = states + tiles_before * tile_size();
    const index_t row = i - tiles_before * rows;
    return {tile + row, tile + rows + row, tile + 2 * rows + (in_lanes ? row : row * channels),
            has_statistics ? statistics_at(states, i) : TileStatistics<Compute>{}};
  }
  /// Sets the states of `count` queries to the state before the first key. In each of their tiles, sets all shifts and
  /// sums.
  template <class Compute>
  void reset(Compute* states, index_t count) const {
    for (index_t i = 0; i < count; i += rows) {
      const SoftmaxState<Compute> state = at(states, i);
      std::fill_n(state.shift, rows, -std::numeric_limits<Compute>::infinity());
      std::fill_n(state.sum, rows, Compute{0});
      std::fill_n(state.o, (in_lanes ? rows : std::min(rows, count - i)) * channels, Compute{0});
      if (!has_statistics) continue;
      for (index_t row = 0; row < rows; ++row) state.statistics.from(row).reset();
    }
  }

 private:
  /// Returns the statistics of query i and of those after it in its tile. Requires has_statistics.
  template <class Compute>
  TileStatistics<Compute> statistics_at(Compute* states, index_t i) const {
    Compute* const first = states + i / rows * tile_size() + (channels + 2) * rows + i % rows;
    return {first, first + rows, first + 2 * rows, first + 3 * rows};
  }
  constexpr index_t tile_size() const { return rows * (channels + (has_statistics ? 6 : 2)); }
};

/// Returns 2^(from - to), which turns sums under the shift `from` into sums under `to`. Returns 1 where the shifts
/// are equal, also at -inf.
template <class T>
T shift_factor(T from, T to) {
  return from == to ? T{1} : static_cast<T>(std::exp2(static_cast<double>(from) - static_cast<double>(to)));
}

/// Returns Σ w·(x - to), given Σ w·(x - from) and the sum of the same earlier weights. `factor` = 2^(from - to) turns
/// them into the weights of the result.
template <class T>
T move_distances(T distances, T sum, T from, T to, T factor) {
  if (from == to) return distances;
  return factor == 0 ? T{0} : factor * (distances + (from - to) * sum);
}

/// Merges the statistics of two states, whose shifts and sums are those before they are merged.
template <class T>
void merge_statistics(const TileStatistics<T>& to, const TileStatistics<T>& from, T shift, T sum,
                      T from_shift, T from_sum) {
  const T raised = std::max(shift, from_shift), f = shift_factor(shift, raised),
          g = shift_factor(from_shift, raised);
  *to.largest = std::max(*to.largest, *from.largest);
  *to.smallest = std::min(*to.smallest, *from.smallest);
  *to.distances = move_distances(*to.distances, sum, shift, raised, f) +
                  move_distances(*from.distances, from_sum, from_shift, raised, g);
  *to.squares = *to.squares * f * f + *from.squares * g * g;
}

/// Merges shift and sum of two states. Writes the factors of o and of other_o, by which the caller multiplies before
/// it adds.
template <class T>
void merge_sums(T& shift, T& sum, T other_shift, T other_sum, T& factor, T& other_factor) {
  const T raised = std::max(shift, other_shift);
  factor = shift_factor(shift, raised);
  other_factor = shift_factor(other_shift, raised);
  shift = raised;
  sum = sum * factor + other_sum * other_factor;
}

template <class T>
void merge_outputs(T* o, const T* other_o, index_t channels, T factor, T other_factor) {
  for (index_t c = 0; c < channels; ++c) o[c] = o[c] * factor + other_o[c] * other_factor;
}

/// Merges two states of one query.
template <class T>
void merge_row(const SoftmaxState<T>& state, const SoftmaxState<T>& other, index_t channels) {
  T factor, other_factor;
  merge_sums(*state.shift, *state.sum, *other.shift, *other.sum, factor, other_factor);
  merge_outputs(state.o, other.o, channels, factor, other_factor);
}

/// Returns ln of the term that a query's sink adds to Σ exp(c·z): the sink or, for scaled sinks, c·sink. A sink of
/// -inf adds 0. Exception: if no key is visible to the query, there is no c, and a scaled sink adds 0.
inline double sink_term(double sink, bool is_scaled, double c, bool sees_any) {
  constexpr double none = -std::numeric_limits<double>::infinity();
  if (!is_scaled || sink == none) return sink;
  return sees_any ? c * sink : none;
}

/// Normalizes a query's state, in double. A sink adds exp(sink) to Σ exp(c·z) and 0 to Σ exp(c·z)·v.
class Normalizer {
 public:
  double factor;  // out = factor · o

  Normalizer(double shift, double sum) : factor(sum == 0 ? 0 : 1 / sum), shift_(shift), total_(sum) {}
  Normalizer(double shift, double sum, double sink) {
    const double sink_shift = sink * std::numbers::log2e;
    shift_ = std::max(shift, sink_shift);
    const double own = shift_factor(shift, shift_);
    total_ = sum * own + shift_factor(sink_shift, shift_);
    factor = sum == 0 ? 0 : own / total_;
  }

  double lse() const { return shift_ * std::numbers::ln2 + std::log(total_); }

 private:
  double shift_, total_;
};

SSMAX_END
