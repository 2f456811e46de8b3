// Attention, forward:
//
//   out_i = Σ_j p_ij v_j,   p_i = softmax(c_i · scale · (R q_i)·(R k_j))   over the keys j that i sees
//
// Shapes: q [batch, heads, queries, d], k [batch, kv_heads, keys, d], v [batch, kv_heads, keys, dv], out
// [batch, heads, queries, dv], lse [batch, heads, queries] if wanted. Last stride 1, other strides free, so that
// [batch, position, head, channel] and packed qkv need no copy. heads is a multiple of kv_heads; head h reads kv
// head h / (heads / kv_heads).
//   scale  1/√d unless given
//   R      the rotary embedding, if given: key j at key_position + j, query i at key_position + i + keys - queries
//   c_i    scaling({head, position, n}): n visible keys, position of the last of them (scaling.hpp)
//   mask   Full, Causal (bottom-right), Lengths, or the user's own (mask.hpp)
// lse_i = ln Σ_j exp(c_i · scale · …), natural logarithm. A query that sees nothing gives out 0 and lse -inf.
//
// Keys are taken in blocks with an online softmax: memory is linear in the sequence, key blocks that no query of
// a block sees are not computed, and hidden keys never enter a result: NaN in them stays there. NaN in visible
// ones spreads. Accuracy: products and sums in T, each row's sum in double. One allocation a call. `out` and
// `lse` must lie apart from the inputs. Errors are std::invalid_argument, thrown before anything is written.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "detail/check_views.hpp"
#include "mask.hpp"
#include "online_softmax.hpp"
#include "rope.hpp"
#include "scaling.hpp"
#include "view.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {

template <class T>
struct AttentionArguments {
  View<const T, 4> q{}, k{}, v{};
  View<T, 4> out{};
  View<T, 3> lse{};
};

template <class T>
struct AttentionOptions {
  std::optional<double> scale{};
  const Rope<T>* rope = nullptr;
  index_t key_position = 0;
};

namespace detail {

inline constexpr index_t query_block = 32, key_block = 256;

template <class T, class S, class M>
QueryShape check_attention(const AttentionArguments<T>& a, const S& scaling, const M& mask,
                           const AttentionOptions<T>& options) {
  const char* function = "attention";
  check_view(function, "q", a.q);
  check_view(function, "k", a.k);
  check_view(function, "v", a.v);
  check_output(function, "out", a.out);
  const auto same = [&](const char* name, const auto& view, int i, const char* other, const auto& as, int j) {
    if (view.extent(i) != as.extent(j)) fail_extent(function, name, i, view.extent(i), other, as.extent(j));
  };
  same("k", a.k, 0, "q", a.q, 0);
  same("k", a.k, 3, "q", a.q, 3);
  same("v", a.v, 0, "k", a.k, 0);
  same("v", a.v, 1, "k", a.k, 1);
  same("v", a.v, 2, "k", a.k, 2);
  for (int i = 0; i < 3; ++i) same("out", a.out, i, "q", a.q, i);
  same("out", a.out, 3, "v", a.v, 3);
  const index_t heads = a.q.extent(1), kv_heads = a.k.extent(1);
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
    fail_value(function, "q", "has heads", heads, "must be a multiple of the heads of k,", kv_heads);
  }
  if (a.lse.data_handle() != nullptr) {
    check_output(function, "lse", a.lse);
    for (int i = 0; i < 3; ++i) same("lse", a.lse, i, "q", a.q, i);
  }
  const auto apart = [&](const auto& inputs) {
    check_apart(function, "out", a.out, inputs.first, inputs.second);
    if (a.lse.data_handle() != nullptr) check_apart(function, "lse", a.lse, inputs.first, inputs.second);
  };
  apart(std::pair{"q", a.q});
  apart(std::pair{"k", a.k});
  apart(std::pair{"v", a.v});
  if (a.lse.data_handle() != nullptr) check_apart(function, "lse", a.lse, "out", View<const T, 4>(a.out));
  const QueryShape shape{a.q.extent(0), heads, a.q.extent(2), a.k.extent(2)};
  check_mask(mask, shape);
  check_scaling(scaling, shape.heads, shape.keys);
  if (options.rope != nullptr && shape.keys > 0 && shape.queries > 0) {
    options.rope->check(function, "k", options.key_position, shape.keys, a.k.extent(3));
    options.rope->check(function, "q", options.key_position + shape.keys - shape.queries, shape.queries,
                        a.q.extent(3));
  }
  return shape;
}

/// One call's memory, in one allocation.
template <class T>
struct AttentionWorkspace {
  AttentionWorkspace(index_t keys, index_t d, index_t dv)
      : blocks((keys + key_block - 1) / key_block),
        memory(static_cast<std::size_t>(blocks * key_block * d + std::max(query_block, key_block) * d +
                                        query_block * (key_block + dv))),
        packed_keys(memory.data()),
        rotated(packed_keys + blocks * key_block * d),
        weights(rotated + std::max(query_block, key_block) * d),
        sums(weights + query_block * key_block) {}

  index_t blocks;
  std::vector<T> memory;
  T* packed_keys;  // [block][d][key_block]: K transposed, so that a product with it runs along keys
  T* rotated;      // rows of K on their way to being packed, then the rows of Q of a block
  T* weights;      // [query_block][key_block]: logits, then weights
  T* sums;         // [query_block][dv]
};

/// Rows of q or k with the rotary embedding applied, contiguous.
template <class T>
void gather_rows(const T* in, index_t stride, index_t rows, index_t d, const Rope<T>* rope, index_t position,
                 T* out) {
  if (rope != nullptr) {
    rope->rotate(in, stride, out, d, rows, d, position, false);
  } else {
    for (index_t r = 0; r < rows; ++r) std::copy_n(in + r * stride, d, out + r * d);
  }
}

template <class T>
void pack_keys(const T* k, index_t stride, index_t keys, index_t d, const AttentionOptions<T>& options,
               AttentionWorkspace<T>& work) {
  for (index_t begin = 0; begin < keys; begin += key_block) {
    const index_t count = std::min(key_block, keys - begin);
    gather_rows(k + begin * stride, stride, count, d, options.rope, options.key_position + begin,
                work.rotated);
    T* block = work.packed_keys + begin * d;
    for (index_t j = 0; j < count; ++j) {
      for (index_t i = 0; i < d; ++i) block[i * key_block + j] = work.rotated[j * d + i];
    }
  }
}

template <class T>
struct AttentionLeaves {
  const RowLeaves<T>& rows = leaves<RowLeaves<T>>();
  const ProductLeaves<T>& products = leaves<ProductLeaves<T>>();
};

/// The queries of one block and what is known of each.
template <class T>
struct QueryBlock {
  index_t rows = 0;
  KeyRange keys[query_block];
  OnlineSoftmax<T> state[query_block];
};

/// Adds keys [begin, begin + count) to every query of the block that sees any of them.
template <class T>
void attend_block(const AttentionLeaves<T>& leaves, QueryBlock<T>& block, index_t begin, index_t count,
                  index_t d, const T* v, index_t v_stride, index_t dv, AttentionWorkspace<T>& work) {
  std::fill_n(work.weights, block.rows * key_block, T{0});
  leaves.products.multiply_add(work.rotated, d, work.packed_keys + begin * d, key_block, work.weights,
                               key_block, block.rows, count, d);
  index_t whole = 0;  // rows just before r that see all keys of this block: their product with V is one
  const auto add_whole_rows = [&](index_t end) {
    leaves.products.multiply_add(work.weights + (end - whole) * key_block, key_block, v + begin * v_stride,
                                 v_stride, work.sums + (end - whole) * dv, dv, whole, dv, count);
    whole = 0;
  };
  for (index_t r = 0; r < block.rows; ++r) {
    const index_t first = std::max<index_t>(block.keys[r].begin - begin, 0);
    const index_t last = std::min(block.keys[r].end - begin, count);
    if (first >= last) {
      add_whole_rows(r);
      continue;
    }
    T* weights = work.weights + r * key_block + first;
    const double factor = block.state[r].update(weights, last - first, weights);
    T* sums = work.sums + r * dv;
    if (factor != 1) leaves.rows.multiply(sums, dv, static_cast<T>(factor), sums);
    if (last - first == count) {
      ++whole;
    } else {
      add_whole_rows(r);
      leaves.products.multiply_add(weights, key_block, v + (begin + first) * v_stride, v_stride, sums, dv, 1,
                                   dv, last - first);
    }
  }
  add_whole_rows(block.rows);
}

/// Queries [query, query + block.rows) of one head.
template <class T, class S, class M>
void attend_queries(const AttentionLeaves<T>& leaves, const AttentionArguments<T>& a, const S& scaling,
                    const M& mask, const AttentionOptions<T>& options, const QueryShape& shape, index_t batch,
                    index_t head, index_t query, AttentionWorkspace<T>& work) {
  const index_t d = a.q.extent(3), dv = a.v.extent(3), kv_head = head / (shape.heads / a.k.extent(1));
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<index_t>(d, 1))));
  QueryBlock<T> block;
  block.rows = std::min(query_block, shape.queries - query);
  KeyRange seen{shape.keys, 0};
  for (index_t r = 0; r < block.rows; ++r) {
    const KeyRange keys = visible_keys(mask, Query{batch, head, query + r, shape});
    block.keys[r] = keys;
    if (keys.size() == 0) continue;
    block.state[r] =
        OnlineSoftmax<T>(scale * static_cast<double>(scaling(Row{head, keys.end - 1, keys.size()})));
    seen = {std::min(seen.begin, keys.begin), std::max(seen.end, keys.end)};
  }
  if (seen.end > 0) {
    const T* q = a.q.data_handle() + batch * a.q.stride(0) + head * a.q.stride(1) + query * a.q.stride(2);
    gather_rows(q, a.q.stride(2), block.rows, d, options.rope,
                options.key_position + query + shape.keys - shape.queries, work.rotated);
  }
  std::fill_n(work.sums, block.rows * dv, T{0});
  const T* v = a.v.data_handle() + batch * a.v.stride(0) + kv_head * a.v.stride(1);
  for (index_t begin = seen.begin / key_block * key_block; begin < seen.end; begin += key_block) {
    attend_block(leaves, block, begin, std::min(key_block, shape.keys - begin), d, v, a.v.stride(2), dv,
                 work);
  }
  for (index_t r = 0; r < block.rows; ++r) {
    T* out = a.out.data_handle() + batch * a.out.stride(0) + head * a.out.stride(1) +
             (query + r) * a.out.stride(2);
    leaves.rows.multiply(work.sums + r * dv, dv, static_cast<T>(block.state[r].finish()), out);
    if (a.lse.data_handle() != nullptr) a.lse(batch, head, query + r) = static_cast<T>(block.state[r].lse());
  }
}

}  // namespace detail

/// See the top of this file. T is float or double; write the element type, arguments do not deduce it:
///   attention<float>({.q = q, .k = k, .v = v, .out = out}, SSMax<float>{s, b}, Causal{}, {.rope = &rope});
template <class T, class S = Softmax, class M = Full>
requires Scaling<S> && Mask<M>
void attention(const std::type_identity_t<AttentionArguments<T>>& arguments, const S& scaling = {},
               const M& mask = {}, const std::type_identity_t<AttentionOptions<T>>& options = {}) {
  static_assert(std::same_as<T, float> || std::same_as<T, double>, "ssmax::attention: T is float or double");
  const QueryShape shape = detail::check_attention(arguments, scaling, mask, options);
  if (shape.rows() == 0) return;
  const detail::AttentionLeaves<T> leaves;
  const View<const T, 4>& k = arguments.k;
  const index_t group = shape.heads / std::max<index_t>(k.extent(1), 1);
  detail::AttentionWorkspace<T> work(shape.keys, k.extent(3), arguments.v.extent(3));
  for (index_t batch = 0; batch < shape.batch; ++batch) {
    for (index_t kv_head = 0; kv_head < k.extent(1); ++kv_head) {
      detail::pack_keys(k.data_handle() + batch * k.stride(0) + kv_head * k.stride(1), k.stride(2),
                        shape.keys, k.extent(3), options, work);
      for (index_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (index_t query = 0; query < shape.queries; query += detail::query_block) {
          detail::attend_queries(leaves, arguments, scaling, mask, options, shape, batch, head, query, work);
        }
      }
    }
  }
}

}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
