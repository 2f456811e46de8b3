// The steps of attention's backward on one kv head: facts about its queries, pieces of queries × keys
// (block.hpp), sums of them, results.
//
//   dq = c·scale·dq̃      dc = scale·⟨q, dq̃⟩
//
// dc takes neither another pass over the keys nor a division by c, which may be 0. With a score,
// dq = scale·dq̃, and dc was summed up where the logits were at hand.
//
// lse need not be an integer, as the kernels' shift is: 2^(s - lse) = 2^(s - shift)·2^(shift - lse), and the
// second factor is multiplied into dout and delta.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "../../kernels/dot.hpp"
#include "../../kernels/rows.hpp"
#include "../load.hpp"
#include "../state.hpp"
#include "block.hpp"
#include "sums.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

template <class T>
class BackwardTask {
 public:
  using A = Compute<T>;
  using Memory = BackwardScratch<A>;

  BackwardTask(const BackwardProblem<T>& problem, const GradientVariant<A>& variant, const Memory& memory,
               const CallSums& sums)
      : problem_(problem),
        forward_(problem.forward),
        variant_(variant),
        kernels_(memory.kernels),
        gradient_kernels_(detail::kernels<PrefillBackwardKernels<A>>()),
        memory_(memory),
        piece_(variant, memory, problem.forward.width(), problem.forward.value_width(),
               problem.forward.keys.length(0)),
        sums_(sums),
        sums_in_place_(keys_have_one_sum()) {}

  /// The kv head that the other members are about, counted over batch entries, and where its sums are.
  void enter(index_t head, const HeadSums<T>& sums) {
    head_sums_ = sums;
    if (head == head_) return;
    head_ = head;
    batch_ = head / forward_.kv_heads();
    kv_head_ = head % forward_.kv_heads();
    loaded_queries_ = -1;
  }

  /// Facts about a block of queries; the sums over its next pieces become 0.
  void survey(index_t block) const {
    const index_t first = block * piece_queries, dv = forward_.value_width();
    const KeyRange stored = forward_.keys.stored(batch_);
    Column seen;
    const auto dot = detail::kernels<DotKernels<A>>().dot;
    const bool asked_once = variant_.shows_same_keys && forward_.group() == 1;
    QueryRow seen_by;
    QueryCursor<T, T> cursor(forward_, batch_, kv_head_, first);
    for (index_t row = first; row < first + queries_of(block); ++row, cursor.next()) {
      const index_t batch = (*cursor).batch, head = (*cursor).head, index = forward_.row_of(*cursor);
      if (row == first || !asked_once) seen_by = variant_.row(*cursor, stored);
      QueryFacts<A>& facts = head_sums_.facts[row] = {seen_by.keys, false, seen_by.multiplier};
      facts.lse = problem_.lse(batch, head, index);
      facts.attends = seen_by.n > 0 && facts.lse != -infinity;
      if (facts.lse == -infinity) facts.keys = {};
      if (seen_by.n > 0) {
        A *wide = memory_.staged, *other = memory_.staged + memory_.pitch;
        facts.delta = dot(widened(row_of(problem_.dout, batch, head, index), dv, wide),
                          widened(row_of(problem_.out, batch, head, index), dv, other), dv);
      }
      if (problem_.dlse.data_handle() != nullptr) facts.delta -= problem_.dlse(batch, head, index);
      seen.add(facts.keys);
      if (!sums_) continue;
      if (problem_.stage.first) std::fill_n(sums_of(*cursor), memory_.sums_of_row, 0.0);
      QueryReport& report = sums_.reports[place_of(*cursor)] = {seen_by.n, seen_by.position, 0};
      if (problem_.sinks.empty()) continue;
      const auto sink = static_cast<double>(problem_.sinks[static_cast<std::size_t>(head)]);
      const auto lse = static_cast<double>(facts.lse);
      const double term = sink_term(sink, problem_.scaled_sinks, seen_by.multiplier, seen_by.n > 0);
      if (term == -infinity) continue;
      // A sink that takes everything is equal to lse, also where both are +inf: its share is 1.
      const double dterm = -(term == lse ? 1 : std::exp(term - lse)) * static_cast<double>(facts.delta);
      report.dsink = problem_.scaled_sinks ? seen_by.multiplier * dterm : dterm;
      if (adds_sinks()) sums_of(*cursor)[0] += sink * dterm;
    }
    head_sums_.seen[block] = seen.any;
    std::fill_n(queries_sums(block), sums_in_use(block), A{0});
  }

  /// Copies a block of keys into rows, if need be, looks for NaN and infinities in K, and sets the sums over
  /// the block's next pieces to 0.
  void prepare_keys(index_t block) {
    const index_t first = block * piece_keys, count = keys_of(block), d = forward_.width();
    if (forward_.rows() > 0) {
      if (packs_keys(problem_, kernels_)) pack_keys(block);
      bool& finite = head_sums_.blocks_are_finite[block] = true;
      load_keys(block);
      finite = keys_.k_stride == d ? kernels_.all_finite(keys_.k, 0, 1, count * d)
                                   : kernels_.all_finite(keys_.k, keys_.k_stride, count, d);
      for (index_t i = 0; !finite && i < piece_keys; ++i) {
        head_sums_.keys_are_finite[first + i] =
            i >= count || kernels_.all_finite(keys_.k + i * keys_.k_stride, 0, 1, d);
      }
    }
    std::fill_n(dk_sums(first), in_passes(count) * memory_.d_pitch, A{0});
    std::fill_n(dv_sums(first), in_passes(count) * memory_.dv_pitch, A{0});
  }

  /// Adds what a block of queries and a block of keys give each other's gradients. After the last piece of a
  /// partial sum (pieces_of_sum), adds that to the whole sum: so this is to be called for pieces that no
  /// query sees, too.
  void attend(index_t queries, index_t keys) {
    if (has_piece(queries, keys)) {
      load_queries(queries);
      load_keys(keys);
      if (variant_.has_score) std::fill_n(memory_.sums, groups_ * memory_.group * memory_.sums_of_row, 0.0);
      piece_.attend(keys_, count_, queries_sums(queries));
      if (variant_.has_score && sums_) add_row_sums(queries);
    }
    const auto ends = [](index_t i, index_t count) { return (i + 1) % pieces_of_sum == 0 || i + 1 == count; };
    bool has_any = false;
    if (ends(keys, key_blocks(problem_))) {
      const index_t begin = keys / pieces_of_sum * pieces_of_sum;
      for (index_t j = begin; j <= keys; ++j) has_any |= has_piece(queries, j);
      const bool is_first = begin == 0 && problem_.stage.first;
      if (has_any || is_first) add_queries(queries, is_first, keys + 1 == key_blocks(problem_));
    }
    if (!sums_in_place_ && ends(queries, query_blocks(problem_))) {
      const index_t begin = queries / pieces_of_sum * pieces_of_sum;
      has_any = false;
      for (index_t i = begin; i <= queries; ++i) has_any |= has_piece(i, keys);
      if (has_any || begin == 0) add_keys(keys, begin == 0, queries + 1 == query_blocks(problem_));
    }
  }

  /// Turns sums into dq, and into dc where there is no score; with one, dc is summed up already.
  void finish_queries(index_t block) const {
    const index_t first = block * piece_queries, d = forward_.width();
    const auto multiply = detail::kernels<RowKernels<A>>().multiply;
    QueryCursor<T, T> cursor(forward_, batch_, kv_head_, first);
    for (index_t row = first; row < first + queries_of(block); ++row, cursor.next()) {
      const QueryFacts<A>& facts = head_sums_.facts[row];
      A* sums = head_sums_.query_sums(problem_, *cursor, row);
      if (problem_.keys() == 0 && problem_.stage.first) std::fill_n(sums, d, A{0});
      if (!problem_.stage.last) continue;
      if (sums_ && !variant_.has_score && facts.attends) {
        const A* q = load_query(forward_, variant_, *cursor, memory_.staged);
        sums_of(*cursor)[0] +=
            forward_.scale * static_cast<double>(detail::kernels<DotKernels<A>>().dot(q, sums, d));
      }
      if (facts.attends) {
        const double factor = variant_.has_score ? forward_.scale : forward_.scale * facts.multiplier;
        multiply(sums, d, static_cast<A>(factor), sums);
        if (forward_.has_rope()) {
          rotate(forward_.rope, sums, d, sums, d, 1, d, rope_position(forward_, variant_, *cursor), true);
        }
      }
      const Query& query = *cursor;
      narrow_to(row_of(problem_.dq, query.batch, query.head, forward_.row_of(query)), d, sums);
    }
  }

  /// Turns sums into dk and dv.
  void finish_keys(index_t block) const {
    if (forward_.rows() > 0 && !forward_.has_rope() && !HeadSums<T>::apart) return;  // they are there
    const Query query{batch_, kv_head_ * forward_.group(), 0, forward_.shape(batch_)};
    const index_t d = forward_.width();
    for_each_key(block, [&](index_t key) {
      A* dk = head_sums_.key_sums(problem_, batch_, kv_head_, key);
      if (forward_.rows() == 0) {
        std::fill_n(dk, d, A{0});
        std::fill_n(head_sums_.value_sums(problem_, batch_, kv_head_, key), forward_.value_width(), A{0});
      }
      if (forward_.has_rope() && forward_.rotate_keys && forward_.rows() > 0) {
        const index_t position =
            forward_.key_position + variant_.key_position(query, problem_.first_key() + key);
        rotate(forward_.rope, dk, d, dk, d, 1, d, position, true);
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
  index_t in_passes(index_t keys) const { return (keys + kernels_.rows - 1) / kernels_.rows * kernels_.rows; }
  index_t keys_of(index_t block) const { return std::min(piece_keys, problem_.keys() - block * piece_keys); }
  index_t place_of(const Query& query) const {
    return (query.batch * query.shape.heads + query.head) * forward_.q.extent(2) + forward_.row_of(query);
  }
  double* sums_of(const Query& query) const { return sums_.sums + place_of(query) * memory_.sums_of_row; }

  /// Whether the sinks' share of dc is this call's to add: once for all of its parts.
  bool adds_sinks() const {
    if (!problem_.scaled_sinks) return false;
    return problem_.stage.kept ? problem_.stage.first : problem_.first_key() == 0;
  }

  template <class F>
  void for_each_key(index_t block, const F& f) const {
    for (index_t i = 0; i < keys_of(block); ++i) f(block * piece_keys + i);
  }

  /// Whether a query of the block sees a key of the block.
  bool has_piece(index_t queries, index_t keys) const {
    const KeyRange& seen = head_sums_.seen[queries];
    const index_t first = problem_.first_key() + keys * piece_keys;
    return seen.begin < first + piece_keys && seen.end > first;
  }

  /// The sums over some pieces of a block of queries: [groups][d_pitch][group].
  A* queries_sums(index_t block) const { return head_sums_.dq + block * sums_of_block(); }
  index_t sums_of_block() const { return memory_.groups * memory_.group * memory_.d_pitch; }
  index_t sums_in_use(index_t block) const {
    return (queries_of(block) + memory_.group - 1) / memory_.group * memory_.group * memory_.d_pitch;
  }

  /// Whether sums over some pieces of queries are the sums over all of them, and results have their layout.
  bool keys_have_one_sum() const {
    return !HeadSums<T>::apart && query_blocks(problem_) <= pieces_of_sum &&
           problem_.keys() % kernels_.rows == 0 && forward_.width() == memory_.d_pitch &&
           forward_.value_width() == memory_.dv_pitch && problem_.dk.stride(2) == memory_.d_pitch &&
           problem_.dv.stride(2) == memory_.dv_pitch;
  }
  /// The sums over some pieces, from a key on: [keys][d_pitch], [keys][dv_pitch].
  A* dk_sums(index_t first) const {
    return sums_in_place_ ? head_sums_.key_sums(problem_, batch_, kv_head_, first)
                          : head_sums_.dk + first * memory_.d_pitch;
  }
  A* dv_sums(index_t first) const {
    return sums_in_place_ ? head_sums_.value_sums(problem_, batch_, kv_head_, first)
                          : head_sums_.dvalues + first * memory_.dv_pitch;
  }

  /// Points keys_ at a block of keys: where they lie or, if they were packed, at the copy.
  void load_keys(index_t block) {
    const index_t first = block * piece_keys, key = problem_.first_key() + first;
    keys_ = {.range = {key, key + keys_of(block)},
             .k = head_sums_.k + first * memory_.d_pitch,
             .k_stride = memory_.d_pitch,
             .v = head_sums_.v + first * memory_.dv_pitch,
             .v_stride = memory_.dv_pitch,
             .dk = dk_sums(first),
             .dv = dv_sums(first),
             .finite = head_sums_.blocks_are_finite[block],
             .are_finite = head_sums_.keys_are_finite + first};
    if constexpr (std::same_as<T, A>) {
      if (packs_keys(problem_, kernels_)) return;
      const KeyStretch<T> stretch = forward_.keys.stretch(batch_, kv_head_, key);
      keys_.k = stretch.k;
      keys_.k_stride = stretch.k_stride;
      keys_.v = stretch.v;
      keys_.v_stride = stretch.v_stride;
    }
  }

  /// Rows of K and V, filled up with 0 to whole vectors and whole passes.
  void pack_keys(index_t block) const {
    const index_t first = block * piece_keys, count = keys_of(block);
    A* k = head_sums_.k + first * memory_.d_pitch;
    A* v = head_sums_.v + first * memory_.dv_pitch;
    std::fill_n(k, in_passes(count) * memory_.d_pitch, A{0});
    std::fill_n(v, in_passes(count) * memory_.dv_pitch, A{0});
    for (index_t i = 0; i < count; ++i, k += memory_.d_pitch, v += memory_.dv_pitch) {
      const index_t at = problem_.first_key() + first + i;
      const KeyRange key{at, at + 1};
      detail::load_keys(forward_, variant_, batch_, kv_head_, key, k);
      load_values(forward_.keys, batch_, kv_head_, key, v);
    }
  }

  /// Queries and dout, in lanes and in rows.
  void load_queries(index_t block) {
    if (block == loaded_queries_) return;
    loaded_queries_ = block;
    const index_t first = block * piece_queries, group = memory_.group;
    count_ = queries_of(block);
    groups_ = (count_ + group - 1) / group;
    const index_t lanes = (count_ + kernels_.width - 1) / kernels_.width * kernels_.width;
    QueryCursor<T, T> cursor(forward_, batch_, kv_head_, first);
    for (index_t i = 0; i < lanes; ++i) {
      QueryRow& row = memory_.rows[i];
      if (i >= count_) {
        row = {memory_.rows[count_ - 1].query, {}, 0};  // a lane without a query sees nothing
      } else {
        const QueryFacts<A>& facts = head_sums_.facts[first + i];
        row = {*cursor, facts.keys, facts.multiplier};
        cursor.next();
      }
    }
    for (index_t i = 0; i < lanes; i += kernels_.width) {
      Column& column = memory_.columns[i / kernels_.width] = {};
      for (index_t lane = 0; lane < kernels_.width; ++lane) column.add(memory_.rows[i + lane].keys);
      load_lanes(i, first);
    }
    const auto are_finite = [&](index_t row, index_t rows) {
      return kernels_.all_finite(memory_.q_rows + row * memory_.d_pitch, 0, 1, rows * memory_.d_pitch) &&
             kernels_.all_finite(memory_.dout_rows + row * memory_.dv_pitch, 0, 1, rows * memory_.dv_pitch);
    };
    for (index_t g = 0; g < groups_; ++g) {
      const index_t end = std::min(lanes, (g + 1) * group);
      memory_.finite[g] = are_finite(g * group, end - g * group);
      for (index_t i = g * group; !memory_.finite[g] && i < end; ++i) {
        memory_.queries_are_finite[i] = are_finite(i, 1);
      }
    }
  }

  /// `width` queries and their dout, from row i on, into lanes and into rows. Rows of q are multiplied by what
  /// dk takes of them: scale·c or, with a score, scale. A query that sees nothing is 0.
  void load_lanes(index_t i, index_t first) {
    const index_t group = memory_.group, width = kernels_.width, d = forward_.width(),
                  dv = forward_.value_width();
    const index_t lanes = i / group * group * d + i % group, dout_lanes = i / group * group * dv + i % group;
    A *factor = memory_.lanes, *row_factor = memory_.lanes + width;
    A* q_rows = memory_.q_rows + i * memory_.d_pitch;
    A* dout_rows = memory_.dout_rows + i * memory_.dv_pitch;
    const auto is_empty = [&](index_t lane) {
      return i + lane >= count_ || memory_.rows[i + lane].keys.size() == 0;
    };
    for (index_t lane = 0; lane < width; ++lane) {
      const QueryRow& row = memory_.rows[i + lane];
      const double c = variant_.has_score ? 1 : row.multiplier;
      row_factor[lane] = static_cast<A>(forward_.scale * c);
      factor[lane] =
          static_cast<A>(forward_.scale * (variant_.has_score ? 1 : row.multiplier * std::numbers::log2e));
      A* scratch = memory_.staged + lane * memory_.pitch;
      if (is_empty(lane)) std::fill_n(scratch, d, A{0});
      memory_.in[lane] = is_empty(lane) ? scratch : load_query(forward_, variant_, row.query, scratch);
    }
    kernels_.transpose(memory_.in, width, d, factor, memory_.q + lanes, group);
    gradient_kernels_.scale_rows(memory_.in, width, d, row_factor, q_rows, memory_.d_pitch);
    for (index_t lane = 0; lane < width; ++lane) {
      A* scratch = memory_.staged + lane * memory_.pitch;
      memory_.in[lane] = scratch;
      factor[lane] = 1;
      if (is_empty(lane)) {
        std::fill_n(scratch, dv, A{0});
        normalise(i + lane, {});
      } else {
        const Query& query = memory_.rows[i + lane].query;
        memory_.in[lane] =
            widened(row_of(problem_.dout, query.batch, query.head, forward_.row_of(query)), dv, scratch);
        factor[lane] = normalise(i + lane, head_sums_.facts[first + i + lane]);
      }
    }
    gradient_kernels_.scale_rows(memory_.in, width, dv, factor, dout_rows, memory_.dv_pitch);
    for (index_t lane = 0; lane < width; ++lane) memory_.in[lane] = dout_rows + lane * memory_.dv_pitch;
    kernels_.transpose(memory_.in, width, dv, nullptr, memory_.dout + dout_lanes, group);
  }

  /// Sets shift and delta of row i, without facts such that its weights are 0. Returns what its dout is to be
  /// multiplied by.
  A normalise(index_t i, const QueryFacts<A>& facts) const {
    memory_.delta[i] = 0;
    memory_.shift[i] = largest_shift<A> / 2;
    memory_.base[i] = 0;
    memory_.regular[i] = true;
    if (facts.keys.size() == 0) return 1;
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
    return static_cast<A>(factor);
  }

  /// Adds what the score has summed up for each query of the piece to the sums of the call.
  void add_row_sums(index_t block) const {
    QueryCursor<T, T> cursor(forward_, batch_, kv_head_, block * piece_queries);
    for (index_t i = 0; i < count_; ++i, cursor.next()) {
      double* sums = sums_of(*cursor);
      for (index_t j = 0; j < memory_.sums_of_row; ++j) sums[j] += memory_.sums[i * memory_.sums_of_row + j];
    }
  }

  /// Adds the sums over some pieces to those over all, of which the first are copied, and sets them to 0 for
  /// the next.
  void add_queries(index_t block, bool is_first, bool is_last) const {
    const index_t first = block * piece_queries, count = queries_of(block), d = forward_.width(),
                  group = memory_.group;
    A* block_sums = queries_sums(block);
    const auto add_row = is_first ? gradient_kernels_.copy_rows : gradient_kernels_.add_rows;
    QueryCursor<T, T> cursor(forward_, batch_, kv_head_, first);
    for (index_t i = 0; i < count; i += kernels_.width) {
      const A* dq = block_sums + i / group * memory_.d_pitch * group + i % group;
      const index_t lanes = std::min(kernels_.width, count - i);
      for (index_t c = 0; c < d; c += kernels_.width) {
        const index_t channels = std::min(kernels_.width, d - c);
        for (index_t r = 0; r < channels; ++r) memory_.in[r] = dq + (c + r) * group;
        kernels_.transpose(memory_.in, channels, lanes, nullptr, memory_.staged + c, memory_.pitch);
      }
      for (index_t lane = 0; lane < lanes; ++lane, cursor.next()) {
        add_row(memory_.staged + lane * memory_.pitch, 0, 1, d,
                head_sums_.query_sums(problem_, *cursor, first + i + lane), 0);
      }
    }
    if (!is_last) std::fill_n(block_sums, sums_in_use(block), A{0});
  }

  void add_keys(index_t block, bool is_first, bool is_last) const {
    const index_t first = block * piece_keys, count = keys_of(block);
    const auto add_rows = is_first ? gradient_kernels_.copy_rows : gradient_kernels_.add_rows;
    const auto add = [&](A* sums, index_t pitch, index_t columns, A* all, index_t stride) {
      add_rows(sums + first * pitch, pitch, count, columns, all, stride);
      if (!is_last) std::fill_n(sums + first * pitch, count * pitch, A{0});
    };
    add(head_sums_.dk, memory_.d_pitch, forward_.width(),
        head_sums_.key_sums(problem_, batch_, kv_head_, first), head_sums_.key_stride(problem_.dk));
    add(head_sums_.dvalues, memory_.dv_pitch, forward_.value_width(),
        head_sums_.value_sums(problem_, batch_, kv_head_, first), head_sums_.key_stride(problem_.dv));
  }

  const BackwardProblem<T>& problem_;
  const Problem<T, T>& forward_;
  const GradientVariant<A>& variant_;
  const PrefillKernels<A>& kernels_;
  const PrefillBackwardKernels<A>& gradient_kernels_;
  const Memory& memory_;
  const BackwardBlock<A> piece_;
  CallSums sums_;  // null where nothing is learnt
  const bool sums_in_place_;
  HeadSums<T> head_sums_{};
  index_t head_ = -1, batch_ = 0, kv_head_ = 0;
  index_t loaded_queries_ = -1;
  index_t count_ = 0, groups_ = 0;
  BlockKeys<A> keys_{};
};

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
