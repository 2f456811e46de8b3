// Finds the policies of a call by their concepts: a scaling, a mask, a score and an executor, in any order.
#pragma once

#include <type_traits>

#include "../../../attention_arguments.hpp"
#include "../../../execution.hpp"
#include "../../../mask.hpp"
#include "../../../scaling.hpp"
#include "../../../score.hpp"
#include "../terms/any_executor.hpp"
#include "user_variant.hpp"

SSMAX_BEGIN_DETAIL

struct IsScaling {
  template <class P>
  static constexpr bool is = Scaling<std::remove_cvref_t<P>>;
};
/// True for the arguments of a call, whose member `keys` is not that of a mask.
template <class P>
inline constexpr bool is_arguments = false;
template <class A>
inline constexpr bool is_arguments<AttentionArguments<A>> = true;
template <class P>
concept MaskOfCall = !is_arguments<P> && Mask<P>;

struct IsMask {
  template <class P>
  static constexpr bool is = MaskOfCall<std::remove_cvref_t<P>>;
};
struct IsScore {
  template <class P>
  static constexpr bool is = Score<std::remove_cvref_t<P>>;
};
struct IsExecutor {
  template <class P>
  static constexpr bool is = Executor<P>;
};

/// Returns the number of kinds of policies that P is.
template <class P>
consteval int kinds_of() {
  return int{IsScaling::is<P>} + int{IsMask::is<P>} + int{IsScore::is<P>} + int{IsExecutor::is<P>};
}
template <class Kind, class... P>
consteval int count_of() {
  return (0 + ... + int{Kind::template is<P>});
}

/// Returns true if each of the types is a policy of one kind, and no two are of the same kind.
template <class... P>
consteval bool are_policies() {
  return ((kinds_of<P>() == 1) && ...) && count_of<IsScaling, P...>() <= 1 && count_of<IsMask, P...>() <= 1 &&
         count_of<IsScore, P...>() <= 1 && count_of<IsExecutor, P...>() <= 1;
}

template <class... P>
consteval bool has_mask_or_executor() {
  return count_of<IsMask, P...>() + count_of<IsExecutor, P...>() > 0;
}

/// Returns the policy of a kind, or `otherwise`.
template <class Kind, class D>
D& pick(D& otherwise) {
  return otherwise;
}
template <class Kind, class D, class First, class... Rest>
auto& pick(D& otherwise, First& first, Rest&... rest) {
  if constexpr (Kind::template is<First&>) {
    return first;
  } else {
    return pick<Kind>(otherwise, rest...);
  }
}

template <class Kind, class D, class... P>
using Picked = std::remove_cvref_t<decltype(pick<Kind>(std::declval<D&>(), std::declval<P&>()...))>;

inline constexpr Softmax default_scaling{};
inline constexpr Full default_mask{};
inline constexpr Identity default_score{};

/// The policies of a call, with the default of each kind that is not given. Refers to the arguments of the call.
template <class... P>
struct Policies {
  using S = Picked<IsScaling, const Softmax, P...>;
  using M = Picked<IsMask, const Full, P...>;
  using C = Picked<IsScore, const Identity, P...>;
  static constexpr bool has_mask = count_of<IsMask, P...>() > 0;

  explicit Policies(P&... policies)
      : scaling(pick<IsScaling>(default_scaling, policies...)),
        mask(pick<IsMask>(default_mask, policies...)),
        score(pick<IsScore>(default_score, policies...)),
        executor(AnyExecutor(pick<IsExecutor>(default_executor, policies...))) {}

  Serial default_executor{};
  const S& scaling;
  const M& mask;
  const C& score;
  const AnyExecutor executor;
};

/// The variant of a call with these policies.
template <class A, class Given>
using VariantOf = UserVariant<A, typename Given::S, typename Given::M, typename Given::C>;

SSMAX_END
