// Attention of many queries: groups of queries, one per lane, against blocks of keys (kernels/tile.inl).
//
// A task takes some groups of one kv head. For each block of keys, those are brought once into rows (K, rotated) and
// panels (V) that all its groups read. A group's vectors of queries share the keys that all of them need; what only
// some need (a causal mask's corner) is done vector by vector, what none needs is not computed. Keys that a lane does
// not see inside of that are hidden: their logit becomes -inf, whatever it was.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../../online_softmax.hpp"
#include "problem.hpp"
#include "result.hpp"
#include "workspace.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// What a group knows after some keys: one query per lane.
template <class A>
struct GroupState {
  A *shift, *sum, *o;  // [group], [group], [channel][group]

  void reset(index_t group, index_t channels) const {
    std::fill_n(shift, group, -std::numeric_limits<A>::infinity());
    std::fill_n(sum, group, A{0});
    std::fill_n(o, channels * group, A{0});
  }
};

/// A vector of queries.
struct Column {
  KeyRange any{};  // keys that one of them sees
  KeyRange all{};  // keys that all of them see, as far as ranges tell
};

/// One thread's memory.
template <class A>
struct TileMemory {
  TileMemory(Carver& carver, index_t queries, index_t d, index_t dv)
      : leaves(detail::leaves<TileLeaves<A>>()),
        group(leaves.width * tile_vectors),
        groups((queries + group - 1) / group),
        channels((dv + leaves.rows - 1) / leaves.rows * leaves.rows),
        rows(carver.take<QueryRow>(groups * group)),
        columns(carver.take<Column>(groups * tile_vectors)),
        q(carver.take<A>(groups * d * group)),
        k(carver.take<A>(key_block * d)),
        panel(key_block * leaves.rows + 64 / static_cast<index_t>(sizeof(A))),
        v(carver.take<A>(channels / leaves.rows * panel)),
        s(carver.take<A>(key_block * group)),
        row(carver.take<A>(std::max(d, channels))),
        lanes(carver.take<A>(4 * group)),
        apart(carver.take<A>(leaves.width * key_block)) {
    chunk = carver.take<A>(states_size());
    total = carver.take<A>(states_size());
  }

  /// The groups' states lie one behind the other.
  index_t states_size() const { return groups * state_size(); }
  index_t state_size() const { return group * (channels + 2); }
  GroupState<A> state(A* states, index_t g) const {
    A* at = states + g * state_size();
    return {at, at + group, at + 2 * group};
  }

  const TileLeaves<A>& leaves;
  index_t group, groups, channels;  // lanes of a group; groups; channels of V, filled up to whole panels
  QueryRow* rows;                   // [groups · group]
  Column* columns;                  // [groups · tile_vectors]
  A* q;                             // [groups][d][group]
  A* k;                             // [key_block][d]
  index_t
      panel;  // from one panel to the next: a cache line more than it holds, or a row's panels share a set
  A* v;       // [panel][key_block][rows of a panel]
  A* s;       // [key_block][group]
  A* row;     // one row of q, k, v or o
  A* lanes;   // four numbers a lane
  A* apart;   // [width][key_block]: weights of lanes that the kernels cannot do
  A *chunk, *total;  // states
};

template <class T, class X, class P>
class TileTask {
 public:
  using A = Compute<T>;

  using Memory = TileMemory<A>;

  /// Queries of the largest task: K and V are brought into tiles once for all of them.
  static index_t most_queries() { return 8 * least_queries(); }
  static index_t least_queries() { return leaves<TileLeaves<A>>().width * tile_vectors; }

  TileTask(const Problem<T, X>& problem, const P& policies, const Memory& memory)
      : problem_(problem), policies_(policies), leaves_(memory.leaves), memory_(memory) {}

  /// The queries of the task, rows [first, first + count) of a kv head, and the keys that they see.
  KeyRange prepare(index_t batch, index_t kv_head, index_t first, index_t count) {
    batch_ = batch;
    kv_head_ = kv_head;
    count_ = count;
    groups_ = (count + memory_.group - 1) / memory_.group;
    const index_t d = problem_.width();
    KeyRange& seen = seen_ = {problem_.keys.length(batch), 0};
    for (index_t i = 0; i < groups_ * memory_.group; ++i) {
      A* q = memory_.q + i / memory_.group * memory_.group * d + i % memory_.group;
      // Lanes without a query see what the last query sees, so that they need no hiding.
      QueryRow& row = memory_.rows[i];
      row = i < count ? query_row(problem_, policies_, batch, kv_head, first + i) : memory_.rows[count - 1];
      Column& column = memory_.columns[i / leaves_.width];
      if (i % leaves_.width == 0) column = {{std::numeric_limits<index_t>::max(), 0}, row.keys};
      column.all = {std::max(column.all.begin, row.keys.begin), std::min(column.all.end, row.keys.end)};
      if (row.keys.size() > 0) {
        column.any = {std::min(column.any.begin, row.keys.begin), std::max(column.any.end, row.keys.end)};
        seen = {std::min(seen.begin, row.keys.begin), std::max(seen.end, row.keys.end)};
      }
      if (i < count && row.keys.size() > 0) {
        load_query(problem_, policies_, row.query, memory_.row);
        const auto factor =
            static_cast<A>(problem_.scale * (P::has_score ? 1 : row.multiplier * std::numbers::log2e));
        for (index_t c = 0; c < d; ++c) q[c * memory_.group] = memory_.row[c] * factor;
      } else {
        for (index_t c = 0; c < d; ++c) q[c * memory_.group] = 0;
      }
    }
    return seen;
  }

  /// States of queries that have seen nothing yet.
  void reset(A* states) const {
    for (index_t g = 0; g < groups_; ++g) memory_.state(states, g).reset(memory_.group, memory_.channels);
  }

  /// The states after the keys of one chunk.
  void attend_chunk(KeyRange keys, A* states) {
    reset(states);
    for (index_t begin = keys.begin / key_block * key_block; begin < keys.end; begin += key_block) {
      const KeyRange block{begin, std::min(begin + key_block, problem_.keys.length(batch_))};
      load_block({std::max(block.begin, keys.begin), std::min(block.end, keys.end)});
      for (index_t g = 0; g < groups_; ++g) {
        fetch_next(g, block.end);
        attend_block(g, block, memory_.state(states, g));
      }
    }
  }

  void merge(A* totals, A* chunks) const {
    A* factor = memory_.lanes;
    A* chunk_factor = memory_.lanes + memory_.group;
    for (index_t g = 0; g < groups_; ++g) {
      const GroupState<A> total = memory_.state(totals, g), chunk = memory_.state(chunks, g);
      for (index_t i = 0; i < memory_.group; ++i) {
        const A shift = std::max(total.shift[i], chunk.shift[i]);
        factor[i] = shift_factor(total.shift[i], shift);
        chunk_factor[i] = shift_factor(chunk.shift[i], shift);
        total.shift[i] = shift;
        total.sum[i] = total.sum[i] * factor[i] + chunk.sum[i] * chunk_factor[i];
      }
      leaves_.merge(total.o, chunk.o, memory_.channels, factor, chunk_factor);
    }
  }

  void store(A* states, const Result<T>& result) const {
    const index_t dv = problem_.value_width();
    for (index_t i = 0; i < count_; ++i) {
      const GroupState<A> state = memory_.state(states, i / memory_.group);
      const index_t lane = i % memory_.group;
      for (index_t c = 0; c < dv; ++c) memory_.row[c] = state.o[c * memory_.group + lane];
      result.store(memory_.rows[i].query, state.shift[lane], state.sum[lane], memory_.row, dv);
    }
  }

 private:
  /// Rows of K and panels of V for the keys of a block, at their places in it; the block's other rows are 0.
  void load_block(KeyRange keys) {
    const index_t at = keys.begin % key_block, count = keys.size(), d = problem_.width(),
                  dv = problem_.value_width();
    std::fill_n(memory_.k, at * d, A{0});
    load_keys(problem_, policies_, batch_, kv_head_, keys, memory_.k + at * d);
    std::fill_n(memory_.k + (at + count) * d, (key_block - at - count) * d, A{0});
    if (count < key_block) std::fill_n(memory_.v, memory_.channels / leaves_.rows * memory_.panel, A{0});
    values_are_finite_ = true;
    const View<const X, 4>& v = problem_.keys.v;
    A* panels = memory_.v + at * leaves_.rows;
    for_each_stretch(problem_.keys, keys, [&](index_t, index_t row, index_t rows) {
      const X* in = v.data_handle() + batch_ * v.stride(0) + kv_head_ * v.stride(1) + row * v.stride(2);
      if constexpr (std::same_as<X, A>) {
        values_are_finite_ &= leaves_.pack_values(in, v.stride(2), rows, dv, panels, memory_.panel);
      } else {
        for (index_t i = 0; i < rows; ++i) {
          const A* wide = widened(in + i * v.stride(2), dv, memory_.row);
          values_are_finite_ &= leaves_.pack_values(wide, 0, 1, dv, panels + i * leaves_.rows, memory_.panel);
        }
      }
      panels += rows * leaves_.rows;
    });
    if (!values_are_finite_) {
      std::replace_if(
          memory_.v, memory_.v + memory_.channels / leaves_.rows * memory_.panel,
          [](A x) { return !std::isfinite(x); }, A{0});
    }
  }

  /// While group g is at work: its share of the rows of the next block, or load_block would wait for all of them (5 % of
  /// the time at width 64).
  void fetch_next(index_t g, index_t begin) const {
    const index_t end = std::min(begin + key_block, seen_.end);
    const KeyRange share{begin + g * key_block / groups_,
                         std::min(end, begin + (g + 1) * key_block / groups_)};
    for_each_stretch(problem_.keys, share, [&](index_t, index_t row, index_t count) {
      for (const View<const X, 4>* view : {&problem_.keys.k, &problem_.keys.v}) {
        const X* at = view->data_handle() + batch_ * view->stride(0) + kv_head_ * view->stride(1) +
                      row * view->stride(2);
        for (index_t i = 0; i < count; ++i, at += view->stride(2)) fetch(at, view->extent(3));
      }
    });
  }

  /// One group against the block of keys that is loaded.
  void attend_block(index_t g, KeyRange block, const GroupState<A>& state) {
    const Column* columns = memory_.columns + g * tile_vectors;
    const index_t vectors =
        std::min<index_t>(tile_vectors, (count_ - g * memory_.group + leaves_.width - 1) / leaves_.width);
    // What each column needs of the block, in whole passes, counted from its begin; and what all of them need.
    KeyRange needed[tile_vectors], shared{0, key_block};
    for (index_t v = 0; v < vectors; ++v) {
      const index_t first = std::max(columns[v].any.begin, block.begin) - block.begin;
      const index_t last = std::min(columns[v].any.end, block.end) - block.begin;
      needed[v] = first < last ? KeyRange{first / leaves_.rows * leaves_.rows,
                                          (last + leaves_.rows - 1) / leaves_.rows * leaves_.rows}
                               : KeyRange{};
      shared = {std::max(shared.begin, needed[v].begin), std::min(shared.end, needed[v].end)};
    }
    if (shared.size() < 0) shared = {};
    const auto for_each_part = [&](const auto& f) {
      if (shared.size() > 0) f(vectors, 0, shared);
      for (index_t v = 0; v < vectors; ++v) {
        if (shared.size() == 0) {
          if (needed[v].size() > 0) f(1, v, needed[v]);
          continue;
        }
        if (needed[v].begin < shared.begin) f(1, v, KeyRange{needed[v].begin, shared.begin});
        if (shared.end < needed[v].end) f(1, v, KeyRange{shared.end, needed[v].end});
      }
    };
    const index_t group = memory_.group, d = problem_.width();
    for_each_part([&](index_t width, index_t v, KeyRange keys) {
      leaves_.logits[width - 1](memory_.k + keys.begin * d, d, keys.size(),
                                memory_.q + g * d * group + v * leaves_.width,
                                memory_.s + keys.begin * group + v * leaves_.width);
    });
    A* factor = memory_.lanes;
    std::fill_n(factor, group, A{1});
    bool raised = false;
    for (index_t v = 0; v < vectors; ++v) {
      if (needed[v].size() == 0) continue;
      const KeyRange keys{block.begin + needed[v].begin, block.begin + needed[v].end};
      const index_t lane = v * leaves_.width;
      A* s = memory_.s + needed[v].begin * group + lane;
      const QueryRow* rows = memory_.rows + g * group + lane;
      if constexpr (P::has_score || P::has_predicate) {
        apply_policies(s, keys, rows);
      }
      if (columns[v].all.begin > keys.begin || columns[v].all.end < keys.end) {
        hide(s, keys, rows);
      }
      const TileState<A> lanes{state.shift + lane, state.sum + lane, factor + lane};
      const TileChange change = leaves_.weights(s, keys.size(), lanes);
      if (change == TileChange::irregular) irregular_weights(s, keys.size(), lanes);
      raised = raised || change != TileChange::none;
    }
    if (raised) leaves_.rescale(state.o, memory_.channels, factor);
    for_each_part([&](index_t width, index_t v, KeyRange keys) {
      leaves_.accumulate[width - 1](
          memory_.v + keys.begin * leaves_.rows, memory_.panel, memory_.channels / leaves_.rows,
          memory_.s + keys.begin * group + v * leaves_.width, keys.size(), state.o + v * leaves_.width);
    });
    if (!values_are_finite_) accumulate_not_finite(g, block, state);
  }

  /// The user's part of a logit, lane by lane: hidden keys become -inf, scores and the multiplier are applied.
  void apply_policies(A* s, KeyRange keys, const QueryRow* rows) const {
    constexpr A hidden = -std::numeric_limits<A>::infinity();
    for (index_t lane = 0; lane < leaves_.width; ++lane) {
      const QueryRow& row = rows[lane];
      const A multiplier = static_cast<A>(row.multiplier * std::numbers::log2e);
      Key key{row.query, 0, query_position(policies_.mask, row.query), 0};
      const index_t last = std::min(keys.end, row.keys.end);
      for (key.index = std::max(keys.begin, row.keys.begin); key.index < last; ++key.index) {
        A& x = s[(key.index - keys.begin) * memory_.group + lane];
        if (!sees(policies_.mask, row.query, key.index)) {
          x = hidden;
        } else if constexpr (P::has_score) {
          key.key_position = key_position(policies_.mask, row.query, key.index);
          const A z = policies_.score(x, key);
          x = z == hidden ? hidden : z * multiplier;
        }
      }
    }
  }

  void hide(A* s, KeyRange keys, const QueryRow* rows) const {
    A* first = memory_.lanes + 2 * memory_.group;
    A* last = memory_.lanes + 3 * memory_.group;
    for (index_t lane = 0; lane < leaves_.width; ++lane) {
      first[lane] = static_cast<A>(std::clamp<index_t>(rows[lane].keys.begin - keys.begin, 0, key_block));
      last[lane] = static_cast<A>(std::clamp<index_t>(rows[lane].keys.end - keys.begin, 0, key_block));
    }
    leaves_.hide(s, keys.size(), first, last);
  }

  /// leaves.weights where that refuses: the lanes it cannot do are done in plain double, the others as ever.
  void irregular_weights(A* s, index_t keys, const TileState<A>& state) const {
    constexpr A hidden = -std::numeric_limits<A>::infinity();
    struct Lane {
      index_t index;
      A shift, sum, factor;
    };
    Lane apart[64];
    index_t count = 0;
    for (index_t lane = 0; lane < leaves_.width; ++lane) {
      A top = hidden;
      bool poisoned = false;
      for (index_t key = 0; key < keys; ++key) {
        const A x = s[key * memory_.group + lane];
        poisoned = poisoned || !(x < -hidden);
        top = std::max(top, x);
      }
      const A before = state.shift[lane], raised = std::max(before, std::rint(top));
      if (!poisoned && (raised == hidden || std::abs(raised) < largest_shift<A>)) continue;
      // NaN and +inf poison the query's sum for good.
      const A factor = poisoned ? A{1} : shift_factor(before, raised);
      double sum = 0;
      for (index_t key = 0; key < keys; ++key) {
        A& x = s[key * memory_.group + lane];
        const double distance = static_cast<double>(x) - static_cast<double>(raised);
        const A weight = poisoned || x == hidden ? A{0} : static_cast<A>(std::exp2(distance));
        memory_.apart[count * key_block + key] = weight;
        sum += static_cast<double>(weight);
        x = hidden;
      }
      apart[count++] = {
          lane, poisoned ? before : raised,
          poisoned ? std::numeric_limits<A>::quiet_NaN() : state.sum[lane] * factor + static_cast<A>(sum),
          factor};
      state.shift[lane] = hidden;
    }
    leaves_.weights(s, keys, state);
    for (index_t i = 0; i < count; ++i) {
      const Lane& lane = apart[i];
      state.shift[lane.index] = lane.shift;
      state.sum[lane.index] = lane.sum;
      state.factor[lane.index] = lane.factor;
      for (index_t key = 0; key < keys; ++key) {
        s[key * memory_.group + lane.index] = memory_.apart[i * key_block + key];
      }
    }
  }

  /// NaN and infinities in V, which load_block left out, for the queries that see them: a weight of 0 times a NaN that a
  /// query must not see would be NaN as well.
  void accumulate_not_finite(index_t g, KeyRange block, const GroupState<A>& state) const {
    for (index_t key = std::max(block.begin, seen_.begin); key < std::min(block.end, seen_.end); ++key) {
      for (index_t c = 0; c < problem_.value_width(); ++c) {
        const A value = static_cast<A>(problem_.keys.v(batch_, kv_head_, problem_.keys.row(key), c));
        if (std::isfinite(value)) continue;
        for (index_t lane = 0; lane < memory_.group; ++lane) {
          const QueryRow& row = memory_.rows[g * memory_.group + lane];
          if (key < row.keys.begin || key >= row.keys.end || !sees(policies_.mask, row.query, key)) continue;
          state.o[c * memory_.group + lane] += memory_.s[(key - block.begin) * memory_.group + lane] * value;
        }
      }
    }
  }

  const Problem<T, X>& problem_;
  const P& policies_;
  const TileLeaves<A>& leaves_;
  const Memory& memory_;
  index_t batch_ = 0, kv_head_ = 0, count_ = 0, groups_ = 0;
  KeyRange seen_{};  // of any query
  bool values_are_finite_ = true;
};

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
