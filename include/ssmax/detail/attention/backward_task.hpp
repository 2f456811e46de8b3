// The steps of attention's backward on one kv head: facts about its queries, pieces of queries × keys, results.
//
//   p = 2^(s - lse), the forward's weights again, from the same products in the same order
//   u = p·(dout·vᵀ - delta),  delta = ⟨dout, out⟩ - dlse      the gradient of c·z
//   dq̃ += u·k    dk += uᵀ·(c·scale·q)    dv += pᵀ·dout         then dq = c·scale·dq̃, and dc = scale·⟨q, dq̃⟩: no further
//                                                             pass, and no division by a c that may be 0
//
// Behind a score, u is the gradient of z itself (times c·score'), the products hold the scale alone, and dc is summed up
// where the logits are at hand.
//
// lse need not be an integer: 2^(s - lse) = 2^(s - shift)·2^(shift - lse), and the second factor goes into dout and delta.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "backward_problem.hpp"
#include "rectangles.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

template <class T>
class BackwardTask {
 public:
  using A = Compute<T>;
  using Memory = BackwardMemory<A>;

  BackwardTask(const BackwardProblem<T>& problem, const GradientPolicies<A>& policies, const Memory& memory,
               double* sums)
      : problem_(problem),
        forward_(problem.forward),
        policies_(policies),
        leaves_(memory.leaves),
        gradient_leaves_(detail::leaves<TileGradientLeaves<A>>()),
        memory_(memory),
        sums_(sums) {}

  /// The kv head that the other members are about, counted over batch entries, and where its sums are.
  void enter(index_t head, const HeadSums<T>& sums) {
    head_sums_ = sums;
    if (head == head_) return;
    head_ = head;
    batch_ = head / forward_.kv_heads();
    kv_head_ = head % forward_.kv_heads();
    loaded_keys_ = -1;
  }

  /// Facts about a block of queries; their sums become 0.
  void survey(index_t block) const {
    const index_t first = block * piece_queries, d = forward_.width(), dv = forward_.value_width();
    const KeyRange held = forward_.keys.held(batch_);
    Column seen;
    QueryCursor<T, T> cursor(forward_, batch_, kv_head_, first);
    for (index_t row = first; row < first + queries_of(block); ++row, cursor.next()) {
      const auto& [batch, head, index, shape, shift] = *cursor;
      const QueryRow seen_by = policies_.row(*cursor, held);
      QueryFacts<A>& facts = head_sums_.facts[row] = {seen_by.keys, seen_by.multiplier};
      facts.lse = problem_.lse(batch, head, index);
      if (facts.lse == -infinity) facts.keys = {};
      if (seen_by.keys.size() > 0) {
        A *wide = memory_.staged, *other = memory_.staged + memory_.pitch;
        facts.delta = detail::leaves<GradientLeaves<A>>().dot(
            widened(row_of(problem_.dout, batch, head, index), dv, wide),
            widened(row_of(problem_.out, batch, head, index), dv, other), dv);
      }
      if (problem_.dlse.data_handle() != nullptr) facts.delta -= problem_.dlse(batch, head, index);
      seen.add(facts.keys);
      std::fill_n(head_sums_.query_sums(problem_, *cursor, row), d, A{0});
      if (sums_ == nullptr) continue;
      double* sums = sums_of(*cursor);
      std::fill_n(sums, memory_.sums_of_row, 0.0);
      if (problem_.dsinks.empty() || facts.lse == -infinity) continue;
      const A sink = problem_.sinks[static_cast<std::size_t>(head)];
      sums[memory_.sums_of_row - 1] = -std::exp(static_cast<double>(sink) - static_cast<double>(facts.lse)) *
                                      static_cast<double>(facts.delta);
    }
    head_sums_.seen[block] = seen.any;
  }

  /// The sums of a block of keys become 0.
  void clear_keys(index_t block) const {
    for_each_key(block, [&](index_t key) {
      std::fill_n(head_sums_.key_sums(problem_, batch_, kv_head_, key), forward_.width(), A{0});
      std::fill_n(head_sums_.value_sums(problem_, batch_, kv_head_, key), forward_.value_width(), A{0});
    });
  }

  /// Whether a query of the block sees a key of the block.
  bool has_piece(index_t queries, index_t keys) const {
    const KeyRange& seen = head_sums_.seen[queries];
    return seen.begin < (keys + 1) * piece_keys && seen.end > keys * piece_keys;
  }

  /// Adds what a block of queries and a block of keys give each other.
  void attend(index_t queries, index_t keys) {
    load_keys(keys);
    load_queries(queries);
    const index_t first = keys * piece_keys, count = keys_of(keys);
    std::fill_n(memory_.dk, count_in_passes(count) * memory_.d_pitch, A{0});
    std::fill_n(memory_.dv, count_in_passes(count) * memory_.dv_pitch, A{0});
    for (index_t at = 0; at < count; at += gradient_block) {
      const KeyRange block{first + at, first + std::min(at + gradient_block, count)};
      for (index_t g = 0; g < groups_; ++g) attend_block(g, block, at);
    }
    add_queries(queries);
    gradient_leaves_.add_rows(memory_.dk, memory_.d_pitch, count, forward_.width(),
                              head_sums_.key_sums(problem_, batch_, kv_head_, first),
                              head_sums_.key_stride(problem_.dk));
    gradient_leaves_.add_rows(memory_.dv, memory_.dv_pitch, count, forward_.value_width(),
                              head_sums_.value_sums(problem_, batch_, kv_head_, first),
                              head_sums_.key_stride(problem_.dv));
  }

  /// From sums to dq, and to dc where no score has seen to that.
  void finish_queries(index_t block) const {
    const index_t first = block * piece_queries, d = forward_.width();
    QueryCursor<T, T> cursor(forward_, batch_, kv_head_, first);
    for (index_t row = first; row < first + queries_of(block); ++row, cursor.next()) {
      const QueryFacts<A>& facts = head_sums_.facts[row];
      A* sums = head_sums_.query_sums(problem_, *cursor, row);
      const bool has_keys = facts.keys.size() > 0;
      if (sums_ != nullptr && !policies_.has_score && has_keys) {
        const A* q = load_query(forward_, policies_, *cursor, memory_.staged);
        sums_of(*cursor)[0] =
            forward_.scale * static_cast<double>(detail::leaves<GradientLeaves<A>>().dot(q, sums, d));
      }
      if (has_keys) {
        const double factor = policies_.has_score ? forward_.scale : forward_.scale * facts.multiplier;
        detail::leaves<RowLeaves<A>>().multiply(sums, d, static_cast<A>(factor), sums);
        if (forward_.rope != nullptr) {
          forward_.rope->rotate(sums, d, sums, d, 1, d, rope_position(forward_, policies_, *cursor), true);
        }
      }
      const auto& [batch, head, index, shape, shift] = *cursor;
      narrow_to(row_of(problem_.dq, batch, head, index), d, sums);
    }
  }

  /// From sums to dk and dv.
  void finish_keys(index_t block) const {
    const Query query{batch_, kv_head_ * forward_.group(), 0, forward_.shape(batch_)};
    const index_t d = forward_.width();
    for_each_key(block, [&](index_t key) {
      A* dk = head_sums_.key_sums(problem_, batch_, kv_head_, key);
      if (forward_.rope != nullptr && query.shape.queries > 0) {
        const index_t position = forward_.key_position + policies_.key_position(query, key);
        forward_.rope->rotate(dk, d, dk, d, 1, d, position, true);
      }
      narrow_to(row_of(problem_.dk, batch_, kv_head_, key), d, dk);
      narrow_to(row_of(problem_.dv, batch_, kv_head_, key), forward_.value_width(),
                head_sums_.value_sums(problem_, batch_, kv_head_, key));
    });
  }

 private:
  static constexpr A infinity = std::numeric_limits<A>::infinity();

  index_t queries_of(index_t block) const {
    return std::min(piece_queries, forward_.rows() - block * piece_queries);
  }
  index_t keys_of(index_t block) const { return std::min(piece_keys, problem_.keys() - block * piece_keys); }
  index_t count_in_passes(index_t keys) const {
    return (keys + leaves_.rows - 1) / leaves_.rows * leaves_.rows;
  }
  double* sums_of(const Query& query) const {
    const QueryShape& shape = query.shape;
    const index_t row = (query.batch * shape.heads + query.head) * shape.queries + query.index;
    return sums_ + row * memory_.sums_of_row;
  }

  template <class F>
  void for_each_key(index_t block, const F& f) const {
    for (index_t i = 0; i < keys_of(block); ++i) f(block * piece_keys + i);
  }

  /// Rows of K and V, filled up with 0 to whole vectors and whole passes.
  void load_keys(index_t block) {
    if (block == loaded_keys_) return;
    loaded_keys_ = block;
    const index_t first = block * piece_keys, count = keys_of(block), padded = count_in_passes(count);
    const index_t d = forward_.width(), dv = forward_.value_width();
    std::fill_n(memory_.k, padded * memory_.d_pitch, A{0});
    std::fill_n(memory_.v, padded * memory_.dv_pitch, A{0});
    for (index_t i = 0; i < count; ++i) {
      A* k = memory_.k + i * memory_.d_pitch;
      detail::load_keys(forward_, policies_, batch_, kv_head_, {first + i, first + i + 1}, k);
      const T* in = row_of(forward_.keys.v, batch_, kv_head_, first + i);
      A* v = memory_.v + i * memory_.dv_pitch;
      const A* wide = widened(in, dv, v);
      if (wide != v) std::copy_n(wide, dv, v);
    }
    keys_are_finite_ = leaves_.all_finite(memory_.k, memory_.d_pitch, count, d);
  }

  /// Queries and dout, in lanes and in rows.
  void load_queries(index_t block) {
    const index_t first = block * piece_queries, group = memory_.group;
    count_ = queries_of(block);
    groups_ = (count_ + group - 1) / group;
    QueryCursor<T, T> cursor(forward_, batch_, kv_head_, first);
    for (index_t i = 0; i < groups_ * group; ++i) {
      QueryRow& row = memory_.rows[i];
      if (i >= count_) {
        row = memory_.rows[count_ - 1];
      } else {
        const QueryFacts<A>& facts = head_sums_.facts[first + i];
        row = {*cursor, facts.keys, facts.multiplier};
        cursor.next();
      }
      load_query_into_rows(i, first);
    }
    for (index_t i = 0; i < groups_ * group; i += leaves_.width) {
      Column& column = memory_.columns[i / leaves_.width] = {};
      for (index_t lane = 0; lane < leaves_.width; ++lane) column.add(memory_.rows[i + lane].keys);
      load_lanes(i);
    }
    for (index_t g = 0; g < groups_; ++g) {
      memory_.finite[g] = leaves_.all_finite(memory_.q_rows + g * group * memory_.d_pitch, memory_.d_pitch,
                                             group, forward_.width()) &&
                          leaves_.all_finite(memory_.dout_rows + g * group * memory_.dv_pitch,
                                             memory_.dv_pitch, group, forward_.value_width());
    }
    std::fill_n(memory_.dq, groups_ * memory_.d_pitch * group, A{0});
    std::fill_n(memory_.sums, groups_ * group * memory_.sums_of_row, 0.0);
  }

  /// Lane i: the rows of q and dout, which lanes are then made of.
  void load_query_into_rows(index_t i, index_t first) {
    const index_t d = forward_.width(), dv = forward_.value_width();
    A* q = memory_.q_rows + i * memory_.d_pitch;
    A* dout = memory_.dout_rows + i * memory_.dv_pitch;
    std::fill_n(q, memory_.d_pitch, A{0});
    std::fill_n(dout, memory_.dv_pitch, A{0});
    memory_.delta[i] = 0;
    memory_.shift[i] = largest_shift<A> / 2;  // weights of 0
    memory_.base[i] = 0;
    memory_.regular[i] = true;
    const QueryRow& row = memory_.rows[i];
    if (i >= count_ || row.keys.size() == 0) return;
    const QueryFacts<A>& facts = head_sums_.facts[first + i];
    const A* wide = load_query(forward_, policies_, row.query, q);
    if (wide != q) std::copy_n(wide, d, q);
    const double lse = static_cast<double>(facts.lse) * std::numbers::log2e;
    const double shift = std::rint(lse);
    double factor = 1;
    memory_.regular[i] = std::abs(shift) < static_cast<double>(largest_shift<A>);
    memory_.base[i] = lse;
    if (memory_.regular[i]) {
      memory_.shift[i] = static_cast<A>(shift);
      factor = std::exp2(shift - lse);
    }
    memory_.delta[i] = static_cast<A>(factor * static_cast<double>(facts.delta));
    const T* in = row_of(problem_.dout, row.query.batch, row.query.head, row.query.index);
    detail::leaves<RowLeaves<A>>().multiply(widened(in, dv, dout), dv, static_cast<A>(factor), dout);
  }

  /// A vector of lanes. Then the rows of q become what dk takes of them.
  void load_lanes(index_t i) {
    const index_t group = memory_.group, d = forward_.width(), dv = forward_.value_width();
    const index_t g = i / group, lane_of_group = i % group;
    A* factor = memory_.lanes;
    for (index_t lane = 0; lane < leaves_.width; ++lane) {
      memory_.in[lane] = memory_.q_rows + (i + lane) * memory_.d_pitch;
      const double c = policies_.has_score ? 1 : memory_.rows[i + lane].multiplier * std::numbers::log2e;
      factor[lane] = static_cast<A>(forward_.scale * c);
    }
    leaves_.transpose(memory_.in, leaves_.width, d, factor, memory_.q + g * d * group + lane_of_group, group);
    for (index_t lane = 0; lane < leaves_.width; ++lane) {
      A* q = memory_.q_rows + (i + lane) * memory_.d_pitch;
      const double c = policies_.has_score ? 1 : memory_.rows[i + lane].multiplier;
      detail::leaves<RowLeaves<A>>().multiply(q, d, static_cast<A>(forward_.scale * c), q);
      memory_.in[lane] = memory_.dout_rows + (i + lane) * memory_.dv_pitch;
    }
    leaves_.transpose(memory_.in, leaves_.width, dv, nullptr, memory_.dout + g * dv * group + lane_of_group,
                      group);
  }

  /// A group of queries against a block of keys, which lies at row `at` of the piece's.
  void attend_block(index_t g, KeyRange block, index_t at) {
    const Column* columns = memory_.columns + g * tile_vectors;
    const index_t group = memory_.group, width = leaves_.width, d = forward_.width(),
                  dv = forward_.value_width();
    const NeededKeys needed(columns, count_ - g * group, width, block, leaves_.rows);
    const A* k = memory_.k + at * memory_.d_pitch;
    const A* v = memory_.v + at * memory_.dv_pitch;
    const auto for_each_part = [&](const auto& f) { needed.for_each_rectangle(gradient_block, f); };
    for_each_part([&](index_t vectors, index_t vector, KeyRange keys) {
      const index_t lane = vector * width;
      leaves_.logits[vectors - 1](k + keys.begin * memory_.d_pitch, memory_.d_pitch, d, keys.size(),
                                  memory_.q + g * d * group + lane, memory_.s + keys.begin * group + lane);
      leaves_.logits[vectors - 1](v + keys.begin * memory_.dv_pitch, memory_.dv_pitch, dv, keys.size(),
                                  memory_.dout + g * dv * group + lane,
                                  memory_.u + keys.begin * group + lane);
    });
    for (index_t vector = 0; vector < needed.vectors; ++vector) {
      const KeyRange& part = needed.of[vector];
      if (part.size() == 0) continue;
      form_gradients(g * group + vector * width, {block.begin + part.begin, block.begin + part.end},
                     part.begin * group + vector * width, columns[vector]);
    }
    if (!memory_.finite[g] || !keys_are_finite_) return add_apart(g, needed, at);
    for_each_part([&](index_t vectors, index_t vector, KeyRange keys) {
      const index_t lane = vector * width, tile = keys.begin * group + lane, row = at + keys.begin;
      gradient_leaves_.add_product(memory_.s + tile, vectors * width, keys.size(),
                                   memory_.dout_rows + (g * group + lane) * memory_.dv_pitch,
                                   memory_.dv_pitch, memory_.dv + row * memory_.dv_pitch);
      gradient_leaves_.add_product(memory_.u + tile, vectors * width, keys.size(),
                                   memory_.q_rows + (g * group + lane) * memory_.d_pitch, memory_.d_pitch,
                                   memory_.dk + row * memory_.d_pitch);
      leaves_.accumulate[vectors - 1](memory_.k + row * memory_.d_pitch, memory_.d_pitch, leaves_.rows,
                                      (d + leaves_.rows - 1) / leaves_.rows, memory_.u + tile, keys.size(),
                                      memory_.dq + g * memory_.d_pitch * group + lane);
    });
  }

  /// One vector of queries, lanes from `lane` on, whose tiles begin at `tile`: s becomes weights, u gradients.
  void form_gradients(index_t lane, KeyRange keys, index_t tile, const Column& column) {
    A *s = memory_.s + tile, *u = memory_.u + tile, *z = memory_.z + tile, *slope = memory_.slope + tile;
    const QueryRow* rows = memory_.rows + lane;
    const TileColumn<A> logits{s, keys, rows, problem_.keys()};
    if (policies_.has_score) {
      policies_.apply(logits, z, slope, memory_);
    } else if (policies_.has_predicate) {
      policies_.apply(logits, memory_);
    }
    if (column.hides(keys)) hide_keys(memory_, s, keys, rows);
    const bool regular =
        std::all_of(memory_.regular + lane, memory_.regular + lane + leaves_.width, [](bool r) { return r; });
    if (regular) {
      gradient_leaves_.gradients(s, u, keys.size(), memory_.shift + lane, memory_.delta + lane);
    } else {
      irregular_gradients(lane, keys.size(), s, u);
    }
    if (policies_.has_score) {
      const index_t stride = memory_.sums_of_row;
      policies_.differentiate(logits, {u, z, slope, memory_.sums + lane * stride, stride}, memory_);
    }
  }

  /// The same for lanes whose lse is NaN or infinite, or too large for an integer: these are done in plain double, the
  /// others as ever.
  void irregular_gradients(index_t lane, index_t keys, A* s, A* u) const {
    const index_t group = memory_.group, width = leaves_.width;
    A *weights = memory_.apart, *gradients = memory_.apart + width * key_block;
    for (index_t i = 0; i < width; ++i) {
      if (memory_.regular[lane + i]) continue;
      for (index_t key = 0; key < keys; ++key) {
        A& x = s[key * group + i];
        const double w = x == -infinity ? 0 : std::exp2(static_cast<double>(x) - memory_.base[lane + i]);
        weights[i * key_block + key] = static_cast<A>(w);
        gradients[i * key_block + key] =
            w == 0 ? A{0} : static_cast<A>(w) * (u[key * group + i] - memory_.delta[lane + i]);
        x = -infinity;
      }
    }
    gradient_leaves_.gradients(s, u, keys, memory_.shift + lane, memory_.delta + lane);
    for (index_t i = 0; i < width; ++i) {
      if (memory_.regular[lane + i]) continue;
      for (index_t key = 0; key < keys; ++key) {
        s[key * group + i] = weights[i * key_block + key];
        u[key * group + i] = gradients[i * key_block + key];
      }
    }
  }

  /// The three sums where q, dout or k are not finite: 0 times that must stay 0 for keys that a query does not see.
  void add_apart(index_t g, const NeededKeys& needed, index_t at) {
    const index_t group = memory_.group, d = forward_.width(), dv = forward_.value_width();
    for (index_t lane = 0; lane < std::min(group, count_ - g * group); ++lane) {
      const KeyRange& keys = needed.of[lane / leaves_.width];
      const A* q = memory_.q_rows + (g * group + lane) * memory_.d_pitch;
      const A* dout = memory_.dout_rows + (g * group + lane) * memory_.dv_pitch;
      A* dq = memory_.dq + g * memory_.d_pitch * group + lane;
      for (index_t key = keys.begin; key < keys.end; ++key) {
        const A p = memory_.s[key * group + lane], u = memory_.u[key * group + lane];
        const index_t row = at + key;
        for (index_t c = 0; p != 0 && c < dv; ++c) memory_.dv[row * memory_.dv_pitch + c] += p * dout[c];
        for (index_t c = 0; u != 0 && c < d; ++c) {
          memory_.dk[row * memory_.d_pitch + c] += u * q[c];
          dq[c * group] += u * memory_.k[row * memory_.d_pitch + c];
        }
      }
    }
  }

  /// Adds the piece's dq̃, and its sums, to those of the queries.
  void add_queries(index_t block) const {
    const index_t first = block * piece_queries, d = forward_.width(), group = memory_.group;
    QueryCursor<T, T> cursor(forward_, batch_, kv_head_, first);
    for (index_t i = 0; i < count_; i += leaves_.width) {
      const A* dq = memory_.dq + i / group * memory_.d_pitch * group + i % group;
      const index_t lanes = std::min(leaves_.width, count_ - i);
      for (index_t c = 0; c < d; c += leaves_.width) {
        const index_t channels = std::min(leaves_.width, d - c);
        for (index_t r = 0; r < channels; ++r) memory_.in[r] = dq + (c + r) * group;
        leaves_.transpose(memory_.in, channels, lanes, nullptr, memory_.staged + c, memory_.pitch);
      }
      for (index_t lane = 0; lane < lanes; ++lane, cursor.next()) {
        gradient_leaves_.add_rows(memory_.staged + lane * memory_.pitch, 0, 1, d,
                                  head_sums_.query_sums(problem_, *cursor, first + i + lane), 0);
        if (sums_ == nullptr || !policies_.has_score) continue;
        double* sums = sums_of(*cursor);
        for (index_t j = 0; j < memory_.sums_of_row; ++j) {
          sums[j] += memory_.sums[(i + lane) * memory_.sums_of_row + j];
        }
      }
    }
  }

  const BackwardProblem<T>& problem_;
  const Problem<T, T>& forward_;
  const GradientPolicies<A>& policies_;
  const TileLeaves<A>& leaves_;
  const TileGradientLeaves<A>& gradient_leaves_;
  const Memory& memory_;
  double* sums_;  // of every query of the call, or null
  HeadSums<T> head_sums_{};
  index_t head_ = -1, batch_ = 0, kv_head_ = 0;
  index_t loaded_keys_ = -1;
  index_t count_ = 0, groups_ = 0;
  bool keys_are_finite_ = true;
};

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
