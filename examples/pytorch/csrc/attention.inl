// Attention, forward, for queries of type T: the text of attention_float.cpp and attention_double.cpp.
#include "call.hpp"
#include "executor.hpp"
#include "operators.hpp"

namespace ssmax_torch {

template <class T>
std::pair<Tensor, MaybeTensor> attention_of(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const Arguments& a, bool with_lse) {
  using A = Compute<T>;
  const Extents extents = check_inputs(query, key, value);
  const auto [batch, heads, queries, keys] = extents;
  const auto q = view<const T, 4>("query", query), k = view<const T, 4>("key", key),
             v = view<const T, 4>("value", value);
  const Parameters parameters(a, heads);
  const Options<A> options(a, extents);

  const Tensor out = new_tensor_like(query, {batch, heads, queries, value.size(3)});
  ssmax::AttentionArguments<A> arguments{.q = q, .k = k, .v = v, .out = view<T, 4>("out", out)};
  options.write_to(arguments);
  MaybeTensor lse;
  if (with_lse) {
    lse = new_tensor(std::array{batch, heads, queries}, scalar_type<A>);
    arguments.lse = view<A, 3>("lse", *lse);
  }
  with_policies<A>(a, parameters, extents, [&](const auto& scaling, const auto& mask, const auto& score) {
    ssmax::attention<A>(arguments, scaling, mask, score, TorchThreads{});
  });
  return {out, lse};
}

}  // namespace ssmax_torch
