/// @defgroup attention_state States of attention (attention_state.hpp)
/// @ingroup online_softmax
/// States of attention over some of the keys. You merge them with states over the other keys. A state holds the shift
/// and the sum of the softmax and the output accumulator of every query.
///
/// attention (attention.hpp) with the argument `state` computes a state for a range of the keys. merge joins two
/// states. finish computes out and lse from a state. In FlashAttention's letters, shift, sum and o are m / ln 2, l and
/// o.
///
/// Shifts are integers, so merge rounds each sum once and is exact otherwise. The order of merging changes results by
/// half an ulp of the total per merge: |error| <= merges · ε/2 · Σ p |v|. Exception: the bf16 path has shifts that
/// are not integers, so the bound has 3/2 in place of 1/2. With SSMax, n is that of the whole row: the multiplier c
/// is applied before the state is formed.
#pragma once

#include <span>
#include <type_traits>

#include "detail/checks/sinks.hpp"
#include "detail/checks/views.hpp"
#include "detail/kernels/rows.hpp"
#include "detail/rows/state.hpp"
#include "view.hpp"

/// @addtogroup attention_state
/// @{
SSMAX_BEGIN_DATA

/// A state over some keys. For each query, Σ exp(c·z) = 2^shift·sum and Σ exp(c·z)·v = 2^shift·o. If no key is
/// visible to a query, its shift is -inf and its sum and o are 0.
template <class T>
struct AttentionState {
  View<T, 3> shift{},  ///< [batch, heads, queries].
      sum{};           ///< [batch, heads, queries].
  View<T, 4> o{};      ///< [batch, heads, queries, dv].
};

SSMAX_END

SSMAX_BEGIN_CODE
namespace detail {

/// The names of the tensors of a state in error messages.
struct StateNames {
  const char *shift, *sum, *o;
};

template <class T>
void check_state(const char* function, const StateNames& names, const AttentionState<T>& state) {
  check_output(function, names.o, state.o);
  check_output(function, names.shift, state.shift);
  check_output(function, names.sum, state.sum);
  for (int i = 0; i < 3; ++i) {
    check_extent(function, names.shift, state.shift, i, names.o, state.o, i);
    check_extent(function, names.sum, state.sum, i, names.o, state.o, i);
  }
}

/// Throws if the tensors of a state overlap.
template <class T>
void check_no_overlap_of_parts(const char* function, const StateNames& names,
                               const AttentionState<T>& state) {
  check_no_overlap(function, names.sum, state.sum, names.shift, state.shift);
  check_no_overlap(function, names.shift, state.shift, names.o, state.o);
  check_no_overlap(function, names.sum, state.sum, names.o, state.o);
}

/// Throws if an output overlaps a tensor of a state.
template <class T, int Rank>
void check_no_overlap_with_state(const char* function, const char* name, const View<T, Rank>& out,
                                 const StateNames& names, const AttentionState<T>& state) {
  check_no_overlap(function, name, out, names.o, state.o);
  check_no_overlap(function, name, out, names.shift, state.shift);
  check_no_overlap(function, name, out, names.sum, state.sum);
}

template <class T>
void check_merge(const AttentionState<T>& into, const AttentionState<T>& other) {
  const char* function = "merge";
  const StateNames names{"into.shift", "into.sum", "into.o"};
  const StateNames other_names{"other.shift", "other.sum", "other.o"};
  check_state(function, names, into);
  check_state(function, other_names, other);
  check_same_extents(function, "other.o", other.o, "into.o", into.o);
  check_no_overlap_of_parts(function, names, into);
  check_no_overlap_with_state(function, names.o, into.o, other_names, other);
  check_no_overlap_with_state(function, names.shift, into.shift, other_names, other);
  check_no_overlap_with_state(function, names.sum, into.sum, other_names, other);
}

template <class T>
AttentionState<T> addressable(const AttentionState<T>& state) {
  return {.shift = state.shift, .sum = state.sum, .o = addressable(state.o)};
}

/// Returns the state of one query.
template <class T>
SoftmaxState<T> state_of(const AttentionState<T>& state, index_t batch, index_t head, index_t row) {
  return {&state.shift(batch, head, row), &state.sum(batch, head, row), row_of(state.o, batch, head, row)};
}

/// Merges without checks. Both states are addressable.
template <class T>
void merge_state(const AttentionState<T>& into, const AttentionState<T>& other) {
  const index_t dv = into.o.extent(3);
  for (index_t b = 0; b < into.o.extent(0); ++b) {
    for (index_t h = 0; h < into.o.extent(1); ++h) {
      for (index_t i = 0; i < into.o.extent(2); ++i) {
        merge_row(state_of(into, b, h, i), state_of(other, b, h, i), dv);
      }
    }
  }
}

}  // namespace detail

/// Merges all of `others` into `into`, in their order. The result does not depend on the thread or the time at which
/// a state was computed. `into` must not overlap the others.
template <class T>
void merge(const AttentionState<T>& into, std::span<const std::type_identity_t<AttentionState<T>>> others) {
  for (const AttentionState<T>& other : others) detail::check_merge(into, other);
  for (const AttentionState<T>& other : others) {
    detail::merge_state(detail::addressable(into), detail::addressable(other));
  }
}

/// Merges `other` into `into`: the state over the keys of both. `into` must not overlap `other`.
template <class T>
void merge(const AttentionState<T>& into, const std::type_identity_t<AttentionState<T>>& other) {
  merge(into, std::span<const AttentionState<T>>(&other, 1));
}

/// Writes out = o / sum and, unless lse is `View{}`, lse = ln Σ exp(c·z). With sinks, adds one sink per head to the
/// denominator. `out` may be the memory of state.o.
template <class T>
void finish(const AttentionState<T>& state, std::type_identity_t<View<T, 4>> out,
            std::type_identity_t<View<T, 3>> lse = {}, std::span<const std::type_identity_t<T>> sinks = {}) {
  const char* function = "finish";
  const detail::StateNames names{"state.shift", "state.sum", "state.o"};
  detail::check_state(function, names, state);
  detail::check_output(function, "out", out);
  detail::check_same_extents(function, "out", out, "state.o", state.o);
  detail::check_in_place_or_no_overlap(function, "out", out, "state.o", View<const T, 4>(state.o));
  detail::check_no_overlap(function, "out", out, "state.shift", state.shift);
  detail::check_no_overlap(function, "out", out, "state.sum", state.sum);
  const bool wants_lse = detail::is_given(lse);
  if (wants_lse) {
    detail::check_output(function, "lse", lse);
    detail::check_same_extents(function, "lse", lse, "state.sum", state.sum);
    detail::check_no_overlap(function, "lse", lse, "out", out);
    detail::check_no_overlap_with_state(function, "lse", lse, names, state);
  }
  detail::check_sinks(function, sinks, out, lse);
  const View<T, 4> from = detail::addressable(state.o), to = detail::addressable(out);
  for (index_t b = 0; b < out.extent(0); ++b) {
    for (index_t h = 0; h < out.extent(1); ++h) {
      for (index_t i = 0; i < out.extent(2); ++i) {
        const auto shift = static_cast<double>(state.shift(b, h, i)),
                   sum = static_cast<double>(state.sum(b, h, i));
        const detail::Normalizer normalizer =
            sinks.empty()
                ? detail::Normalizer(shift, sum)
                : detail::Normalizer(shift, sum, static_cast<double>(sinks[static_cast<std::size_t>(h)]));
        detail::kernels<detail::RowKernels<T>>().multiply(detail::row_of(from, b, h, i), to.extent(3),
                                                          static_cast<T>(normalizer.factor),
                                                          detail::row_of(to, b, h, i));
        if (wants_lse) lse(b, h, i) = static_cast<T>(normalizer.lse());
      }
    }
  }
}

SSMAX_END
/// @}
