// Names the mistakes of calls, so that the compiler's first lines say them.
//
// A call with a mistake selects an overload that ends with SSMAX_REFUSE. GCC prints the overload with the type
// `Mistake`, whose name is the cause. Clang prints the text.
#pragma once

#include <type_traits>

#include "policies.hpp"

SSMAX_BEGIN_CODE

/// @cond
namespace mistake {

template <class A>
struct the_compute_type_is_float_or_double_and_the_tensors_bring_their_own_types;
template <class P>
struct is_no_scaling_mask_score_or_executor;
template <class P>
struct a_mask_needs_the_member_keys;
template <class P>
struct a_score_needs_the_member_derivative;
template <class P>
struct is_policy_of_several_kinds_write_as_mask;
template <class... P>
struct has_two_scalings;
template <class... P>
struct has_two_masks_join_them_with_the_operator_and;
template <class... P>
struct has_two_scores_compose_them_with_the_operator_bar;
template <class... P>
struct has_two_executors;
struct policies_have_no_braces_and_options_are_members_of_the_arguments;

}  // namespace mistake
/// @endcond

SSMAX_END

SSMAX_BEGIN_DETAIL

template <class P>
constexpr bool has_member_sees = requires {
  &P::sees;
};

/// Returns the mistake of one policy, or void, as a std::type_identity.
template <class P>
consteval auto mistake_of_one() {
  using X = std::remove_cvref_t<P>;
  if constexpr (kinds_of<P>() > 1) {
    return std::type_identity<mistake::is_policy_of_several_kinds_write_as_mask<X>>();
  } else if constexpr (kinds_of<P>() == 1) {
    return std::type_identity<void>();
  } else if constexpr (has_member_sees<X>) {
    return std::type_identity<mistake::a_mask_needs_the_member_keys<X>>();
  } else if constexpr (has_value<const X, float> && has_value<const X, double>) {
    return std::type_identity<mistake::a_score_needs_the_member_derivative<X>>();
  } else {
    return std::type_identity<mistake::is_no_scaling_mask_score_or_executor<X>>();
  }
}

/// Returns the first mistake of policies of which each is one policy.
template <class... P>
consteval auto mistake_of_all() {
  if constexpr (count_of<IsScaling, P...>() > 1) {
    return std::type_identity<mistake::has_two_scalings<std::remove_cvref_t<P>...>>();
  } else if constexpr (count_of<IsMask, P...>() > 1) {
    return std::type_identity<
        mistake::has_two_masks_join_them_with_the_operator_and<std::remove_cvref_t<P>...>>();
  } else if constexpr (count_of<IsScore, P...>() > 1) {
    return std::type_identity<
        mistake::has_two_scores_compose_them_with_the_operator_bar<std::remove_cvref_t<P>...>>();
  } else {
    return std::type_identity<mistake::has_two_executors<std::remove_cvref_t<P>...>>();
  }
}

/// The mistake of a call: that of its first policy with one, else two policies of a kind.
template <class All, class... P>
struct MistakeOf {
  using type = typename All::type;
};
template <class All, class First, class... P>
struct MistakeOf<All, First, P...> {
  using Found = typename decltype(mistake_of_one<First>())::type;
  using type = typename std::conditional_t<std::is_void_v<Found>, MistakeOf<All, P...>,
                                           std::type_identity<Found>>::type;
};
template <class A, class... P>
consteval auto mistake_of() {
  if constexpr (!std::same_as<A, float> && !std::same_as<A, double>) {
    return std::type_identity<
        mistake::the_compute_type_is_float_or_double_and_the_tensors_bring_their_own_types<A>>();
  } else {
    return MistakeOf<decltype(mistake_of_all<P...>()), P...>();
  }
}

/// Returns true for a call with a compute type and policies without mistakes.
template <class A, class... P>
consteval bool is_call() {
  return (std::same_as<A, float> || std::same_as<A, double>)&&are_policies<P...>();
}
template <class A>
using ComputeOr = std::conditional_t<std::same_as<A, double>, double, float>;

/// Takes a policy, or options, in braces.
struct Anything {
  Anything() = default;
  template <class Value>
  Anything(const Value&);
};
struct InBraces {
  Anything scale{}, rope{}, key_position{}, sinks{}, workspace{}, float_products{}, rounded_rotation{},
      batch_invariant{}, scaled_sinks{}, rotate_source_keys{}, more_queries_than_keys{}, dropout{},
      statistics{}, lengths{}, explanation{};
};

SSMAX_END

/// Declares overloads of a public function for calls with mistakes. The other arguments are the parameters before the
/// policies, of which A is the compute type.
#define SSMAX_MISTAKES_OF(function, ...)                                                                    \
  template <class A = float, class... P,                                                                    \
            class Mistake = typename decltype(detail::mistake_of<A, P...>())::type>                         \
  requires(!detail::is_call<A, P...>()) void function(__VA_ARGS__, P&&...) SSMAX_REFUSE(                    \
      "ssmax::" #function                                                                                   \
      ": a policy is a scaling, a mask with `keys`, a score with `derivative` "                             \
      "or an executor, each kind at most once; join masks with &, scores with |; pass a type of "           \
      "several kinds as as_mask(x); the compute type is float or double");                                  \
  SSMAX_MISTAKE_IN_BRACES(function, (__VA_ARGS__, const detail::InBraces&, const auto&...))                 \
  SSMAX_MISTAKE_IN_BRACES(function, (__VA_ARGS__, const auto&, const detail::InBraces&, const auto&...))    \
  SSMAX_MISTAKE_IN_BRACES(function,                                                                         \
                          (__VA_ARGS__, const auto&, const auto&, const detail::InBraces&, const auto&...)) \
  SSMAX_MISTAKE_IN_BRACES(function, (__VA_ARGS__, const auto&, const auto&, const auto&,                    \
                                     const detail::InBraces&, const auto&...))
#define SSMAX_MISTAKE_IN_BRACES(function, parameters)                                                  \
  template <class A = float,                                                                           \
            class Mistake = mistake::policies_have_no_braces_and_options_are_members_of_the_arguments> \
  void function parameters SSMAX_REFUSE(                                                               \
      "ssmax::" #function                                                                              \
      ": policies have no braces, and options are members of the arguments: {.q = q, "                 \
      "..., .rope = &rope}");
