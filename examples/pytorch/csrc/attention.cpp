// Attention, forward.
#include <ssmax/attention.hpp>

#include "call.hpp"
#include "executor.hpp"
#include "operators.hpp"

namespace ssmax_torch {

std::array<index_t, 4> check_inputs(const Tensor& query, const Tensor& key, const Tensor& value) {
  check_rank("query", query, 4);
  check_rank("key", key, 4);
  check_rank("value", value, 4);
  const index_t batch = query.size(0), heads = query.size(1), kv_heads = key.size(1);
  check_shape("key", key, std::array{batch, kv_heads, key.size(2), query.size(3)});
  check_shape("value", value, std::array{batch, kv_heads, key.size(2), value.size(3)});
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
    fail("query has " + std::to_string(heads) + " heads, must be a multiple of key's " +
         std::to_string(kv_heads));
  }
  return {batch, heads, query.size(2), key.size(2)};
}

namespace {

template <class T>
std::pair<Tensor, Tensor> attention_of(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const Arguments& a) {
  using A = Compute<T>;
  const auto extents = check_inputs(query, key, value);
  const auto [batch, heads, queries, keys] = extents;
  const auto q = view<const T, 4>("query", query), k = view<const T, 4>("key", key),
             v = view<const T, 4>("value", value);
  const Parameters parameters(a, heads);
  const AnyScaling scaling = make_scaling(a, parameters);
  const Options<T> options(a, heads, keys);

  const Tensor out = new_tensor_like(query, {batch, heads, queries, value.size(3)});
  const Tensor lse = new_tensor(std::array{batch, heads, queries}, scalar_type<A>);
  const ssmax::AttentionArguments<T> arguments{
      .q = q, .k = k, .v = v, .out = view<T, 4>("out", out), .lse = view<A, 3>("lse", lse)};
  with_mask<A>(a, extents, [&](const auto& mask) {
    with_score<A>(a, parameters, extents, [&](const auto& score) {
      ssmax::attention<T>(arguments, scaling, mask, score, options.options, TorchThreads{});
    });
  });
  return {out, lse};
}

}  // namespace

std::pair<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const Arguments& a) {
  return with_type(query,
                   [&]<class T>(std::type_identity<T>) { return attention_of<T>(query, key, value, a); });
}

}  // namespace ssmax_torch
