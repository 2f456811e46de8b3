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

#define SSMAX_UNTYPED(function) \
  "ssmax::" function ": write the element type, as in " function "<float>({.q = q, ...})"

template <int type = 0, class... More>
void attention(const detail::UntypedArguments&, const More&...) {
  static_assert(type != 0, SSMAX_UNTYPED("attention"));
}
template <int type = 0, class S, class M, class... Rest>
void attention(const detail::UntypedArguments&, const S&, const M&, const detail::UntypedOptions&,
               const Rest&...) {
  static_assert(type != 0, SSMAX_UNTYPED("attention"));
}
template <int type = 0, class S, class M, class C, class... Rest>
void attention(const detail::UntypedArguments&, const S&, const M&, const C&, const detail::UntypedOptions&,
               const Rest&...) {
  static_assert(type != 0, SSMAX_UNTYPED("attention"));
}

template <int type = 0, class Source, class S, class M, class C, class... Rest>
void attention(const detail::UntypedArguments&, const Source&, const S&, const M&, const C&,
               const detail::UntypedOptions&, const Rest&...) {
  static_assert(type != 0, SSMAX_UNTYPED("attention"));
}

template <int type = 0, class... More>
void attention_partial(const detail::UntypedArguments&, const More&...) {
  static_assert(type != 0, SSMAX_UNTYPED("attention_partial"));
}
template <int type = 0, class S, class M, class... Rest>
void attention_partial(const detail::UntypedArguments&, const S&, const M&, const detail::UntypedOptions&,
                       const Rest&...) {
  static_assert(type != 0, SSMAX_UNTYPED("attention_partial"));
}
template <int type = 0, class S, class M, class C, class... Rest>
void attention_partial(const detail::UntypedArguments&, const S&, const M&, const C&,
                       const detail::UntypedOptions&, const Rest&...) {
  static_assert(type != 0, SSMAX_UNTYPED("attention_partial"));
}

template <int type = 0, class... More>
void attention_backward(const detail::UntypedArguments&, const detail::UntypedGradients&, const More&...) {
  static_assert(type != 0, SSMAX_UNTYPED("attention_backward"));
}
template <int type = 0, class S, class M, class... Rest>
void attention_backward(const detail::UntypedArguments&, const detail::UntypedGradients&, const S&, const M&,
                        const detail::UntypedOptions&, const Rest&...) {
  static_assert(type != 0, SSMAX_UNTYPED("attention_backward"));
}
template <int type = 0, class S, class M, class C, class... Rest>
void attention_backward(const detail::UntypedArguments&, const detail::UntypedGradients&, const S&, const M&,
                        const C&, const detail::UntypedOptions&, const Rest&...) {
  static_assert(type != 0, SSMAX_UNTYPED("attention_backward"));
}

template <int type = 0, class Cache, class... More>
void decode(const detail::UntypedArguments&, const Cache&, const More&...) {
  static_assert(type != 0, SSMAX_UNTYPED("decode"));
}
template <int type = 0, class Cache, class S, class M, class... Rest>
void decode(const detail::UntypedArguments&, const Cache&, const S&, const M&, const detail::UntypedOptions&,
            const Rest&...) {
  static_assert(type != 0, SSMAX_UNTYPED("decode"));
}
template <int type = 0, class Cache, class S, class M, class C, class... Rest>
void decode(const detail::UntypedArguments&, const Cache&, const S&, const M&, const C&,
            const detail::UntypedOptions&, const Rest&...) {
  static_assert(type != 0, SSMAX_UNTYPED("decode"));
}

#undef SSMAX_UNTYPED

SSMAX_END
