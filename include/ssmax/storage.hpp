/// @defgroup storage Storage types (storage.hpp)
/// @ingroup key_source
/// Storage types: what the elements of a row, of queries, keys and values are stored in.
///
///     float, double        computed in as they are
///     half, bfloat16       widened to float, computed, and rounded once when stored, to nearest even
///
/// Another type of storage is one specialisation, in namespace ssmax:
///
///     template <>
///     struct StorageTraits<Int8> {
///       using Compute = float;
///       static void load(const Int8* in, index_t n, float* out);     // widens n elements
///       static void store(const float* in, index_t n, Int8* out);    // rounds n elements
///       static float scale(const float* in, index_t n);              // may be left out
///     };
///
/// Attention, its backward, decode and KvCache::append call `load` and `store` with the whole row of a query, key or
/// value: `in` (or `out`) points to the first channel, and n is the width. So a type may keep several elements in a
/// block, as q8_0 does, if the width is a multiple of the block. Exception: the functions over rows of logits, such as
/// softmax, convert a long row in parts that begin at any element.
///
/// With `scale`, a row of keys or values is stored divided by scale(row). A KvCache keeps one such float for
/// each row, and attention multiplies by it what load gives. Such a type is for caches alone; one without
/// `scale` serves rows, queries, keys and values. Exception: with `SSMAX_COMPILED`, the functions over rows of logits
/// take the four types above alone.
#pragma once

#include <concepts>
#include <type_traits>

#include "config.hpp"
#include "half.hpp"

/// @addtogroup storage
/// @{
SSMAX_BEGIN_DETAIL

// By the kernels of detail/memory/conversion.hpp.
template <class X>
void widen(const X* in, index_t n, float* out);
template <class X>
void narrow(const float* in, index_t n, X* out);

SSMAX_END

SSMAX_BEGIN_DATA

/// To be specialised for a type of one's own: the top of storage.hpp. A type that does not specialise it is
/// float, or no storage type.
template <class X>
struct StorageTraits {
  using Compute = float;  ///< The type that rows of X are computed in.
};

/// double, computed in as it is.
template <>
struct StorageTraits<double> {
  using Compute = double;  ///< The type that rows of double are computed in.
};

/// half and bfloat16, converted by the kernels.
template <class X>
requires std::same_as<X, half> || std::same_as<X, bfloat16>
struct StorageTraits<X> {
  using Compute = float;  ///< The type that rows of X are computed in.
  /// Widens n elements.
  SSMAX_INLINE static void load(const X* in, index_t n, float* out) { detail::widen(in, n, out); }
  /// Rounds n elements to nearest even.
  SSMAX_INLINE static void store(const float* in, index_t n, X* out) { detail::narrow(in, n, out); }
};

namespace SSMAX_VISIBLE shared {

/// The type that rows of X are computed in.
template <class X>
using Compute = typename StorageTraits<std::remove_cv_t<X>>::Compute;

}  // namespace shared

SSMAX_END

SSMAX_BEGIN_DETAIL

/// The types whose kernels and drivers the library brings along.
template <class X>
concept BuiltInStorage =
    std::same_as<X, float> || std::same_as<X, double> || std::same_as<X, half> || std::same_as<X, bfloat16>;

template <class X>
concept ConvertedStorage = requires(const X* in, X* out, const Compute<X>* wide, Compute<X>* to, index_t n) {
  StorageTraits<X>::load(in, n, to);
  StorageTraits<X>::store(wide, n, out);
};

/// Whose rows carry a factor each.
template <class X>
concept ScaledStorage = ConvertedStorage<X> && requires(const Compute<X>* in, index_t n) {
  { StorageTraits<X>::scale(in, n) } -> std::convertible_to<float>;
};

/// What keys and values may be stored in.
template <class X>
concept KeyStorage = BuiltInStorage<X> || ConvertedStorage<X>;

/// What everything else may be stored in.
template <class X>
concept Storage = KeyStorage<X> && !ScaledStorage<X>;

/// What rows of logits may be stored in. Drivers of rows are compiled for each storage type, so with SSMAX_COMPILED for
/// the library's own types alone.
template <class X>
concept RowStorage = Storage<X> &&(BuiltInStorage<X> || SSMAX_COMPILES_DRIVERS != 0);

SSMAX_END
/// @}
