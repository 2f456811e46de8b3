/// @defgroup storage Storage types (storage.hpp)
/// @ingroup key_source
/// Storage types: the types of the elements of rows, queries, keys and values in memory.
///
/// | storage type | computed in | conversion |
/// |---|---|---|
/// | float | float | - |
/// | double | double | - |
/// | half, bfloat16 | float | rounded once when stored, to nearest even |
/// | Int8, Fp8E4M3, Fp8E5M2 | float | for caches and sources of keys: the same, with a factor per row (eight_bit.hpp) |
/// | Q8_0 | float | for caches and sources of keys: groups of 32 numbers with a factor, as in ggml (eight_bit.hpp) |
///
/// You add a storage type by one specialisation in namespace ssmax:
///
///     template <>
///     struct StorageTraits<Byte> {
///       using Compute = float;
///       static void load(const Byte* in, index_t n, float* out);     // widens n elements
///       static void store(const float* in, index_t n, Byte* out);    // rounds n elements
///       static float scale(const float* in, index_t n);              // may be left out
///       static constexpr index_t group = 1;                          // channels of an element; may be left out
///     };
///
/// Attention, its backward and KvCache::append call `load` and `store` with the whole row of a query, key or
/// value. The pointer `in` (or `out`) points to the first channel, and n is the width. Exception: the functions over
/// rows of logits, such as softmax, convert a long row in ranges that begin at any element.
///
/// With `group`, an element holds `group` channels, as Q8_0 does. n still counts channels. The caches, and extents and
/// strides of views and key runs, count elements. Widths are multiples of `group`: caches throw std::invalid_argument
/// for other widths. A type with `group` is for caches and sources of keys only.
///
/// If the type has `scale`, caches divide each row of keys or values by scale(row) and store one float per row.
/// Attention multiplies the result of `load` by this float. A type with `scale` is for caches and for sources that
/// return factors. A type without `scale` is for rows, queries, keys and values. Exception: with `SSMAX_COMPILED`, the
/// functions over rows of logits accept float, double, half and bfloat16 only.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <limits>
#include <type_traits>

#include "config.hpp"
#include "eight_bit.hpp"
#include "half.hpp"

/// @addtogroup storage
/// @{
SSMAX_BEGIN_DETAIL

// Defined by the kernels of detail/memory/conversion.hpp.
template <class X>
void widen(const X* in, index_t n, float* out);
template <class X>
void narrow(const float* in, index_t n, X* out);

SSMAX_END

SSMAX_BEGIN_DATA

/// The trait that you specialise for your own storage type: see the top of storage.hpp. An unspecialised type other
/// than float is not a storage type.
template <class X>
struct StorageTraits {
  using Compute = float;  ///< The type that rows of X are computed in.
};

/// double: stored and computed in double.
template <>
struct StorageTraits<double> {
  using Compute = double;  ///< The type that rows of double are computed in.
};

/// half and bfloat16: converted by the kernels.
template <class X>
requires std::same_as<X, half> || std::same_as<X, bfloat16>
struct StorageTraits<X> {
  using Compute = float;  ///< The type that rows of X are computed in.
  /// Converts n elements to float.
  SSMAX_INLINE static void load(const X* in, index_t n, float* out) { detail::widen(in, n, out); }
  /// Rounds n elements to nearest even.
  SSMAX_INLINE static void store(const float* in, index_t n, X* out) { detail::narrow(in, n, out); }
};

/// Int8, Fp8E4M3 and Fp8E5M2: divided by a factor per row, widened by the kernels.
template <detail::EightBitStorage X>
struct StorageTraits<X> {
  using Compute = float;  ///< The type that rows of X are computed in.
  /// Converts n elements to float.
  SSMAX_INLINE static void load(const X* in, index_t n, float* out) { detail::widen(in, n, out); }
  /// Rounds n elements to nearest even.
  SSMAX_INLINE static void store(const float* in, index_t n, X* out) {
    for (index_t i = 0; i < n; ++i) out[i] = X(in[i]);
  }
  /// Returns the factor of a row: 1 for zeros, NaN for a row with a NaN or an infinity, else max|x| / X::largest, at
  /// least 2^-126.
  SSMAX_INLINE static float scale(const float* in, index_t n) {
    float most = 0, sum = 0;  // the sum of x · 0 is NaN if a number is not finite
    for (index_t i = 0; i < n; ++i) {
      most = std::max(most, std::abs(in[i]));
      sum += in[i] * 0;
    }
    if (std::isnan(sum)) return sum;
    return most == 0 ? 1 : std::max(most / X::largest, std::numeric_limits<float>::min());
  }
};

/// Q8_0: converted in groups of 32.
template <>
struct StorageTraits<Q8_0> {
  using Compute = float;                         ///< The type that rows of Q8_0 are computed in.
  static constexpr index_t group = Q8_0::group;  ///< The channels of an element.
  /// Converts n / 32 groups to n floats.
  SSMAX_INLINE static void load(const Q8_0* in, index_t n, float* out) { detail::widen(in, n, out); }
  /// Rounds n floats to n / 32 groups: eight_bit.hpp.
  SSMAX_INLINE static void store(const float* in, index_t n, Q8_0* out) { detail::narrow(in, n, out); }
};

/// The type that rows of X are computed in.
template <class X>
using ComputeType = typename StorageTraits<std::remove_cv_t<X>>::Compute;

SSMAX_END

SSMAX_BEGIN_DETAIL

/// The types for which the library has kernels and drivers.
template <class X>
concept BuiltInStorage =
    std::same_as<X, float> || std::same_as<X, double> || std::same_as<X, half> || std::same_as<X, bfloat16>;

/// The library's types of 8 bits: rows have factors, or groups of their channels have.
template <class X>
concept QuantizedStorage = EightBitStorage<X> || std::same_as<X, Q8_0>;

template <class X>
concept ConvertedStorage = requires(const X* in, X* out, const ComputeType<X>* wide, ComputeType<X>* to,
                                    index_t n) {
  StorageTraits<X>::load(in, n, to);
  StorageTraits<X>::store(wide, n, out);
};

/// A storage type with a scale per row.
template <class X>
concept ScaledStorage = ConvertedStorage<X> && requires(const ComputeType<X>* in, index_t n) {
  { StorageTraits<X>::scale(in, n) } -> std::convertible_to<float>;
};

template <class X>
consteval index_t find_group() {
  if constexpr (requires { StorageTraits<X>::group; }) return StorageTraits<X>::group;
  return 1;
}
/// The number of channels that an element of X holds.
template <class X>
inline constexpr index_t group_of = find_group<X>();

/// A storage type of keys and values.
template <class X>
concept KeyStorage = BuiltInStorage<X> || ConvertedStorage<X>;

/// A storage type of all other tensors.
template <class X>
concept Storage = KeyStorage<X> && !ScaledStorage<X> && group_of<X> == 1;

/// A storage type of rows of logits. Drivers of rows are compiled for each storage type: with SSMAX_COMPILED only for
/// the library's own types.
template <class X>
concept RowStorage = Storage<X> &&(BuiltInStorage<X> || SSMAX_COMPILES_DRIVERS != 0);

SSMAX_END
/// @}
