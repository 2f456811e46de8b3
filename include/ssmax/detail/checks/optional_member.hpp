// Members that a policy of the user's (a mask, a scaling, a score) may have or leave out.
//
// A member with the right name but another signature would be passed over without a word, and the policy
// would do less than its author wrote. So a name that is found in any other form is an error of the compiler:
// a member that is not const, that returns something else, that takes something else, that is data or static.
// (Two kinds of member cannot be seen from outside and are passed over: overloads of which none takes these
// arguments, and private members.)
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

#include "../../config.hpp"

/// Defines  trait<P>: whether P has the member  name(arguments…) const,  and what it returns satisfies
/// `returns`. `policy` says what P is, `signature` how the member must be declared.
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
