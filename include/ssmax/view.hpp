/// @defgroup view Views (view.hpp)
/// View: a pointer, extents and strides. It owns nothing and copies in a few registers.
///
/// Element (i0, …, ik) lies at `data[i0·stride(0) + … + ik·stride(k)]`. Strides count elements, may be
/// 0 (broadcast, for inputs only) and are free but for the last one, which must be 1 wherever a kernel takes
/// the view. Member names are those of std::mdspan.
///
/// Extents and strides are taken as they are; every function that takes views refuses what cannot be:
/// negative extents, more elements than half of what index_t counts (an extent of 0 counting as 1), strides
/// that reach over more bytes than index_t counts. A view that may be left out is left out only by `View{}`:
/// null with an extent other than 0 is an error.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <type_traits>

#include "config.hpp"

/// @addtogroup view
/// @{
SSMAX_BEGIN_DATA

template <class T, int Rank>
class View;

namespace shared {

/// What a span of T can be made of.
template <class Range, class T>
concept RangeOf = std::is_constructible_v<std::span<T>, std::add_lvalue_reference_t<Range>>;

/// A row that owns its elements and ends with the expression it stands in: a span of it would dangle.
template <class Range, class T>
concept Temporary = RangeOf<Range, T> && !std::is_lvalue_reference_v<Range> &&
                    !std::ranges::enable_borrowed_range<std::remove_cvref_t<Range>>;

}  // namespace shared

/// `Rank` extents and strides over elements of type T (`const T` for inputs).
template <class T, int Rank>
class View {
  static_assert(Rank >= 1, "ssmax::View: Rank must be at least 1");

 public:
  /// T, with its const.
  using element_type = T;
  /// T without const.
  using value_type = std::remove_cv_t<T>;
  /// One number per dimension: extents, or strides.
  using Extents = std::array<index_t, Rank>;

  /// Null and without elements: what is left out.
  SSMAX_INLINE constexpr View() = default;

  /// Contiguous, row-major.
  SSMAX_INLINE constexpr View(T* data, const Extents& extents) : data_(data), extents_(extents) {
    index_t stride = 1;
    for (int i = Rank - 1; i >= 0; --i) {
      strides_[static_cast<std::size_t>(i)] = stride;
      // Absurd extents may wrap here; what takes the view then refuses the extents.
      stride = static_cast<index_t>(static_cast<std::size_t>(stride) * static_cast<std::size_t>(extent(i)));
    }
  }

  /// Any strides.
  SSMAX_INLINE constexpr View(T* data, const Extents& extents, const Extents& strides)
      : data_(data), extents_(extents), strides_(strides) {}

  /// Anything contiguous (std::vector, std::array, std::span) as one row.
  template <shared::RangeOf<T> Range>
  requires(Rank == 1 && !shared::Temporary<Range, T>) SSMAX_INLINE constexpr View(Range&& range)
      : View(std::span<T>(range).data(), {static_cast<index_t>(std::span<T>(range).size())}) {}

  // Takes what cannot be a view where a view is wanted, so that the compiler says why. (It shows a
  // deleted function's line.)
  /// @cond
  // clang-format off
  template <shared::RangeOf<T> Range>
  requires(Rank == 1 && shared::Temporary<Range, T>)
  View(Range&&) = delete;  // the view of a temporary would dangle: give the vector a name
  // clang-format on
  template <shared::RangeOf<T> Range>
  requires(Rank >= 3) SSMAX_INLINE constexpr View(Range&&) {
    static_assert(std::is_void_v<Range>,
                  "ssmax::View: a vector has no extents: write {data, {batch, heads, positions, channels}}");
  }
  template <class U, int OtherRank>
  requires(Rank >= 3 && OtherRank != Rank) SSMAX_INLINE constexpr View(const View<U, OtherRank>&) {
    static_assert(
        OtherRank == Rank,
        "ssmax::View: the rank differs: tensors of attention are [batch, heads, positions, channels], "
        "lse is [batch, heads, positions]");
  }
  template <class U>
  requires(Rank >= 3 && std::is_const_v<U> == std::is_const_v<T> &&
           !std::same_as<std::remove_cv_t<U>, std::remove_cv_t<T>>)  //
      SSMAX_INLINE constexpr View(const View<U, Rank>&) {
    static_assert(
        std::same_as<U, T>,
        "ssmax::View: the element type differs: where q, k, v and out are stored in different types, "
        "write attention<Elements<Query, Key, Value, Out>>");
  }

  /// @endcond

  /// `View<T, Rank>` to `View<const T, Rank>`.
  SSMAX_INLINE constexpr operator View<const T, Rank>() const requires(!std::is_const_v<T>) {
    return {data_, extents_, strides_};
  }

  /// The number of dimensions.
  SSMAX_INLINE static constexpr int rank() { return Rank; }
  /// Elements along dimension i, from 0 to Rank - 1.
  SSMAX_INLINE constexpr index_t extent(int i) const { return extents_[static_cast<std::size_t>(i)]; }
  /// Elements from one index of dimension i to the next.
  SSMAX_INLINE constexpr index_t stride(int i) const { return strides_[static_cast<std::size_t>(i)]; }
  /// Where element (0, …, 0) lies.
  SSMAX_INLINE constexpr T* data_handle() const { return data_; }
  /// The number of elements; modulo 2^64 (2^32) where index_t does not count as far.
  SSMAX_INLINE constexpr index_t size() const {
    std::size_t size = 1;
    for (index_t e : extents_) size *= static_cast<std::size_t>(e);
    return static_cast<index_t>(size);
  }
  /// Some extent is 0.
  SSMAX_INLINE constexpr bool empty() const {
    bool empty = false;
    SSMAX_UNROLL
    for (int i = 0; i < Rank; ++i) empty |= extent(i) == 0;
    return empty;
  }

  /// The element at one index per dimension; checked where SSMAX_ASSERTIONS is 1.
  template <class... Index>
  requires(sizeof...(Index) == Rank) SSMAX_INLINE constexpr T& operator()(Index... index) const {
    const Extents at{static_cast<index_t>(index)...};
    index_t offset = 0;
    SSMAX_UNROLL
    for (int i = 0; i < Rank; ++i) {
      SSMAX_ASSERT(at[static_cast<std::size_t>(i)] >= 0 && at[static_cast<std::size_t>(i)] < extent(i));
      offset += at[static_cast<std::size_t>(i)] * stride(i);
    }
    return data_[offset];
  }

 private:
  T* data_ = nullptr;
  Extents extents_{};
  Extents strides_{};
};

SSMAX_END
/// @}
