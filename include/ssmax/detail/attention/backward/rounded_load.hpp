// As load.hpp, for products that take bfloat16 (rounded_block.hpp): rows go into them as they are stored, and what
// they are multiplied by is set beside them. Operands of the products over queries and keys come once more in the
// layout that these want, with 0 for what is not finite.
#pragma once

#include "../tile/operands.hpp"
#include "load.hpp"

SSMAX_BEGIN_DETAIL

template <class T, class E>
class RoundedLoader {
 public:
  using A = Compute<T>;

  RoundedLoader(const BackwardProblem<T>& problem, const GradientVariant<A>& variant,
                const BackwardScratch<A, E>& memory)
      : problem_(problem),
        forward_(problem.forward),
        variant_(variant),
        kernels_(memory.kernels),
        products_(memory.products),
        memory_(memory) {}

  /// As BackwardLoader's.
  void load_queries(const QueryCursor<T, T>& cursor, index_t count, const QueryFacts<A>* facts) const {
    const index_t lanes = list_queries(memory_, cursor, count, facts, true);
    for (index_t i = 0; i < lanes; i += kernels_.width) {
      load_q(i);
      load_dout(i);
      for (index_t lane = i; lane < i + kernels_.width; ++lane) set_factors(lane, facts);
    }
    find_nonfinite_queries(memory_, lanes);
    pair_queries(memory_.q_rows, memory_.d_pitch, lanes, memory_.rounded.q_pairs);
    pair_queries(memory_.dout_rows, memory_.dv_pitch, lanes, memory_.rounded.dout_pairs);
  }

  /// As BackwardLoader's; k in its parts.
  void load_key(index_t batch, index_t kv_head, index_t key, E* k, E* v) const {
    load_key_parts(forward_, variant_, batch, kv_head, {key, key + 1}, memory_.depth, memory_.rounded.wide,
                   k);
    std::copy_n(forward_.keys.stretch(batch, kv_head, key).v, forward_.value_width(), v);
  }

  /// Panels of rows of K, of which the first part if they are rotated.
  void pack_panels(const E* k, index_t k_stride, index_t keys, bool finite, E* panels, index_t panel) const {
    const index_t count = memory_.d_pitch / products_.rows * panel;
    std::fill_n(panels, count, E{});
    products_.pack_values(k, k_stride, 0, keys, forward_.width(), panels, panel);
    if (!finite) std::replace_if(panels, panels + count, is_not_finite, E{});
  }

 private:
  static bool is_not_finite(E x) { return !std::isfinite(static_cast<A>(x)); }

  /// A vector of queries from lane i on, in parts in lanes, by their first part in rows.
  void load_q(index_t i) const {
    const auto load = [&](const Query& query, E* row) {
      load_query_parts(forward_, variant_, query, memory_.depth, memory_.rounded.wide, row);
    };
    load_lanes(i, memory_.depth, load, memory_.q);
    keep_rows(i, forward_.width(), memory_.q_rows, memory_.d_pitch);
  }

  /// Their dout.
  void load_dout(index_t i) const {
    const index_t dv = forward_.value_width();
    const auto load = [&](const Query& query, E* row) {
      std::copy_n(row_of(problem_.dout, query.batch, query.head, forward_.row_of(query)), dv, row);
    };
    load_lanes(i, memory_.value_depth, load, memory_.dout);
    keep_rows(i, dv, memory_.dout_rows, memory_.dv_pitch);
  }

  /// Into lanes what load(query, row) makes of each query that sees something; others are 0.
  template <class Load>
  void load_lanes(index_t i, index_t depth, const Load& load, E* to) const {
    const index_t group = memory_.group, width = kernels_.width, tuple = tuple_size<A, E>;
    for (index_t lane = 0; lane < width; ++lane) {
      A* scratch = memory_.staged + lane * memory_.pitch;
      E* row = reinterpret_cast<E*>(scratch);
      std::fill_n(row, depth, E{});
      if (memory_.rows[i + lane].keys.size() > 0) load(memory_.rows[i + lane].query, row);
      memory_.in[lane] = scratch;
    }
    // A pair of bfloat16 changes its place as a float does.
    A* lanes = reinterpret_cast<A*>(to) + (i / group * depth / tuple * group + i % group);
    kernels_.transpose(memory_.in, width, depth / tuple, nullptr, lanes, group);
  }

  /// The first channels of the rows that have gone into lanes.
  void keep_rows(index_t i, index_t channels, E* to, index_t pitch) const {
    for (index_t lane = 0; lane < kernels_.width; ++lane) {
      E* row = to + (i + lane) * pitch;
      std::copy_n(reinterpret_cast<const E*>(memory_.in[lane]), channels, row);
      std::fill_n(row + channels, pitch - channels, E{});
    }
  }

  /// What logits and gradients of lane i are multiplied by, and what is taken from the logits: the rest of lse.
  void set_factors(index_t i, const QueryFacts<A>* all_facts) const {
    const auto& rounded = memory_.rounded;
    const QueryRow& row = memory_.rows[i];
    const double c = forward_.scale * (variant_.has_score ? 1 : row.multiplier);
    rounded.factor[i] = static_cast<A>(c);
    rounded.multiplier[i] = static_cast<A>(variant_.has_score ? c : c * std::numbers::log2e);
    const QueryFacts<A> facts = row.keys.size() > 0 ? all_facts[i] : QueryFacts<A>{};
    const bool shifted = set_shift(memory_, i, facts);
    const double rest = shifted ? memory_.base[i] - static_cast<double>(memory_.shift[i]) : 0;
    rounded.offset[i] = static_cast<A>(rest);
    memory_.delta[i] = facts.delta;
  }

  /// Rows of queries in pairs; all that follow are 0.
  void pair_queries(const E* rows, index_t pitch, index_t lanes, E* pairs) const {
    for (index_t i = 0; i < lanes; i += 2) {
      detail::kernels<RoundedBackwardKernels<A, E>>().pair_rows(rows + i * pitch, rows + (i + 1) * pitch,
                                                                pitch, pairs + i * pitch, pitch);
    }
    for (index_t i = 0; i < lanes; ++i) {
      if (memory_.finite[i / memory_.group] || memory_.queries_are_finite[i]) continue;
      E* pair = pairs + i / 2 * 2 * pitch;
      std::replace_if(pair, pair + 2 * pitch, is_not_finite, E{});
    }
    std::fill_n(pairs + lanes * pitch, (memory_.rounded.lanes - lanes) * pitch, E{});
  }

  const BackwardProblem<T>& problem_;
  const Problem<T, T>& forward_;
  const GradientVariant<A>& variant_;
  const PrefillKernels<A>& kernels_;
  const PrefillKernels<A, E>& products_;
  const BackwardScratch<A, E>& memory_;
};

SSMAX_END
