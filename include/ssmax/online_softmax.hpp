// The state of a softmax whose logits arrive in blocks: what attention keeps per query instead of a row of N
// logits.
//
// After any number of blocks, Σ exp(c·z) = 2^shift · sum over the keys seen so far, and the caller's
// accumulator holds Σ exp(c·z) · v / 2^shift. A block with larger logits raises the shift; the caller then
// multiplies its accumulator by the returned power of two. Shifts are integers wherever logits allow (|c·z| <
// 7·10^5), so that rescaling is exact and the result does not depend on how the keys were cut, but for the
// order of additions.
//
// AttentionState is the same for whole tensors, with the accumulator: attention over a range of the keys
// (attention_partial in attention.hpp) gives one, merge joins two, finish turns one into out and lse. In FlashAttention's
// letters shift, sum and o are m / ln 2, l and o. merge is exact but for one rounding of each sum: the order of merging
// changes results by half an ulp of the total per merge, |error| <= merges · ε/2 · Σ p |v|. With SSMax, n is that of the
// whole row: it enters with the logits.
#pragma once

#include <cmath>
#include <limits>
#include <numbers>
#include <optional>
#include <span>

#include "detail/checks/views.hpp"
#include "detail/rows/forward.hpp"
#include "view.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {

template <class T>
class OnlineSoftmax {
 public:
  /// c multiplies every logit of this query. May be 0 or negative.
  explicit OnlineSoftmax(double c = 1) : c_(c), multiplier_(c) {}

  /// Takes n logits in and puts their weights out (out may be in); returns the factor by which what was
  /// accumulated under earlier weights must be multiplied first. NaN, c·z = +inf, or a c that is not finite
  /// poisons the state for good; c·z·log2 e is +inf or -inf where a double cannot hold it.
  double update(const T* in, index_t n, T* out) {
    const auto& kernels = detail::kernels<detail::RowKernels<T>>();
    constexpr T inf = std::numeric_limits<T>::infinity();
    const T* z = in;
    if (c_ < 0) {
      kernels.affine(in, n, T{0}, T{-1}, T{0}, out);
      z = out;
    }
    const detail::Extremum<T> top = kernels.max(z, n);
    const double largest = std::abs(c_) * static_cast<double>(top.value) * std::numbers::log2e;
    poisoned_ = poisoned_ || top.has_nan || !std::isfinite(c_) || top.value == inf ||
                (top.value != -inf && !(largest < std::numeric_limits<double>::infinity()));
    if (poisoned_ || !std::isfinite(largest)) {  // the rest: nothing but weights of 0
      std::fill_n(out, n, T{0});
      return 1;
    }
    const bool exact = std::abs(largest) < detail::largest_shift<double>;
    const double block_shift = exact ? detail::round_shift(largest) : largest;
    const bool first = sum_ == 0;
    const double raised = first ? block_shift : std::max(shift_, block_shift);
    const double factor = first ? 1 : std::exp2(shift_ - raised);
    shift_ = raised;
    const T unit = std::abs(multiplier_.direction);
    const bool direct = exact && std::abs(raised) < detail::largest_shift<double>;
    if (!direct || unit != 1) {
      kernels.affine(z, n, direct ? T{0} : top.value, unit, T{0}, out);
      z = out;
    }
    detail::OverlappedWork<T> nothing;
    T sum = kernels.exp_store(z, n, multiplier_.scale, direct ? static_cast<T>(raised) : T{0}, out, nothing);
    if (!direct && largest != raised) {
      const auto lowered = static_cast<T>(std::exp2(largest - raised));
      kernels.multiply(out, n, lowered, out);
      sum *= lowered;
    }
    sum_ = sum_ * factor + static_cast<double>(sum);
    return factor;
  }

  /// What the accumulator must be multiplied by in the end: 1 / sum; 0 where nothing was visible, NaN where
  /// poisoned.
  [[nodiscard]] double finish() const {
    if (poisoned_) return std::numeric_limits<double>::quiet_NaN();
    return sum_ > 0 ? 1 / sum_ : 0;
  }

  /// ln Σ exp(c·z): -inf where nothing was visible, NaN where poisoned.
  [[nodiscard]] double lse() const {
    if (poisoned_) return std::numeric_limits<double>::quiet_NaN();
    return shift_ * std::numbers::ln2 + std::log(sum_);
  }

  /// The state as numbers: Σ exp(c·z) = 2^shift · sum. -inf and 0 where nothing was visible, sum NaN where poisoned.
  [[nodiscard]] double shift() const { return sum_ == 0 ? -std::numeric_limits<double>::infinity() : shift_; }
  [[nodiscard]] double sum() const { return poisoned_ ? std::numeric_limits<double>::quiet_NaN() : sum_; }

  /// Forgets all blocks.
  void reset() { *this = OnlineSoftmax(c_); }

 private:
  double c_;
  detail::Multiplier<T> multiplier_;
  double shift_ = 0;
  double sum_ = 0;
  bool poisoned_ = false;
};

/// Attention over some keys: for each query, Σ exp(c·z) = 2^shift · sum and Σ exp(c·z)·v = 2^shift · o. Shapes
/// [batch, heads, queries] and [batch, heads, queries, dv]. A query that saw nothing has shift -inf and zeros.
template <class T>
struct AttentionState {
  View<T, 3> shift{}, sum{};
  View<T, 4> o{};
};

namespace detail {

/// By what sums under the shift `from` must be multiplied to count under `to`.
template <class T>
T shift_factor(T from, T to) {
  return from == to ? T{1} : static_cast<T>(std::exp2(static_cast<double>(from) - static_cast<double>(to)));
}

template <class T>
void merge_row(T& shift, T& sum, T* o, T other_shift, T other_sum, const T* other_o, index_t dv) {
  const T raised = std::max(shift, other_shift);
  const T factor = shift_factor(shift, raised), other_factor = shift_factor(other_shift, raised);
  shift = raised;
  sum = sum * factor + other_sum * other_factor;
  for (index_t c = 0; c < dv; ++c) o[c] = o[c] * factor + other_o[c] * other_factor;
}

/// What is left to do with a query's state, in double; a sink adds exp(sink) to Σ exp(c·z), and nothing to Σ exp(c·z)·v.
struct Normalizer {
  double factor;  // out = factor · o
  double lse;

  Normalizer(double shift, double sum)
      : factor(sum == 0 ? 0 : 1 / sum), lse(shift * std::numbers::ln2 + std::log(sum)) {}
  Normalizer(double shift, double sum, double sink) {
    const double sink_shift = sink * std::numbers::log2e;
    const double raised = std::max(shift, sink_shift);
    const double own = shift_factor(shift, raised);
    const double total = sum * own + shift_factor(sink_shift, raised);
    factor = sum == 0 ? 0 : own / total;
    lse = raised * std::numbers::ln2 + std::log(total);
  }
};

/// The parts of a state under the names that a caller knows them by.
struct StateNames {
  const char *shift, *sum, *o;
};

template <class T>
void check_state(const char* function, const StateNames& names, const AttentionState<T>& state) {
  check_output(function, names.o, state.o);
  check_output(function, names.shift, state.shift);
  check_output(function, names.sum, state.sum);
  for (int i = 0; i < 3; ++i) {
    if (state.shift.extent(i) != state.o.extent(i)) {
      fail_extent(function, names.shift, i, state.shift.extent(i), names.o, state.o.extent(i));
    }
    if (state.sum.extent(i) != state.o.extent(i)) {
      fail_extent(function, names.sum, i, state.sum.extent(i), names.o, state.o.extent(i));
    }
  }
}

/// The parts of a state that is written do not overlap.
template <class T>
void check_parts_apart(const char* function, const StateNames& names, const AttentionState<T>& state) {
  check_apart(function, names.sum, state.sum, names.shift, state.shift);
  check_apart(function, names.shift, state.shift, names.o, state.o);
  check_apart(function, names.sum, state.sum, names.o, state.o);
}

/// An output lies apart from every part of a state.
template <class T, int Rank>
void check_apart_from_state(const char* function, const char* name, const View<T, Rank>& out,
                            const StateNames& names, const AttentionState<T>& state) {
  check_apart(function, name, out, names.o, state.o);
  check_apart(function, name, out, names.shift, state.shift);
  check_apart(function, name, out, names.sum, state.sum);
}

template <class T>
void check_merge(const AttentionState<T>& into, const AttentionState<T>& other) {
  const char* function = "merge";
  const StateNames names{"into.shift", "into.sum", "into.o"};
  const StateNames other_names{"other.shift", "other.sum", "other.o"};
  check_state(function, names, into);
  check_state(function, other_names, other);
  check_same_extents(function, "other.o", other.o, "into.o", into.o);
  check_parts_apart(function, names, into);
  check_apart_from_state(function, names.o, into.o, other_names, other);
  check_apart_from_state(function, names.shift, into.shift, other_names, other);
  check_apart_from_state(function, names.sum, into.sum, other_names, other);
}

template <class T>
void merge_state(const AttentionState<T>& into, const AttentionState<T>& other) {
  const index_t dv = into.o.extent(3);
  for (index_t b = 0; b < into.o.extent(0); ++b) {
    for (index_t h = 0; h < into.o.extent(1); ++h) {
      for (index_t i = 0; i < into.o.extent(2); ++i) {
        merge_row(into.shift(b, h, i), into.sum(b, h, i), row_of(into.o, b, h, i), other.shift(b, h, i),
                  other.sum(b, h, i), row_of(other.o, b, h, i), dv);
      }
    }
  }
}

inline void check_sink_count(const char* function, const char* name, index_t count, index_t heads) {
  if (count != heads) fail_value(function, name, "has extent", count, "heads are", heads);
}

/// One number per head, if any, apart from what is written.
template <class A, class T>
void check_sinks(const char* function, std::span<const A> sinks, const View<T, 4>& out,
                 const View<A, 3>& lse) {
  if (sinks.empty()) return;
  const View<const A, 1> view(sinks);
  check_sink_count(function, "sinks", view.extent(0), out.extent(1));
  check_apart(function, "out", out, "sinks", view);
  check_apart(function, "lse", lse, "sinks", view);
}

}  // namespace detail

/// into = all of them, in their order: the result does not depend on who computed which when. No part of one may overlap a
/// part of `into`.
template <class T>
void merge(const AttentionState<T>& into, std::span<const std::type_identity_t<AttentionState<T>>> others) {
  for (const AttentionState<T>& other : others) detail::check_merge(into, other);
  for (const AttentionState<T>& other : others) detail::merge_state(into, other);
}

/// into = attention over the keys of both. No part of one may overlap a part of the other.
template <class T>
void merge(const AttentionState<T>& into, const std::type_identity_t<AttentionState<T>>& other) {
  merge(into, std::span<const AttentionState<T>>(&other, 1));
}

/// out = o / sum, lse = ln Σ exp(c·z) if wanted (not View{}), with a sink per head if given. out may be state.o.
template <class T>
void finish(const AttentionState<T>& state, std::type_identity_t<View<T, 4>> out,
            std::type_identity_t<View<T, 3>> lse = {}, std::span<const std::type_identity_t<T>> sinks = {}) {
  const char* function = "finish";
  const detail::StateNames names{"state.shift", "state.sum", "state.o"};
  detail::check_state(function, names, state);
  detail::check_output(function, "out", out);
  detail::check_same_extents(function, "out", out, "state.o", state.o);
  detail::check_in_place_or_apart(function, "out", out, "state.o", View<const T, 4>(state.o));
  detail::check_apart(function, "out", out, "state.shift", state.shift);
  detail::check_apart(function, "out", out, "state.sum", state.sum);
  const bool wants_lse = detail::is_given(lse);
  if (wants_lse) {
    detail::check_output(function, "lse", lse);
    detail::check_same_extents(function, "lse", lse, "state.sum", state.sum);
    detail::check_apart(function, "lse", lse, "out", out);
    detail::check_apart_from_state(function, "lse", lse, names, state);
  }
  detail::check_sinks(function, sinks, out, lse);
  for (index_t b = 0; b < out.extent(0); ++b) {
    for (index_t h = 0; h < out.extent(1); ++h) {
      for (index_t i = 0; i < out.extent(2); ++i) {
        const auto shift = static_cast<double>(state.shift(b, h, i)),
                   sum = static_cast<double>(state.sum(b, h, i));
        const detail::Normalizer normalizer =
            sinks.empty()
                ? detail::Normalizer(shift, sum)
                : detail::Normalizer(shift, sum, static_cast<double>(sinks[static_cast<std::size_t>(h)]));
        detail::kernels<detail::RowKernels<T>>().multiply(detail::row_of(state.o, b, h, i), out.extent(3),
                                                          static_cast<T>(normalizer.factor),
                                                          detail::row_of(out, b, h, i));
        if (wants_lse) lse(b, h, i) = static_cast<T>(normalizer.lse);
      }
    }
  }
}

}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
