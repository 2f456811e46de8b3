/// @defgroup heads_view Views of packed tensors (heads_view.hpp)
/// Views [batch, heads, tokens, d] of tensors that store the channels of all heads side by side, without a copy.
///
///     const auto [q, k, v] = qkv_views(qkv, heads, kv_heads);  // qkv [tokens, (heads + 2·kv_heads)·d]
///     attention({.q = q, .k = k, .v = v, .out = heads_view(out, heads)}, SSMax<float>{s}, Causal{});
///
/// | tensor | call | result |
/// |---|---|---|
/// | x [tokens, heads·d] | heads_view(x, heads) | [1, heads, tokens, d] |
/// | x [batch, tokens, heads·d] | heads_view(x, heads) | [batch, heads, tokens, d] |
/// | x [batch, tokens, heads, d] | heads_view(x) | [batch, heads, tokens, d] |
/// | qkv [tokens, (heads + 2·kv_heads)·d], or [batch, tokens, …] | qkv_views(qkv, heads, kv_heads) | q, k and v |
///
/// Throws std::invalid_argument if the last stride is not 1, or if the number of channels is not a multiple of the
/// heads. The header eigen.hpp has the same functions for RowMajor matrices.
#pragma once

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "view.hpp"

/// @addtogroup heads_view
/// @{
SSMAX_BEGIN_DATA

/// The result of qkv_views.
template <class T>
struct QkvViews {
  View<T, 4> q,  ///< [batch, heads, tokens, d].
      k,         ///< [batch, kv_heads, tokens, d].
      v;         ///< [batch, kv_heads, tokens, d].
};

SSMAX_END

SSMAX_BEGIN_CODE
namespace detail {

template <class T, int Rank>
void check_channels_adjacent(const char* function, const char* name, const View<T, Rank>& x) {
  if (x.extent(Rank - 1) > 1 && x.stride(Rank - 1) != 1)
    fail_value(function, name, "has a last stride of", x.stride(Rank - 1), "must be", 1);
}

/// Throws unless the channels of x are a multiple of `heads`, the number of heads or of all heads together.
template <class T>
void check_heads_divide(const char* function, const char* name, const View<T, 3>& x, const char* heads_name,
                        index_t heads) {
  const index_t channels = x.extent(2);
  if (channels < heads || channels % heads != 0) {
    fail_format("ssmax::%s: %s has %td channels, must be a positive multiple of %s, %td", function, name,
                channels, heads_name, heads);
  }
}

/// Returns heads [first, first + count) of d channels each, of x [batch, tokens, channels].
template <class T>
View<T, 4> heads_of(const View<T, 3>& x, index_t first, index_t count, index_t d) {
  T* const data = x.data_handle() == nullptr ? nullptr : x.data_handle() + first * d;
  return {data, {x.extent(0), count, x.extent(1), d}, {x.stride(0), d, x.stride(1), 1}};
}

/// Returns [tokens, channels] as [1, tokens, channels].
template <class T>
View<T, 3> one_batch_entry(const View<T, 2>& x) {
  return {x.data_handle(), {1, x.extent(0), x.extent(1)}, {0, x.stride(0), x.stride(1)}};
}

}  // namespace detail

/// Returns [batch, tokens, heads·d] as [batch, heads, tokens, d].
template <class T>
[[nodiscard]] View<T, 4> heads_view(const View<T, 3>& x, index_t heads) {
  if (heads < 1) detail::fail_value("heads_view", "heads", "are", heads, "must be at least", 1);
  detail::check_channels_adjacent("heads_view", "x", x);
  detail::check_heads_divide("heads_view", "x", x, "heads", heads);
  return detail::heads_of(x, 0, heads, x.extent(2) / heads);
}

/// Returns [tokens, heads·d] as [1, heads, tokens, d].
template <class T>
[[nodiscard]] View<T, 4> heads_view(const View<T, 2>& x, index_t heads) {
  return heads_view(detail::one_batch_entry(x), heads);
}

/// Returns [batch, tokens, heads, d] as [batch, heads, tokens, d].
template <class T>
[[nodiscard]] View<T, 4> heads_view(const View<T, 4>& x) {
  detail::check_channels_adjacent("heads_view", "x", x);
  return {x.data_handle(),
          {x.extent(0), x.extent(2), x.extent(1), x.extent(3)},
          {x.stride(0), x.stride(2), x.stride(1), x.stride(3)}};
}

/// Returns [batch, tokens, (heads + 2·kv_heads)·d] as q, k and v: first the heads of q, then those of k, then of v.
template <class T>
[[nodiscard]] QkvViews<T> qkv_views(const View<T, 3>& qkv, index_t heads, index_t kv_heads) {
  if (heads < 1) detail::fail_value("qkv_views", "heads", "are", heads, "must be at least", 1);
  if (kv_heads < 1) detail::fail_value("qkv_views", "kv_heads", "are", kv_heads, "must be at least", 1);
  if (heads % kv_heads != 0)
    detail::fail_value("qkv_views", "heads", "are", heads, "must be a multiple of kv_heads,", kv_heads);
  detail::check_channels_adjacent("qkv_views", "qkv", qkv);
  // Checks `heads` alone first, so that the sum below does not overflow.
  if (heads > qkv.extent(2)) detail::check_heads_divide("qkv_views", "qkv", qkv, "heads", heads);
  const index_t all = heads + 2 * kv_heads;
  detail::check_heads_divide("qkv_views", "qkv", qkv, "heads + 2·kv_heads", all);
  const index_t d = qkv.extent(2) / all;
  return {detail::heads_of(qkv, 0, heads, d), detail::heads_of(qkv, heads, kv_heads, d),
          detail::heads_of(qkv, heads + kv_heads, kv_heads, d)};
}

/// Returns [batch, tokens, 3·heads·d] as q, k and v, with equal numbers of heads.
template <class T>
[[nodiscard]] QkvViews<T> qkv_views(const View<T, 3>& qkv, index_t heads) {
  return qkv_views(qkv, heads, heads);
}

/// Returns [tokens, (heads + 2·kv_heads)·d] as q, k and v, for one batch entry.
template <class T>
[[nodiscard]] QkvViews<T> qkv_views(const View<T, 2>& qkv, index_t heads, index_t kv_heads) {
  return qkv_views(detail::one_batch_entry(qkv), heads, kv_heads);
}

/// Returns [tokens, 3·heads·d] as q, k and v, for one batch entry.
template <class T>
[[nodiscard]] QkvViews<T> qkv_views(const View<T, 2>& qkv, index_t heads) {
  return qkv_views(qkv, heads, heads);
}

SSMAX_END
/// @}
