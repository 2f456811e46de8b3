// Detects the members that make a type a source of keys. key_source.hpp documents the members.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

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
SSMAX_OPTIONAL_MEMBER(has_layout, "source of keys", layout, std::same_as<std::uint64_t>,
                      "std::uint64_t layout() const")

/// True for a source with `owns_keys`.
template <class S>
constexpr bool owns_keys = requires {
  requires S::owns_keys;
};

/// True for a source with `owns_keys = false`.
template <class S>
constexpr bool refers_to_keys = requires {
  requires !S::owns_keys;
};

/// The addresses of keys and values.
struct RowLists {
  const std::byte **k, **v;
};

/// The bytes from a key, or a value, of a kv head to that of the next kv head at the same position.
struct HeadDistance {
  bool is_known = false;
  index_t k = 0, v = 0;
};

/// Returns the bytes of a stride, modulo 2^64: the stride of a single kv head may be any number.
template <class X>
constexpr index_t bytes_of(index_t stride) {
  return static_cast<index_t>(static_cast<std::size_t>(stride) * sizeof(X));
}

/// Calls private members of the library's sources: find_rows writes the addresses of a range, and head_distance returns
/// the one distance of all kv heads and positions.
struct SourceRows {
  template <class S>
  static constexpr bool has_find_rows = requires(const S& source, index_t i, RowLists to) {
    source.find_rows(i, i, i, i, to);
  };
  template <class S>
  static void find_rows(const S& source, index_t batch, index_t kv_head, index_t first, index_t count,
                        RowLists to) {
    source.find_rows(batch, kv_head, first, count, to);
  }
  template <class S>
  static HeadDistance head_distance(const S& source) {
    if constexpr (requires {
                    { source.head_distance() } -> std::same_as<HeadDistance>;
                  }) {
      return source.head_distance();
    } else {
      return {};
    }
  }
};

template <class S>
consteval bool is_key_source() {
  if constexpr (requires { typename S::Element; }) {
    return has_source_shape<S> && has_source_length<S> && has_source_stored<S> && has_source_run<S>;
  }
  return false;
}

SSMAX_END
