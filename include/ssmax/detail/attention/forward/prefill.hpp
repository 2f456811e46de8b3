// Attention of many queries: groups of queries, one per lane, against blocks of keys (kernels/prefill.inl).
//
// A task takes some groups of one kv head. Keys are held ready for all of them, a block of 128 or, for products in
// 16 bits, 512, which a group takes in blocks of 64 or 128. They are read from where they lie or, if something has to
// be done to them, copied: K into rows (widened, rotated), V into panels. In 16 bits V always is. The part
// of a block that each vector of queries needs is computed in rectangles, as wide as neighbouring vectors
// need the same keys (a causal mask's corner is a staircase); what none needs is not computed. Keys in a
// rectangle that a lane does not see are hidden: their logit becomes -inf, whatever it was.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../call/problem.hpp"
#include "../call/variant.hpp"
#include "../keys/load.hpp"
#include "../nonfinite/weights.hpp"
#include "../tile/acquired_products.hpp"
#include "../tile/state.hpp"
#include "../tile/visibility.hpp"
#include "epilogue.hpp"
#include "prefill_scratch.hpp"

SSMAX_BEGIN_DETAIL

/// Operands of the products are E: A, or bfloat16 where q, k and v are that and the target has such products.
template <class T, class X, class E = Compute<T>>
class PrefillTask {
 public:
  using A = Compute<T>;

  using Memory = PrefillScratch<A, E>;

  /// Queries of the largest task: K and V are brought in once for all of them. 24 groups are 1.5 to 2 %
  /// faster than 8, though their states no longer fit a second-level cache of 1 MB, and 48 are no better.
  /// Prefetching (the next block, the task's queries, the rows of its results; at once or spread among the
  /// products) changed nothing.
  static index_t most_queries() { return 24 * least_queries(); }
  static index_t least_queries() { return kernels<PrefillKernels<A>>().width * tile_vectors; }

  PrefillTask(const Problem<T, X>& problem, const Variant<A>& variant, const Memory& memory)
      : problem_(problem),
        variant_(variant),
        kernels_(memory.products),
        memory_(memory),
        block_keys_(memory.block_keys) {}

  /// The queries of the task, rows [first, first + count) of a kv head, and the keys that they see.
  KeyRange prepare(index_t batch, index_t kv_head, index_t first, index_t count) {
    batch_ = batch;
    kv_head_ = kv_head;
    count_ = count;
    groups_ = (count + memory_.group - 1) / memory_.group;
    stored_ = problem_.keys.stored(batch);
    QueryCursor<T, X> cursor(problem_, batch, kv_head, first);
    for (index_t i = 0; i < groups_ * memory_.group; i += kernels_.width) {
      Column& column = memory_.columns[i / kernels_.width];
      column = {};
      for (index_t lane = 0; lane < kernels_.width; ++lane) {
        // Lanes without a query see what the last query sees, so that they need no hiding.
        QueryRow& row = memory_.rows[i + lane];
        const bool exists = i + lane < count;
        row = exists ? variant_.row(*cursor, stored_) : memory_.rows[count - 1];
        const bool sees_any = row.keys.size() > 0;
        column.add(row.keys);
        A* scratch = memory_.staged + lane * memory_.pitch;
        memory_.in[lane] = exists && sees_any ? stage_query(row.query, scratch) : scratch;
        if (!exists || !sees_any) std::fill_n(scratch, memory_.depth / tuple, A{0});
        // A query that sees nothing has no c.
        const double c = variant_.has_score || !sees_any ? 1 : row.multiplier * std::numbers::log2e;
        memory_.lanes[lane] = static_cast<A>(problem_.scale * c);
        if constexpr (in_16_bits)
          memory_.multipliers[i + lane] = positive_multiplier(memory_.lanes[lane], scratch);
        if (exists) cursor.next();
      }
      // A pair of bfloat16 changes its place as a float does.
      A* q = reinterpret_cast<A*>(memory_.q) + i / memory_.group * memory_.group * (memory_.depth / tuple);
      kernels_.transpose(memory_.in, kernels_.width, memory_.depth / tuple,
                         in_16_bits ? nullptr : memory_.lanes, q + i % memory_.group, memory_.group);
    }
    columns_ = {};
    for (index_t i = 0; i < groups_ * tile_vectors; ++i) columns_.add(memory_.columns[i]);
    return columns_.any;
  }

  /// States of queries that have seen nothing yet.
  void reset(A* states) const {
    for (index_t g = 0; g < groups_; ++g) memory_.state(states, g).reset(memory_.group, memory_.channels);
  }

  /// States to begin with: nothing has been seen or, where the result continues one, what it holds.
  void begin(A* states, const Result<T>& result) const {
    reset(states);
    if (!result.continues) return;
    const index_t dv = problem_.value_width();
    for (index_t i = 0; i < count_; i += kernels_.width) {
      const SoftmaxState<A> state = memory_.state(states, i / memory_.group);
      const index_t first_lane = i % memory_.group, lanes = std::min(kernels_.width, count_ - i);
      for (index_t lane = 0; lane < lanes; ++lane) {
        const Query& query = memory_.rows[i + lane].query;
        const index_t row = problem_.row_of(query);
        state.shift[first_lane + lane] = result.state.shift(query.batch, query.head, row);
        state.sum[first_lane + lane] = result.state.sum(query.batch, query.head, row);
        memory_.in[lane] = row_of(result.state.o, query.batch, query.head, row);
      }
      kernels_.transpose(memory_.in, lanes, dv, nullptr, state.o + first_lane, memory_.group);
    }
  }

  /// The states after the keys of one chunk.
  void attend_chunk(KeyRange keys, A* states) {
    reset(states);
    const AcquiredProducts products(kernels_);
    const index_t length = problem_.keys.length(batch_);
    // For one group nothing stays: a block that is used at once is still in the first-level cache.
    const index_t at_once = groups_ == 1 ? block_keys_ : held_keys;
    for (index_t first = keys.begin / at_once * at_once; first < keys.end; first += at_once) {
      const KeyRange held{first, std::min(first + at_once, length)},
          seen{std::max(held.begin, keys.begin), std::min(held.end, keys.end)};
      if (!point_at_keys(held)) load_held_keys(first, seen);
      for (index_t g = 0; g < groups_; ++g) {
        for (index_t begin = seen.begin / block_keys_ * block_keys_; begin < seen.end; begin += block_keys_) {
          attend_block(g, {begin, std::min(begin + block_keys_, length)}, memory_.state(states, g));
        }
      }
    }
  }

  void merge(A* totals, A* chunks) const {
    A* factor = memory_.lanes;
    A* chunk_factor = memory_.lanes + memory_.group;
    for (index_t g = 0; g < groups_; ++g) {
      const SoftmaxState<A> total = memory_.state(totals, g), chunk = memory_.state(chunks, g);
      for (index_t i = 0; i < memory_.group; ++i) {
        const A shift = std::max(total.shift[i], chunk.shift[i]);
        factor[i] = shift_factor(total.shift[i], shift);
        chunk_factor[i] = shift_factor(chunk.shift[i], shift);
        total.shift[i] = shift;
        total.sum[i] = total.sum[i] * factor[i] + chunk.sum[i] * chunk_factor[i];
      }
      kernels_.merge(total.o, chunk.o, memory_.channels, factor, chunk_factor);
    }
  }

  void store(A* states, const Result<T>& result) const {
    const index_t dv = problem_.value_width();
    for (index_t i = 0; i < count_; i += kernels_.width) {
      const SoftmaxState<A> state = memory_.state(states, i / memory_.group);
      const index_t first_lane = i % memory_.group, lanes = std::min(kernels_.width, count_ - i);
      for (index_t c = 0; c < dv; c += kernels_.width) {
        const index_t channels = std::min(kernels_.width, dv - c);
        for (index_t r = 0; r < channels; ++r) memory_.in[r] = state.o + (c + r) * memory_.group + first_lane;
        kernels_.transpose(memory_.in, channels, lanes, nullptr, memory_.staged + c, memory_.pitch);
      }
      for (index_t lane = 0; lane < lanes; ++lane) {
        const QueryRow& seen = memory_.rows[i + lane];
        store_result(result, seen, problem_.row_of(seen.query), state.shift[first_lane + lane],
                     state.sum[first_lane + lane], memory_.staged + lane * memory_.pitch, dv);
      }
    }
  }

 private:
  static constexpr index_t held_keys = Memory::held_keys;
  static constexpr bool in_16_bits = !std::same_as<E, A>;
  static constexpr index_t tuple = tuple_size<A, E>;
  /// Rows that lie far apart, as where heads lie closer than positions do, fill the first-level TLB with pages:
  /// from four groups of queries on a copy costs less (with it 1.08 times as fast at 8 heads of width 64, 1.15
  /// at 32 of 128, on Zen 3).
  static constexpr index_t groups_for_a_copy = 4;

  /// A query as the products take it, to be put into lanes: where it lies, or in scratch.
  const A* stage_query(const Query& query, A* scratch) const {
    if constexpr (in_16_bits) {
      load_query_parts(problem_, variant_, query, memory_.depth, memory_.wide, reinterpret_cast<E*>(scratch));
      return scratch;
    } else {
      return load_query(problem_, variant_, query, scratch);
    }
  }

  /// A multiplier's sign, or its being 0, goes into the staged query, which rounds nothing. So what is left is above
  /// 0, and a hidden logit is -inf before it is multiplied as after. NaN stays, infinity becomes NaN.
  A positive_multiplier(A c, A* staged) const {
    if (!std::isfinite(c)) return std::numeric_limits<A>::quiet_NaN();
    if (c > 0) return c;
    E* query = reinterpret_cast<E*>(staged);
    const A sign = c < 0 ? -1 : 0;
    std::transform(query, query + memory_.depth, query,
                   [sign](E x) { return static_cast<E>(sign * static_cast<A>(x)); });
    return c < 0 ? -c : 1;
  }

  /// Where the weights of a key of the block begin, in the memory of its logits.
  E* weights_of(index_t key, index_t lane) const {
    return reinterpret_cast<E*>(memory_.s) + tuple_at<A, E>(key, lane, memory_.group);
  }

  /// Multiplies a column's logits by their multipliers, which are 1 from then on.
  void multiply(A* s, index_t keys, TileState<A>& lanes) const {
    kernels_.multiply(s, keys, lanes.multiplier);
    lanes.multiplier = nullptr;
  }

  /// Products in float: points held_ at keys where they lie, if nothing has to be done to them: a whole block, stored
  /// in one stretch, in the kernels' type, not to be rotated, with values that fill whole panels and are finite
  /// where keys are hidden, and rows that lie close together. Returns whether it did.
  bool point_at_keys(KeyRange held) {
    if constexpr (std::same_as<X, A> && !in_16_bits) {
      const index_t dv = problem_.value_width();
      if (problem_.has_rope() && problem_.rotate_keys) return false;
      if (held.size() < held_keys || held.begin < stored_.begin || held.end > stored_.end) return false;
      if (dv % kernels_.rows != 0) return false;
      const KeyStretch<X> stretch = problem_.keys.stretch(batch_, kv_head_, held.begin);
      if (stretch.count < held_keys) return false;
      if (lie_apart(stretch.k_stride, problem_.width()) || lie_apart(stretch.v_stride, dv)) return false;
      const bool hides = variant_.has_predicate || columns_.hides(held);
      if (hides && !kernels_.all_finite(stretch.v, stretch.v_stride, held_keys, dv)) return false;
      held_ = {held.begin, held.begin,       stretch.k,     stretch.k_stride,
               stretch.v,  stretch.v_stride, kernels_.rows, true};
      return true;
    } else {
      return false;
    }
  }

  /// Whether rows, the first `width` numbers of every `stride`, are better copied.
  bool lie_apart(index_t stride, index_t width) const {
    return stride >= 2 * width && groups_ >= groups_for_a_copy;
  }

  /// Products in 16 bits: points held_ at rows of K where they lie, if they are not in parts, of a width that needs no
  /// filling up, whole blocks (nothing is read behind the last key), in one stretch. Returns whether it did.
  bool point_at_rows_of_k([[maybe_unused]] KeyRange keys) {
    if constexpr (in_16_bits) {
      if (logit_parts(problem_) > 1 || memory_.depth != problem_.width()) return false;
      if (keys.begin % block_keys_ != 0 || keys.size() % block_keys_ != 0) return false;
      const KeyStretch<X> stretch = problem_.keys.stretch(batch_, kv_head_, keys.begin);
      if (stretch.count < keys.size() || lie_apart(stretch.k_stride, problem_.width())) return false;
      held_.first_row = keys.begin;
      held_.k = stretch.k;
      held_.k_stride = stretch.k_stride;
      return true;
    } else {
      return false;
    }
  }

  /// Rows of K and panels of V: key i at place i - first. The rest of the first and the last block is 0, blocks without
  /// a key are left as they are.
  void load_held_keys(index_t first, KeyRange keys) {
    const index_t depth = memory_.depth, dv = problem_.value_width(),
                  panels = memory_.channels / kernels_.rows;
    const index_t at = keys.begin - first, begin = at / block_keys_ * block_keys_,
                  end = (at + keys.size() + block_keys_ - 1) / block_keys_ * block_keys_;
    held_ = {first, first, memory_.k, depth, memory_.v, kernels_.rows, memory_.panel, true};
    if (!point_at_rows_of_k(keys)) {
      std::fill_n(memory_.k + begin * depth, (at - begin) * depth, E{});
      if constexpr (in_16_bits) {
        load_key_parts(problem_, variant_, batch_, kv_head_, keys, depth, memory_.wide,
                       memory_.k + at * depth);
      } else {
        load_keys(problem_, variant_, batch_, kv_head_, keys, memory_.k + at * depth);
      }
      std::fill_n(memory_.k + (at + keys.size()) * depth, (end - at - keys.size()) * depth, E{});
    }
    const index_t from = begin * kernels_.rows, panel = (end - begin) * kernels_.rows;
    if (keys.size() < end - begin) {
      for (index_t p = 0; p < panels; ++p) std::fill_n(memory_.v + p * memory_.panel + from, panel, E{});
    }
    for_each_stretch(problem_.keys, batch_, kv_head_, keys, [&](index_t key, const KeyStretch<X>& stretch) {
      const index_t row = key - first;
      if constexpr (std::same_as<X, E>) {
        kernels_.pack_values(stretch.v, stretch.v_stride, row, stretch.count, dv, memory_.v, memory_.panel);
      } else {
        for (index_t i = 0; i < stretch.count; ++i) {
          const A* wide = load_row(stretch.v, stretch.v_stride, stretch.v_scales, i, dv, memory_.staged);
          kernels_.pack_values(wide, 0, row + i, 1, dv, memory_.v, memory_.panel);
        }
      }
    });
    held_.values_are_finite = kernels_.all_finite(memory_.v + from, memory_.panel, panels, panel);
    if (held_.values_are_finite) return;
    for (index_t p = 0; p < panels; ++p) {
      E* v = memory_.v + p * memory_.panel + from;
      std::replace_if(
          v, v + panel, [](E x) { return !std::isfinite(static_cast<A>(x)); }, E{});
    }
  }

  /// One group against a block of the keys that are held.
  void attend_block(index_t g, KeyRange block, const SoftmaxState<A>& state) {
    const Column* columns = memory_.columns + g * tile_vectors;
    const index_t group = memory_.group, depth = memory_.depth, at = block.begin - held_.first;
    const E *k = held_.k + (block.begin - held_.first_row) * held_.k_stride,
            *values = held_.v + at * held_.v_stride;
    const NeededKeys needed(columns, count_ - g * group, kernels_.width, block, kernels_.rows);
    needed.for_each_rectangle(block_keys_, [&](index_t width, index_t v, KeyRange keys) {
      kernels_.logits[width - 1](k + keys.begin * held_.k_stride, held_.k_stride, depth, keys.size(),
                                 memory_.q + g * depth * group + v * kernels_.width * tuple,
                                 memory_.s + keys.begin * group + v * kernels_.width);
    });
    A* factor = memory_.lanes;
    if (form_weights(g, block, needed, state, factor)) kernels_.rescale(state.o, memory_.channels, factor);
    needed.for_each_rectangle(block_keys_, [&](index_t width, index_t v, KeyRange keys) {
      kernels_.accumulate[width - 1](values + keys.begin * held_.v_stride, held_.v_stride, held_.panel_stride,
                                     memory_.channels / kernels_.rows,
                                     weights_of(keys.begin, v * kernels_.width), keys.size(),
                                     state.o + v * kernels_.width);
    });
    if (!held_.values_are_finite) accumulate_not_finite(g, block, state);
  }

  /// The weights of a block of keys in the place of their logits. Returns whether earlier sums must be multiplied by
  /// factor[group].
  bool form_weights(index_t g, KeyRange block, const NeededKeys& needed, const SoftmaxState<A>& state,
                    A* factor) {
    const Column* columns = memory_.columns + g * tile_vectors;
    const index_t group = memory_.group;
    std::fill_n(factor, group, A{1});
    if constexpr (in_16_bits) {
      const KeyRange all = needed.of[0];
      if (takes_vectors_at_once(columns, block, needed)) {
        const TileChange change = kernels_.group_weights[needed.vectors - 1](
            memory_.s + all.begin * group, all.size(),
            {state.shift, state.sum, factor, memory_.multipliers + g * group}, weights_of(all.begin, 0));
        if (change != TileChange::irregular) return change == TileChange::raised;
      }
    }
    bool raised = false;
    for (index_t v = 0; v < needed.vectors; ++v) {
      if (needed.of[v].size() == 0) continue;
      const KeyRange keys{block.begin + needed.of[v].begin, block.begin + needed.of[v].end};
      const index_t lane = v * kernels_.width;
      A* s = memory_.s + needed.of[v].begin * group + lane;
      const QueryRow* rows = memory_.rows + g * group + lane;
      E* weights = weights_of(needed.of[v].begin, lane);
      TileState<A> lanes{state.shift + lane, state.sum + lane, factor + lane};
      const bool hides = columns[v].hides(keys);
      if constexpr (in_16_bits) {
        lanes.multiplier = memory_.multipliers + g * group + lane;
        if (variant_.has_score || variant_.has_predicate) multiply(s, keys.size(), lanes);
      }
      if (variant_.has_score || variant_.has_predicate) {
        variant_.apply(TileColumn<A>{s, keys, rows, problem_.keys.length(batch_)}, memory_);
      }
      if (hides) hide_keys(memory_, s, keys, rows);
      const TileChange change = kernels_.weights(s, keys.size(), lanes, weights);
      if (change == TileChange::irregular) {
        if (lanes.multiplier != nullptr) multiply(s, keys.size(), lanes);
        irregular_weights(kernels_, memory_, s, keys.size(), lanes, weights);
      }
      raised = raised || change != TileChange::none;
    }
    return raised;
  }

  /// Whether a group's vectors need the same keys of a block, of whose logits nothing else is to be made.
  bool takes_vectors_at_once(const Column* columns, KeyRange block, const NeededKeys& needed) const {
    if (variant_.has_score || variant_.has_predicate || needed.of[0].size() == 0) return false;
    const KeyRange keys{block.begin + needed.of[0].begin, block.begin + needed.of[0].end};
    for (index_t v = 0; v < needed.vectors; ++v) {
      const bool is_same = needed.of[v].begin == needed.of[0].begin && needed.of[v].end == needed.of[0].end;
      if (!is_same || columns[v].hides(keys)) return false;
    }
    return true;
  }

  /// Adds NaN and infinities in V, which load_held_keys replaced by 0, to the queries that see them: a weight of
  /// 0 times a NaN that a query must not see would be NaN as well.
  void accumulate_not_finite(index_t g, KeyRange block, const SoftmaxState<A>& state) const {
    for (index_t key = std::max(block.begin, columns_.any.begin); key < std::min(block.end, columns_.any.end);
         ++key) {
      load_values(problem_.keys, batch_, kv_head_, {key, key + 1}, memory_.staged);
      for (index_t c = 0; c < problem_.value_width(); ++c) {
        const A value = memory_.staged[c];
        if (std::isfinite(value)) continue;
        for (index_t lane = 0; lane < std::min(memory_.group, count_ - g * memory_.group); ++lane) {
          const QueryRow& row = memory_.rows[g * memory_.group + lane];
          if (key < row.keys.begin || key >= row.keys.end || !variant_.sees(row.query, key)) continue;
          state.o[c * memory_.group + lane] += static_cast<A>(*weights_of(key - block.begin, lane)) * value;
        }
      }
    }
  }

  /// The keys at hand: in the task's memory or, if nothing has to be done to them, where they lie.
  struct HeldKeys {
    index_t first = 0;      // the key whose values are first
    index_t first_row = 0;  // the key whose row of K is
    const E* k = nullptr;
    index_t k_stride = 0;
    const E* v = nullptr;
    index_t v_stride = 0, panel_stride = 0;
    bool values_are_finite = true;
  };

  const Problem<T, X>& problem_;
  const Variant<A>& variant_;
  const PrefillKernels<A, E>& kernels_;
  const Memory& memory_;
  const index_t block_keys_;
  index_t batch_ = 0, kv_head_ = 0, count_ = 0, groups_ = 0;
  KeyRange stored_{};
  Column columns_{};  // of all queries
  HeldKeys held_{};
};

SSMAX_END
