// Fast paths: what may be done by vectors for a score, or once for many rows for a mask, in
// place of asking it key by key.
//
// A policy is computed by its own formula unless its type asks for a fast path by name, in namespace ssmax or
// the global one, before its first use:
//
//   template <>
//   inline constexpr ssmax::FastPath ssmax::fast_path<Clipped> = ssmax::FastPath::elementwise;
//
//   fast path    of      the type promises                               and has the members, all const
//   none         all     nothing; what a type has that does not ask
//   elementwise  scores  z' depends on z alone                           apply(T* z, index_t n)
//                                                                        differentiate(const T* z', n, T* d)
//   distance     scores  z' = z + slope·(key position - query position)  slope(index_t head)
//   row          scores  z' = z + row[key]                               row(const Query&)
//   same_keys    masks   all queries of a batch entry and head see the same keys
//
// apply replaces n logits by z'; differentiate multiplies d by dz'/dz where apply made z'. Both take
// T = float and double, lanes that hold no logit among them. row returns a pointer to the query's row of
// float, double, half or bfloat16, contiguous, or null where it has none. The formula must say the same as
// the fast path, up to rounding: which of them is used depends on the number of queries, the types and the
// mask. A member that is missing or has another signature is an error of the compiler.
//
// A class does not inherit the fast path of its base, since it may have a formula of its own.
#pragma once

#include "config.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {

enum class FastPath { none, elementwise, distance, row, same_keys };

/// The fast path that a type asks for. To be specialised for a type of one's own.
template <class Policy>
inline constexpr FastPath fast_path = FastPath::none;

}  // namespace SSMAX_DATA_NAMESPACE
}  // namespace ssmax
