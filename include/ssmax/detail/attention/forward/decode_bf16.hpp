// Computes attention of few queries by pair dots of bfloat16, as in decoding. A tile is all queries of a task.
//
// The steps are those of prefill (prefill.hpp), and so are states, weights and key blocks. The products differ
// (kernels/decode_pairs.inl): logits are computed with keys in lanes, and o has channels in lanes. All sums add their
// terms in the same order. So the results are bit-identical to those of prefill.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../dispatch/bf16.hpp"
#include "../../kernels/decode.hpp"
#include "../operands/finite.hpp"
#include "../operands/gather.hpp"
#include "../operands/prefetch.hpp"
#include "../tile/softmax.hpp"
#include "task.hpp"

SSMAX_BEGIN_DETAIL

/// The scratch memory of one thread. Operand is bfloat16.
template <class Compute, class Operand>
struct DecodeBf16Scratch : ForwardScratch<Compute, Operand> {
  using Base = ForwardScratch<Compute, Operand>;
  using Base::arena, Base::block_keys, Base::tile_lanes;
  static_assert(logit_pitch >= key_block);
  static constexpr index_t max_rows = 16;  // whole vectors of the queries of a task

  DecodeBf16Scratch(Arena& an_arena, index_t queries, const Problem<Compute>& problem)
      : Base(an_arena, queries, problem, logit_parts(problem) * part_width(problem.width())),
        parts(logit_parts(problem)),
        d(problem.width()),
        dv(problem.value_width()),
        dequantized_k(problem.keys.k_kind() == ElementKind::quantized
                          ? arena.template take<Operand>(block_keys * d)
                          : nullptr),
        dequantized_v(problem.keys.v_kind() == ElementKind::quantized
                          ? arena.template take<Operand>(block_keys * dv)
                          : nullptr) {
    // Null while the arena counts bytes.
    if (zeros != nullptr) std::fill_n(zeros, std::max(d, dv), Operand{});
  }

  static constexpr bool in_lanes = false;  // states
  void merge_outputs(Compute* o, const Compute* other, index_t count, const Compute* factors,
                     const Compute* other_factors) const {
    const auto merge = detail::kernels<PairDecodeKernels<Compute, Operand>>().merge;
    for (index_t r = 0; r < count; ++r)
      merge(o + r * pitch, other + r * pitch, pitch, factors[r], other_factors[r]);
  }

  index_t parts, d, dv;              // parts of a query; widths
  index_t pitch = round_up(dv, 32);  // numbers per row of o
  StateLayout layout{.rows = tile_lanes, .channels = pitch};
  Operand* k = arena.template take<Operand>(block_keys * part_width(d));  // packed keys of a block
  Operand* dequantized_k;  // [block_keys][d]: keys of 8 bits, else null
  Operand* dequantized_v;  // [block_keys][dv]: values of 8 bits, else null
  Operand* finite = arena.template take<Operand>(block_keys * dv);  // values with 0 for NaN and infinities
  Operand* zeros = arena.template take<Operand>(std::max(d, dv));   // the row of a key that is not stored
  const Operand** k_rows = arena.template take<const Operand*>(block_keys);
  const Operand** v_rows = arena.template take<const Operand*>(block_keys);
  const Operand** later_k_rows = arena.template take<const Operand*>(block_keys);  // to prefetch
  const Operand** later_v_rows = arena.template take<const Operand*>(block_keys);
  const std::byte** found_k = arena.template take<const std::byte*>(block_keys);
  const std::byte** found_v = arena.template take<const std::byte*>(block_keys);
  Compute* row_logits = arena.template take<Compute>(max_rows * logit_pitch);
  Operand* row_weights =
      arena.template take<Operand>(max_rows * logit_pitch);  // [max_rows / 8][logit_pitch / 2][8][2]
  Compute* before = arena.template take<Compute>(tile_lanes * pitch);  // o before the last product
  Compute* chunk = arena.template take<Compute>(layout.size());
  Compute* total = arena.template take<Compute>(layout.size());
};

/// The attention of at most max_queries() queries of a kv head by pair dots of Operand, which is bfloat16.
template <class Compute, class Operand>
class DecodeBf16Task : public ForwardTask<Compute, DecodeBf16Scratch<Compute, Operand>> {
 public:
  using Memory = DecodeBf16Scratch<Compute, Operand>;

  static index_t max_queries() { return bf16_capabilities(target_in_use()).decode_rows_max; }
  static index_t min_queries() { return max_queries(); }
  static bool has_few_queries(index_t) { return true; }

  DecodeBf16Task(const Problem<Compute>& problem, const Variant<Compute>& variant, const Memory& memory)
      : Base(problem, variant, memory),
        kernels_(kernels<PairDecodeKernels<Compute, Operand>>()),
        scores_(variant, problem.scale, memory.products, memory) {}

  /// Loads the queries of the task (ForwardTask::select). Returns the hull of their visible keys.
  KeyRange prepare(std::span<const Sequence> sequences, index_t kv_head, index_t first, index_t count) {
    const Hull hull = this->load_rows(sequences, kv_head, first, count, scores_.multipliers);
    has_short_runs_ = has_short_runs(problem_.keys, batch_, kv_head, hull.any, short_run);
    prefetch_ = has_short_runs_ ? 64 : keys_to_prefetch(problem_, rows_, hull.any, sizeof(Operand));
    // The kernels read 8 or 16 rows of logits, and write those of the queries.
    std::fill_n(memory_.row_logits + count * logit_pitch, (Memory::max_rows - count) * logit_pitch,
                Compute{0});
    return hull.any;
  }

  /// Writes the states after the keys of one chunk.
  void attend_chunk(KeyRange keys, Compute* states) {
    this->reset(states);
    const SoftmaxState<Compute> state = memory_.layout.at(states, 0);
    const index_t length = sequence_->shape.keys, block_keys = memory_.block_keys;
    for (index_t first = keys.begin / block_keys * block_keys; first < keys.end; first += block_keys) {
      const KeyRange block{first, std::min(first + block_keys, length)};
      KeyRange seen{std::max(block.begin, keys.begin), std::min(block.end, keys.end)};
      if (variant_.has_runs) seen = visible_part(memory_.visible_blocks[0], seen);
      if (seen.size() > 0) attend_block(block, seen, state);
    }
  }

 private:
  using Base = ForwardTask<Compute, Memory>;
  using Base::batch_, Base::count_, Base::kv_head_, Base::memory_, Base::problem_, Base::rows_,
      Base::sequence_, Base::variant_;
  using Op = Operands<Compute, Operand>;

  Compute* row(Compute* o, index_t r) const { return o + r * memory_.pitch; }

  /// Returns the rows that key `begin` and the keys after it prefetch.
  static RowsAhead<Operand> from(RowsAhead<Operand> rows, index_t begin) {
    if (rows.rows != nullptr) rows.rows += begin;
    return rows;
  }

  /// Points k_rows and v_rows at the keys `read` of a block. Other keys read zeros. Dequantizes rows of 8 bits.
  void find_rows(KeyRange block, KeyRange read) {
    const auto fill = [&](index_t begin, index_t end) {
      std::fill(memory_.k_rows + begin, memory_.k_rows + end, memory_.zeros);
      std::fill(memory_.v_rows + begin, memory_.v_rows + end, memory_.zeros);
    };
    fill(0, read.begin - block.begin);
    k_ahead_ = v_ahead_ = {};
    if (has_short_runs_ && !dequantizes_k() && !dequantizes_v()) {
      find_stored_rows(read, memory_.k_rows + (read.begin - block.begin),
                       memory_.v_rows + (read.begin - block.begin));
    } else {
      for_each_run(problem_.keys, {batch_, kv_head_, read}, [&](index_t key, const AnyKeyRun& run) {
        find_rows_of_run<false>(run, key, key - block.begin);
        find_rows_of_run<true>(run, key, key - block.begin);
      });
    }
    if (has_short_runs_) find_later_rows(block.begin);
    fill(read.end - block.begin, memory_.block_keys);
  }

  /// Points rows of k_rows or v_rows at the keys of a run, from row `first` on. `key` is the first key. Points k_ahead_
  /// or v_ahead_ at the rows that are prefetched. Exception: rows of 8 bits are dequantized, and prefetched meanwhile.
  template <bool are_values>
  void find_rows_of_run(const AnyKeyRun& run, index_t key, index_t first) {
    const index_t n = are_values ? problem_.value_width() : problem_.width();
    const Operand** rows = (are_values ? memory_.v_rows : memory_.k_rows) + first;
    const auto point = [&](const Operand* at, index_t stride) {
      for (index_t i = 0; i < run.count; ++i) rows[i] = at + i * stride;
    };
    const index_t stride = are_values ? run.v_stride : run.k_stride;
    if (are_values ? dequantizes_v() : dequantizes_k()) {
      Operand* to = (are_values ? memory_.dequantized_v : memory_.dequantized_k) + first * n;
      index_t ahead =
          bytes_ahead(2 * prefetch_, stride, are_values ? problem_.keys.v_size() : problem_.keys.k_size());
      if (has_short_runs_) ahead = bytes_to_later_run<are_values>(problem_.keys, batch_, kv_head_, key, run);
      if constexpr (are_values) {
        problem_.keys.dequantize_v(run, ahead, {to, n});
      } else {
        problem_.keys.dequantize_k(run, ahead, {to, n});
      }
      return point(to, n);
    }
    point(static_cast<const Operand*>(are_values ? run.v : run.k), stride);
    if (prefetch_ == 0) return;
    const index_t distance = are_values ? prefetch_ : 2 * prefetch_;
    RowsAhead<Operand>& ahead = are_values ? v_ahead_ : k_ahead_;
    ahead = {are_values ? memory_.v_rows : memory_.k_rows, n,
             bytes_ahead(distance, stride, static_cast<index_t>(sizeof(Operand)))};
  }

  bool dequantizes_k() const { return problem_.keys.k_kind() == ElementKind::quantized; }
  bool dequantizes_v() const { return problem_.keys.v_kind() == ElementKind::quantized; }

  /// Points `k` and `v` at the keys and values of a range of at most block_keys keys. Null: not written.
  void find_stored_rows(KeyRange keys, const Operand** k, const Operand** v) const {
    problem_.keys.find_rows(batch_, kv_head_, keys, memory_.found_k, memory_.found_v);
    const auto point = [&](const std::byte* const* found, const Operand** rows) {
      if (rows == nullptr) return;
      for (index_t i = 0; i < keys.size(); ++i) rows[i] = reinterpret_cast<const Operand*>(found[i]);
    };
    point(memory_.found_k, k);
    point(memory_.found_v, v);
  }

  /// Points k_ahead_ and v_ahead_ at the rows that lie as many positions later as those of a long run. Exception: rows
  /// of 8 bits are prefetched while they are dequantized.
  void find_later_rows(index_t block) {
    const index_t end = problem_.keys.stored(batch_).end;
    const auto later = [&](index_t distance) {
      return KeyRange{std::min(block + distance, end), std::min(block + distance + memory_.block_keys, end)};
    };
    if (!dequantizes_k()) {
      std::copy_n(memory_.k_rows, memory_.block_keys, memory_.later_k_rows);
      find_stored_rows(later(2 * prefetch_), memory_.later_k_rows, nullptr);
      k_ahead_ = {memory_.later_k_rows, problem_.width(), 0};
    }
    if (!dequantizes_v()) {
      std::copy_n(memory_.v_rows, memory_.block_keys, memory_.later_v_rows);
      find_stored_rows(later(prefetch_), nullptr, memory_.later_v_rows);
      v_ahead_ = {memory_.later_v_rows, problem_.value_width(), 0};
    }
  }

  /// Adds the keys `seen` of a key block to the states.
  void attend_block(KeyRange block, KeyRange seen, const SoftmaxState<Compute>& state) {
    const NeededKeys needed(hulls_of(variant_, memory_, 0, count_, block), count_, memory_.products.width,
                            block, memory_.products.pass);
    KeyRange keys{memory_.block_keys, 0};  // that some vector of queries needs
    for (index_t v = 0; v < needed.vectors; ++v) {
      if (needed.of[v].size() > 0)
        keys = {std::min(keys.begin, needed.of[v].begin), std::max(keys.end, needed.of[v].end)};
    }
    if (keys.size() <= 0) return;
    const index_t begin = keys.begin / packed_keys * packed_keys,
                  packed = round_up(keys.end - begin, packed_keys);
    const index_t first_read = std::max(seen.begin, block.begin + begin);
    find_rows(block, {first_read, std::max(first_read, std::min(seen.end, block.begin + begin + packed))});
    // 1. Compute the logits, and replace them by weights.
    kernels_.pack_keys(memory_.k_rows + begin, packed, problem_.width(), memory_.k);
    kernels_.logits(memory_.q, memory_.parts, count_, {memory_.k, packed, problem_.width()},
                    from(v_ahead_, begin), memory_.row_logits);
    bool rescales = false;
    if (!form_row_weights({begin, begin + packed}, needed, state, rescales)) {
      put_logits_in_lanes({begin, begin + packed});
      rescales = form_weights(scores_, memory_, 0, sequence_->shape.keys, needed, state);
      weights_ = {weights_of(memory_, 0, 0), 2 * memory_.tile_lanes, 2 * 8};
    }
    if (rescales) {
      for (index_t r = 0; r < count_; ++r) {
        const Compute factor = memory_.lane.rescale[r];
        if (factor != 1)
          kernels<RowKernels<Compute>>().multiply(row(state.o, r), memory_.pitch, factor, row(state.o, r));
      }
    }
    // 2. Multiply the weights by V.
    const bool masks = variant_.has_predicate || masks_any(needed);
    if (masks) std::copy_n(state.o, count_ * memory_.pitch, memory_.before);
    add_values(needed, state.o);
    // A weight of 0 times NaN is NaN, also if the key is masked.
    if (masks &&
        !std::all_of(state.o, state.o + count_ * memory_.pitch, [](Compute x) { return std::isfinite(x); }))
      add_nonfinite_values(needed, block, seen, state.o);
  }

  /// Replaces the logits of the packed keys `keys` by weights, in rows. Writes to `rescales` whether earlier sums must
  /// be multiplied by memory_.lane.rescale. Returns false and leaves the state unchanged if a logit is masked, has a
  /// score function or is irregular.
  [[nodiscard]] bool form_row_weights(KeyRange keys, const NeededKeys& needed,
                                      const SoftmaxState<Compute>& state, bool& rescales) {
    if (kernels_.weights == nullptr || !takes_vectors_at_once(scores_, needed)) return false;
    // The kernel computes 32 keys at once.
    const index_t end = keys.begin + round_up(keys.size(), 32);
    const KeyRange seen = needed.of[0];
    if (seen.begin > keys.begin || seen.end < end) {
      for (index_t r = 0; r < memory_.products.width; ++r) {
        Compute* logits = memory_.row_logits + r * logit_pitch;
        std::fill(logits, logits + seen.begin - keys.begin, -std::numeric_limits<Compute>::infinity());
        std::fill(logits + seen.end - keys.begin, logits + end - keys.begin,
                  -std::numeric_limits<Compute>::infinity());
      }
    }
    const TileChange change = kernels_.weights(
        memory_.row_logits, end - keys.begin, count_,
        {state.shift, state.sum, memory_.lane.rescale, memory_.multipliers}, memory_.row_weights);
    if (change == TileChange::irregular) return false;
    weights_ = {memory_.row_weights - keys.begin * 8, 16, 8 * logit_pitch};
    rescales = change == TileChange::raised;
    return true;
  }

  /// Writes the logits of the packed keys `keys`, counted from the block, to memory_.s.
  void put_logits_in_lanes(KeyRange keys) const {
    for (index_t lane = 0; lane < count_; lane += memory_.products.width) {
      for (index_t r = 0; r < memory_.products.width; ++r)
        memory_.in[r] = memory_.row_logits + (lane + r) * logit_pitch;
      memory_.kernels.transpose(memory_.in, memory_.products.width, keys.size(), nullptr,
                                memory_.s + keys.begin * memory_.tile_lanes + lane, memory_.tile_lanes);
    }
  }

  /// Returns whether a vector of queries needs a key that is masked for one of them.
  bool masks_any(const NeededKeys& needed) const {
    const index_t first = needed.block.begin;
    for (index_t v = 0; v < needed.vectors; ++v) {
      const KeyRange part = needed.of[v];
      if (part.size() > 0 && needed.hulls[v].masks({first + part.begin, first + part.end})) return true;
    }
    return false;
  }

  /// Adds the weights weights_ times V to o.
  void add_values(const NeededKeys& needed, Compute* o) const {
    for (index_t v = 0; v < needed.vectors; ++v) {
      const KeyRange part = needed.of[v];
      if (part.size() <= 0) continue;
      const index_t first = v * memory_.products.width;
      kernels_.accumulate(
          {weights_.at(part.begin, first), weights_.pair_step, weights_.group_step},
          std::min(memory_.products.width, count_ - first),
          {memory_.v_rows + part.begin, part.size(), problem_.value_width(), from(k_ahead_, part.begin)},
          {row(o, first), memory_.pitch});
    }
  }

  /// Does what add_values does, with 0 for NaN and infinities in V. Adds NaN and infinities to the queries to which
  /// the key is visible.
  void add_nonfinite_values(const NeededKeys& needed, KeyRange block, KeyRange seen, Compute* o) const {
    const index_t dv = problem_.value_width();
    std::copy_n(memory_.before, count_ * memory_.pitch, o);
    for (index_t key = seen.begin - block.begin; key < seen.end - block.begin; ++key) {
      Operand* finite = memory_.finite + key * dv;
      copy_finite(memory_.v_rows[key], dv, finite);
      memory_.v_rows[key] = finite;
    }
    add_values(needed, o);
    for_each_nonfinite(problem_, variant_, {batch_, kv_head_, seen}, memory_.rows, count_, memory_.staged,
                       [&](index_t r, index_t key, index_t c, Compute x) {
                         row(o, r)[c] += static_cast<Compute>(*weights_.at(key - block.begin, r)) * x;
                       });
  }

  const PairDecodeKernels<Compute, Operand>& kernels_;
  const Scores<Compute, Operand, Variant<Compute>> scores_;
  PairWeights<Operand> weights_{};        // of the keys of a block
  index_t prefetch_ = 0;                  // keys
  bool has_short_runs_ = false;           // these always prefetch
  RowsAhead<Operand> k_ahead_, v_ahead_;  // of the keys of a block
};

SSMAX_END
