/// @defgroup elements Element types (elements.hpp)
/// @ingroup attention
/// Storage types for a call whose tensors have different storage types.
///
///     attention<Elements<float, half>>({.q = q, .k = k, .v = v, .out = out}, scaling);  // k, v: half
///
/// `attention<T>` takes tensors that are all stored as T. `attention<Elements<Query, Key, Value, Out>>` takes:
///
/// | type | tensors | default |
/// |---|---|---|
/// | Query | q, dq | |
/// | Key | k, dk | Query |
/// | Value | v, dv | Key |
/// | Out | out, dout | Query |
///
/// attention_partial, attention_backward and AttentionPlan take Elements as well. Each type is float, half, bfloat16
/// or a type of your own (storage.hpp), or all types are double. The call computes in float, or in double for double.
/// The bf16 path computes a call only if q, k and v are all bfloat16.
///
/// Exception: calls over a source use the source's types in place of Key and Value. Exception: over MPI, all tensors
/// have one type.
#pragma once

#include <concepts>

#include "storage.hpp"

/// @addtogroup elements
/// @{
SSMAX_BEGIN_DATA

/// The storage types of q, k, v and out, in place of one element type.
template <class Query, class Key = Query, class Value = Key, class Out = Query>
struct Elements {};

/// Computes in the type that queries are computed in.
template <class Query, class Key, class Value, class Out>
struct StorageTraits<Elements<Query, Key, Value, Out>> {
  using Compute = shared::ComputeType<Query>;  ///< float or double.
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// The storage types of the tensors of a call. T is one type for all tensors, or Elements.
template <class T>
struct ElementsOf {
  using Query = T;
  using Key = T;
  using Value = T;
  using Out = T;
};
template <class Q, class K, class V, class O>
struct ElementsOf<Elements<Q, K, V, O>> {
  using Query = Q;
  using Key = K;
  using Value = V;
  using Out = O;
};

template <class T>
using QueryElement = typename ElementsOf<T>::Query;
template <class T>
using KeyElement = typename ElementsOf<T>::Key;
template <class T>
using ValueElement = typename ElementsOf<T>::Value;
template <class T>
using OutElement = typename ElementsOf<T>::Out;

template <class T, class A>
concept StoredFor = Storage<T> && std::same_as<ComputeType<T>, A>;

/// A type that attention<T> accepts.
template <class T>
concept CallElements =
    StoredFor<QueryElement<T>, ComputeType<T>> && StoredFor<KeyElement<T>, ComputeType<T>> &&
    StoredFor<ValueElement<T>, ComputeType<T>> && StoredFor<OutElement<T>, ComputeType<T>>;

SSMAX_END
/// @}
