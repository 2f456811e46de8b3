// Computes attention of few queries, as in decoding. Each number of K and V is used only a few times. So the kernels
// (kernels/decode.inl) read K and V in place, once and in order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>

#include "../../../attention_state.hpp"
#include "../../kernels/decode.hpp"
#include "../../memory/arena.hpp"
#include "../../rows/state.hpp"
#include "../operands/finite.hpp"
#include "../operands/gather.hpp"
#include "../operands/prefetch.hpp"
#include "../terms/variant.hpp"
#include "../tile/scores.hpp"
#include "../tile/visibility.hpp"
#include "row_list.hpp"
#include "task.hpp"

SSMAX_BEGIN_DETAIL

/// The scratch memory of one thread.
template <class Compute>
struct DecodeScratch {
  static constexpr index_t block_keys = key_chunk, tile_lanes = 0;  // for Explanation: keys are in lanes

  DecodeScratch(Arena& arena, index_t, const Problem<Compute>& problem)
      : DecodeScratch(arena, problem.width(), problem.value_width(), problem.statistics != nullptr) {}

  DecodeScratch(Arena& arena, index_t d, index_t value_width, bool has_statistics)
      : pitch((d + 31) / 32 * 32),
        dv(value_width),
        layout{.rows = decode_rows, .channels = value_width, .has_statistics = has_statistics},
        rows(arena.take<QueryRow>(decode_rows)),
        q(arena.take<Compute>(decode_rows * pitch)),
        wide(arena.take<Compute>(key_chunk * std::max(d, dv))),
        k_rows(arena.take<const std::byte*>(key_chunk + listed_ahead)),
        v_rows(arena.take<const std::byte*>(key_chunk + listed_ahead)),
        s(arena.take<Compute>(decode_rows * key_chunk)),
        block_o(arena.take<Compute>(decode_rows * dv)),
        scaled(arena.take<Compute>(decode_rows * std::max(pitch, dv))),
        weights(arena.take<Compute>(has_statistics ? key_chunk : 0)) {
    chunk = arena.take<Compute>(layout.size());
    total = arena.take<Compute>(layout.size());
  }

  static constexpr bool in_lanes = false;  // states
  void merge_outputs(Compute* o, const Compute* other, index_t count, const Compute* factors,
                     const Compute* other_factors) const {
    for (index_t r = 0; r < count; ++r)
      detail::merge_outputs(o + r * dv, other + r * dv, dv, factors[r], other_factors[r]);
  }

  index_t pitch, dv;  // pitch: numbers per row of q, whole vectors of every target
  StateLayout layout;
  QueryRow* rows;
  Compute* q;                          // [decode_rows][pitch]
  Compute* wide;                       // [key_chunk]: rows of K or V that cannot be read in place
  const std::byte **k_rows, **v_rows;  // [key_chunk + listed_ahead]: the rows of short runs
  Compute* s;                          // [decode_rows][key_chunk]: logits, then weights
  Compute* block_o;                    // [decode_rows][dv]: product with V of rows under a mask
  Compute* scaled;   // [decode_rows][pitch] or [dv]: scratch of products with factors of channels
  Compute* weights;  // [key_chunk]: those of one row, until its statistics have read the logits
  Compute *chunk, *total;
};

/// The attention of at most decode_rows queries of a kv head, or of several. Rows of several kv heads whose keys lie
/// between each other read them in the order of memory: keys_in_turn keys of a head, then the next head.
template <class Compute>
class DecodeTask : public ForwardTask<Compute, DecodeScratch<Compute>> {
 public:
  using Memory = DecodeScratch<Compute>;

  static index_t max_queries() { return decode_rows; }
  static index_t min_queries() { return decode_rows; }
  static bool has_few_queries(index_t) { return true; }
  static constexpr bool takes_heads = true;

  DecodeTask(const Problem<Compute>& problem, const Variant<Compute>& variant, const Memory& memory)
      : Base(problem, variant, memory),
        multipliers_(problem.scale, variant),
        list_(problem, variant.has_runs, memory.k_rows, memory.v_rows) {
    // If a product is null, its keys or values are copied. Only your own storage types lack these products.
    SSMAX_ASSERT(problem.keys.k_type().logits != nullptr || problem.keys.k_kind() == ElementKind::other);
    SSMAX_ASSERT(problem.keys.v_type().accumulate != nullptr || problem.keys.v_kind() == ElementKind::other);
  }

  /// Loads the queries of the task (ForwardTask::select). Returns the hull of their visible keys.
  KeyRange prepare(std::span<const Sequence> sequences, index_t kv_head, index_t first, index_t count) {
    queries_ = {memory_.q, memory_.pitch};
    rows_of_head_ = count;
    KeyRange seen{std::numeric_limits<index_t>::max(), 0};
    for (index_t h = heads_; h-- > 0;) {
      RowCursor cursor = this->select(sequences, kv_head + h, first, count);
      load_head(cursor, h * count, seen);
    }
    count_ = heads_ * count;
    if (variant_.has_runs) distinct_rows_ = variant_.has_same_runs(memory_.rows, count) ? 1 : count;
    // The list has the rows of one kv head. A task of several needs the distance to the rows of the others.
    lists_rows_ = reads_keys_in_place() && (heads_ == 1 || problem_.keys.head_distance().is_known) &&
                  list_.select(batch_, kv_head, seen);
    if (!lists_rows_) prefetching_ = Prefetching(problem_, batch_, rows_, seen);
    return seen;
  }

  /// Computes and stores the result of one query over at most listed_ahead listed keys. It is bit-identical to that of
  /// attend_chunk and store. Returns false for other tasks, and for logits that these kernels do not take.
  bool store_at_once(const Result<Compute>& result) {
    if (!lists_rows_ || count_ != 1 || variant_.has_runs || variant_.has_predicate ||
        multipliers_.has_score || problem_.statistics != nullptr)
      return false;
    const QueryRow& row = memory_.rows[0];
    const KeyRange keys = row.keys;
    const index_t first = keys.begin % key_chunk, count = keys.size();
    if (count == 0 || count > listed_ahead || first + count > key_chunk) return false;
    if (const double c = multipliers_.of_softmax(row); c != scale_.c) {
      const Multiplier<Compute> multiplier(c);
      if (!multiplier.is_plain()) return false;
      scale_ = {c, multiplier.scale};
    }
    list_.list(keys, first);
    Compute shift, sum, factor;
    if (!problem_.keys.k_type().listed_weights(queries_.first, list_.keys(first, count), scale_, memory_.s,
                                               shift, sum))
      return false;
    Compute* const out =
        place_result(result, row, problem_.state_row(row.query), shift, sum, memory_.block_o, factor);
    problem_.keys.v_type().listed_output(memory_.s, list_.values(first, count), factor, out);
    narrow_result(result, row, out);
    return true;
  }

  /// Returns whether a key of a chunk may be visible to a query. Always returns true unless the mask has runs.
  /// attend_chunk requires a call of sees_chunk for the same keys.
  bool sees_chunk(KeyRange keys) {
    if (!variant_.has_runs) return true;
    const KeyRange chunk{keys.begin / key_chunk * key_chunk, keys.end};
    visible_blocks_ = variant_.visible_blocks(memory_.rows, distinct_rows_, chunk, visible_block);
    return visible_blocks_ != 0;
  }

  /// Computes all logits of the chunk first, then weights and o. A split of the chunk into blocks would cost time
  /// that only few queries share.
  void attend_chunk(KeyRange keys, Compute* states) {
    const SoftmaxState<Compute> state = memory_.layout.at(states, 0);
    this->reset(states);
    for (index_t r = 0; r < count_; ++r)
      softmax_[r] = OnlineSoftmax<Compute>(multipliers_.of_softmax(memory_.rows[r]));
    weigh_values(keys, state);
    for (index_t r = 0; r < count_; ++r) {
      // `lost` is the rounding error of the shift in Compute. Multiplying sum and o by 2^lost corrects the error.
      // Exception: if |lost| >= 64, the error stays.
      const double shift = softmax_[r].shift();
      if (std::abs(shift) > static_cast<double>(std::numeric_limits<Compute>::max()) &&
          softmax_[r].sum() > 0) {
        overflow(state, r, shift);
        if (state.statistics.is_given()) state.statistics.from(r).reset();
        continue;
      }
      state.shift[r] = static_cast<Compute>(shift);
      const double lost = shift - static_cast<double>(state.shift[r]);
      const double factor = lost != 0 && std::abs(lost) < 64 ? std::exp2(lost) : 1;
      state.sum[r] = static_cast<Compute>(softmax_[r].sum() * factor);
      if (factor == 1) continue;
      if (state.statistics.is_given()) {
        const TileStatistics<Compute> of = state.statistics.from(r);
        *of.distances = static_cast<Compute>((*of.distances + lost * softmax_[r].sum()) * factor);
        *of.squares *= static_cast<Compute>(factor * factor);
      }
      Compute* o = state.o + r * memory_.dv;
      kernels<RowKernels<Compute>>().multiply(o, memory_.dv, static_cast<Compute>(factor), o);
    }
  }

 private:
  using Base = ForwardTask<Compute, Memory>;
  using Base::batch_, Base::count_, Base::heads_, Base::kv_head_, Base::memory_, Base::problem_, Base::rows_,
      Base::sequence_, Base::variant_;

  /// Loads the rows of a cursor, from number `first` on. Adds their visible keys to `seen`.
  void load_head(RowCursor<Compute>& cursor, index_t first, KeyRange& seen) {
    const index_t d = problem_.width(), end = first + rows_of_head_;
    for (; padded_rows_ < end; ++padded_rows_)
      std::fill_n(memory_.q + padded_rows_ * memory_.pitch + d, memory_.pitch - d, Compute{0});
    for (index_t r = first; r < end; ++r) {
      // In place: a copy of a fresh write stalls on store forwarding.
      const QueryRow& row = *::new (memory_.rows + r) QueryRow(this->next_row(cursor));
      Compute* q = memory_.q + r * memory_.pitch;
      if (row.keys.size() == 0) {
        std::fill_n(q, d, Compute{0});
        continue;
      }
      seen = {std::min(seen.begin, row.keys.begin), std::max(seen.end, row.keys.end)};
      const Compute* loaded = load_query(problem_, variant_, row, q);
      if (heads_ * rows_of_head_ == 1 && d % widest_vector == 0 && !multipliers_.has_score) {
        queries_.first = loaded;
        continue;
      }
      if (loaded != q) std::copy_n(loaded, d, q);
      if (multipliers_.has_score) {
        for (index_t c = 0; c < d; ++c) q[c] *= static_cast<Compute>(problem_.scale);
      }
    }
  }

  /// Sets the state of a row whose largest logit is beyond the range of Compute. Above the range, the state is NaN.
  /// Below the range, it is the state without keys. The other paths have these states, because their logits overflow.
  void overflow(const SoftmaxState<Compute>& state, index_t r, double shift) const {
    state.shift[r] = shift > 0 ? 0 : -std::numeric_limits<Compute>::infinity();
    state.sum[r] = shift > 0 ? std::numeric_limits<Compute>::quiet_NaN() : Compute{0};
    std::fill_n(state.o + r * memory_.dv, memory_.dv, state.sum[r]);
  }

  /// The keys of a chunk from the first to the last that is visible to a row.
  struct Seen {
    KeyRange keys{};
    bool masks = false;  // whether some of these keys may be masked
  };

  /// Finds the visible keys of a chunk for each row. Returns a range that holds the visible keys of all rows.
  KeyRange find_seen(KeyRange chunk) {
    const auto cut = [](KeyRange a, KeyRange b) {
      return KeyRange{std::max(a.begin, b.begin), std::min(a.end, b.end)};
    };
    KeyRange all{chunk.end, chunk.begin};
    Hull hull;
    for (index_t r = 0; r < count_; ++r) {
      Seen seen{cut(memory_.rows[r].keys, chunk), variant_.has_predicate};
      if (variant_.has_runs) {
        if (r < distinct_rows_) hull = variant_.hull(memory_.rows + r, 1, seen.keys);
        seen.keys = cut(hull.any, seen.keys);
        seen.masks = hull.masks(seen.keys);
      }
      if (seen.keys.size() <= 0) seen = {};
      if (seen.keys.size() > 0)
        all = {std::min(all.begin, seen.keys.begin), std::max(all.end, seen.keys.end)};
      seen_[r] = seen;
    }
    return all;
  }

  /// Computes weights and adds weights · V to o of the states.
  void weigh_values(KeyRange chunk, const SoftmaxState<Compute>& state) {
    if (const KeyRange seen = find_seen(chunk); seen.size() > 0) logits(seen, chunk.begin);
    index_t first_same = 0;  // rows [first_same, r) have the same visible keys and share one product with V
    Seen same_seen{};
    for (index_t r = 0; r <= count_; ++r) {
      const Seen seen = r < count_ ? seen_[r] : Seen{};
      const KeyRange keys = seen.keys;
      if (r == count_ || keys.begin != same_seen.keys.begin || keys.end != same_seen.keys.end) {
        if (same_seen.keys.size() > 0)
          accumulate(first_same, r - first_same, same_seen, chunk.begin, state.o);
        first_same = r;
        same_seen = seen;
      }
      same_seen.masks = same_seen.masks || seen.masks;
      if (keys.size() == 0) continue;
      Compute* s = memory_.s + r * key_chunk + (keys.begin - chunk.begin);
      if (multipliers_.has_score || seen.masks) variant_.apply(s, keys, memory_.rows[r]);
      if (problem_.statistics == nullptr) {
        softmax_[r].update(s, keys.size(), s);
        continue;
      }
      softmax_[r].update(s, keys.size(), memory_.weights);
      problem_.statistics->of_row(s, memory_.weights, keys.size(),
                                  multipliers_.of_softmax(memory_.rows[r]) * std::numbers::log2e,
                                  softmax_[r].shift(), state.statistics.from(r));
    }
  }

  /// Calls f(range) for the ranges of keys that are visible to some row, in whole visible blocks. Exception: unless
  /// the mask has runs, calls f(keys).
  template <class F>
  void for_each_visible_range(KeyRange keys, const F& f) const {
    if (!variant_.has_runs) return f(keys);
    const index_t chunk = keys.begin / key_chunk * key_chunk;
    KeyRange range{keys.begin, keys.begin};
    while (range.end < keys.end) {
      const index_t block = (range.end - chunk) / visible_block;
      const index_t block_end = std::min(chunk + (block + 1) * visible_block, keys.end);
      if ((visible_blocks_ >> block & 1) == 0) {
        if (range.size() > 0) f(range);
        range.begin = block_end;
      }
      range.end = block_end;
    }
    if (range.size() > 0) f(range);
  }

  /// Writes s[r][key - chunk_begin] for all rows and the visible keys of a range.
  void logits(KeyRange range, index_t chunk_begin) {
    for_each_visible_range(range, [&](KeyRange keys) {
      Compute* s = memory_.s + (keys.begin - chunk_begin);
      range_logits(keys, s);
    });
  }

  /// Returns whether the kernels read keys in their storage type. Rotated keys, and keys of your own storage type, are
  /// copied.
  bool reads_keys_in_place() const {
    return problem_.keys.k_type().logits != nullptr && !problem_.rotates_keys();
  }

  /// Calls f(kv head, first row, rows, keys) for the kv heads of rows [r, r + rows) and the keys of a range.
  template <class F>
  void for_each_head(index_t r, index_t rows, KeyRange keys, const F& f) const {
    if (heads_ == 1) return f(kv_head_, r, rows, keys);
    const index_t in_turn = keys_in_turn(problem_.keys.k_size());
    for (KeyRange tile = keys; tile.begin < keys.end; tile.begin = tile.end) {
      tile.end = std::min(tile.begin + in_turn, keys.end);
      for (index_t first = r, end; first < r + rows; first = end) {
        const index_t head = first / rows_of_head_;
        end = std::min((head + 1) * rows_of_head_, r + rows);
        f(kv_head_ + head, first, end - first, tile);
      }
    }
  }

  void range_logits(KeyRange range, Compute* range_s) {
    if (lists_rows_) list_.list(range, range_s - memory_.s);
    for_each_head(0, count_, range, [&](index_t kv_head, index_t r, index_t rows, KeyRange keys) {
      const index_t first = (range_s - memory_.s) + (keys.begin - range.begin);
      head_logits(kv_head, {queries_[r], queries_.stride}, rows, keys, first,
                  memory_.s + r * key_chunk + first);
    });
  }

  /// Writes the logits of rows of a kv head. The keys have the numbers from `first` on in their chunk.
  void head_logits(index_t kv_head, StridedRows<const Compute> q, index_t rows, KeyRange keys, index_t first,
                   Compute* s) const {
    const index_t d = problem_.width();
    const auto logits = problem_.keys.k_type().logits;
    if (!reads_keys_in_place()) {
      load_keys(problem_, variant_, sequence_->shape, {batch_, kv_head, keys}, {memory_.wide, d});
      kernels<DecodeKernels<Compute, Compute>>().logits(q, rows, {memory_.wide, d, keys.size(), d},
                                                        {s, key_chunk});
      return;
    }
    if (lists_rows_) {
      return problem_.keys.k_type().listed_logits(
          q, rows,
          heads_ == 1 ? list_.keys(first, keys.size())
                      : list_.keys_of(kv_head, is_last(kv_head), first, keys.size()),
          {s, key_chunk});
    }
    for_each_run(problem_.keys, {batch_, kv_head, keys}, [&](index_t key, const AnyKeyRun& run) {
      logits(q, rows, {run.k, run.k_stride, run.count, d, bytes_ahead_of<false>(kv_head, key, run)},
             run.k_factors, memory_.scaled, {s + (key - keys.begin), key_chunk});
    });
  }

  bool is_last(index_t kv_head) const { return kv_head + 1 == kv_head_ + heads_; }

  /// Returns the distance to the keys, or the values, that a run prefetches. Several kv heads prefetch as in
  /// RowList::keys_of.
  template <bool are_values>
  index_t bytes_ahead_of(index_t kv_head, index_t key, const AnyKeyRun& run) const {
    const AnyKeys<Compute>& source = problem_.keys;
    if (heads_ == 1) return prefetching_.template bytes<are_values>(source, batch_, kv_head, key, run);
    if (!source.head_distance().is_known) return 0;
    const index_t distance = are_values ? source.head_distance().v : source.head_distance().k;
    if (!is_last(kv_head)) return distance;
    const index_t row = are_values ? run.v_stride * source.v_size() : run.k_stride * source.k_size();
    return keys_in_turn(source.k_size()) * row - (heads_ - 1) * distance;
  }

  /// Adds the weights of rows [r, r + rows) times V to o. All these rows have the visible keys `seen`.
  void accumulate(index_t r, index_t rows, const Seen& seen, index_t chunk_begin, Compute* o) const {
    const index_t dv = memory_.dv;
    const KeyRange keys = seen.keys;
    Compute* to = o + r * dv;
    if (seen.masks) {
      to = memory_.block_o;
      std::fill_n(to, rows * dv, Compute{0});
    }
    for_each_visible_range(keys, [&](KeyRange range) {
      for_each_head(r, rows, range, [&](index_t kv_head, index_t first, index_t count, KeyRange tile) {
        add_values(kv_head, first * key_chunk + (tile.begin - chunk_begin), count, tile,
                   to + (first - r) * dv);
      });
    });
    if (seen.masks) {
      // A weight of 0 times NaN is NaN, also if the key is masked.
      const bool finite = std::all_of(to, to + rows * dv, [](Compute x) { return std::isfinite(x); });
      if (!finite) accumulate_nonfinite(r, rows, keys, chunk_begin, to);
      for (index_t i = 0; i < rows * dv; ++i) o[r * dv + i] += to[i];
    }
  }

  /// Calls f(first key, run) for the runs of the range. With factors of channels, each run has a sum of its own. Under
  /// a mask with runs, the call cuts such a run at visible blocks: so the sums do not depend on what other queries see.
  template <class F>
  void for_each_run_of_values(index_t kv_head, KeyRange keys, const F& f) const {
    for_each_run(problem_.keys, {batch_, kv_head, keys}, [&](index_t key, const AnyKeyRun& run) {
      if (!variant_.has_runs || run.v_factors.channels == nullptr) return f(key, run);
      for (index_t i = 0, count; i < run.count; i += count) {
        count = std::min(run.count - i, visible_block - (key + i) % visible_block);
        f(key + i, values_of(problem_.keys, run, i, count));
      }
    });
  }

  /// Adds weights times the values of `keys`. The weights start at number `first`.
  void add_values(index_t kv_head, index_t first, index_t rows, KeyRange keys, Compute* to) const {
    const index_t dv = memory_.dv;
    if (const auto add = problem_.keys.v_type().accumulate; add != nullptr) {
      if (lists_rows_) {
        const index_t at = first % key_chunk;
        return problem_.keys.v_type().accumulate_listed(
            {memory_.s + first, key_chunk}, rows,
            heads_ == 1 ? list_.values(at, keys.size())
                        : list_.values_of(kv_head, is_last(kv_head), at, keys.size()),
            {to, dv});
      }
      for_each_run_of_values(kv_head, keys, [&](index_t key, const AnyKeyRun& run) {
        add({memory_.s + first + (key - keys.begin), key_chunk}, rows,
            {run.v, run.v_stride, run.count, dv, bytes_ahead_of<true>(kv_head, key, run)}, run.v_factors,
            memory_.scaled, {to, dv});
      });
    } else {
      load_values(problem_.keys, {batch_, kv_head, keys}, {memory_.wide, dv});
      kernels<DecodeKernels<Compute, Compute>>().accumulate({memory_.s + first, key_chunk}, rows,
                                                            {memory_.wide, dv, keys.size(), dv}, {to, dv});
    }
  }

  /// Computes the product of `accumulate` with 0 for NaN and infinities in V. Adds NaN and infinities only to rows
  /// to which the key is visible.
  void accumulate_nonfinite(index_t r, index_t rows, KeyRange keys, index_t chunk_begin, Compute* out) const {
    const index_t dv = memory_.dv, first = r * key_chunk + (keys.begin - chunk_begin);
    Compute* const values = memory_.wide;
    const Compute* s = memory_.s + first;
    std::fill_n(out, rows * dv, Compute{0});
    for_each_visible_range(keys, [&](KeyRange range) {
      add_finite_values(first + (range.begin - keys.begin), rows, range, out);
    });
    load_values(problem_.keys, {batch_, kv_head_, keys}, {values, dv});
    for (index_t key = keys.begin; key < keys.end; ++key) {
      const index_t at = key - keys.begin;
      for_each_nonfinite(
          variant_, memory_.rows + r, rows, key, values + at * dv, dv,
          [&](index_t i, index_t c, Compute x) { out[i * dv + c] += s[i * key_chunk + at] * x; });
    }
  }

  /// Does what add_values does, with 0 for NaN and infinities in V.
  void add_finite_values(index_t first, index_t rows, KeyRange keys, Compute* to) const {
    const index_t dv = memory_.dv;
    Compute* const values = memory_.wide;
    const auto add = [&](KeyRange part) {
      load_values(problem_.keys, {batch_, kv_head_, part}, {values, dv});
      copy_finite(values, part.size() * dv, values);
      kernels<DecodeKernels<Compute, Compute>>().accumulate(
          {memory_.s + first + (part.begin - keys.begin), key_chunk}, rows, {values, dv, part.size(), dv},
          {to, dv});
    };
    if (problem_.keys.v_type().accumulate == nullptr) return add(keys);
    if (const auto add_finite = problem_.keys.v_type().accumulate_finite; add_finite != nullptr) {
      return for_each_run_of_values(kv_head_, keys, [&](index_t key, const AnyKeyRun& run) {
        add_finite({memory_.s + first + (key - keys.begin), key_chunk}, rows,
                   {run.v, run.v_stride, run.count, dv}, run.v_factors, values, memory_.scaled, {to, dv});
      });
    }
    for_each_run(problem_.keys, {batch_, kv_head_, keys}, [&](index_t key, const AnyKeyRun& run) {
      add({key, key + run.count});
    });
  }

  static constexpr index_t widest_vector = 64 / sizeof(Compute);  // in numbers, of all targets

  const Multipliers multipliers_;
  StridedRows<const Compute> queries_{};                                     // padded with 0 to whole vectors
  QueryScale<Compute> scale_{std::numeric_limits<double>::quiet_NaN(), {}};  // the last one of store_at_once
  OnlineSoftmax<Compute> softmax_[decode_rows];
  Seen seen_[decode_rows];            // visible keys of the chunk, per row
  index_t distinct_rows_ = 0;         // under a mask with runs: 1 if all rows have the same runs, else count_
  std::uint32_t visible_blocks_ = 0;  // under a mask with runs: one bit per visible_block keys of the chunk
  Prefetching prefetching_;
  RowList<Compute> list_;
  bool lists_rows_ = false;   // of short runs
  index_t padded_rows_ = 0;   // rows of q that end with 0
  index_t rows_of_head_ = 0;  // rows of each kv head
};

SSMAX_END
