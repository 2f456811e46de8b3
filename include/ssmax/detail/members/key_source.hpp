// Detects the members that make a type a source of keys. key_source.hpp documents the members.
#pragma once

#include <concepts>

#include "../../config.hpp"
#include "optional_member.hpp"

SSMAX_BEGIN_DATA

struct KeySourceShape;
struct KeyRange;
template <class X, class V>
struct KeyRun;

SSMAX_END

SSMAX_BEGIN_DETAIL

/// The storage types of a source's keys and values.
template <class S>
struct SourceElements {
  using Key = typename S::Element;
  using Value = Key;
};
template <class S>
requires requires { typename S::ValueElement; }
struct SourceElements<S> {
  using Key = typename S::Element;
  using Value = typename S::ValueElement;
};
template <class S>
using SourceKey = typename SourceElements<S>::Key;
template <class S>
using SourceValue = typename SourceElements<S>::Value;
template <class S>
using SourceRun = KeyRun<SourceKey<S>, SourceValue<S>>;

/// Defines trait<S>: true if the source S has the member `name(arguments…) const` and its result satisfies
/// `returns`. A member of that name with another signature is a compile error.
#define SSMAX_SOURCE_MEMBER(trait, name, returns, signature, ...)                           \
  template <class S>                                                                        \
  consteval bool find_##trait() {                                                           \
    constexpr bool fits = requires(const S& source, index_t i) {                            \
      { source.name(__VA_ARGS__) } -> returns;                                              \
    };                                                                                      \
    constexpr bool is_named = requires(S & source, index_t i) { source.name(__VA_ARGS__); } \
    || requires { &S::name; };                                                              \
    static_assert(fits || !is_named,                                                        \
                  "ssmax: the member '" #name "' of a source of keys must be  " signature); \
    return fits;                                                                            \
  }                                                                                         \
  template <class S>                                                                        \
  constexpr bool trait = find_##trait<S>();

SSMAX_SOURCE_MEMBER(has_source_shape, shape, std::same_as<KeySourceShape>, "KeySourceShape shape() const")
SSMAX_SOURCE_MEMBER(has_source_length, length, std::integral, "index_t length(index_t batch) const", i)
SSMAX_SOURCE_MEMBER(has_source_stored, stored, std::same_as<KeyRange>, "KeyRange stored(index_t batch) const",
                    i)
SSMAX_SOURCE_MEMBER(has_source_run, run, std::same_as<SourceRun<S>>,
                    "KeyRun<Element> run(index_t batch, index_t kv_head, index_t key) const", i, i, i)

SSMAX_OPTIONAL_MEMBER(has_shares_keys, "source of keys", shares_keys, std::same_as<bool>,
                      "bool shares_keys() const")
SSMAX_OPTIONAL_MEMBER(has_forgotten, "source of keys", forgotten, std::same_as<KeyRange>,
                      "KeyRange forgotten(index_t batch) const", index_t{})

template <class S>
consteval bool is_key_source() {
  if constexpr (requires { typename S::Element; }) {
    return has_source_shape<S> && has_source_length<S> && has_source_stored<S> && has_source_run<S>;
  }
  return false;
}

SSMAX_END
