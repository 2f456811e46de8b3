// Implements the functions of Variant that depend on the user's mask, but not on scaling and score function.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../../../mask.hpp"
#include "../../../row.hpp"
#include "../terms/variant.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the facts about a mask, for a call without a score function.
template <class M>
VariantFacts facts_of_mask(const M&) {
  return {.has_score = false,
          .has_predicate = detail::has_predicate<M>,
          .has_runs = detail::has_run<M>,
          .shows_same_keys = same_keys<M>,
          .has_positions = defines_positions<M>,
          .rotated_to_positions = detail::rotated_to_positions<M>,
          .refuses_lengths = detail::refuses_lengths<M>};
}

/// Calls f(key - keys.begin, lane, query, key) for the keys of the logits that lie in each lane's range.
template <class Compute, class F>
SSMAX_INLINE void for_each_visible(const Logits<Compute>& logits, index_t width, const F& f) {
  for (index_t lane = 0; lane < width; ++lane) {
    const QueryRow& row = logits.rows[lane];
    const index_t last = std::min(logits.keys.end, row.keys.end);
    for (index_t key = std::max(logits.keys.begin, row.keys.begin); key < last; ++key) {
      f(key - logits.keys.begin, lane, row.query, key);
    }
  }
}

/// `Interface` is Variant<Compute>, GradientVariant<Compute> or, for the mask of a plan, MaskVariantOf<Compute, M>.
template <class Compute, class M, class Interface>
class UserMask : public Interface {
 public:
  const M& mask;

  index_t query_position(const Query& query) const override { return detail::query_position(mask, query); }
  index_t key_position(const Query& query, index_t key) const override {
    return detail::key_position(mask, query, key);
  }
  bool sees(const Query& query, index_t key) const override { return detail::sees(mask, query, key); }
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
  index_t first_visible(const Query& query, KeyRange range) const override {
    const KeyRange keys = visible_keys(mask, query);
    const KeyRange both{std::max(keys.begin, range.begin), std::min(keys.end, range.end)};
    if (both.size() <= 0) return range.end;
    const index_t key = detail::first_visible(mask, query, both);
    return key < both.end ? key : range.end;
  }

 protected:
  UserMask(const VariantFacts& facts, const M& a_mask) : Interface(facts), mask(a_mask) {}

  /// Returns the row of a query without the multiplier, and writes the Row with which the scaling is called to
  /// `scaled`: n is 0 if no key is visible.
  QueryRow masked_row(const Query& query, KeyRange stored, Row& scaled) const {
    QueryRow result{query, {}, 0};
    const KeyRange visible = visible_keys(mask, query);
    scaled = scaled_row(query, visible);
    if (scaled.n == 0) return result;
    result.keys = {std::max(visible.begin, stored.begin), std::min(visible.end, stored.end)};
    if (result.keys.size() <= 0) result.keys = {};
    result.n = scaled.n;
    return result;
  }

  /// Returns the Row with which the scaling is called. `visible` is the query's whole range. n is 0 if no key is
  /// visible.
  Row scaled_row(const Query& query, KeyRange visible) const {
    const index_t n = visible_count(mask, query, visible);
    if (n == 0) return {};
    return {query.head, row_position(mask, query), n};
  }

  static constexpr bool is_erased = false;

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

  /// Does the same for the contiguous logits of one query, also if the mask has runs.
  void mask_row(Compute* s, KeyRange keys, const QueryRow& row) const {
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

  /// Calls f(run) for the runs of a row within `keys`.
  template <class F>
  SSMAX_INLINE void for_each_run(const QueryRow& row, KeyRange keys, const F& f) const {
    for_each_visible_run(mask, row.query,
                         {std::max(keys.begin, row.keys.begin), std::min(keys.end, row.keys.end)}, f);
  }

 private:
  static constexpr Compute masked_logit = -std::numeric_limits<Compute>::infinity();
};

SSMAX_END
