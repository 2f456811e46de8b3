// Computes attention of many queries: tiles of queries, one per lane, against blocks of keys (kernels/prefill.inl).
//
// A task computes some tiles of one kv head:
// 1. Load a block of keys for all tiles: 128 keys, or 256 or 512 on the bf16 path, where a tile then reads key blocks
//    of 64 or 128.
// 2. Compute the logits of each tile.
// 3. Replace logits by weights, and update the states of the queries.
// 4. Multiply weights by V.
//
// Keys are read in place or, if they must be converted or rotated, copied: K into rows, V into panels. The bf16 path
// always copies V. A task of one or two rows of queries, in float, reads rows by their addresses (row_logits,
// row_accumulate). Each vector of queries needs a range of a block's keys. Products are computed for rectangles, for as
// many vectors at once as need the same keys. Keys that no query needs are skipped.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>

#include "../operands/finite.hpp"
#include "../operands/gather.hpp"
#include "../operands/prefetch.hpp"
#include "../tile/dropout.hpp"
#include "../tile/softmax.hpp"
#include "task.hpp"

SSMAX_BEGIN_DETAIL

/// The scratch memory of one thread. Operand is the type of the products' operands.
template <class Compute, class Operand = Compute>
struct PrefillScratch : ForwardScratch<Compute, Operand> {
  using Base = ForwardScratch<Compute, Operand>;
  using Base::arena, Base::channels, Base::depth, Base::products, Base::tile_lanes, Base::tiles;
  using Op = Operands<Compute, Operand>;

  PrefillScratch(Arena& an_arena, index_t queries, const Problem<Compute>& problem)
      : Base(an_arena, queries, problem,
             product_depth<Operand>(problem, detail::kernels<PrefillKernels<Compute, Operand>>().depth)),
        layout{.tiles = tiles,
               .rows = tile_lanes,
               .channels = channels,
               .in_lanes = true,
               .has_statistics = problem.statistics != nullptr} {}

  static constexpr bool in_lanes = true;  // states: one query per lane
  void merge_outputs(Compute* o, const Compute* other, index_t, const Compute* factors,
                     const Compute* other_factors) const {
    products.merge(o, other, channels, factors, other_factors);
  }

  index_t held_keys = Op::held_keys(depth, channels);  // keys that are loaded at once
  StateLayout layout;
  Operand* k = arena.template take<Operand>(held_keys * depth);
  /// The stride of panels: a panel and one cache line, so that the panels of a row use different cache sets.
  index_t panel = held_keys * products.pass + 64 / static_cast<index_t>(sizeof(Operand));
  /// [panel][held_keys][rows of a panel]: the layout of pack_values.
  Operand* v = arena.template take<Operand>(channels / products.pass * panel);
  /// The rows of a single tile's key blocks.
  const std::byte** k_rows = arena.template take<const std::byte*>(2 * key_block);
  const std::byte** v_rows = arena.template take<const std::byte*>(2 * key_block);
  Compute* chunk = arena.template take<Compute>(layout.size());  // states
  Compute* total = arena.template take<Compute>(layout.size());
};

/// The attention of some tiles of queries of a kv head. Operand is the type of the products' operands: Compute,
/// or bfloat16 (see route.hpp).
template <class Compute, class Operand = Compute>
class PrefillTask : public ForwardTask<Compute, PrefillScratch<Compute, Operand>> {
 public:
  using Memory = PrefillScratch<Compute, Operand>;

  /// The number of queries of the largest task. These queries share loaded keys. 24 tiles are 1.5 to 2 % faster than
  /// 8, though their states exceed a second-level cache of 1 MB, and 48 are no faster than 24. Rejected: prefetching
  /// the next block, the task's queries or the rows of its results did not change the time.
  static index_t max_queries() { return 24 * min_queries(); }
  static index_t min_queries() { return kernels<PrefillKernels<Compute>>().width * tile_vectors; }
  /// Returns whether few queries share loaded keys: those of one tile.
  static bool has_few_queries(index_t rows) { return rows <= min_queries(); }

  PrefillTask(const Problem<Compute>& problem, const Variant<Compute>& variant, const Memory& memory)
      : Base(problem, variant, memory),
        kernels_(memory.products),
        scores_(variant, problem.scale, memory.products, memory) {}

  /// Loads the queries of the task (ForwardTask::select). Returns the hull of their visible keys.
  KeyRange prepare(std::span<const Sequence> sequences, index_t kv_head, index_t first, index_t count) {
    hull_ = this->load_rows(sequences, kv_head, first, count, scores_.multipliers);
    tiles_ = ceil_div(count, memory_.tile_lanes);
    if (problem_.dropout.p > 0) dropper_.emplace(problem_.dropout, sequence_->batch);
    finds_rows_ =
        tiles_ == 1 && has_short_runs(problem_.keys, batch_, kv_head, hull_.any, memory_.block_keys);
    reads_rows_ = tiles_ == 1 && count <= std::min(most_rows_read, kernels_.width / 2) && !Op::is_bf16 &&
                  problem_.keys.are_both(ElementKind::compute) && !problem_.rotates_keys();
    reads_ahead_ = reads_rows_ && exceeds_cache(problem_, hull_.any);
    keys_ahead_ = tiles_ == 1 && !finds_rows_ ? 2 * keys_to_prefetch(problem_, rows_, hull_.any, 1) : 0;
    listed_ = {memory_.k_rows, memory_.v_rows};
    next_listed_ = {memory_.k_rows + key_block, memory_.v_rows + key_block};
    return hull_.any;
  }

  /// Writes the states after the keys of one chunk.
  void attend_chunk(KeyRange keys, Compute* states) {
    this->reset(states);
    const AcquiredProducts products(kernels_);
    const index_t length = sequence_->shape.keys, block_keys = memory_.block_keys;
    // A single tile loads one key block at a time: the tile reads the block while it is still in the first-level
    // cache.
    const index_t at_once = tiles_ == 1 ? block_keys : memory_.held_keys;
    const auto seen_from = [&](index_t first) {
      const KeyRange held{std::max(first, keys.begin), std::min({first + at_once, length, keys.end})};
      return held.size() > 0 ? seen_of(held) : KeyRange{};
    };
    const index_t first_held = keys.begin / at_once * at_once;
    KeyRange next = seen_from(first_held);
    if (finds_rows_) find_next_rows(next);
    for (index_t first = first_held; first < keys.end; first += at_once) {
      const KeyRange seen = next;
      next = seen_from(first + at_once);
      if (finds_rows_) {
        std::swap(listed_, next_listed_);
        find_next_rows(next);
      }
      if (seen.size() == 0) continue;
      if (!point_at_rows(first, seen) && !point_at_keys({first, std::min(first + at_once, length)}))
        load_held_keys(first, seen);
      for (index_t tile = 0; tile < tiles_; ++tile) {
        for (index_t begin = seen.begin / block_keys * block_keys; begin < seen.end; begin += block_keys) {
          const KeyRange block{begin, std::min(begin + block_keys, length)};
          if (sees(tile, block)) attend_block(tile, block, states);
        }
      }
    }
    if (dropper_) scale_kept(states);
  }

 private:
  using Base = ForwardTask<Compute, Memory>;
  using Base::batch_, Base::count_, Base::kv_head_, Base::memory_, Base::problem_, Base::rows_,
      Base::sequence_, Base::variant_;
  using Op = Operands<Compute, Operand>;
  static constexpr ElementKind stored_kind = Op::is_bf16 ? ElementKind::bfloat16 : ElementKind::compute;
  /// The number of tiles from which on rows with a large stride are copied. If heads are closer in memory than
  /// positions, rows fill the first-level TLB with pages. On Zen 3, a copy is 1.08 times as fast at 8 heads of width
  /// 64, 1.15 times at 32 of 128.
  static constexpr index_t tiles_for_a_copy = 4;

  /// The addresses of keys and values.
  struct ListedRows {
    const std::byte **k = nullptr, **v = nullptr;
  };

  /// Finds and prefetches rows that are loaded next.
  void find_next_rows(KeyRange keys) const {
    const AnyKeys<Compute>& source = problem_.keys;
    if (keys.size() <= 0) return;
    source.find_rows(batch_, kv_head_, keys, next_listed_.k, next_listed_.v);
    prefetch_rows(next_listed_.k, keys.size(), 0, source.k_row() * source.k_size());
    prefetch_rows(next_listed_.v, keys.size(), 0, source.v_row() * source.v_size());
  }

  /// Returns whether a key of a block may be visible to a tile.
  bool sees(index_t tile, KeyRange block) const {
    return !variant_.has_runs || visible_part(memory_.visible_blocks[tile], block).size() > 0;
  }
  /// Returns the part of a range of keys that may be visible to the tiles.
  KeyRange seen_of(KeyRange keys) const {
    if (!variant_.has_runs) return keys;
    std::uint32_t blocks = 0;
    for (index_t tile = 0; tile < tiles_; ++tile) blocks |= memory_.visible_blocks[tile];
    return visible_part(blocks, keys);
  }

  /// Float, double: points held_ at the rows of keys and returns true if the task reads rows and sees all keys.
  bool point_at_rows(index_t first, KeyRange keys) {
    const index_t at = keys.begin - first;
    if (!reads_rows_ || at % kernels_.pass != 0 || variant_.has_predicate || hull_.masks(keys)) return false;
    const std::byte **k = memory_.k_rows, **v = memory_.v_rows;
    if (finds_rows_) {
      k = listed_.k;
      v = listed_.v;
    } else {
      problem_.keys.find_rows(batch_, kv_head_, keys, k, v);
    }
    // Products read whole passes. Weights of the additional keys are 0, and so are their values.
    const index_t all = round_up(at + keys.size(), kernels_.pass) - at;
    if (all > keys.size()) std::fill_n(memory_.v, problem_.value_width(), Operand{0});
    std::fill(k + keys.size(), k + all, k[0]);
    std::fill(v + keys.size(), v + all, reinterpret_cast<const std::byte*>(memory_.v));
    held_ = {};
    held_.first = keys.begin;
    held_.k_rows = k;
    held_.v_rows = v;
    return true;
  }

  /// Float, double: points held_ at keys in place and returns true if all of these conditions hold:
  /// - The whole block lies in one key run, is stored as Compute and needs no rotation.
  /// - The values fill whole panels, and are finite if keys are masked.
  /// - The rows are close to each other (are_far returns false).
  bool point_at_keys([[maybe_unused]] KeyRange held) {
    if constexpr (!Op::is_bf16) {
      const index_t dv = problem_.value_width();
      if (!problem_.keys.are_both(ElementKind::compute)) return false;
      if (problem_.rotates_keys()) return false;
      if (held.size() < memory_.held_keys || held.begin < sequence_->stored.begin ||
          held.end > sequence_->stored.end)
        return false;
      if (dv % kernels_.pass != 0) return false;
      const AnyKeyRun run = problem_.keys.run(batch_, kv_head_, held.begin);
      if (run.count < memory_.held_keys) return false;
      if (are_far(run.k_stride, problem_.width()) || are_far(run.v_stride, dv)) return false;
      const bool masks = variant_.has_predicate || hull_.masks(held);
      const Compute *k = static_cast<const Compute*>(run.k), *v = static_cast<const Compute*>(run.v);
      if (masks && !kernels_.all_finite(v, run.v_stride, memory_.held_keys, dv)) return false;
      held_ = {held.begin, held.begin, {k, run.k_stride}, {v, run.v_stride, kernels_.pass, panels()}, true};
      return true;
    } else {
      return false;
    }
  }

  /// Returns whether rows of `width` numbers with this stride should be copied.
  bool are_far(index_t stride, index_t width) const {
    return stride >= 2 * width && tiles_ >= tiles_for_a_copy;
  }

  /// Returns whether all rows of K of a run are aligned as the products read them fastest.
  bool is_aligned(const AnyKeyRun& run) const {
    const auto bytes = static_cast<std::uintptr_t>(run.k_stride) * sizeof(Operand);
    return (reinterpret_cast<std::uintptr_t>(run.k) | bytes) %
               static_cast<std::uintptr_t>(kernels_.alignment) ==
           0;
  }

  /// bf16 path: points held_ at rows of K in place and returns true if all of these conditions hold:
  /// - Rows are stored as bfloat16, have one part, and need no rotation and no padding.
  /// - The keys are whole key blocks of one key run, so that no product reads past the last key.
  /// - The rows are close to each other (are_far returns false).
  /// - The rows are aligned as the products read them fastest, or a single tile reads them.
  bool point_at_rows_of_k([[maybe_unused]] KeyRange keys) {
    if constexpr (Op::is_bf16) {
      if (problem_.keys.k_kind() != ElementKind::bfloat16) return false;
      if (logit_parts(problem_) > 1 || problem_.rotates_keys() || memory_.depth != problem_.width())
        return false;
      if (keys.begin % memory_.block_keys != 0 || keys.size() % memory_.block_keys != 0) return false;
      const AnyKeyRun run = problem_.keys.run(batch_, kv_head_, keys.begin);
      if (run.count < keys.size() || are_far(run.k_stride, problem_.width())) return false;
      if (tiles_ > 1 && !is_aligned(run)) return false;
      held_.first_row = keys.begin;
      held_.k = {static_cast<const Operand*>(run.k), run.k_stride};
      return true;
    } else {
      return false;
    }
  }

  /// Loads rows of K and panels of V. Key i has the index i - first. Pads the first and the last key block with 0.
  /// Key blocks without a key stay unchanged.
  void load_held_keys(index_t first, KeyRange keys) {
    const index_t depth = memory_.depth, block_keys = memory_.block_keys;
    const index_t at = keys.begin - first, begin = at / block_keys * block_keys,
                  end = round_up(at + keys.size(), block_keys);
    const ValuePanels<Operand> v{memory_.v, kernels_.pass, memory_.panel, panels()};
    held_ = {first, first, {memory_.k, depth}, v, true};
    if (!point_at_rows_of_k(keys)) {
      std::fill_n(memory_.k + begin * depth, (at - begin) * depth, Operand{});
      if (finds_rows_ && copies_keys_as_stored()) {
        copy_rows(listed_.k, keys.size(), problem_.width(), memory_.k + at * depth, depth);
      } else {
        Op::load_keys(problem_, variant_, sequence_->shape, {batch_, kv_head_, keys}, memory_.widened_row,
                      {memory_.k + at * depth, depth}, keys_ahead_);
      }
      std::fill_n(memory_.k + (at + keys.size()) * depth, (end - at - keys.size()) * depth, Operand{});
    }
    const index_t from = begin * kernels_.pass, panel = (end - begin) * kernels_.pass;
    if (keys.size() < end - begin) {
      for (index_t p = 0; p < v.panels; ++p)
        std::fill_n(memory_.v + p * memory_.panel + from, panel, Operand{});
    }
    pack_values(first, keys);
    held_.values_are_finite = kernels_.all_finite(memory_.v + from, memory_.panel, v.panels, panel);
    if (held_.values_are_finite) return;
    for (index_t p = 0; p < v.panels; ++p) {
      Operand* values = memory_.v + p * memory_.panel + from;
      copy_finite(values, panel, values);
    }
  }

  /// Returns whether the operand of a key is its row.
  bool copies_keys_as_stored() const {
    return problem_.keys.k_kind() == stored_kind && !problem_.rotates_keys() &&
           (!Op::is_bf16 || logit_parts(problem_) == 1);
  }

  /// Returns at most `most` stored values from `key` on, which is number i of the held keys.
  KeyRows<Operand> stored_values(index_t key, index_t i, index_t most) const {
    const index_t dv = problem_.value_width();
    if (finds_rows_) {
      index_t distance;
      const index_t count = equally_distant(listed_.v + i, most, distance);
      return {reinterpret_cast<const Operand*>(listed_.v[i]), distance / index_t{sizeof(Operand)}, count, dv};
    }
    const AnyKeyRun run = problem_.keys.run(batch_, kv_head_, key);
    return {static_cast<const Operand*>(run.v), run.v_stride, std::min(run.count, most), dv};
  }

  /// Packs the values of `keys` as panels. Values that are converted, and values of short runs, are copied side by
  /// side first, `most` rows at a time. Few rows stay in the first-level cache. All but the first copies begin as
  /// pack_values packs fastest.
  void pack_values(index_t first, KeyRange keys) {
    constexpr index_t short_values = 8;
    // `staged` holds `width` rows of Compute, or twice as many of bfloat16.
    const index_t dv = problem_.value_width(),
                  most = Op::is_bf16 ? std::max(kernels_.width, kernels_.pass) : kernels_.width;
    const bool as_stored = problem_.keys.v_kind() == stored_kind;
    auto* const rows = reinterpret_cast<Operand*>(memory_.staged);
    for (index_t key = keys.begin, count; key < keys.end; key += count) {
      const index_t row = key - first, left = keys.end - key;
      if (as_stored) {
        const KeyRows<Operand> run = stored_values(key, key - keys.begin, left);
        count = run.count;
        if (count >= std::min(short_values, left)) {
          kernels_.pack_values(run.first, run.stride, row, count, dv, memory_.v, memory_.panel);
          continue;
        }
      }
      count = std::min(most - row % most, left);
      if (as_stored && finds_rows_) {
        copy_rows(listed_.v + (key - keys.begin), count, dv, rows, dv);
      } else {
        Op::load_values(problem_.keys, {batch_, kv_head_, {key, key + count}}, {rows, dv}, keys_ahead_);
      }
      kernels_.pack_values(rows, dv, row, count, dv, memory_.v, memory_.panel);
    }
  }

  index_t panels() const { return memory_.channels / kernels_.pass; }

  /// Adds a key block to the states of one tile.
  void attend_block(index_t tile, KeyRange block, Compute* states) {
    const index_t tile_lanes = memory_.tile_lanes, queries = count_ - tile * tile_lanes;
    const SoftmaxState<Compute> state = memory_.layout.at(states, tile * tile_lanes);
    const ValuePanels<Operand> values = held_.v.from(block.begin - held_.first);
    const NeededKeys needed(hulls_of(variant_, memory_, tile, queries, block), queries, kernels_.width, block,
                            kernels_.pass);
    // 1. Compute the logits, and replace them by weights.
    if (held_.k_rows != nullptr) {
      multiply_rows(needed);
    } else {
      scores_.multiply(needed, memory_.block_keys, {held_.k[block.begin - held_.first_row], held_.k.stride},
                       memory_.depth, memory_.q + tile * memory_.depth * tile_lanes, memory_.s);
    }
    if (dropper_ || !attend_group(tile, needed, values, state)) {
      if (form_weights(scores_, memory_, tile, sequence_->shape.keys, needed, state))
        kernels_.rescale(state.o, memory_.channels, memory_.lane.rescale);
      if (dropper_) drop_weights(tile, needed);
      // 2. Multiply the weights by V.
      if (held_.k_rows != nullptr) return accumulate_rows(needed, state);
      needed.for_each_rectangle(memory_.block_keys, [&](index_t vectors, index_t v, KeyRange keys) {
        kernels_.accumulate[vectors - 1](values.from(keys.begin),
                                         weights_of(memory_, keys.begin, v * kernels_.width), keys.size(),
                                         state.o + v * kernels_.width);
      });
    }
    if (!held_.values_are_finite) accumulate_nonfinite(tile, block, state);
  }

  /// Computes the logits of the queries of a task that reads rows.
  void multiply_rows(const NeededKeys& needed) const {
    const KeyRange keys = needed.of[0];
    const std::byte* const* k = held_.k_rows + (needed.block.begin + keys.begin - held_.first);
    // Prefetching has no effect if rows do not lie at one distance.
    const index_t ahead = reads_ahead_ && keys.size() > 1
                              ? static_cast<index_t>(reinterpret_cast<std::uintptr_t>(k[1]) -
                                                     reinterpret_cast<std::uintptr_t>(k[0]))
                              : 0;
    kernels_.row_logits[count_ - 1](k, memory_.depth, keys.size(), memory_.q, ahead,
                                    memory_.s + keys.begin * memory_.tile_lanes);
  }
  /// Multiplies the weights of these queries by V.
  void accumulate_rows(const NeededKeys& needed, const SoftmaxState<Compute>& state) const {
    const KeyRange keys = needed.of[0];
    kernels_.row_accumulate[count_ - 1](held_.v_rows + (needed.block.begin + keys.begin - held_.first),
                                        problem_.value_width(), keys.size(),
                                        weights_of(memory_, keys.begin, 0), state.o);
  }

  /// Sets the dropped weights of a tile and a key block to 0.
  void drop_weights(index_t tile, const NeededKeys& needed) {
    for (index_t v = 0; v < needed.vectors; ++v) {
      const KeyRange part = needed.of[v];
      const index_t lane = v * kernels_.width;
      if (part.size() > 0)
        dropper_->clear(weights_of(memory_, part.begin, lane), memory_.tile_lanes,
                        memory_.rows + tile * memory_.tile_lanes + lane, kernels_.width,
                        needed.block.begin + part.begin, part.size());
    }
  }
  /// Multiplies the outputs of a chunk by the factor of the weights that are kept.
  void scale_kept(Compute* states) const {
    std::fill_n(memory_.lane.rescale, memory_.tile_lanes, dropper_->factor());
    for (index_t tile = 0; tile < tiles_; ++tile) {
      const SoftmaxState<Compute> state = memory_.layout.at(states, tile * memory_.tile_lanes);
      kernels_.rescale(state.o, memory_.channels, memory_.lane.rescale);
    }
  }

  /// Computes both steps after the logits at once if the kernels can, and all vectors of the tile need the same keys.
  /// Returns false, and has no effect, otherwise. Exception: in blocks of more than 64 keys, each vector would read V
  /// from the second-level cache. There the function always returns false.
  bool attend_group([[maybe_unused]] index_t tile, [[maybe_unused]] const NeededKeys& needed,
                    [[maybe_unused]] const ValuePanels<Operand>& values,
                    [[maybe_unused]] const SoftmaxState<Compute>& state) {
    if constexpr (Op::is_bf16) {
      const auto attend = memory_.group.attend[needed.vectors - 1];
      if (attend == nullptr || memory_.block_keys > 64) return false;
      if (!takes_vectors_at_once(scores_, needed)) return false;
      const KeyRange keys = needed.of[0];
      const TileState<Compute> sums{state.shift, state.sum, memory_.lane.rescale,
                                    memory_.multipliers + tile * memory_.tile_lanes, state.statistics};
      return attend(memory_.s + keys.begin * memory_.tile_lanes, keys.size(), sums,
                    weights_of(memory_, keys.begin, 0), values.from(keys.begin),
                    state.o) != TileChange::irregular;
    } else {
      return false;
    }
  }

  /// Adds NaN and infinities in V to the queries to which the key is visible. The panels hold 0 in their place.
  void accumulate_nonfinite(index_t tile, KeyRange block, const SoftmaxState<Compute>& state) const {
    const index_t tile_lanes = memory_.tile_lanes, queries = std::min(tile_lanes, count_ - tile * tile_lanes);
    const KeyRange keys{std::max(block.begin, hull_.any.begin), std::min(block.end, hull_.any.end)};
    for_each_nonfinite(problem_, variant_, {batch_, kv_head_, keys}, memory_.rows + tile * tile_lanes,
                       queries, memory_.staged, [&](index_t lane, index_t key, index_t c, Compute x) {
                         state.o[c * tile_lanes + lane] +=
                             static_cast<Compute>(*weights_of(memory_, key - block.begin, lane)) * x;
                       });
  }

  /// Loaded keys: in the task's memory or in place.
  struct HeldKeys {
    index_t first = 0;      // the first key of v
    index_t first_row = 0;  // the first key of k
    StridedRows<const Operand> k;
    ValuePanels<Operand> v;
    bool values_are_finite = true;
    const std::byte* const* k_rows = nullptr;  // or the addresses of rows from `first` on
    const std::byte* const* v_rows = nullptr;
  };

  const PrefillKernels<Compute, Operand>& kernels_;
  const Scores<Compute, Operand, Variant<Compute>> scores_;
  index_t tiles_ = 0;
  Hull hull_{};  // of all queries of the task
  HeldKeys held_{};
  // A single tile that reads runs shorter than its key blocks finds and prefetches the rows of the next block. Longer
  // runs are not prefetched: from the third-level cache this costs 10 %, from memory it gains at most 10 %.
  bool finds_rows_ = false;
  bool reads_ahead_ = false;  // such a task prefetches keys
  bool reads_rows_ = false;   // a task of one or two queries multiplies rows in place
  index_t keys_ahead_ = 0;    // distance at which a single tile prefetches long runs of 8 bits
  std::optional<WeightDropper<Compute>> dropper_{};
  ListedRows listed_, next_listed_;  // of the held keys, and of those that are loaded next
};

SSMAX_END
