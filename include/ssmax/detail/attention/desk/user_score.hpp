// Implements the functions of Variant that depend on the user's mask and score function, but not on the scaling.
#pragma once

#include <numbers>
#include <type_traits>

#include "../../../score.hpp"
#include "../../kernels/scores.hpp"
#include "../../memory/conversion.hpp"
#include "user_mask.hpp"

SSMAX_BEGIN_DETAIL

/// `Interface` is Variant<Compute> or GradientVariant<Compute>.
template <class Compute, class M, class C, class Interface = Variant<Compute>>
class UserScore : public UserMask<Compute, M, Interface> {
  using Base = UserMask<Compute, M, Interface>;

 public:
  using Base::mask, Base::query_position;
  const C& score;

  void apply(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const override {
    if constexpr (!std::same_as<C, Identity>) {
      apply_score(score, logits, memory);
      multiply(logits, memory);
    }
    mask_single(logits, memory);
  }

  void apply(Compute* s, KeyRange keys, const QueryRow& row) const override {
    if constexpr (!std::same_as<C, Identity>) apply_score(score, s, keys, row);
    mask_row(s, keys, row);
  }

 protected:
  using Base::mask_row, Base::mask_single;

  UserScore(const VariantFacts& facts, const M& a_mask, const C& a_score)
      : Base(facts, a_mask), score(a_score) {}

  /// Multiplies the score's results by c·log2(e), in place. The kernels require logits in units of log2.
  void multiply(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const {
    Compute* multiplier = memory.lane.multiplier;
    for (index_t lane = 0; lane < memory.kernels.width; ++lane) {
      multiplier[lane] = static_cast<Compute>(logits.rows[lane].multiplier * std::numbers::log2e);
    }
    kernels<ScoreKernels<Compute>>().multiply(logits.s, logits.keys.size(), multiplier);
  }

  Key key_of(const Query& query, index_t key) const {
    return {query, key, Base::query_position(query), Base::key_position(query, key)};
  }

  template <class Part>
  void apply_score(const Part& part, const Logits<Compute>& logits,
                   const TileScratch<Compute>& memory) const {
    if constexpr (shared::is_composed<Part>) {
      apply_score(part.first(), logits, memory);
      apply_score(part.second(), logits, memory);
    } else {
      with_moves_keys([&](auto moves) { apply_part<moves.value>(part, logits, memory); });
    }
  }

  /// Calls f with a constant that says whether the mask defines positions of keys.
  template <class F>
  SSMAX_INLINE void with_moves_keys(const F& f) const {
    if constexpr (Base::is_erased) {
      this->moves_keys() ? f(std::true_type()) : f(std::false_type());
    } else {
      f(std::bool_constant<has_key_position<M>>());
    }
  }

  /// `moves_keys`: the mask defines positions of keys.
  template <bool moves_keys, class Part>
  void apply_part(const Part& part, const Logits<Compute>& logits, const TileScratch<Compute>& memory) const {
    if constexpr (uses_lanes<Part, moves_keys>) {
      for_each_key_lanes<Part>(logits, memory, [&](index_t, const auto& lanes) { part.apply(lanes); });
    } else if constexpr (has_slope_kernel<Part> && !moves_keys) {
      add_slopes(part, logits, memory);
    } else if constexpr (by_row<Part>) {
      add_rows(part, logits, memory);
    } else if constexpr (scales_by_distance<Part, moves_keys>) {
      scale_by_distance(part, logits, nullptr, memory);
    } else {
      apply_each(part, logits, memory);
    }
  }

  /// True if a score is vectorized by its own members. Exception: false for a score that reads positions, if the
  /// mask defines the positions of keys.
  template <class Part, bool moves_keys>
  static constexpr bool uses_lanes = by_lanes<Part> && !(reads_place<Part> && moves_keys);

  /// Calls f(key - keys.begin, lanes) for each key of the logits: one query per lane.
  template <class Part, class F>
  void for_each_key_lanes(const Logits<Compute>& logits, const TileScratch<Compute>& memory,
                          const F& f) const {
    const index_t tile_lanes = memory.tile_lanes, width = memory.kernels.width;
    if constexpr (reads_place<Part>) {
      Compute* distance = memory.lane.distance;
      for (index_t lane = 0; lane < width; ++lane)
        distance[lane] = static_cast<Compute>(logits.keys.begin - query_position(logits.rows[lane].query));
      for (index_t at = 0; at < logits.keys.size(); ++at) {
        f(at, PlacedLanes<Compute>({logits.s + at * tile_lanes, width}, distance, static_cast<Compute>(at),
                                   &logits.rows[0].query, sizeof(QueryRow)));
      }
    } else {
      for (index_t at = 0; at < logits.keys.size(); ++at)
        f(at, Lanes<Compute>(logits.s + at * tile_lanes, width));
    }
  }

  /// Adds slope·distance. An absolute distance changes its sign at the query's position: the keys between two such
  /// positions take one call of the kernel.
  template <class Part>
  void add_slopes(const Part& part, const Logits<Compute>& logits, const TileScratch<Compute>& memory) const {
    const index_t keys = logits.keys.size(), width = memory.kernels.width;
    Compute *slope = memory.lane.slope, *distance = memory.lane.distance;
    for (index_t lane = 0; lane < width; ++lane) {
      const Query& query = logits.rows[lane].query;
      slope[lane] = static_cast<Compute>(part.slope(query.head));
      distance[lane] = static_cast<Compute>(logits.keys.begin - query_position(query));
    }
    const auto ramp = kernels<ScoreKernels<Compute>>().ramp;
    if (part.kind == AlibiDistance::relative) return ramp(logits.s, keys, slope, distance);
    for (index_t begin = 0, end = 0; begin < keys; begin = end) {
      end = keys;
      for (index_t lane = 0; lane < width; ++lane) {
        if (distance[lane] == 0 || (distance[lane] > 0 && begin == 0)) slope[lane] = -slope[lane];
        if (distance[lane] < 0) end = std::min(end, begin - static_cast<index_t>(distance[lane]));
      }
      ramp(logits.s + begin * memory.tile_lanes, end - begin, slope, distance);
      for (index_t lane = 0; lane < width; ++lane) distance[lane] += static_cast<Compute>(end - begin);
    }
  }

  /// True if a score is vectorized by factors of the distance.
  template <class Part, bool moves_keys>
  static constexpr bool scales_by_distance = has_factor_kernel<Part> && !moves_keys;

  /// Replaces z by z', and multiplies slope, unless null, by dz'/dz. If the queries have consecutive positions, all
  /// lanes read one array of factors. Otherwise the factors of each query are transposed into lanes first.
  template <class Part>
  void scale_by_distance(const Part& part, const Logits<Compute>& logits, Compute* slope,
                         const TileScratch<Compute>& memory) const {
    const index_t count = std::min(logits.keys.size(), logits.length - logits.keys.begin),
                  width = memory.kernels.width;
    const auto distance = [&](index_t lane) {  // distance to the first key
      return query_position(logits.rows[lane].query) - logits.keys.begin;
    };
    const auto apply = kernels<ScoreKernels<Compute>>().scale_by_distance;
    bool side_by_side = true;
    for (index_t lane = 1; lane < width; ++lane) side_by_side &= distance(lane) == distance(0) + lane;
    if (side_by_side) {
      const Compute* factors = part.factors(distance(0) - count + 1, count + width - 1, memory.wide);
      apply(logits.s, slope, count, factors + count - 1, -1);
      return;
    }
    for (index_t lane = 0; lane < width; ++lane) {
      memory.in[lane] = part.factors(-distance(lane), count, memory.wide + lane * key_block);
    }
    memory.kernels.transpose(memory.in, width, count, nullptr, memory.transposed, width);
    apply(logits.s, slope, count, memory.transposed, width);
  }

  /// Adds the rows of a by_row score: converts the rows to Compute if needed, and transposes them into lanes.
  /// Multiplies each row by the slope of its head if the score has slopes.
  template <class Part>
  void add_rows(const Part& part, const Logits<Compute>& logits, const TileScratch<Compute>& memory) const {
    const index_t count = std::min(logits.keys.size(), logits.length - logits.keys.begin),
                  width = memory.kernels.width;
    for (index_t lane = 0; lane < width; ++lane) {
      const auto* numbers = part.row(logits.rows[lane].query);
      if (numbers == nullptr) return apply_each(part, logits, memory);
      memory.in[lane] = converted(numbers + logits.keys.begin, count, memory.wide + lane * key_block);
      if constexpr (has_row_slope<Part>)
        memory.lane.slope[lane] = static_cast<Compute>(part.slope(logits.rows[lane].query.head));
    }
    const Compute* slope = has_row_slope<Part> ? memory.lane.slope : nullptr;
    memory.kernels.transpose(memory.in, width, count, slope, memory.transposed, width);
    kernels<ScoreKernels<Compute>>().add(logits.s, count, memory.transposed);
  }

  template <class Part>
  void apply_each(const Part& part, const Logits<Compute>& logits, const TileScratch<Compute>& memory) const {
    for_each_visible(logits, memory.kernels.width,
                     [&](index_t at, index_t lane, const Query& query, index_t key) {
                       if (!Base::sees(query, key)) return;
                       Compute& z = logits.s[at * memory.tile_lanes + lane];
                       z = static_cast<Compute>(part(z, key_of(query, key)));
                     });
  }

 private:
  template <class Part>
  void apply_score(const Part& part, Compute* s, KeyRange keys, const QueryRow& row) const {
    if constexpr (shared::is_composed<Part>) {
      apply_score(part.first(), s, keys, row);
      apply_score(part.second(), s, keys, row);
    } else {
      with_moves_keys([&](auto moves) { apply_part<moves.value>(part, s, keys, row); });
    }
  }

  template <bool moves_keys, class Part>
  void apply_part(const Part& part, Compute* s, KeyRange keys, const QueryRow& row) const {
    if constexpr (uses_lanes<Part, moves_keys>) {
      apply_key_lanes(part, s, keys, row);
    } else if constexpr (has_slope_kernel<Part> && !moves_keys) {
      const index_t position = query_position(row.query);
      const Compute slope = static_cast<Compute>(part.slope(row.query.head));
      for_each_block(s, keys, [&](Compute* z, KeyRange block, Compute* distance) {
        for (index_t key = block.begin; key < block.end; ++key) {
          distance[key - block.begin] = static_cast<Compute>(part.distance(key - position));
        }
        kernels<ScoreKernels<Compute>>().ramp_row(z, block.size(), slope, distance);
      });
    } else if constexpr (scales_by_distance<Part, moves_keys>) {
      const index_t position = query_position(row.query);
      for_each_block(s, keys, [&](Compute* z, KeyRange block, Compute* scratch) {
        const Compute* factors = part.factors(block.begin - position, block.size(), scratch);
        kernels<ScoreKernels<Compute>>().scale_row_by_distance(z, block.size(), factors);
      });
    } else if constexpr (by_row<Part>) {
      const auto* numbers = part.row(row.query);
      if (numbers == nullptr) return apply_each(part, s, keys, row);
      for_each_block(s, keys, [&](Compute* z, KeyRange block, Compute* scratch) {
        const Compute* added = converted(numbers + block.begin, block.size(), scratch);
        if constexpr (has_row_slope<Part>) {
          const auto slope = static_cast<Compute>(part.slope(row.query.head));
          kernels<ScoreKernels<Compute>>().ramp_row(z, block.size(), slope, added);
        } else {
          kernels<ScoreKernels<Compute>>().add_row(z, block.size(), added);
        }
      });
    } else {
      apply_each(part, s, keys, row);
    }
  }

  /// Applies a vectorized score: one key per lane.
  template <class Part>
  void apply_key_lanes(const Part& part, Compute* s, KeyRange keys, const QueryRow& row) const {
    if constexpr (reads_place<Part>) {
      const index_t position = query_position(row.query);
      for_each_block(s, keys, [&](Compute* z, KeyRange block, Compute* distance) {
        for (index_t key = block.begin; key < block.end; ++key) {
          distance[key - block.begin] = static_cast<Compute>(key - position);
        }
        part.apply(PlacedLanes<Compute>({z, block.size()}, distance, Compute{0}, &row.query, 0));
      });
    } else {
      part.apply(Lanes<Compute>(s, keys.size()));
    }
  }

  template <class Part>
  void apply_each(const Part& part, Compute* s, KeyRange keys, const QueryRow& row) const {
    const index_t position = query_position(row.query);
    for (index_t key = keys.begin; key < keys.end; ++key, ++s) {
      if (!Base::sees(row.query, key)) continue;
      *s = static_cast<Compute>(part(*s, Key{row.query, key, position, Base::key_position(row.query, key)}));
    }
  }

  /// Calls f(logits, keys, scratch) for each block of keys. `scratch` holds one number per key.
  template <class F>
  static void for_each_block(Compute* s, KeyRange keys, const F& f) {
    Compute scratch[key_block];
    for (index_t begin = keys.begin; begin < keys.end; begin += key_block) {
      f(s + (begin - keys.begin), KeyRange{begin, std::min(begin + key_block, keys.end)}, scratch);
    }
  }
};

SSMAX_END
