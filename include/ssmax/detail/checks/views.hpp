// Checks the views of every public call, in O(1) time and before the call writes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <span>

#include "../../view.hpp"
#include "error.hpp"

SSMAX_BEGIN_DETAIL

/// Upper bound for every extent and element count: the sum of two such numbers cannot overflow.
inline constexpr index_t max_counted = std::numeric_limits<index_t>::max() / 2;

/// A view of elements of any type, as checks read it. The view must outlive it.
class AnyView {
 public:
  SSMAX_INLINE AnyView(const void* data, const index_t* extents, const index_t* strides, int rank,
                       index_t element_bytes)
      : data_(data), extents_(extents), strides_(strides), rank_(rank), element_bytes_(element_bytes) {}
  template <class T, int Rank>
  SSMAX_INLINE AnyView(const View<T, Rank>& view)
      : data_(view.data_handle()),
        extents_(view.extents().data()),
        strides_(view.strides().data()),
        rank_(Rank),
        element_bytes_(sizeof(T)) {}

  SSMAX_INLINE const void* data() const { return data_; }
  SSMAX_INLINE int rank() const { return rank_; }
  SSMAX_INLINE index_t element_bytes() const { return element_bytes_; }
  SSMAX_INLINE index_t extent(int i) const { return extents_[i]; }
  SSMAX_INLINE index_t stride(int i) const { return strides_[i]; }
  SSMAX_INLINE bool empty() const {
    bool empty = false;
    for_each_dimension([&](int i) { empty |= extents_[i] == 0; });
    return empty;
  }
  /// Calls f(i) for each dimension. Unrolled for tensors of attention: half the time of a loop.
  template <class F>
  SSMAX_INLINE void for_each_dimension(const F& f) const {
    if (rank_ == 4) {
      SSMAX_UNROLL
      for (int i = 0; i < 4; ++i) f(i);
    } else {
      for (int i = 0; i < rank_; ++i) f(i);
    }
  }
  index_t size() const {
    std::size_t size = 1;
    for (int i = 0; i < rank_; ++i) size *= static_cast<std::size_t>(extents_[i]);
    return static_cast<index_t>(size);
  }

 private:
  const void* data_;
  const index_t *extents_, *strides_;
  int rank_;
  index_t element_bytes_;
};

/// Returns true if the caller passed this optional view. A null view with a nonzero extent counts as passed,
/// and check_view then reports it as an error.
inline bool is_given(const AnyView& view) {
  bool given = view.data() != nullptr;
  for (int i = 0; i < view.rank(); ++i) given = given || view.extent(i) != 0;
  return given;
}

[[noreturn]] SSMAX_COLD inline void fail_reach(const char* function, const char* name, int dimension,
                                               index_t extent, index_t stride, index_t most) {
  fail_format("ssmax::%s: %s has extent %td and stride %td in dimension %d, its bytes must be at most %td",
              function, name, extent, stride, dimension, most);
}

/// Throws unless the byte offset of every element, and every stride in bytes, fits index_t.
inline void check_reach(const char* function, const char* name, const AnyView& view) {
  constexpr index_t most = std::numeric_limits<index_t>::max();
  index_t left = most / view.element_bytes() - 1;
  const index_t longest = left;
  for (int i = 0; i < view.rank(); ++i) {
    const index_t stride = view.stride(i), steps = view.extent(i) - 1;
    const bool fits =
        stride >= -longest && stride <= longest && (steps == 0 || std::abs(stride) <= left / steps);
    if (!fits) fail_reach(function, name, i, view.extent(i), stride, most);
    left -= steps * std::abs(stride);
  }
}

/// Throws unless every extent is at least 0 and the product of the extents is at most max_counted. An extent
/// of 0 counts as 1, so that the product of any subset of the extents is bounded as well.
inline void check_extents(const char* function, const char* name, const AnyView& view) {
  index_t elements = 1;
  for (int i = 0; i < view.rank(); ++i) {
    const index_t extent = view.extent(i);
    if (extent < 0) fail_value(function, name, "has extent", extent, "must be at least", 0);
    if (extent > max_counted / elements) {
      fail_format("ssmax::%s: %s has extent %td in dimension %d after %td elements, they must be at most %td",
                  function, name, extent, i, elements, max_counted);
    }
    elements *= std::max<index_t>(extent, 1);
  }
}

/// Returns true if extents and strides are so small that their products cannot overflow. This test is cheaper
/// than check_extents and check_reach. Exception: returns false for elements of more than 8 bytes.
inline bool is_small(const AnyView& view) {
  if (view.rank() > 4 || view.element_bytes() > 8) return false;
  constexpr int digits = std::numeric_limits<index_t>::digits;
  constexpr int of_extent = digits / 4,
                of_stride = digits - 6 - of_extent;  // 4 extents × 8 bytes: 5 bits, and 1 spare
  std::size_t extents = 0, strides = 0;
  view.for_each_dimension([&](int i) {
    extents |= static_cast<std::size_t>(view.extent(i));
    strides |= static_cast<std::size_t>(view.stride(i) < 0 ? ~view.stride(i) : view.stride(i));
  });
  return extents >> of_extent == 0 && strides >> of_stride == 0;
}

/// Throws as check_view does, but accepts any last stride.
inline void check_strided_view(const char* function, const char* name, const AnyView& view) {
  if (!is_small(view)) {
    check_extents(function, name, view);
    if (!view.empty()) check_reach(function, name, view);
  }
  if (!view.empty() && view.data() == nullptr)
    fail_value(function, name, "is null but has size", view.size(), "must be", 0);
}

inline void check_view(const char* function, const char* name, const AnyView& view) {
  check_strided_view(function, name, view);
  const int last = view.rank() - 1;
  if (!view.empty() && view.extent(last) > 1 && view.stride(last) != 1) {
    fail_value(function, name, "has last stride", view.stride(last), "must be", 1);
  }
}

inline void check_extent(const char* function, const char* name, const AnyView& view, int i,
                         const char* other, const AnyView& as, int j) {
  if (view.extent(i) != as.extent(j)) fail_extent(function, name, i, view.extent(i), other, as.extent(j));
}

inline void check_same_extents(const char* function, const char* name, const AnyView& view,
                               const char* other_name, const AnyView& other) {
  for (int i = 0; i < view.rank(); ++i) check_extent(function, name, view, i, other_name, other, i);
}

/// Throws unless a view of a policy has the extents of the attention. Any strides whose bytes fit index_t.
inline void check_fits_attention(const char* function, const char* name, const AnyView& view,
                                 const index_t* expected) {
  for (int i = 0; i < view.rank(); ++i) {
    const index_t extent = expected[i];
    if (view.extent(i) == extent) continue;
    fail_format("ssmax::%s: %s has extent %td in dimension %d, the attention has %td%s", function, name,
                view.extent(i), i, extent, view.extent(i) == 1 ? " (stride 0 broadcasts)" : "");
  }
  if (view.empty()) return;
  if (view.data() == nullptr) fail_value(function, name, "is null but has size", view.size(), "must be", 0);
  check_reach(function, name, view);
}

/// Throws unless each element of an output view has one index only. In order of rising stride, the stride of each
/// dimension must be at least the span of the dimensions before it.
inline void check_distinct(const char* function, const char* name, const AnyView& view) {
  if (view.empty()) return;
  index_t span = 1;
  std::array<bool, 4> seen{};
  for (int step = 0; step < view.rank(); ++step) {
    int next = -1;  // unvisited dimension with the smallest stride
    for (int i = 0; i < view.rank(); ++i) {
      const bool smaller = next < 0 || std::abs(view.stride(i)) < std::abs(view.stride(next));
      if (!seen[static_cast<std::size_t>(i)] && smaller) next = i;
    }
    seen[static_cast<std::size_t>(next)] = true;
    if (view.extent(next) == 1) continue;
    const index_t stride = std::abs(view.stride(next));
    if (stride < span) {
      fail_value(function, name, "is an output with stride", view.stride(next), "its smaller dimensions span",
                 span);
    }
    span += (view.extent(next) - 1) * stride;
  }
}

inline void check_output(const char* function, const char* name, const AnyView& view) {
  check_view(function, name, view);
  check_distinct(function, name, view);
}

/// Throws as check_output does, but accepts any last stride.
inline void check_strided_output(const char* function, const char* name, const AnyView& view) {
  check_strided_view(function, name, view);
  check_distinct(function, name, view);
}

struct Bytes {
  std::uintptr_t begin, end;
};

inline Bytes span_of(const AnyView& view) {
  index_t low = 0, high = 1;
  view.for_each_dimension([&](int i) {
    const index_t reach = (view.extent(i) - 1) * view.stride(i);
    low += reach < 0 ? reach : 0;
    high += reach < 0 ? 0 : reach;
  });
  const auto base = reinterpret_cast<std::uintptr_t>(view.data());
  const index_t size = view.element_bytes();
  return {base + static_cast<std::uintptr_t>(low * size), base + static_cast<std::uintptr_t>(high * size)};
}

/// Returns the memory from the first to the last element of a view.
template <class T, int Rank>
std::span<const std::remove_const_t<T>> memory_of(const View<T, Rank>& view) {
  if (view.empty()) return {};
  const Bytes bytes = span_of(view);
  return {reinterpret_cast<const T*>(bytes.begin),
          static_cast<std::size_t>(bytes.end - bytes.begin) / sizeof(T)};
}

/// Returns true if both views are disjoint columns of one matrix, in any order of their dimensions. Example:
/// q, k and v of a packed projection.
///
/// The function tries each stride as the pitch of the matrix. Longer strides must be multiples of the pitch.
/// The spans of the shorter strides of both views must fit side by side into one row.
inline bool are_separate_columns(const AnyView& a, const AnyView& b) {
  const index_t size = a.element_bytes();
  if (a.rank() != b.rank() || a.rank() == 1 || size != b.element_bytes()) return false;
  const auto distance = static_cast<index_t>(reinterpret_cast<std::uintptr_t>(b.data()) -
                                             reinterpret_cast<std::uintptr_t>(a.data()));
  if (distance % size != 0) return false;
  // Returns the span of a view within a row, or pitch + 1 if the view is not made of columns.
  const auto span = [](const AnyView& view, index_t pitch) {
    index_t result = 1;
    for (int i = 0; i < view.rank(); ++i) {
      if (view.extent(i) == 1) continue;
      const index_t stride = view.stride(i);
      if (stride < 0 || (stride > pitch && stride % pitch != 0)) return pitch + 1;
      if (stride < pitch) result += (view.extent(i) - 1) * stride;
    }
    return result;
  };
  const auto fit = [&](index_t pitch) {
    const index_t offset = ((distance / size) % pitch + pitch) % pitch;
    return offset >= span(a, pitch) && offset + span(b, pitch) <= pitch;
  };
  for (int i = 0; i < a.rank(); ++i) {
    if (a.extent(i) > 1 && a.stride(i) > 0 && fit(a.stride(i))) return true;
    if (b.extent(i) > 1 && b.stride(i) > 0 && fit(b.stride(i))) return true;
  }
  return false;
}

inline bool are_disjoint(const AnyView& a, const AnyView& b) {
  if (a.empty() || b.empty()) return true;
  const Bytes x = span_of(a), y = span_of(b);
  if (x.end <= y.begin || y.end <= x.begin) return true;
  return are_separate_columns(a, b);
}

[[noreturn]] SSMAX_COLD inline void fail_overlap(const char* function, const char* name, Bytes a,
                                                 const char* other, Bytes b, const char* but) {
  const std::size_t overlap = std::min(a.end, b.end) - std::max(a.begin, b.begin);
  const std::size_t a_bytes = a.end - a.begin, b_bytes = b.end - b.begin;
  fail_format("ssmax::%s: %s (%zu bytes) overlaps %s (%zu bytes) by %zu bytes%s", function, name, a_bytes,
              other, b_bytes, overlap, but);
}

/// Throws unless `out` and `in` are known not to overlap. Exception: disjoint views that interleave in
/// another way than columns of one matrix are rejected as well.
inline void check_no_overlap(const char* function, const char* out_name, const AnyView& out,
                             const char* in_name, const AnyView& in) {
  if (!are_disjoint(out, in)) fail_overlap(function, out_name, span_of(out), in_name, span_of(in), "");
}

/// Throws unless `out` is exactly the view `in`, with elements of the same type, or does not overlap it.
inline void check_in_place_or_no_overlap(const char* function, const char* out_name, const AnyView& out,
                                         const char* in_name, const AnyView& in, bool same_type) {
  if (are_disjoint(out, in)) return;
  bool same = out.data() == in.data() && same_type;
  for (int i = 0; i < out.rank(); ++i)
    same = same && out.extent(i) == in.extent(i) && (out.extent(i) == 1 || out.stride(i) == in.stride(i));
  if (!same)
    fail_overlap(function, out_name, span_of(out), in_name, span_of(in), " without being the same view");
}

/// Does the check for views of known types.
template <class T, class U, int Rank>
void check_in_place_or_no_overlap(const char* function, const char* out_name, const View<T, Rank>& out,
                                  const char* in_name, const View<U, Rank>& in) {
  check_in_place_or_no_overlap(function, out_name, out, in_name, in,
                               std::is_same_v<T, std::remove_const_t<U>>);
}

/// Returns the view. Exception: an empty view gets strides of 0, because adding a stride to a null pointer is
/// undefined even if the result is never read.
template <class T, int Rank>
View<T, Rank> addressable(const View<T, Rank>& view) {
  if (!view.empty()) return view;
  std::array<index_t, Rank> extents;
  for (int i = 0; i < Rank; ++i) extents[static_cast<std::size_t>(i)] = view.extent(i);
  return {view.data_handle(), extents, {}};
}

/// Returns the first element of a row. The row may be empty if the view is addressable.
template <class T>
T* row_of(const View<T, 4>& view, index_t batch, index_t head, index_t row) {
  return view.data_handle() + batch * view.stride(0) + head * view.stride(1) + row * view.stride(2);
}

/// Returns the same view with leading dimensions of extent 1, so that loops handle one rank only.
template <int To, class T, int Rank>
View<T, To> with_rank(const View<T, Rank>& view) {
  static_assert(Rank <= To, "ssmax: rows have rank 1 to 4");
  std::array<index_t, To> extents, strides;
  for (int i = 0; i < To; ++i) {
    const int from = i - (To - Rank);
    extents[static_cast<std::size_t>(i)] = from < 0 ? 1 : view.extent(from);
    strides[static_cast<std::size_t>(i)] = from < 0 ? 0 : view.stride(from);
  }
  return {view.data_handle(), extents, strides};
}

SSMAX_END
