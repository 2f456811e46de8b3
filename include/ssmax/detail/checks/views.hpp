// What every public call checks of its views, in O(1) and before anything is written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "../../view.hpp"
#include "error.hpp"

SSMAX_BEGIN_DETAIL

/// Of what a call counts, at most so many: sums with smaller numbers do not overflow.
inline constexpr index_t most_counted = std::numeric_limits<index_t>::max() / 2;

/// The view was not left out. (Null with extents was not: it is an error.)
template <class T, int Rank>
bool is_given(const View<T, Rank>& view) {
  bool given = view.data_handle() != nullptr;
  for (int i = 0; i < Rank; ++i) given = given || view.extent(i) != 0;
  return given;
}

[[noreturn]] SSMAX_COLD inline void fail_reach(const char* function, const char* name, int dimension,
                                               index_t extent, index_t stride, index_t most) {
  fail_format("ssmax::%s: %s has extent %td and stride %td in dimension %d, its bytes must be at most %td",
              function, name, extent, stride, dimension, most);
}

/// The bytes from the first element to the end of the last one can be counted, and each stride's.
template <class T, int Rank>
void check_reach(const char* function, const char* name, const View<T, Rank>& view) {
  constexpr index_t most = std::numeric_limits<index_t>::max();
  index_t left = most / static_cast<index_t>(sizeof(T)) - 1;
  const index_t longest = left;
  for (int i = 0; i < Rank; ++i) {
    const index_t stride = view.stride(i), steps = view.extent(i) - 1;
    const bool fits =
        stride >= -longest && stride <= longest && (steps == 0 || std::abs(stride) <= left / steps);
    if (!fits) fail_reach(function, name, i, view.extent(i), stride, most);
    left -= steps * std::abs(stride);
  }
}

/// Throws unless extents are at least 0, and their product, with an extent of 0 taken as 1, is at most
/// most_counted: so any of them can be multiplied.
template <class T, int Rank>
void check_extents(const char* function, const char* name, const View<T, Rank>& view) {
  index_t elements = 1;
  for (int i = 0; i < Rank; ++i) {
    const index_t extent = view.extent(i);
    if (extent < 0) fail_value(function, name, "has extent", extent, "must be at least", 0);
    if (extent > most_counted / elements) {
      fail_format("ssmax::%s: %s has extent %td in dimension %d after %td elements, they must be at most %td",
                  function, name, extent, i, elements, most_counted);
    }
    elements *= std::max<index_t>(extent, 1);
  }
}

/// Extents and strides are so small that no product of theirs overflows, which costs less to ask.
template <class T, int Rank>
bool is_small(const View<T, Rank>& view) {
  static_assert(Rank <= 4 && sizeof(T) <= 8);
  constexpr int digits = std::numeric_limits<index_t>::digits;
  constexpr int of_extent = digits / 4,
                of_stride = digits - 6 - of_extent;  // 4 extents of 8 bytes: 5 digits, and one
  std::size_t extents = 0, strides = 0;
  SSMAX_UNROLL
  for (int i = 0; i < Rank; ++i) {
    extents |= static_cast<std::size_t>(view.extent(i));
    strides |= static_cast<std::size_t>(view.stride(i) < 0 ? ~view.stride(i) : view.stride(i));
  }
  return extents >> of_extent == 0 && strides >> of_stride == 0;
}

template <class T, int Rank>
void check_view(const char* function, const char* name, const View<T, Rank>& view) {
  if (!is_small(view)) {
    check_extents(function, name, view);
    if (!view.empty()) check_reach(function, name, view);
  }
  if (view.empty()) return;
  if (view.data_handle() == nullptr)
    fail_value(function, name, "is null but has size", view.size(), "must be", 0);
  if (view.extent(Rank - 1) > 1 && view.stride(Rank - 1) != 1) {
    fail_value(function, name, "has last stride", view.stride(Rank - 1), "must be", 1);
  }
}

template <class V, class W>
void check_extent(const char* function, const char* name, const V& view, int i, const char* other,
                  const W& as, int j) {
  if (view.extent(i) != as.extent(j)) fail_extent(function, name, i, view.extent(i), other, as.extent(j));
}

template <class T, class U, int Rank>
void check_same_extents(const char* function, const char* name, const View<T, Rank>& view,
                        const char* other_name, const View<U, Rank>& other) {
  for (int i = 0; i < Rank; ++i) {
    if (view.extent(i) != other.extent(i)) {
      fail_extent(function, name, i, view.extent(i), other_name, other.extent(i));
    }
  }
}

/// No two indices of an output may share an element: taken by rising stride, each dimension must step over
/// what the smaller ones span.
template <class T, int Rank>
void check_output(const char* function, const char* name, const View<T, Rank>& view) {
  check_view(function, name, view);
  if (view.empty()) return;
  index_t span = 1;
  std::array<bool, Rank> seen{};
  for (int step = 0; step < Rank; ++step) {
    int next = -1;  // of the dimensions not seen yet, the one with the smallest stride
    for (int i = 0; i < Rank; ++i) {
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

struct Bytes {
  std::uintptr_t begin, end;
};

template <class T, int Rank>
Bytes span_of(const View<T, Rank>& view) {
  index_t low = 0, high = 1;
  for (int i = 0; i < Rank; ++i) {
    const index_t reach = (view.extent(i) - 1) * view.stride(i);
    (reach < 0 ? low : high) += reach;
  }
  const auto base = reinterpret_cast<std::uintptr_t>(view.data_handle());
  const auto size = static_cast<index_t>(sizeof(T));
  return {base + static_cast<std::uintptr_t>(low * size), base + static_cast<std::uintptr_t>(high * size)};
}

/// Both views are columns of one matrix that do not touch, as the q, k and v of a packed projection
/// are, whatever the order of their dimensions. That is: some stride is the matrix' pitch, longer
/// strides are multiples of it, and what the shorter strides of either view span fits into a row
/// beside what the other's span.
template <class T, class U, int Rank>
bool are_separate_columns(const View<T, Rank>& a, const View<U, Rank>& b) {
  if constexpr (Rank == 1 || sizeof(T) != sizeof(U)) {
    return false;
  } else {
    const auto distance = static_cast<index_t>(reinterpret_cast<std::uintptr_t>(b.data_handle()) -
                                               reinterpret_cast<std::uintptr_t>(a.data_handle()));
    const auto size = static_cast<index_t>(sizeof(T));
    if (distance % size != 0) return false;
    // What a view spans of a row; more than there is, if it is not made of columns.
    const auto span = [](const auto& view, index_t pitch) {
      index_t result = 1;
      for (int i = 0; i < Rank; ++i) {
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
    for (int i = 0; i < Rank; ++i) {
      if (a.extent(i) > 1 && a.stride(i) > 0 && fit(a.stride(i))) return true;
      if (b.extent(i) > 1 && b.stride(i) > 0 && fit(b.stride(i))) return true;
    }
    return false;
  }
}

template <class T, int RankT, class U, int RankU>
bool are_apart(const View<T, RankT>& a, const View<U, RankU>& b) {
  if (a.empty() || b.empty()) return true;
  const Bytes x = span_of(a), y = span_of(b);
  if (x.end <= y.begin || y.end <= x.begin) return true;
  if constexpr (RankT == RankU) {
    return are_separate_columns(a, b);
  } else {
    return false;
  }
}

[[noreturn]] SSMAX_COLD inline void fail_overlap(const char* function, const char* name, Bytes a,
                                                 const char* other, Bytes b, const char* but) {
  const std::size_t overlap = std::min(a.end, b.end) - std::max(a.begin, b.begin);
  const std::size_t a_bytes = a.end - a.begin, b_bytes = b.end - b.begin;
  fail_format("ssmax::%s: %s (%zu bytes) overlaps %s (%zu bytes) by %zu bytes%s", function, name, a_bytes,
              other, b_bytes, overlap, but);
}

/// `out` lies apart from `in`. (Ranges that interleave in another way than as columns of one matrix are
/// refused.)
template <class T, int RankT, class U, int RankU>
void check_apart(const char* function, const char* out_name, const View<T, RankT>& out, const char* in_name,
                 const View<U, RankU>& in) {
  if (!are_apart(out, in)) fail_overlap(function, out_name, span_of(out), in_name, span_of(in), "");
}

/// `out` is `in` exactly, or lies apart from it.
template <class T, class U, int Rank>
void check_in_place_or_apart(const char* function, const char* out_name, const View<T, Rank>& out,
                             const char* in_name, const View<U, Rank>& in) {
  if (are_apart(out, in)) return;
  bool same = out.data_handle() == static_cast<const void*>(in.data_handle()) && sizeof(T) == sizeof(U);
  for (int i = 0; i < Rank; ++i) same = same && (out.extent(i) == 1 || out.stride(i) == in.stride(i));
  if (!same) {
    fail_overlap(function, out_name, span_of(out), in_name, span_of(in), " without being the same view");
  }
}

/// The same view, but every row of a view without elements begins at its pointer: adding strides to a null
/// pointer is undefined, even where nothing is read.
template <class T, int Rank>
View<T, Rank> addressable(const View<T, Rank>& view) {
  if (!view.empty()) return view;
  std::array<index_t, Rank> extents;
  for (int i = 0; i < Rank; ++i) extents[static_cast<std::size_t>(i)] = view.extent(i);
  return {view.data_handle(), extents, {}};
}

/// The first element of a row, which need not have any if the view is addressable.
template <class T>
T* row_of(const View<T, 4>& view, index_t batch, index_t head, index_t row) {
  return view.data_handle() + batch * view.stride(0) + head * view.stride(1) + row * view.stride(2);
}

/// The same view with leading dimensions of extent 1, so that loops know one rank only.
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
