// Queries and keys of a piece of attention's backward on their way into its products (block.hpp). Queries and dout
// come in lanes, one query per lane of a vector, and in rows; keys are copied into rows where they cannot be read
// in place.
//
// lse need not be an integer, as the kernels' shift is: 2^(s - lse) = 2^(s - shift)·2^(shift - lse), and the
// second factor is multiplied into dout and delta.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "../../kernels/prefill_backward.hpp"
#include "../call/backward_problem.hpp"
#include "../call/gradient_variant.hpp"
#include "../keys/load.hpp"
#include "../tile/state.hpp"
#include "scratch.hpp"

SSMAX_BEGIN_DETAIL

/// Who the queries of a block are and which keys they see, one vector after the other; `facts` are those of the
/// first query. Returns how many lanes that takes. Lanes of the last vector without a query see nothing: hides_rest
/// says whether keys are hidden from them; if not, what they give is to be left out of every sum.
template <class T, class E, class A>
index_t list_queries(const BackwardScratch<A, E>& memory, QueryCursor<T, T> cursor, index_t count,
                     const QueryFacts<A>* facts, bool hides_rest) {
  const index_t width = memory.kernels.width, lanes = (count + width - 1) / width * width;
  for (index_t i = 0; i < lanes; ++i) {
    if (i >= count) {
      memory.rows[i] = {memory.rows[count - 1].query, {}, 0};
    } else {
      memory.rows[i] = {*cursor, facts[i].keys, facts[i].multiplier};
      cursor.next();
    }
  }
  for (index_t i = 0; i < lanes; i += width) {
    Column& column = memory.columns[i / width] = {};
    const index_t real = hides_rest ? width : std::min(width, count - i);
    for (index_t lane = 0; lane < real; ++lane) column.add(memory.rows[i + lane].keys);
  }
  return lanes;
}

/// Looks for NaN and infinities in the rows of q and dout.
template <class A, class E>
void find_nonfinite_queries(const BackwardScratch<A, E>& memory, index_t lanes) {
  const auto are_finite = [&](const E* rows, index_t pitch, index_t row, index_t count) {
    return memory.products.all_finite(rows + row * pitch, 0, 1, count * pitch);
  };
  const auto both_are_finite = [&](index_t row, index_t count) {
    return are_finite(memory.q_rows, memory.d_pitch, row, count) &&
           are_finite(memory.dout_rows, memory.dv_pitch, row, count);
  };
  const index_t group = memory.group;
  for (index_t begin = 0; begin < lanes; begin += group) {
    const index_t end = std::min(lanes, begin + group);
    bool& finite = memory.finite[begin / group] = both_are_finite(begin, end - begin);
    for (index_t i = begin; !finite && i < end; ++i) memory.queries_are_finite[i] = both_are_finite(i, 1);
  }
}

/// Sets lse and shift of lane i or, where it sees nothing, a shift that makes its weights 0. Returns whether
/// the kernels take the shift for lse, so that 2^(shift - lse) is left to the caller.
template <class A, class E>
bool set_shift(const BackwardScratch<A, E>& memory, index_t i, const QueryFacts<A>& facts) {
  memory.shift[i] = largest_shift<A> / 2;
  memory.base[i] = 0;
  memory.regular[i] = true;
  if (facts.keys.size() == 0) return false;
  const double lse = static_cast<double>(facts.lse) * std::numbers::log2e;
  const double shift = std::rint(lse);
  memory.base[i] = lse;
  memory.regular[i] = std::abs(shift) < static_cast<double>(largest_shift<A>);
  if (memory.regular[i]) memory.shift[i] = static_cast<A>(shift);
  return memory.regular[i];
}

/// Loads for BackwardBlock, in A. A query that sees nothing is 0.
template <class T>
class BackwardLoader {
 public:
  using A = Compute<T>;

  BackwardLoader(const BackwardProblem<T>& problem, const GradientVariant<A>& variant,
                 const BackwardScratch<A>& memory)
      : problem_(problem),
        forward_(problem.forward),
        variant_(variant),
        kernels_(memory.kernels),
        gradient_kernels_(detail::kernels<PrefillBackwardKernels<A>>()),
        memory_(memory) {}

  /// `count` queries from the cursor on, and their dout; `facts` are those of the first.
  void load_queries(const QueryCursor<T, T>& cursor, index_t count, const QueryFacts<A>* facts) const {
    const index_t lanes = list_queries(memory_, cursor, count, facts, variant_.has_score);
    for (index_t i = 0; i < lanes; i += kernels_.width) {
      load_q(i);
      load_dout(i, facts);
    }
    find_nonfinite_queries(memory_, lanes);
  }

  /// Copies a key into rows of K and V.
  void load_key(index_t batch, index_t kv_head, index_t key, A* k, A* v) const {
    load_keys(forward_, variant_, batch, kv_head, {key, key + 1}, k);
    load_values(forward_.keys, batch, kv_head, {key, key + 1}, v);
  }

 private:
  bool sees_nothing(index_t i) const { return memory_.rows[i].keys.size() == 0; }

  /// A vector of queries from lane i on. Rows of q are multiplied by what dk takes of them: scale·c or, with a
  /// score, scale.
  void load_q(index_t i) const {
    const index_t group = memory_.group, width = kernels_.width, d = forward_.width();
    A *factor = memory_.lanes, *row_factor = memory_.lanes + width;
    for (index_t lane = 0; lane < width; ++lane) {
      const QueryRow& row = memory_.rows[i + lane];
      const double c = variant_.has_score ? 1 : row.multiplier;
      row_factor[lane] = static_cast<A>(forward_.scale * c);
      factor[lane] =
          static_cast<A>(forward_.scale * (variant_.has_score ? 1 : row.multiplier * std::numbers::log2e));
      A* scratch = memory_.staged + lane * memory_.pitch;
      if (sees_nothing(i + lane)) std::fill_n(scratch, d, A{0});
      memory_.in[lane] =
          sees_nothing(i + lane) ? scratch : load_query(forward_, variant_, row.query, scratch);
    }
    kernels_.transpose(memory_.in, width, d, factor, memory_.q + i / group * group * d + i % group, group);
    gradient_kernels_.scale_rows(memory_.in, width, d, row_factor, memory_.q_rows + i * memory_.d_pitch,
                                 memory_.d_pitch);
  }

  /// Their dout, with shift and delta of each.
  void load_dout(index_t i, const QueryFacts<A>* facts) const {
    const index_t group = memory_.group, width = kernels_.width, dv = forward_.value_width();
    A* factor = memory_.lanes;
    A* rows = memory_.dout_rows + i * memory_.dv_pitch;
    for (index_t lane = 0; lane < width; ++lane) {
      A* scratch = memory_.staged + lane * memory_.pitch;
      if (sees_nothing(i + lane)) {
        std::fill_n(scratch, dv, A{0});
        memory_.in[lane] = scratch;
        factor[lane] = normalise(i + lane, {});
      } else {
        const Query& query = memory_.rows[i + lane].query;
        memory_.in[lane] =
            widened(row_of(problem_.dout, query.batch, query.head, forward_.row_of(query)), dv, scratch);
        factor[lane] = normalise(i + lane, facts[i + lane]);
      }
    }
    gradient_kernels_.scale_rows(memory_.in, width, dv, factor, rows, memory_.dv_pitch);
    for (index_t lane = 0; lane < width; ++lane) memory_.in[lane] = rows + lane * memory_.dv_pitch;
    kernels_.transpose(memory_.in, width, dv, nullptr, memory_.dout + i / group * group * dv + i % group,
                       group);
  }

  /// Sets shift and delta of lane i. Returns what its dout is to be multiplied by.
  A normalise(index_t i, const QueryFacts<A>& facts) const {
    const bool shifted = set_shift(memory_, i, facts);
    const double factor = shifted ? std::exp2(static_cast<double>(memory_.shift[i]) - memory_.base[i]) : 1;
    memory_.delta[i] = static_cast<A>(factor * static_cast<double>(facts.delta));
    return static_cast<A>(factor);
  }

  const BackwardProblem<T>& problem_;
  const Problem<T, T>& forward_;
  const GradientVariant<A>& variant_;
  const PrefillKernels<A>& kernels_;
  const PrefillBackwardKernels<A>& gradient_kernels_;
  const BackwardScratch<A>& memory_;
};

SSMAX_END
