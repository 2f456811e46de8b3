// Loads queries of the backward pass for its products (block.hpp), and packs keys. q and dout are loaded twice: in
// lanes, one query per lane of a vector, and in rows.
//
// The shift of the kernels is an integer, lse is not: 2^(s - lse) = 2^(s - shift)·2^(shift - lse). In float and
// double, dout and delta are multiplied by the second factor. The bf16 path subtracts lse - shift from the logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "../../kernels/prefill_backward.hpp"
#include "../../rows/state.hpp"
#include "../operands/finite.hpp"
#include "../terms/backward_problem.hpp"
#include "../terms/variant.hpp"
#include "../tile/queries.hpp"
#include "scratch.hpp"

SSMAX_BEGIN_DETAIL

template <class Compute, class Operand>
class BackwardLoader {
 public:
  BackwardLoader(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
                 const BackwardScratch<Compute, Operand>& memory)
      : problem_(problem),
        forward_(problem.forward),
        variant_(variant),
        memory_(memory),
        multipliers_(problem.forward.scale, variant) {}

  /// Loads `count` queries from the cursor on, and their dout. `facts` points at the facts of the first query. A
  /// query without a visible key is loaded as 0.
  void load_queries(QueryCursor cursor, index_t count, const QueryFacts<Compute>* facts) const {
    const UnusedLanes unused =
        Op::is_bf16 || multipliers_.has_score ? UnusedLanes::empty : UnusedLanes::left_out;
    const index_t lanes = list_queries(memory_, count, unused, [&](index_t i) {
      const QueryRow row{.query = *cursor,
                         .keys = facts[i].keys,
                         .multiplier = facts[i].multiplier,
                         .sequence = cursor.sequence()};
      cursor.next();
      return row;
    });
    list_runs<Compute>(variant_, memory_, lanes);
    for (index_t i = 0; i < lanes; i += memory_.kernels.width) {
      load_q(i);
      load_dout(i, facts);
    }
    find_nonfinite_queries(lanes);
    if constexpr (Op::is_bf16) {
      pair_queries(memory_.q_rows, memory_.d_pitch, lanes, memory_.bf16.q_pairs);
      pair_queries(memory_.dout_rows, memory_.dv_pitch, lanes, memory_.bf16.dout_pairs);
    }
  }

  /// bf16 path: packs rows of K into panels, with 0 for NaN and infinities. Packs the first part of rotated rows.
  void pack_panels(StridedRows<const Operand> k, index_t keys, bool finite, Operand* panels,
                   index_t panel) const {
    const index_t count = memory_.d_pitch / memory_.products.pass * panel;
    std::fill_n(panels, count, Operand{});
    memory_.products.pack_values(k.first, k.stride, 0, keys, forward_.width(), panels, panel);
    if (!finite) copy_finite(panels, count, panels);
  }

 private:
  using Op = Operands<Compute, Operand>;

  /// Loads one vector of queries, from lane i on.
  void load_q(index_t i) const {
    const index_t width = memory_.kernels.width, d = forward_.width();
    Compute *factor = memory_.lane.q_factor, *row_factor = memory_.lane.row_factor;
    gather_rows(memory_, i, i + width, memory_.depth, [&](const QueryRow& row, Compute* scratch) {
      return Op::load_query(forward_, variant_, row, memory_.depth, memory_.widened_row, scratch);
    });
    for (index_t lane = 0; lane < width; ++lane) {
      const QueryRow& row = memory_.rows[i + lane];
      factor[lane] = static_cast<Compute>(multipliers_.of_product(row));
      row_factor[lane] = static_cast<Compute>(multipliers_.of_gradient(row.multiplier));
    }
    put_in_lanes(memory_, i, memory_.depth, Op::is_bf16 ? nullptr : factor, memory_.q);
    if constexpr (Op::is_bf16) {
      std::copy_n(factor, width, memory_.bf16.multiplier + i);
      std::copy_n(row_factor, width, memory_.bf16.factor + i);
      keep_rows(i, d, memory_.q_rows, memory_.d_pitch);
    } else {
      gradient_kernels().scale_rows(memory_.in, width, d, row_factor, memory_.q_rows + i * memory_.d_pitch,
                                    memory_.d_pitch);
    }
  }

  /// Loads the dout of one vector of queries, and sets shift and delta of each query.
  void load_dout(index_t i, const QueryFacts<Compute>* facts) const {
    const index_t width = memory_.kernels.width, dv = forward_.value_width(), depth = memory_.value_depth;
    Compute* factor = memory_.lane.row_factor;
    Operand* rows = memory_.dout_rows + i * memory_.dv_pitch;
    gather_rows(memory_, i, i + width, depth, [&](const QueryRow& of, Compute* scratch) -> const Compute* {
      if constexpr (Op::is_bf16) {
        Operand* row = reinterpret_cast<Operand*>(scratch);
        std::copy_n(problem_.dout.template stored_as<Operand>(of.entry(), of.query.head, of.row()), dv, row);
        std::fill_n(row + dv, depth - dv, Operand{});
        return scratch;
      }
      return problem_.dout.load(of.entry(), of.query.head, of.row(), scratch);
    });
    for (index_t lane = i; lane < i + width; ++lane) {
      const bool sees_any = memory_.rows[lane].keys.size() > 0;
      factor[lane - i] = normalize(lane, sees_any ? facts[lane] : QueryFacts<Compute>{});
    }
    if constexpr (Op::is_bf16) {
      put_in_lanes(memory_, i, depth, nullptr, memory_.dout);
      keep_rows(i, dv, memory_.dout_rows, memory_.dv_pitch);
    } else {
      gradient_kernels().scale_rows(memory_.in, width, dv, factor, rows, memory_.dv_pitch);
      for (index_t lane = 0; lane < width; ++lane) memory_.in[lane] = rows + lane * memory_.dv_pitch;
      put_in_lanes(memory_, i, dv, nullptr, memory_.dout);
    }
  }

  /// Sets shift and delta of lane i, on the bf16 path also the offset of its logits. Returns the factor of the
  /// lane's dout.
  Compute normalize(index_t i, const QueryFacts<Compute>& facts) const {
    const bool has_shift = set_shift(i, facts);
    const auto rest = has_shift ? memory_.base[i] - static_cast<double>(memory_.shift[i]) : 0.0;
    if constexpr (Op::is_bf16) {
      memory_.bf16.offset[i] = static_cast<Compute>(rest);
      memory_.delta[i] = facts.delta;
      return 1;
    }
    const double factor = has_shift ? std::exp2(-rest) : 1;
    memory_.delta[i] = static_cast<Compute>(factor * static_cast<double>(facts.delta));
    return static_cast<Compute>(factor);
  }

  /// Sets base (lse in units of log2) and shift of lane i. If no key is visible to the lane, the shift makes its
  /// weights 0. Returns whether the kernels use the shift in place of lse.
  bool set_shift(index_t i, const QueryFacts<Compute>& facts) const {
    memory_.shift[i] = largest_shift<Compute> / 2;
    memory_.base[i] = 0;
    memory_.regular[i] = true;
    if (facts.keys.size() == 0) return false;
    const double lse = static_cast<double>(facts.lse) * std::numbers::log2e;
    const double shift = std::rint(lse);
    memory_.base[i] = lse;
    memory_.regular[i] = std::abs(shift) < static_cast<double>(largest_shift<Compute>);
    if (memory_.regular[i]) memory_.shift[i] = static_cast<Compute>(shift);
    return memory_.regular[i];
  }

  void find_nonfinite_queries(index_t lanes) const {
    const auto are_finite = [&](const Operand* rows, index_t pitch, index_t row, index_t count) {
      return memory_.products.all_finite(rows + row * pitch, 0, 1, count * pitch);
    };
    const auto both_are_finite = [&](index_t row, index_t count) {
      return are_finite(memory_.q_rows, memory_.d_pitch, row, count) &&
             are_finite(memory_.dout_rows, memory_.dv_pitch, row, count);
    };
    const index_t tile_lanes = memory_.tile_lanes;
    for (index_t begin = 0; begin < lanes; begin += tile_lanes) {
      const index_t end = std::min(lanes, begin + tile_lanes);
      bool& finite = memory_.finite[begin / tile_lanes] = both_are_finite(begin, end - begin);
      for (index_t i = begin; !finite && i < end; ++i) memory_.queries_are_finite[i] = both_are_finite(i, 1);
    }
  }

  /// bf16 path: copies the first channels of the gathered rows.
  void keep_rows(index_t i, index_t channels, Operand* to, index_t pitch) const {
    for (index_t lane = 0; lane < memory_.kernels.width; ++lane) {
      Operand* row = to + (i + lane) * pitch;
      std::copy_n(reinterpret_cast<const Operand*>(memory_.in[lane]), channels, row);
      std::fill_n(row + channels, pitch - channels, Operand{});
    }
  }

  /// bf16 path: writes rows of queries in pairs, with 0 for NaN and infinities. Pairs past the last query are 0.
  void pair_queries(const Operand* rows, index_t pitch, index_t lanes, Operand* pairs) const {
    for (index_t i = 0; i < lanes; i += 2) {
      detail::kernels<RoundedBackwardKernels<Compute, Operand>>().pair_rows(
          rows + i * pitch, rows + (i + 1) * pitch, pitch, pairs + i * pitch, pitch);
    }
    for (index_t i = 0; i < lanes; ++i) {
      if (memory_.finite[i / memory_.tile_lanes] || memory_.queries_are_finite[i]) continue;
      Operand* pair = pairs + i / 2 * 2 * pitch;
      copy_finite(pair, 2 * pitch, pair);
    }
    std::fill_n(pairs + lanes * pitch, (memory_.bf16.lanes - lanes) * pitch, Operand{});
  }

  static const PrefillBackwardKernels<Compute>& gradient_kernels() {
    return detail::kernels<PrefillBackwardKernels<Compute>>();
  }

  const BackwardProblem<Compute>& problem_;
  const Problem<Compute>& forward_;
  const GradientVariant<Compute>& variant_;
  const BackwardScratch<Compute, Operand>& memory_;
  const Multipliers multipliers_;
};

SSMAX_END
