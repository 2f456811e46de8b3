// Detects the members that a user's policy (a mask, a scaling, a score) may have or leave out.
//
// A member with the right name and another signature would be ignored silently. The policy would then do less
// than its author wrote. So a member of that name in any other form is a compile error: not const, another
// return type, other parameters, static, or data. Exception: the compiler ignores private members, and
// overloaded members of which no overload takes these arguments. Both kinds cannot be detected from outside.
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

#include "../../config.hpp"

/// Defines trait<P>: true if P has the member `name(arguments…) const` and its result satisfies `returns`.
/// `policy` is the kind of P in the error message, `signature` the required declaration.
#define SSMAX_OPTIONAL_MEMBER(trait, policy, name, returns, signature, ...)             \
  template <class P>                                                                    \
  consteval bool find_##trait() {                                                       \
    constexpr bool fits = requires(const P& p) {                                        \
      { p.name(__VA_ARGS__) } -> returns;                                               \
    };                                                                                  \
    constexpr bool is_no_function = requires {                                          \
      requires !std::is_member_function_pointer_v<decltype(&P::name)>;                  \
    };                                                                                  \
    constexpr bool is_named = requires(P & p) { p.name(__VA_ARGS__); }                  \
    || requires { &P::name; };                                                          \
    static_assert(!is_named || (fits && !is_no_function),                               \
                  "ssmax: the member '" #name "' of a " policy " must be  " signature); \
    return fits;                                                                        \
  }                                                                                     \
  template <class P>                                                                    \
  constexpr bool trait = find_##trait<P>();

/// Defines name<P>: the value of the member `static constexpr bool name` of P, or false without this member.
/// A derived class inherits the value. Fast paths must not be inherited, so they are variables (fast_path.hpp).
#define SSMAX_OPTIONAL_FLAG(policy, name)                                                  \
  template <class P>                                                                       \
  consteval bool find_##name() {                                                           \
    if constexpr (requires {                                                               \
                    requires std::same_as<decltype(P::name), const bool>;                  \
                    typename std::bool_constant<P::name>;                                  \
                  }) {                                                                     \
      return P::name;                                                                      \
    } else {                                                                               \
      static_assert(                                                                       \
          !requires { &P::name; },                                                         \
          "ssmax: the member '" #name "' of a " policy " must be  static constexpr bool"); \
      return false;                                                                        \
    }                                                                                      \
  }                                                                                        \
  template <class P>                                                                       \
  constexpr bool name = find_##name<P>();
