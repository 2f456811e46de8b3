/// @defgroup view Views (view.hpp)
/// A view is a pointer with extents and strides. It does not own its elements. A copy takes a few registers.
///
/// Element (i0, …, ik) is `data[i0·stride(0) + … + ik·stride(k)]`. Strides count elements. A stride of an input may
/// be 0 (broadcast). If a kernel takes the view, the last stride must be 1. You choose the other strides. Member
/// names are those of std::mdspan.
///
/// The constructors do not check extents and strides. Every function that takes views throws std::invalid_argument
/// for:
///
/// - negative extents,
/// - more elements than half of the range of index_t (an extent of 0 counts as 1),
/// - strides that span more bytes than index_t holds,
/// - a null pointer with extents other than 0.
///
/// To omit an optional view, pass `View{}`.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <type_traits>

#include "config.hpp"
#include "kept_span.hpp"

/// @addtogroup view
/// @{
SSMAX_BEGIN_DATA

/// A view with `Rank` extents and strides over elements of type T (`const T` for inputs).
template <class T, int Rank>
class View {
  static_assert(Rank >= 1, "ssmax::View: Rank must be at least 1");

 public:
  /// The element type, with const for inputs.
  using element_type = T;
  /// The element type without const.
  using value_type = std::remove_cv_t<T>;
  /// Extents or strides: one number per dimension.
  using Extents = std::array<index_t, Rank>;

  /// Makes a null view with 0 elements: an omitted argument.
  SSMAX_INLINE constexpr View() = default;

  /// Makes a contiguous row-major view.
  SSMAX_INLINE constexpr View(T* data, const Extents& extents) : data_(data), extents_(extents) {
    index_t stride = 1;
    for (int i = Rank - 1; i >= 0; --i) {
      strides_[static_cast<std::size_t>(i)] = stride;
      // Huge extents may wrap here. The function that takes the view then throws for the extents.
      stride = static_cast<index_t>(static_cast<std::size_t>(stride) * static_cast<std::size_t>(extent(i)));
    }
  }

  /// Makes a view with any strides.
  SSMAX_INLINE constexpr View(T* data, const Extents& extents, const Extents& strides)
      : data_(data), extents_(extents), strides_(strides) {}

  /// Makes a view of a contiguous range (std::vector, std::array, std::span) as one row.
  template <shared::RangeOf<T> Range>
  requires(Rank == 1 && !shared::Temporary<Range, T>) SSMAX_INLINE constexpr View(Range&& range)
      : View(std::span<T>(range).data(), {static_cast<index_t>(std::span<T>(range).size())}) {}

  // Constructors for arguments that cannot be a view, so that the compiler prints the reason. (For a deleted
  // function, the compiler prints its line.)
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
    static_assert(std::same_as<U, T>,
                  "ssmax::View: the element type differs: lse has the type of computation");
  }

  /// @endcond

  /// Converts `View<T, Rank>` to `View<const T, Rank>`.
  SSMAX_INLINE constexpr operator View<const T, Rank>() const requires(!std::is_const_v<T>) {
    return {data_, extents_, strides_};
  }

  /// Returns the number of dimensions.
  SSMAX_INLINE static constexpr int rank() { return Rank; }
  /// Returns the number of elements along dimension i, from 0 to Rank - 1.
  SSMAX_INLINE constexpr index_t extent(int i) const { return extents_[static_cast<std::size_t>(i)]; }
  /// Returns the distance between consecutive indices of dimension i, in elements.
  SSMAX_INLINE constexpr index_t stride(int i) const { return strides_[static_cast<std::size_t>(i)]; }
  /// The extents of all dimensions.
  SSMAX_INLINE constexpr const Extents& extents() const { return extents_; }
  /// The strides of all dimensions, in elements.
  SSMAX_INLINE constexpr const Extents& strides() const { return strides_; }
  /// Returns the address of element (0, …, 0).
  SSMAX_INLINE constexpr T* data_handle() const { return data_; }
  /// Returns the number of elements, modulo 2^64 (2^32) if index_t cannot hold it.
  SSMAX_INLINE constexpr index_t size() const {
    std::size_t size = 1;
    for (index_t e : extents_) size *= static_cast<std::size_t>(e);
    return static_cast<index_t>(size);
  }
  /// Returns true if an extent is 0.
  SSMAX_INLINE constexpr bool empty() const {
    bool empty = false;
    SSMAX_UNROLL
    for (int i = 0; i < Rank; ++i) empty |= extent(i) == 0;
    return empty;
  }

  /// Returns the element at one index per dimension. Checks the indices if SSMAX_ASSERTIONS is 1.
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
