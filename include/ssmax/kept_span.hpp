/// @defgroup kept_span Spans that an object keeps (kept_span.hpp)
/// @ingroup view
/// A KeptSpan is a std::span that refuses temporaries: of a temporary vector, it would dangle after the expression.
///
///     const std::vector<index_t> lengths{5, 3};
///     const KeyLengths mask(lengths);                          // right: lengths outlives the mask
///     const KeyLengths dangling(std::vector<index_t>{5, 3});   // does not compile
///
/// Constructors, factories and options that store a span for later take a KeptSpan. Functions that read a span during
/// the call take a std::span.
#pragma once

#include <cstddef>
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

SSMAX_END

/// @cond
// A temporary KeptSpan owns no elements.
template <class T>
inline constexpr bool std::ranges::enable_borrowed_range<ssmax::KeptSpan<T>> = true;
/// @endcond
/// @}
