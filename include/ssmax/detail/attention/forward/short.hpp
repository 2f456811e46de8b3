// Computes attention over few keys. The keys of a kv head are one block, so the weights of a query are final at
// once: no state is merged and no output is transposed. K and V are read in place unless they must be converted or
// rotated. Results are bit-identical to prefill.
//
// A query of width 16 takes 17 ns and 0.38 ns per key on Zen 5 (1200 queries, 32 to 1024 keys). The arithmetic of a
// logit bounds the second number at 0.34 ns: 32 FMAs and 15 operations of the weight. The first number consists of
// listing the queries (4 ns), placing results (4), and loading and transposing queries (6).
#pragma once

#include <algorithm>
#include <limits>
#include <span>

#include "../../kernels/short_attention.hpp"
#include "../operands/finite.hpp"
#include "../tile/queries.hpp"
#include "../tile/softmax.hpp"
#include "epilogue.hpp"

SSMAX_BEGIN_DETAIL

/// One thread's memory for one tile of queries and one kv head.
template <class Compute>
struct ShortScratch : LaneScratch<Compute> {
  using LaneScratch<Compute>::arena;
  using LaneScratch<Compute>::tile_lanes;

  ShortScratch(Arena& an_arena, index_t d, index_t dv)
      : LaneScratch<Compute>(an_arena, tile_size(), d, dv, d), v_pitch(round_up(dv, 16)) {}

  static index_t tile_size() { return detail::kernels<PrefillKernels<Compute>>().width * tile_vectors; }

  index_t v_pitch;  // row length of v, a multiple of the vector length of every target
  Compute* k = arena.template take<Compute>(key_block * this->depth);
  Compute* v = arena.template take<Compute>(key_block * v_pitch);
  Compute* s = arena.template take<Compute>(key_block * tile_lanes);  // logits, then weights
  Compute* shift = arena.template take<Compute>(tile_lanes);          // states
  Compute* sum = arena.template take<Compute>(tile_lanes);
  Compute* factor = arena.template take<Compute>(tile_lanes);  // normalizing factors of the weights
  Compute** out = arena.template take<Compute*>(tile_lanes);   // where each query's row is written
  /// Rows to be converted to the type of out.
  Compute* wide = arena.template take<Compute>(tile_lanes * v_pitch);
};

template <class Compute>
class ShortTask {
 public:
  using Memory = ShortScratch<Compute>;

  ShortTask(const Problem<Compute>& problem, const Variant<Compute>& variant, const Result<Compute>& result,
            const Memory& memory)
      : problem_(problem),
        variant_(variant),
        result_(result),
        kernels_(memory.kernels),
        weigh_values_(detail::kernels<ShortAttentionKernels<Compute>>().weigh_values),
        memory_(memory),
        scores_(variant, problem.scale, memory.kernels, memory) {}

  /// Computes one of `tiles` tiles of a kv head of a sequence.
  void attend(const Sequence& sequence, index_t kv_head, index_t tile, index_t tiles) {
    if (sequence.batch != sequence_.batch || kv_head != kv_head_) enter(sequence, kv_head);
    // The tiles of a head differ by at most one vector: two vectors and two, not three and one.
    const index_t width = kernels_.width, rows = sequence.queries * problem_.heads_per_kv_head(),
                  vectors = ceil_div(rows, width);
    const index_t first = tile * vectors / tiles * width;
    count_ = std::min((tile + 1) * vectors / tiles * width, rows) - first;
    load_tile(first);
    const KeyRange block{0, length_};
    const Hull* hulls = hulls_of(variant_, memory_, 0, count_, block);
    const NeededKeys needed(hulls, count_, width, block, kernels_.pass);
    scores_.multiply(needed, key_block, k_, problem_.width(), memory_.q, memory_.s);
    bool masks = variant_.has_predicate;
    for (index_t v = 0; v < needed.vectors; ++v) {
      masks |= hulls[v].masks(block);
      form_weights(v * width, needed.of[v], hulls[v]);
    }
    // After NaN and infinities were replaced by 0 in V, every later tile must add them.
    const bool has_nonfinite = finite_ == Finite::no || (masks && !values_are_finite());
    for (index_t i = 0; i < count_; ++i) {
      const QueryRow& seen = memory_.rows[i];
      memory_.out[i] = place_result(result_, seen, problem_.state_row(seen.query), memory_.shift[i],
                                    memory_.sum[i], memory_.wide + i * memory_.v_pitch, memory_.factor[i]);
    }
    for (index_t v = 0; v < needed.vectors; ++v) {
      const index_t lane = v * width, from = needed.of[v].begin;
      weigh_values_(memory_.s + from * memory_.tile_lanes + lane, std::min(width, count_ - lane),
                    {v_[from], v_.stride, std::min(needed.of[v].end, length_) - from, problem_.value_width()},
                    memory_.factor + lane, memory_.out + lane);
    }
    if (has_nonfinite) add_nonfinite();
    if (!narrows_results(result_)) return;
    for (index_t i = 0; i < count_; ++i) narrow_result(result_, memory_.rows[i], memory_.out[i]);
  }

 private:
  /// Points k_ and v_ at the keys of a kv head: in place or, if they must be converted, rotated or padded, at
  /// copies.
  void enter(const Sequence& sequence, index_t kv_head) {
    sequence_ = sequence;
    kv_head_ = kv_head;
    length_ = sequence.shape.keys;
    finite_ = Finite::unknown;
    const index_t d = problem_.width(), dv = problem_.value_width();
    k_ = {memory_.k, d};
    v_ = {memory_.v, memory_.v_pitch};
    bool k_in_place = false, v_in_place = false;
    if (sequence_.stored.begin == 0 && sequence_.stored.end == length_ && length_ > 0) {
      const AnyKeyRun run = problem_.keys.run(sequence_.batch, kv_head_, 0);
      const bool whole = run.count >= length_, rotates = problem_.rotates_keys();
      k_in_place =
          whole && problem_.keys.k_kind() == ElementKind::compute && length_ % kernels_.pass == 0 && !rotates;
      v_in_place = whole && problem_.keys.v_kind() == ElementKind::compute && dv % kernels_.width == 0;
      if (k_in_place) k_ = {static_cast<const Compute*>(run.k), run.k_stride};
      if (v_in_place) v_ = {static_cast<const Compute*>(run.v), run.v_stride};
    }
    if (!k_in_place) {
      const index_t passes = round_up(length_, kernels_.pass);
      std::fill_n(memory_.k, sequence_.stored.begin * d, Compute{0});
      load_keys(problem_, variant_, sequence_.shape, {sequence_.batch, kv_head_, sequence_.stored},
                {memory_.k + sequence_.stored.begin * d, d});
      std::fill_n(memory_.k + sequence_.stored.end * d, (passes - sequence_.stored.end) * d, Compute{0});
    }
    if (!v_in_place) {
      std::fill_n(memory_.v, length_ * memory_.v_pitch, Compute{0});
      load_values(problem_.keys, {sequence_.batch, kv_head_, sequence_.stored},
                  {memory_.v + sequence_.stored.begin * memory_.v_pitch, memory_.v_pitch});
    }
  }

  /// Loads the queries of a tile, from `first` on. If all queries of a head have the same visible keys, calls the
  /// variant once per head.
  void load_tile(index_t first) {
    const index_t heads = variant_.shows_same_keys ? problem_.heads_per_kv_head() : count_;
    RowCursor cursor(problem_, std::span<const Sequence>(&sequence_, 1), kv_head_, first);
    const index_t lanes = list_queries(memory_, count_, UnusedLanes::repeat_last, [&](index_t i) {
      const QueryRow row = i < heads ? cursor.row(variant_) : cursor.row_like(memory_.rows[i - heads]);
      cursor.next();
      return row;
    });
    list_runs(variant_, memory_, lanes);
    load_queries(problem_, variant_, scores_.multipliers, memory_, lanes, count_);
  }

  /// Replaces the logits of one vector of queries by weights, and sets shift and sum.
  void form_weights(index_t lane, KeyRange keys, const Hull& hull) const {
    const TileState<Compute> state{memory_.shift + lane, memory_.sum + lane, memory_.factor + lane};
    std::fill_n(state.shift, kernels_.width, -std::numeric_limits<Compute>::infinity());
    std::fill_n(state.sum, kernels_.width, Compute{0});
    if (keys.size() == 0) return;
    Compute* s = memory_.s + keys.begin * memory_.tile_lanes + lane;
    Logits<Compute> logits{.s = s, .keys = keys, .rows = memory_.rows + lane, .length = length_};
    scores_.form(logits, hull);
    update_states(scores_, kernels_.weights, memory_, logits, state, s);
  }

  /// Returns whether V is free of NaN and infinities. If V is not, points v_ at a copy with 0 in their place.
  bool values_are_finite() {
    const index_t dv = problem_.value_width();
    if (finite_ == Finite::unknown) {
      finite_ = kernels_.all_finite(v_.first, v_.stride, length_, dv) ? Finite::yes : Finite::no;
      if (finite_ == Finite::no) {
        for (index_t key = 0; key < length_; ++key) {
          copy_finite(v_[key], dv, memory_.v + key * memory_.v_pitch);
        }
        v_ = {memory_.v, memory_.v_pitch};
      }
    }
    return finite_ == Finite::yes;
  }

  /// Adds NaN and infinities in V to the queries to which the key is visible.
  void add_nonfinite() const {
    for_each_nonfinite(problem_, variant_, {sequence_.batch, kv_head_, sequence_.stored}, memory_.rows,
                       count_, memory_.staged, [&](index_t i, index_t key, index_t c, Compute x) {
                         memory_.out[i][c] += memory_.s[key * memory_.tile_lanes + i] * x;
                       });
  }

  enum class Finite { unknown, yes, no };

  const Problem<Compute>& problem_;
  const Variant<Compute>& variant_;
  const Result<Compute>& result_;
  const PrefillKernels<Compute>& kernels_;
  decltype(ShortAttentionKernels<Compute>::weigh_values) weigh_values_;
  const Memory& memory_;
  const Scores<Compute, Compute, Variant<Compute>> scores_;
  Sequence sequence_{};  // that the task has entered
  index_t kv_head_ = -1, length_ = 0, count_ = 0;
  Finite finite_ = Finite::unknown;
  StridedRows<const Compute> k_{}, v_{};
};

SSMAX_END
