// Counts the keys within gaps of the largest logit, by calls whose values have no channels. The first call finds the
// largest logit. A call per gap replaces logits by 0 or -inf, so that all weights are equal and Σ p² is 1 / count.
#pragma once

#include <cmath>
#include <limits>
#include <numbers>

#include "../../../scaling.hpp"
#include "build.hpp"
#include "check.hpp"
#include "user_variant.hpp"

SSMAX_BEGIN_SHARED

/// z' = z. A call with a score function multiplies by c after the score function: so z has the same bits for any c.
struct KeptLogit : Identity {
  template <class T>
  SSMAX_INLINE void apply(const Lanes<T>&) const {}
  template <class T>
  SSMAX_INLINE void differentiate(const Lanes<const T>&, T*) const {}
};

SSMAX_END

SSMAX_BEGIN_DATA

/// Vectorized.
template <>
inline constexpr bool by_lanes<shared::KeptLogit> = true;

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Makes c·log2(e) equal to 1, so that `largest` is the largest z without an error.
inline constexpr Constant unit_of_log2{std::numbers::ln2};
static_assert(std::numbers::ln2 * std::numbers::log2e == 1);

inline constexpr KeptLogit kept_logit{};
/// Returns a score function of type C, which is not Identity.
template <class C>
const auto& kept_score(const C& score) {
  if constexpr (std::same_as<C, Identity>) {
    return kept_logit;
  } else {
    return score;
  }
}

/// The variant of the call that finds the largest logits.
template <class A, class M, class C>
using LogitVariant = UserVariant<A, Constant, M, C>;
template <class A, class M, class C>
LogitVariant<A, M, C> logit_variant(const M& mask, const C& score) {
  return {unit_of_log2, mask, score};
}

/// Returns the largest logit of a query, by the query's place in the tensors of the call.
template <class A>
struct LargestInPlace {
  View<A, 3> largest;

  A operator()(const QueryRow& row) const { return largest(row.entry(), row.query.head, row.row()); }
};

/// The variant of a call that counts. A logit becomes 0 if it is at least largest(row) - gap, else -inf.
template <class A, class M, class C, class Largest>
class GapVariant final : public LogitVariant<A, M, C> {
  using Base = LogitVariant<A, M, C>;

 public:
  GapVariant(const M& a_mask, const C& a_score, const Largest& largest, A gap)
      : Base(unit_of_log2, a_mask, a_score), largest_(largest), gap_(gap) {}

  void apply(const Logits<A>& logits, const TileScratch<A>& memory) const override {
    Base::apply(logits, memory);
    constexpr index_t most_lanes = 64, at_once = 4;  // at_once: the compiler vectorizes loops of known length
    const index_t width = memory.kernels.width;
    SSMAX_ASSERT(width <= most_lanes);
    A bounds[most_lanes];
    for (index_t lane = 0; lane < width; ++lane) bounds[lane] = bound_of(logits.rows[lane]);
    for (index_t key = 0; key < logits.keys.size(); ++key) {
      A* const z = logits.s + key * memory.tile_lanes;
      index_t lane = 0;
      for (; lane + at_once <= width; lane += at_once) {
        for (index_t i = 0; i < at_once; ++i) z[lane + i] = counted(z[lane + i], bounds[lane + i]);
      }
      for (; lane < width; ++lane) z[lane] = counted(z[lane], bounds[lane]);
    }
  }

  void apply(A* s, KeyRange keys, const QueryRow& row) const override {
    Base::apply(s, keys, row);
    const A bound = bound_of(row);
    for (index_t i = 0; i < keys.size(); ++i) s[i] = counted(s[i], bound);
  }

 private:
  static A counted(A z, A bound) { return z >= bound ? A{0} : -std::numeric_limits<A>::infinity(); }

  /// Returns the smallest logit that counts. The bound is finite or NaN: a masked logit is below it.
  A bound_of(const QueryRow& row) const {
    return std::max(largest_(row) - gap_, std::numeric_limits<A>::lowest());
  }

  const Largest largest_;
  const A gap_;
};

/// Returns the arguments of a call that computes logits alone.
template <class A>
AttentionArguments<A> without_values(AttentionArguments<A> a) {
  a.v = a.k;
  a.v.keep(3, 0, 0);
  a.out = {nullptr, {a.q.extent(0), a.q.extent(1), a.q.extent(2), 0}};
  a.lse = {};
  a.sinks = {};
  a.scaled_sinks = false;
  a.dropout = {};
  return a;
}

/// Replaces Σ p² by 1 / Σ p² in some rows of an entry. Writes NaN where the largest logit is NaN.
template <class A>
void invert_counts(const View<A, 3>& counts, const View<A, 3>& largest, index_t entry, index_t first,
                   index_t rows) {
  for (index_t h = 0; h < counts.extent(1); ++h) {
    for (index_t i = first; i < first + rows; ++i) {
      A& n = counts(entry, h, i);
      if (n != 0) n = std::round(1 / n);
      if (std::isnan(largest(entry, h, i))) n = largest(entry, h, i);
    }
  }
}

/// The same for all rows.
template <class A>
void invert_counts(const View<A, 3>& counts, const View<A, 3>& largest) {
  for (index_t b = 0; b < counts.extent(0); ++b) invert_counts(counts, largest, b, 0, counts.extent(2));
}

/// Calls pass(variant) for the pass that finds the largest logits, then for the pass of each gap, and finish(counts)
/// after it. Sets the statistics of `logits`, which each pass takes.
template <class A, class M, class C, class Largest, class Pass, class Finish>
void for_each_pass(const GapCounts<A>& to, const LogitVariant<A, M, C>& variant, const Largest& largest,
                   AttentionArguments<A>& logits, const Pass& pass, const Finish& finish) {
  logits.statistics = RowStatistics<A>{.largest = to.largest};
  pass(variant);
  const View<A, 4>& all = to.counts;
  for (index_t g = 0; g < std::ssize(to.gaps); ++g) {
    const View<A, 3> counts(all.data_handle() + g * all.stride(0), to.largest.extents(),
                            {all.stride(1), all.stride(2), all.stride(3)});
    logits.statistics = RowStatistics<A>{.sum_of_squares = counts};
    pass(GapVariant<A, M, C, Largest>(variant.mask, variant.score, largest,
                                      to.gaps[static_cast<std::size_t>(g)]));
    finish(counts);
  }
}

/// Throws unless gaps and results fit the tensors of the call.
template <class A>
void check_gap_counts(const char* function, const AttentionArguments<A>& a, const GapCounts<A>& to) {
  if (has_state(a.state)) fail_format("ssmax::%s: state is given, must be left out", function);
  for (std::size_t j = 0; j < to.gaps.size(); ++j) {
    const auto gap = static_cast<double>(to.gaps[j]);
    if (!(gap >= 0)) fail_format("ssmax::%s: gaps[%zu] is %g, must be at least 0", function, j, gap);
  }
  const View<const A, 1> gaps(to.gaps);
  check_view(function, "q", a.q);
  check_view(function, "k", a.k);
  check_output(function, "largest", to.largest);
  check_output(function, "counts", to.counts);
  check_extent(function, "counts", to.counts, 0, "gaps", gaps, 0);
  for (int i = 0; i < 3; ++i) {
    check_extent(function, "largest", to.largest, i, "q", a.q, i);
    check_extent(function, "counts", to.counts, i + 1, "q", a.q, i);
  }
  check_no_overlap(function, "counts", to.counts, "largest", to.largest);
  const auto check_inputs = [&](const char* name, const AnyView& view) {
    check_no_overlap(function, name, view, "q", a.q);
    check_no_overlap(function, name, view, "k", a.k);
    check_no_overlap(function, name, view, "gaps", gaps);
    if (a.keys.is_given()) check_no_overlap_with_source(function, name, view, a.keys.refer());
  };
  check_inputs("largest", to.largest);
  check_inputs("counts", to.counts);
}

SSMAX_END
