/// @defgroup eigen Eigen (eigen.hpp)
/// Eigen matrices, arrays, Map, Ref, blocks and expressions as arguments of the functors:
///
///     Eigen::MatrixXf p = ssmax::SSMax<float>{0.43f}(logits);   // each row sums to 1
///     ssmax::Softmax{}(logits, p, ssmax::Axis::columns);        // each column does; p may be logits
///
/// n is the number of columns, or of rows for Axis::columns. A compile-time vector is one row in both orientations.
///
/// | argument | how it is computed |
/// |---|---|
/// | RowMajor along rows, ColMajor along columns | in place, without a copy |
/// | the other direction | through a buffer of a few rows |
/// | an expression such as 2 * m | evaluated first, so `out` may be m |
/// | Eigen::half, Eigen::bfloat16 | through a buffer, in float |
/// | `out` without memory of its own, such as m.reverse() | the logits are copied first |
///
/// `out` must have the shape of `in`. It must be the same matrix (same memory and strides) or must not overlap `in`.
/// Throws std::invalid_argument otherwise, before anything is written. So `softmax(m.transpose(), m)` throws, as do
/// two blocks that overlap. Interleaved memory without a common element is allowed if both are columns, or both are
/// rows, of one matrix.
///
/// `column_view(matrix)` returns the columns of a ColMajor matrix as the rows of a view, for the other functions of
/// this library. `heads_view(matrix, heads)` and `qkv_views(matrix, heads, kv_heads)` return attention's views of a
/// RowMajor matrix [tokens, channels] (heads_view.hpp).
///
/// Eigen's matrices are ColMajor by default. For them, keep channels in rows and tokens in columns, [channels,
/// tokens], and write `heads_view(column_view(matrix), heads)`. The last stride of attention's views is 1, so you
/// have to transpose a ColMajor matrix [tokens, channels] first.
#pragma once

#include <Eigen/Core>

#include "heads_view.hpp"
#include "softmax.hpp"

/// @addtogroup eigen
/// @{
SSMAX_BEGIN_CODE

namespace detail {
template <class Derived>
void take_dense(const Eigen::DenseBase<Derived>&);
}

/// A type that derives from DenseBase of any type: its own type, or Block as the result of head() does.
template <class X>
concept EigenDense = requires(const X& x) {
  detail::take_dense(x);
};

namespace detail {

template <class X>
inline constexpr bool has_memory = (Eigen::internal::traits<std::remove_const_t<X>>::Flags &
                                    Eigen::DirectAccessBit) != 0;

/// True if rows are contiguous in memory.
template <class X>
inline constexpr bool is_row_major = (X::Flags & Eigen::RowMajorBit) != 0;

/// Returns a view of the lines that are contiguous in memory: rows of a RowMajor matrix, columns of a ColMajor one.
template <class T, class X>
View<T, 2> line_view(T* data, const X& matrix) {
  const index_t lines = is_row_major<X> ? matrix.rows() : matrix.cols();
  const index_t length = is_row_major<X> ? matrix.cols() : matrix.rows();
  return {data, {lines, length}, {matrix.outerStride(), matrix.innerStride()}};
}

template <class In, class Out>
void check_same_shape(const In& in, const Out& out) {
  if (out.rows() != in.rows()) fail_extent("softmax", "out", 0, out.rows(), "logits", in.rows());
  if (out.cols() != in.cols()) fail_extent("softmax", "out", 1, out.cols(), "logits", in.cols());
}

/// Returns a view of every element of a matrix with memory, for any strides.
template <class X>
auto element_view(X& matrix) {
  return View<std::remove_pointer_t<decltype(matrix.data())>, 2>(
      matrix.data(), {matrix.rows(), matrix.cols()}, {matrix.rowStride(), matrix.colStride()});
}

/// Computes a few lines at a time through a row-major buffer: for lines that are not contiguous, and for half
/// precision. `out` is `in` or does not overlap `in`.
template <class S, class In, class Out>
void softmax_through_buffer(const S& scaling, const In& in, Out& out, bool by_columns) {
  using T = std::conditional_t<std::same_as<typename In::Scalar, double>, double, float>;
  using Buffer = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const index_t lines = by_columns ? in.cols() : in.rows(), length = by_columns ? in.rows() : in.cols();
  const index_t lines_a_time = std::clamp<index_t>(8192 / std::max<index_t>(length, 1), 16, 1024);
  Buffer buffer;
  for (index_t begin = 0; begin < lines; begin += lines_a_time) {
    const index_t count = std::min(lines_a_time, lines - begin);
    if (by_columns) {
      buffer = in.middleCols(begin, count).transpose().template cast<T>();
    } else {
      buffer = in.middleRows(begin, count).template cast<T>();
    }
    const View<T, 2> rows(buffer.data(), {count, length});
    softmax(rows, rows, scaling);
    if (by_columns) {
      out.middleCols(begin, count) = buffer.transpose().template cast<typename Out::Scalar>();
    } else {
      out.middleRows(begin, count) = buffer.template cast<typename Out::Scalar>();
    }
  }
}

template <class S, class In, class Out>
void softmax_of_eigen(const S& scaling, const In& in, Out& out, Axis axis) {
  using T = typename In::Scalar;
  static_assert(std::same_as<T, typename Out::Scalar>,
                "ssmax::softmax: logits and out have the same scalar type");
  static_assert(std::same_as<T, float> || std::same_as<T, double> || std::same_as<T, Eigen::half> ||
                    std::same_as<T, Eigen::bfloat16>,
                "ssmax::softmax: scalars are float, double, Eigen::half or Eigen::bfloat16");
  check_same_shape(in, out);
  if constexpr (!has_memory<In>) {
    const typename In::PlainObject evaluated = in;
    softmax_of_eigen(scaling, evaluated, out, axis);
  } else {
    const bool by_columns = In::IsVectorAtCompileTime ? In::ColsAtCompileTime == 1 : axis == Axis::columns;
    if constexpr (std::is_floating_point_v<T> && has_memory<Out> && is_row_major<In> == is_row_major<Out>) {
      if (by_columns != is_row_major<In> && in.innerStride() == 1 && out.innerStride() == 1) {
        softmax(line_view<const T>(in.data(), in), line_view<T>(out.data(), out), scaling);
        return;
      }
    }
    if constexpr (has_memory<Out>) {
      check_in_place_or_no_overlap("softmax", "out", element_view(out), "logits", element_view(in));
      softmax_through_buffer(scaling, in, out, by_columns);
    } else {  // m.reverse() or m(rows, columns): the memory that it writes to is unknown
      const typename In::PlainObject no_overlap = in;
      softmax_through_buffer(scaling, no_overlap, out, by_columns);
    }
  }
}

/// Returns an array as a matrix: Eigen does not assign arrays to matrices.
template <class X>
decltype(auto) as_matrix(X& x) {
  if constexpr (std::same_as<typename Eigen::internal::traits<std::remove_const_t<X>>::XprKind,
                             Eigen::ArrayXpr>) {
    return x.matrix();
  } else {
    return x.derived();
  }
}

}  // namespace detail

/// Eigen types as arguments of a functor.
template <EigenDense X>
struct Adaptor<X> {
  /// Computes scaling(in, out, axis).
  template <class S, class Out>
  static void apply(const S& scaling, const X& in, Out& out, Axis axis) {
    auto&& from = detail::as_matrix(in);
    auto&& to = detail::as_matrix(out);
    detail::softmax_of_eigen(scaling, from, to, axis);
  }
  /// Returns scaling(in, axis) in a new matrix or array.
  template <class S>
  static typename X::PlainObject apply(const S& scaling, const X& in, Axis axis) {
    typename X::PlainObject out(in.rows(), in.cols());
    apply(scaling, in, out, axis);
    return out;
  }
};

/// Returns the columns of a ColMajor matrix, map or block as the rows of a view.
template <class X>
requires EigenDense<std::remove_const_t<X>>
[[nodiscard]] auto column_view(X& matrix) {
  static_assert(detail::has_memory<X> && !detail::is_row_major<X>,
                "ssmax::column_view: needs a ColMajor matrix");
  return detail::line_view<std::remove_pointer_t<decltype(matrix.data())>>(matrix.data(), matrix);
}

namespace detail {

template <class X>
auto token_view(X& matrix) {
  static_assert(has_memory<X>, "ssmax::heads_view: needs a matrix, map or block, not an expression");
  static_assert(is_row_major<X>,
                "ssmax::heads_view: needs a RowMajor matrix [tokens, channels]; of a ColMajor matrix "
                "[channels, tokens] pass column_view(matrix)");
  return line_view<std::remove_pointer_t<decltype(matrix.data())>>(matrix.data(), matrix);
}

}  // namespace detail

/// Returns a RowMajor matrix, map or block [tokens, heads·d] as a view [1, heads, tokens, d].
template <class X>
requires EigenDense<std::remove_const_t<X>>
[[nodiscard]] auto heads_view(X& matrix, index_t heads) {
  return heads_view(detail::token_view(matrix), heads);
}

/// Returns the views q, k and v of a RowMajor matrix, map or block [tokens, (heads + 2·kv_heads)·d].
template <class X>
requires EigenDense<std::remove_const_t<X>>
[[nodiscard]] auto qkv_views(X& matrix, index_t heads, index_t kv_heads) {
  return qkv_views(detail::token_view(matrix), heads, kv_heads);
}

/// Returns the views q, k and v of a RowMajor matrix, map or block [tokens, 3·heads·d].
template <class X>
requires EigenDense<std::remove_const_t<X>>
[[nodiscard]] auto qkv_views(X& matrix, index_t heads) { return qkv_views(matrix, heads, heads); }

SSMAX_END
/// @}
