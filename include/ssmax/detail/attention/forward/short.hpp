// Attention of short sequences: a kv head's keys are one block, so a query's weights are final when they are
// formed. There is no state to merge and nothing to transpose back, and K and V stay where they lie unless
// something has to be done to them. The bits are those of prefill.hpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numbers>

#include "../../../workspace.hpp"
#include "../../kernels/short_attention.hpp"
#include "../../threads/any_executor.hpp"
#include "../keys/load.hpp"
#include "../nonfinite/weights.hpp"
#include "../tile/visibility.hpp"
#include "epilogue.hpp"

SSMAX_BEGIN_DETAIL

/// One thread's memory: for one group of queries and one kv head.
template <class A>
struct ShortScratch : LaneScratch<A> {
  using LaneScratch<A>::group;

  ShortScratch(Arena& arena, index_t d, index_t dv)
      : LaneScratch<A>(arena, group_size(), d, dv, d),
        k(arena.take<A>(key_block * d)),
        v_pitch((dv + 15) / 16 * 16),
        v(arena.take<A>(key_block * v_pitch)),
        s(arena.take<A>(key_block * group)),
        shift(arena.take<A>(group)),
        sum(arena.take<A>(group)),
        factor(arena.take<A>(group)),
        out(arena.take<A*>(group)),
        wide(arena.take<A>(group * v_pitch)) {}

  static index_t group_size() { return detail::kernels<PrefillKernels<A>>().width * tile_vectors; }

  A* k;             // [key_block][d]
  index_t v_pitch;  // whole vectors of every target
  A* v;             // [key_block][v_pitch]
  A* s;             // [key_block][group]
  A *shift, *sum, *factor;
  A** out;  // [group]: where each query's row goes
  A* wide;  // [group][v_pitch]: rows that are narrowed, or of lanes without a query
};

template <class T, class X>
class ShortTask {
 public:
  using A = Compute<T>;
  using Memory = ShortScratch<A>;

  ShortTask(const Problem<T, X>& problem, const Variant<A>& variant, const Result<T>& result,
            const Memory& memory)
      : problem_(problem),
        variant_(variant),
        result_(result),
        kernels_(memory.kernels),
        weigh_values_(detail::kernels<ShortAttentionKernels<A>>().weigh_values),
        memory_(memory) {}

  /// A group of a kv head's queries; heads are counted over batch entries.
  void attend(index_t head, index_t group, index_t groups) {
    if (head != head_) enter(head);
    // The groups of a head are of nearly the same size: two vectors and two, not three and one.
    const index_t width = kernels_.width, vectors = (problem_.rows() + width - 1) / width;
    const index_t first = group * vectors / groups * width;
    count_ = std::min((group + 1) * vectors / groups * width, problem_.rows()) - first;
    load_queries(first);
    const KeyRange block{0, length_};
    const NeededKeys needed(memory_.columns, count_, width, block, kernels_.rows);
    needed.for_each_rectangle(key_block, [&](index_t wide, index_t v, KeyRange keys) {
      kernels_.logits[wide - 1](k_ + keys.begin * k_stride_, k_stride_, problem_.width(), keys.size(),
                                memory_.q + v * width, memory_.s + keys.begin * memory_.group + v * width);
    });
    bool hides = variant_.has_predicate;
    for (index_t v = 0; v < needed.vectors; ++v) {
      hides |= memory_.columns[v].hides(block);
      form_weights(v * width, needed.of[v], memory_.columns[v]);
    }
    // Once an earlier group had NaN and infinities taken out of V, they are missing for all that follow.
    const bool apart = finite_ == Finite::no || (hides && !values_are_finite());
    for (index_t i = 0; i < count_; ++i) memory_.out[i] = place_result(i);
    for (index_t v = 0; v < needed.vectors; ++v) {
      const index_t lane = v * width, from = needed.of[v].begin;
      weigh_values_(memory_.s + from * memory_.group + lane, std::min(width, count_ - lane),
                    std::min(needed.of[v].end, length_) - from, v_ + from * v_stride_, v_stride_,
                    problem_.value_width(), memory_.factor + lane, memory_.out + lane);
    }
    if (apart) add_not_finite();
    for (index_t i = 0; i < count_; ++i) {
      const Query& query = memory_.rows[i].query;
      narrow_result(result_, query, problem_.row_of(query), memory_.out[i], problem_.value_width());
    }
  }

 private:
  /// Points k_ and v_ at a kv head's keys: where they lie, if nothing has to be done to them, else at copies.
  void enter(index_t head) {
    head_ = head;
    batch_ = head / problem_.kv_heads();
    kv_head_ = head % problem_.kv_heads();
    length_ = problem_.keys.length(batch_);
    stored_ = problem_.keys.stored(batch_);
    finite_ = Finite::unknown;
    const index_t d = problem_.width(), dv = problem_.value_width();
    k_ = memory_.k;
    k_stride_ = d;
    v_ = memory_.v;
    v_stride_ = memory_.v_pitch;
    bool k_lies_well = false, v_lies_well = false;
    if constexpr (std::same_as<X, A>) {
      if (stored_.begin == 0 && stored_.end == length_ && length_ > 0) {
        const KeyStretch<X> stretch = problem_.keys.stretch(batch_, kv_head_, 0);
        const bool whole = stretch.count >= length_;
        k_lies_well = whole && length_ % kernels_.rows == 0 && !(problem_.has_rope() && problem_.rotate_keys);
        v_lies_well = whole && dv % kernels_.width == 0;
        if (k_lies_well) {
          k_ = stretch.k;
          k_stride_ = stretch.k_stride;
        }
        if (v_lies_well) {
          v_ = stretch.v;
          v_stride_ = stretch.v_stride;
        }
      }
    }
    if (!k_lies_well) {
      const index_t passes = (length_ + kernels_.rows - 1) / kernels_.rows * kernels_.rows;
      std::fill_n(memory_.k, stored_.begin * d, A{0});
      load_keys(problem_, variant_, batch_, kv_head_, stored_, memory_.k + stored_.begin * d);
      std::fill_n(memory_.k + stored_.end * d, (passes - stored_.end) * d, A{0});
    }
    if (!v_lies_well) {
      std::fill_n(memory_.v, length_ * memory_.v_pitch, A{0});
      for_each_stored_value(
          [&](index_t key, const A* value) { std::copy_n(value, dv, memory_.v + key * memory_.v_pitch); });
    }
  }

  /// Calls f(key, row of V).
  template <class F>
  void for_each_stored_value(const F& f) const {
    for_each_stretch(problem_.keys, batch_, kv_head_, stored_,
                     [&](index_t key, const KeyStretch<X>& stretch) {
                       for (index_t i = 0; i < stretch.count; ++i) {
                         f(key + i, load_row(stretch.v, stretch.v_stride, stretch.v_scales, i,
                                             problem_.value_width(), memory_.staged));
                       }
                     });
  }

  /// Queries `first`, … into lanes, and what each of them sees. Lanes without a query see what the last query
  /// sees, so that they need no hiding.
  void load_queries(index_t first) {
    const index_t d = problem_.width(), members = problem_.group();
    QueryCursor<T, X> cursor(problem_, batch_, kv_head_, first);
    for (index_t i = 0; i < count_; i += kernels_.width) {
      Column& column = memory_.columns[i / kernels_.width] = {};
      for (index_t lane = 0; lane < kernels_.width; ++lane) {
        QueryRow& row = memory_.rows[i + lane];
        A* scratch = memory_.staged + lane * memory_.pitch;
        memory_.in[lane] = scratch;
        if (i + lane >= count_) {
          row = memory_.rows[count_ - 1];
          std::fill_n(scratch, d, A{0});
        } else {
          if (variant_.shows_same_keys && i + lane >= members) {
            row = memory_.rows[i + lane - members];
            row.query = *cursor;
          } else {
            row = variant_.row(*cursor, stored_);
          }
          if (row.keys.size() > 0) {
            memory_.in[lane] = load_query(problem_, variant_, row.query, scratch);
          } else {
            std::fill_n(scratch, d, A{0});
          }
          cursor.next();
        }
        column.add(row.keys);
        const double c = variant_.has_score ? 1 : row.multiplier * std::numbers::log2e;
        memory_.lanes[lane] = static_cast<A>(problem_.scale * c);
      }
      kernels_.transpose(memory_.in, kernels_.width, d, memory_.lanes, memory_.q + i, memory_.group);
    }
  }

  /// One vector of queries: logits become weights, shift and sum what they add up to.
  void form_weights(index_t lane, KeyRange keys, const Column& column) const {
    const TileState<A> state{memory_.shift + lane, memory_.sum + lane, memory_.factor + lane};
    std::fill_n(state.shift, kernels_.width, -std::numeric_limits<A>::infinity());
    std::fill_n(state.sum, kernels_.width, A{0});
    if (keys.size() == 0) return;
    A* s = memory_.s + keys.begin * memory_.group + lane;
    const QueryRow* rows = memory_.rows + lane;
    if (variant_.has_score || variant_.has_predicate) {
      variant_.apply(TileColumn<A>{s, keys, rows, length_}, memory_);
    }
    if (column.hides(keys)) hide_keys(memory_, s, keys, rows);
    const TileChange change = kernels_.weights(s, keys.size(), state, s);
    if (change == TileChange::irregular) irregular_weights(kernels_, memory_, s, keys.size(), state, s);
  }

  /// Normalises the query in lane i. Returns where its row goes in A.
  A* place_result(index_t i) const {
    const QueryRow& seen = memory_.rows[i];
    return detail::place_result(result_, seen, problem_.row_of(seen.query), memory_.shift[i], memory_.sum[i],
                                memory_.wide + i * memory_.v_pitch, memory_.factor[i]);
  }

  /// Whether V holds no NaN or infinity; if it does, v_ then has 0 there.
  bool values_are_finite() {
    const index_t dv = problem_.value_width();
    if (finite_ == Finite::unknown) {
      finite_ = kernels_.all_finite(v_, v_stride_, length_, dv) ? Finite::yes : Finite::no;
      if (finite_ == Finite::no) {
        for (index_t key = 0; key < length_; ++key) {
          std::replace_copy_if(
              v_ + key * v_stride_, v_ + key * v_stride_ + dv, memory_.v + key * memory_.v_pitch,
              [](A x) { return !std::isfinite(x); }, A{0});
        }
        v_ = memory_.v;
        v_stride_ = memory_.v_pitch;
      }
    }
    return finite_ == Finite::yes;
  }

  /// Adds NaN and infinities in V to the queries that see them: a weight of 0 times a NaN that a query must
  /// not see would be NaN as well.
  void add_not_finite() const {
    for_each_stored_value([&](index_t key, const A* value) {
      for (index_t c = 0; c < problem_.value_width(); ++c) {
        if (std::isfinite(value[c])) continue;
        for (index_t i = 0; i < count_; ++i) {
          const QueryRow& row = memory_.rows[i];
          if (key < row.keys.begin || key >= row.keys.end || !variant_.sees(row.query, key)) continue;
          memory_.out[i][c] += memory_.s[key * memory_.group + i] * value[c];
        }
      }
    });
  }

  enum class Finite { unknown, yes, no };

  const Problem<T, X>& problem_;
  const Variant<A>& variant_;
  const Result<T>& result_;
  const PrefillKernels<A>& kernels_;
  decltype(ShortAttentionKernels<A>::weigh_values) weigh_values_;
  const Memory& memory_;
  index_t head_ = -1, batch_ = 0, kv_head_ = 0, length_ = 0, count_ = 0;
  KeyRange stored_{};
  Finite finite_ = Finite::unknown;
  const A *k_ = nullptr, *v_ = nullptr;
  index_t k_stride_ = 0, v_stride_ = 0;
};

/// A task takes some neighbouring groups of queries, of many kv heads where those are small.
template <class T, class X>
void run_short(const Problem<T, X>& problem, const Variant<Compute<T>>& variant, const Result<T>& result,
               Workspace& workspace, const AnyExecutor& executor) {
  using Memory = ShortScratch<Compute<T>>;
  const index_t d = problem.width(), dv = problem.value_width(), threads = executor.concurrency();
  const index_t size = Memory::group_size(), groups = (problem.rows() + size - 1) / size;
  const index_t all = problem.q.extent(0) * problem.kv_heads() * groups;
  const index_t share = std::clamp<index_t>(all / (8 * threads), 1, 64), tasks = (all + share - 1) / share;
  const index_t lanes = std::min(threads, tasks);
  Arena count;
  const Memory counted(count, d, dv);
  std::byte* memory = workspace.reserve(multiply_bytes(static_cast<std::size_t>(lanes), count.used()));
  std::atomic<index_t> next{0};
  executor.run(lanes, [&](index_t lane) {
    Arena arena(memory + static_cast<std::size_t>(lane) * count.used());
    const Memory own(arena, d, dv);
    ShortTask<T, X> task(problem, variant, result, own);
    for (index_t i = next++; i < tasks; i = next++) {
      for (index_t g = i * share; g < std::min(all, (i + 1) * share); ++g) {
        task.attend(g / groups, g % groups, groups);
      }
    }
  });
}

SSMAX_END
