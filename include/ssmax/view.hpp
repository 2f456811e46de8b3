/// @defgroup view Views (view.hpp)
/// A view is a pointer with extents and strides. It does not own its elements. A copy takes a few registers.
///
/// Element (i0, …, ik) is `data[i0·stride(0) + … + ik·stride(k)]`. Strides count elements. A stride of an input may
/// be 0 (broadcast). The last stride of a tensor of attention must be 1. You choose the other strides. Member
/// names are those of std::mdspan.
///
/// The constructors do not check extents and strides. Every function that reads or writes elements throws
/// std::invalid_argument for:
///
/// - negative extents,
/// - more elements than half of the range of index_t (an extent of 0 counts as 1),
/// - strides that span more bytes than index_t holds,
/// - a null pointer with extents other than 0.
///
/// To omit an optional view, pass `View{}`.

/// @defgroup kept_span Spans that an object keeps, and spans of any integers (view.hpp)
/// @ingroup view
/// A KeptSpan is a std::span that refuses temporaries: of a temporary vector, it would dangle after the expression.
///
///     const std::vector<index_t> lengths{5, 3};
///     const KeyLengths mask(lengths);                          // right: lengths outlives the mask
///     const KeyLengths dangling(std::vector<index_t>{5, 3});   // does not compile
///
/// Constructors, factories and options that store a span for later take a KeptSpan. Functions that read a span during
/// the call take a std::span.
///
/// Integers is a span of integers of any type, as lengths, positions and targets have. KeptIntegers refuses
/// temporaries.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <type_traits>

#include "config.hpp"

/// @addtogroup kept_span
/// @{
SSMAX_BEGIN_DATA

namespace shared {

/// A range from which you can construct a span of T.
template <class Range, class T>
concept RangeOf = std::is_constructible_v<std::span<T>, std::add_lvalue_reference_t<Range>>;

/// A temporary that owns its elements: a span of it would dangle after the expression.
template <class Range, class T>
concept Temporary = RangeOf<Range, T> && !std::is_lvalue_reference_v<Range> &&
                    !std::ranges::enable_borrowed_range<std::remove_cvref_t<Range>>;

/// The element type of a std::vector, std::array or std::span.
template <class Range>
using ElementOf =
    typename decltype(std::span(std::declval<std::add_lvalue_reference_t<Range>>()))::value_type;

/// The type of a number that counts or numbers something.
template <class I>
concept Integer =
    std::integral<I> && !std::same_as<std::remove_cv_t<I>, bool> && sizeof(I) <= sizeof(index_t);

/// A std::vector, std::array or std::span of integers.
template <class Range>
concept IntegerRange = Integer<ElementOf<Range>>;

}  // namespace shared

/// A std::span of T that is not constructible from a temporary that owns its elements. The elements must outlive
/// whatever stores the span.
template <class T>
class KeptSpan : public std::span<T> {
 public:
  /// Makes an empty span.
  SSMAX_INLINE constexpr KeptSpan() = default;
  /// Refers to `count` elements.
  SSMAX_INLINE constexpr KeptSpan(T* data, std::size_t count) : std::span<T>(data, count) {}
  /// Refers to the elements of a std::vector, std::array or std::span.
  template <shared::RangeOf<T> Range>
  requires(!shared::Temporary<Range, T>) SSMAX_INLINE constexpr KeptSpan(Range&& range)
      : std::span<T>(range) {}
  /// @cond
  // For a deleted function, the compiler prints its line.
  // clang-format off
  template <shared::RangeOf<T> Range>
  requires(shared::Temporary<Range, T>)
  KeptSpan(Range&&) = delete;  // a temporary ends before the span is used: give the vector a name
  // clang-format on
  /// @endcond
};

/// A span of integers of one type, which are read as index_t. Unsigned numbers above the largest index_t are read as
/// negative numbers. The function that reads them says what a negative number means.
class Integers {
  class Iterator;

 public:
  /// Makes an empty span.
  SSMAX_INLINE constexpr Integers() = default;
  /// Refers to `count` integers.
  template <shared::Integer I>
  SSMAX_INLINE constexpr Integers(const I* data, std::size_t count)
      : data_(data), count_(count), bytes_(sizeof(I)), is_signed_(std::is_signed_v<I>) {}
  /// Refers to the integers of a std::vector, std::array or std::span.
  template <shared::IntegerRange Range>
  SSMAX_INLINE constexpr Integers(const Range& range) : Integers(std::data(range), std::size(range)) {}

  /// The number of integers.
  SSMAX_INLINE constexpr std::size_t size() const { return count_; }
  /// Returns whether there are no integers.
  SSMAX_INLINE constexpr bool empty() const { return count_ == 0; }
  /// Returns integer i.
  SSMAX_INLINE index_t operator[](std::size_t i) const {
    switch (bytes_) {
      case 8:
        return read<std::int64_t>(i);
      case 4:
        return is_signed_ ? read<std::int32_t>(i) : read<std::uint32_t>(i);
      case 2:
        return is_signed_ ? read<std::int16_t>(i) : read<std::uint16_t>(i);
      default:
        return is_signed_ ? read<std::int8_t>(i) : read<std::uint8_t>(i);
    }
  }
  /// Returns the first integer. Requires that there is one.
  SSMAX_INLINE index_t front() const { return (*this)[0]; }
  /// Returns the last integer. Requires that there is one.
  SSMAX_INLINE index_t back() const { return (*this)[count_ - 1]; }
  /// The first integer, for loops.
  SSMAX_INLINE constexpr Iterator begin() const { return {*this, 0}; }
  /// The end of the integers, for loops.
  SSMAX_INLINE constexpr Iterator end() const { return {*this, count_}; }
  /// The memory of the integers.
  SSMAX_INLINE std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(data_), count_ * bytes_};
  }

 private:
  class Iterator {
   public:
    SSMAX_INLINE constexpr Iterator(const Integers& of, std::size_t at) : of_(&of), at_(at) {}
    SSMAX_INLINE index_t operator*() const { return (*of_)[at_]; }
    SSMAX_INLINE constexpr Iterator& operator++() {
      ++at_;
      return *this;
    }
    SSMAX_INLINE constexpr bool operator!=(const Iterator& other) const { return at_ != other.at_; }

   private:
    const Integers* of_;
    std::size_t at_;
  };

  template <class I>
  SSMAX_INLINE index_t read(std::size_t i) const {
    I number;
    __builtin_memcpy(&number, static_cast<const std::byte*>(data_) + i * sizeof(I), sizeof(I));
    return static_cast<index_t>(number);
  }

  const void* data_ = nullptr;
  std::size_t count_ = 0;
  std::uint8_t bytes_ = sizeof(index_t);  // of an integer
  bool is_signed_ = true;
};

/// Integers that are not constructible from a temporary that owns its elements.
class KeptIntegers : public Integers {
 public:
  /// Makes an empty span.
  SSMAX_INLINE constexpr KeptIntegers() = default;
  /// Refers to what another span refers to.
  SSMAX_INLINE constexpr KeptIntegers(const Integers& integers) : Integers(integers) {}
  /// Refers to `count` integers.
  template <shared::Integer I>
  SSMAX_INLINE constexpr KeptIntegers(const I* data, std::size_t count) : Integers(data, count) {}
  /// Refers to the integers of a std::vector, std::array or std::span.
  template <shared::IntegerRange Range>
  requires(!shared::Temporary<Range, const shared::ElementOf<Range>>) SSMAX_INLINE
      constexpr KeptIntegers(Range&& range)
      : Integers(range) {}
  /// @cond
  // For a deleted function, the compiler prints its line.
  // clang-format off
  template <shared::IntegerRange Range>
  requires(shared::Temporary<Range, const shared::ElementOf<Range>>)
  KeptIntegers(Range&&) = delete;  // a temporary ends before the span is used: give the vector a name
  // clang-format on
  /// @endcond
};

SSMAX_END

/// @cond
// A temporary KeptSpan owns no elements.
template <class T>
inline constexpr bool std::ranges::enable_borrowed_range<ssmax::KeptSpan<T>> = true;
/// @endcond
/// @}

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
