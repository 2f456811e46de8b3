// View<T, Rank>: a pointer, extents and strides. It owns nothing and copies in a few registers.
//
// Element (i0, …, ik) lies at data[i0·stride(0) + … + ik·stride(k)]. Strides count elements, may be 0
// (broadcast, for inputs only) and are free but for the last one, which must be 1 wherever a kernel takes the
// view. Member names are those of std::mdspan.
#pragma once

#include <array>
#include <span>
#include <type_traits>

#include "config.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {

template <class T, int Rank>
class View {
  static_assert(Rank >= 1, "ssmax::View: Rank must be at least 1");

 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;
  using Extents = std::array<index_t, Rank>;

  SSMAX_INLINE constexpr View() = default;

  /// Contiguous, row-major.
  SSMAX_INLINE constexpr View(T* data, const Extents& extents) : data_(data), extents_(extents) {
    index_t stride = 1;
    for (int i = Rank - 1; i >= 0; --i) {
      strides_[static_cast<std::size_t>(i)] = stride;
      stride *= extent(i);
    }
  }

  SSMAX_INLINE constexpr View(T* data, const Extents& extents, const Extents& strides)
      : data_(data), extents_(extents), strides_(strides) {}

  /// Anything contiguous (std::vector, std::array, std::span) as one row.
  template <class Range>
  requires(Rank == 1 && std::is_constructible_v<std::span<T>, Range&>) SSMAX_INLINE
      constexpr View(Range&& range)
      : View(std::span<T>(range).data(), {static_cast<index_t>(std::span<T>(range).size())}) {}

  /// View<T> to View<const T>.
  SSMAX_INLINE constexpr operator View<const T, Rank>() const requires(!std::is_const_v<T>) {
    return {data_, extents_, strides_};
  }

  SSMAX_INLINE static constexpr int rank() { return Rank; }
  SSMAX_INLINE constexpr index_t extent(int i) const { return extents_[static_cast<std::size_t>(i)]; }
  SSMAX_INLINE constexpr index_t stride(int i) const { return strides_[static_cast<std::size_t>(i)]; }
  SSMAX_INLINE constexpr T* data_handle() const { return data_; }
  SSMAX_INLINE constexpr index_t size() const {
    index_t size = 1;
    for (index_t e : extents_) size *= e;
    return size;
  }
  SSMAX_INLINE constexpr bool empty() const { return size() == 0; }

  template <class... Index>
  requires(sizeof...(Index) == Rank) SSMAX_INLINE constexpr T& operator()(Index... index) const {
    const Extents at{static_cast<index_t>(index)...};
    index_t offset = 0;
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

}  // namespace SSMAX_DATA_NAMESPACE
}  // namespace ssmax
