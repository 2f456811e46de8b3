// Implements Variant with the user's mask, scaling and score function.
#pragma once

#include <limits>
#include <numbers>

#include "../../../mask.hpp"
#include "../../../row.hpp"
#include "../../../score.hpp"
#include "../../kernels/scores.hpp"
#include "../../memory/conversion.hpp"
#include "../terms/variant.hpp"

SSMAX_BEGIN_DETAIL

/// `Interface` is Variant<Compute> or GradientVariant<Compute>.
template <class Compute, class S, class M, class C, class Interface = Variant<Compute>>
class UserVariant : public Interface {
 public:
  const S& scaling;
  const M& mask;
  const C& score;

  UserVariant(const S& a_scaling, const M& a_mask, const C& a_score)
      : Interface(VariantFacts{.has_score = !std::same_as<C, Identity>,
                               .has_predicate = detail::has_predicate<M>,
                               .has_runs = detail::has_run<M>,
                               .shows_same_keys = same_keys<M> && detail::depends_on_size_only<S>,
                               .has_positions = defines_positions<M>,
                               .rotated_to_positions = detail::rotated_to_positions<M>,
                               .refuses_lengths = detail::refuses_lengths<M>}),
        scaling(a_scaling),
        mask(a_mask),
        score(a_score) {}

  QueryRow row(const Query& query, KeyRange stored) const override {
    QueryRow result{query, {}, 0};
    const KeyRange visible = visible_keys(mask, query);
    const PlacedRow scaled{scaled_row(query, visible), query.batch, query.index};
    if (scaled.n == 0) return result;
    result.keys = {std::max(visible.begin, stored.begin), std::min(visible.end, stored.end)};
    if (result.keys.size() <= 0) result.keys = {};
    result.multiplier = static_cast<double>(scaling(scaled));
    result.n = scaled.n;
    return result;
  }

  index_t query_position(const Query& query) const override { return detail::query_position(mask, query); }
  index_t key_position(const Query& query, index_t key) const override {
    return detail::key_position(mask, query, key);
  }
  bool sees(const Query& query, index_t key) const override { return detail::sees(mask, query, key); }
  Key key_of(const Query& query, index_t key) const {
    return {query, key, query_position(query), key_position(query, key)};
  }

  void apply(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const override {
    if constexpr (!std::same_as<C, Identity>) {
      apply_score(score, logits, memory);
      multiply(logits, memory);
    }
    mask_single(logits, memory);
  }

  void apply(Compute* s, KeyRange keys, const QueryRow& row) const override {
    if constexpr (!std::same_as<C, Identity>) apply_score(score, s, keys, row);
    if constexpr (detail::has_run<M>) {
      index_t from = keys.begin;
      for_each_visible_run(mask, row.query, keys, [&](KeyRange run) {
        std::fill(s + (from - keys.begin), s + (run.begin - keys.begin), masked_logit);
        from = run.end;
      });
      std::fill(s + (from - keys.begin), s + keys.size(), masked_logit);
    } else if constexpr (detail::has_predicate<M>) {
      for (index_t key = keys.begin; key < keys.end; ++key, ++s) {
        const Compute either[2]{masked_logit, *s};  // no branch: the mask's answers are not predictable
        *s = either[mask.sees(row.query, key) ? 1 : 0];
      }
    }
  }

  bool has_same_runs(const QueryRow* rows, index_t count) const override {
    if constexpr (detail::has_run<M>) {
      const auto is_same = [this, first = rows](const QueryRow& row) {
        return row.keys.begin == first->keys.begin && row.keys.end == first->keys.end &&
               row.query.batch == first->query.batch && same_runs(mask, first->query, row.query);
      };
      return std::all_of(rows, rows + count, is_same);
    }
    return false;
  }

  index_t next_visible(const QueryRow* rows, index_t count, index_t from) const override {
    index_t next = std::numeric_limits<index_t>::max();
    if constexpr (detail::has_run<M>) {
      for (index_t i = 0; i < count; ++i) {
        const KeyRange keys = rows[i].keys;
        if (std::max(from, keys.begin) >= keys.end) continue;
        const KeyRange run = next_run(mask, rows[i].query, std::max(from, keys.begin));
        if (run.begin < std::min(run.end, keys.end)) next = std::min(next, run.begin);
      }
    }
    return next;
  }

  std::uint32_t visible_blocks(const QueryRow* rows, index_t count, KeyRange keys,
                               index_t block_keys) const override {
    std::uint32_t blocks = 0;
    if constexpr (detail::has_run<M>) {
      for (index_t i = 0; i < count; ++i) {
        for_each_run(rows[i], keys, [&](KeyRange run) {
          const index_t first = (run.begin - keys.begin) / block_keys,
                        last = (run.end - 1 - keys.begin) / block_keys;
          blocks |= (std::uint32_t{2} << last) - (std::uint32_t{1} << first);
        });
      }
    }
    return blocks;
  }

  Hull hull(const QueryRow* rows, index_t count, KeyRange keys) const override {
    Hull result;
    if constexpr (detail::has_run<M>) {
      for (index_t i = 0; i < count; ++i) {
        Hull row;
        const KeyRange range = rows[i].keys;
        for (index_t from = std::max(keys.begin, range.begin); from < std::min(keys.end, range.end);) {
          const KeyRange next = next_run(mask, rows[i].query, from);
          const KeyRange run{std::max(next.begin, from), std::min(next.end, range.end)};
          if (run.size() <= 0 || run.begin >= keys.end) break;
          row.add(run);
          from = run.end;
        }
        if (row.any.size() <= 0) row.all = {};
        result.add(row);
      }
    }
    return result;
  }

  void mask_runs(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const override {
    if constexpr (detail::has_run<M>) {
      const KeyRange keys = logits.keys;
      Compute *first = memory.lane.first, *last = memory.lane.last;
      for (index_t lane = 0; lane < memory.kernels.width; ++lane) {
        KeyRange seen{keys.begin, keys.begin};
        for_each_run(logits.rows[lane], keys, [&](KeyRange run) {
          if (seen.size() == 0) seen = {run.begin, run.begin};
          for (index_t key = seen.end; key < run.begin; ++key) {
            logits.s[(key - keys.begin) * memory.tile_lanes + lane] = masked_logit;
          }
          seen.end = run.end;
        });
        first[lane] = static_cast<Compute>(seen.begin - keys.begin);
        last[lane] = static_cast<Compute>(seen.end - keys.begin);
      }
      memory.kernels.mask_logits(logits.s, keys.size(), first, last);
    }
  }

  void check_mask(const QueryShape& shape) const override { detail::check_mask(mask, shape); }
  void check_logits(const char* function, const QueryShape& shape) const override {
    check_score(score, shape);
    check_scaling(function, scaling, shape);
  }
  index_t first_visible(const Query& query, KeyRange range) const override {
    const KeyRange keys = visible_keys(mask, query);
    const KeyRange both{std::max(keys.begin, range.begin), std::min(keys.end, range.end)};
    if (both.size() <= 0) return range.end;
    const index_t key = detail::first_visible(mask, query, both);
    return key < both.end ? key : range.end;
  }

 protected:
  /// Returns the Row with which the scaling is called. `visible` is the query's whole range. n is 0 if no key is
  /// visible.
  Row scaled_row(const Query& query, KeyRange visible) const {
    const index_t n = visible_count(mask, query, visible);
    if (n == 0) return {};
    return {query.head, row_position(mask, query), n};
  }

  /// Multiplies the score's results by c·log2(e), in place. The kernels require logits in units of log2.
  void multiply(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const {
    Compute* multiplier = memory.lane.multiplier;
    for (index_t lane = 0; lane < memory.kernels.width; ++lane) {
      multiplier[lane] = static_cast<Compute>(logits.rows[lane].multiplier * std::numbers::log2e);
    }
    kernels<ScoreKernels<Compute>>().multiply(logits.s, logits.keys.size(), multiplier);
  }

  /// Sets the logits of keys that the mask's member `sees` rejects to -inf. Has no effect if the mask has runs.
  void mask_single(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const {
    if constexpr (detail::has_predicate<M> && !detail::has_run<M>) {
      for_each_visible(logits, memory.kernels.width,
                       [&](index_t at, index_t lane, const Query& query, index_t key) {
                         Compute& z = logits.s[at * memory.tile_lanes + lane];
                         const Compute either[2]{masked_logit, z};
                         z = either[mask.sees(query, key) ? 1 : 0];
                       });
    }
  }

  /// Calls f(run) for the runs of a row within `keys`.
  template <class F>
  SSMAX_INLINE void for_each_run(const QueryRow& row, KeyRange keys, const F& f) const {
    for_each_visible_run(mask, row.query,
                         {std::max(keys.begin, row.keys.begin), std::min(keys.end, row.keys.end)}, f);
  }

  /// Calls f(key - keys.begin, lane, query, key) for the keys of the logits that lie in each lane's range.
  template <class F>
  static void for_each_visible(const Logits<Compute>& logits, index_t width, const F& f) {
    for (index_t lane = 0; lane < width; ++lane) {
      const QueryRow& row = logits.rows[lane];
      const index_t last = std::min(logits.keys.end, row.keys.end);
      for (index_t key = std::max(logits.keys.begin, row.keys.begin); key < last; ++key) {
        f(key - logits.keys.begin, lane, row.query, key);
      }
    }
  }

  template <class Part>
  void apply_score(const Part& part, const Logits<Compute>& logits,
                   const TileScratch<Compute>& memory) const {
    if constexpr (shared::is_composed<Part>) {
      apply_score(part.first(), logits, memory);
      apply_score(part.second(), logits, memory);
    } else if constexpr (uses_lanes<Part>) {
      for_each_key_lanes<Part>(logits, memory, [&](index_t, const auto& lanes) { part.apply(lanes); });
    } else if constexpr (has_slope_kernel<Part> && !has_key_position<M>) {
      add_slopes(part, logits, memory);
    } else if constexpr (by_row<Part>) {
      add_rows(part, logits, memory);
    } else if constexpr (scales_by_distance<Part>) {
      scale_by_distance(part, logits, nullptr, memory);
    } else {
      apply_each(part, logits, memory);
    }
  }

  /// True if a score is vectorized by its own members. Exception: false for a score that reads positions, if the
  /// mask defines the positions of keys.
  template <class Part>
  static constexpr bool uses_lanes = by_lanes<Part> && !(reads_place<Part> && has_key_position<M>);

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
  template <class Part>
  static constexpr bool scales_by_distance = has_factor_kernel<Part> && !has_key_position<M>;

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
                       if (!detail::sees(mask, query, key)) return;
                       Compute& z = logits.s[at * memory.tile_lanes + lane];
                       z = static_cast<Compute>(part(z, key_of(query, key)));
                     });
  }

 private:
  static constexpr Compute masked_logit = -std::numeric_limits<Compute>::infinity();

  template <class Part>
  void apply_score(const Part& part, Compute* s, KeyRange keys, const QueryRow& row) const {
    if constexpr (shared::is_composed<Part>) {
      apply_score(part.first(), s, keys, row);
      apply_score(part.second(), s, keys, row);
    } else if constexpr (uses_lanes<Part>) {
      apply_key_lanes(part, s, keys, row);
    } else if constexpr (has_slope_kernel<Part> && !has_key_position<M>) {
      const index_t position = query_position(row.query);
      const Compute slope = static_cast<Compute>(part.slope(row.query.head));
      for_each_block(s, keys, [&](Compute* z, KeyRange block, Compute* distance) {
        for (index_t key = block.begin; key < block.end; ++key) {
          distance[key - block.begin] = static_cast<Compute>(part.distance(key - position));
        }
        kernels<ScoreKernels<Compute>>().ramp_row(z, block.size(), slope, distance);
      });
    } else if constexpr (scales_by_distance<Part>) {
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
      if (!detail::sees(mask, row.query, key)) continue;
      *s = static_cast<Compute>(part(*s, Key{row.query, key, position, key_position(row.query, key)}));
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
