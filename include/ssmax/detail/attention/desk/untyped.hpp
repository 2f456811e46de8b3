// Declares overloads for calls without an element type, so that the compiler's message says how to write one.
//
// The arguments of attention are braces, from which no type is deduced. Braces convert to the structs of this file,
// whose members accept any value. The first template parameter is a number, so calls with a type never match these
// overloads.
#pragma once

#include <initializer_list>

#include "../../../config.hpp"

SSMAX_BEGIN_CODE
namespace detail {

struct Anything {
  Anything() = default;
  template <class Value>
  Anything(const Value&);
  template <class T>
  Anything(T*, std::initializer_list<index_t>,
           std::initializer_list<index_t> = {});  // the arguments of a view's constructor
};

/// The members of AttentionArguments, PartialArguments, BackwardArguments and DecodeArguments.
struct UntypedArguments {
  Anything q{}, k{}, v{}, out{}, lse{}, first_query{}, queries{}, first_key{}, keys{}, state{}, continues{};
};
struct UntypedGradients {
  Anything dout{}, dlse{}, dq{}, dk{}, dv{}, dsinks{}, accumulate{};
};
struct UntypedOptions {
  Anything scale{}, rope{}, key_position{}, sinks{}, workspace{}, float_products{}, rounded_rotation{},
      batch_invariant{}, scaled_sinks{}, rotate_source_keys{}, lengths{}, explanation{};
};

}  // namespace detail

/// Declares an overload with these parameters.
#define SSMAX_UNTYPED(function, ...)                                                          \
  template <int type = 0>                                                                     \
  void function(__VA_ARGS__) {                                                                \
    static_assert(type != 0, "ssmax::" #function ": write the element type, as in " #function \
                             "<float>({.q = q, ...})");                                       \
  }
/// Declares the overloads of a function from its parameters before the scaling. Options in braces may follow the mask
/// or the score function.
#define SSMAX_UNTYPED_CALLS(function, ...)                                                                   \
  SSMAX_UNTYPED(function, __VA_ARGS__, const auto&...)                                                       \
  SSMAX_UNTYPED(function, __VA_ARGS__, const auto&, const auto&, const detail::UntypedOptions&,              \
                const auto&...)                                                                              \
  SSMAX_UNTYPED(function, __VA_ARGS__, const auto&, const auto&, const auto&, const detail::UntypedOptions&, \
                const auto&...)

SSMAX_UNTYPED_CALLS(attention, const detail::UntypedArguments&)
SSMAX_UNTYPED(attention, const detail::UntypedArguments&, const auto&, const auto&, const auto&, const auto&,
              const detail::UntypedOptions&, const auto&...)  // over a source of keys
SSMAX_UNTYPED_CALLS(attention_partial, const detail::UntypedArguments&)
SSMAX_UNTYPED_CALLS(attention_backward, const detail::UntypedArguments&, const detail::UntypedGradients&)
SSMAX_UNTYPED_CALLS(decode, const detail::UntypedArguments&, const auto&)

#undef SSMAX_UNTYPED_CALLS
#undef SSMAX_UNTYPED

SSMAX_END
