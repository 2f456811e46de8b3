// Attention, forward, for queries of type T: the text of attention_float.cpp and attention_double.cpp.
#include "call.hpp"
#include "executor.hpp"
#include "operators.hpp"

namespace ssmax_torch {

template <class T>
Results attention_of(const Tensor& query, const Tensor& key, const Tensor& value, const Arguments& a,
                     Wanted wanted) {
  using A = Compute<T>;
  const Extents extents = check_inputs(query, key, value);
  const auto [batch, heads, queries, keys] = extents;
  const auto q = view<const T, 4>("query", query), k = view<const T, 4>("key", key),
             v = view<const T, 4>("value", value);
  const Parameters parameters(a, heads);
  const Options<A> options(a, extents);

  Results results{.out = new_tensor_like(query, {batch, heads, queries, value.size(3)})};
  ssmax::AttentionArguments<A> arguments{.q = q, .k = k, .v = v, .out = view<T, 4>("out", results.out)};
  options.write_to(arguments);
  const auto rows = [&] { return new_tensor(std::array{batch, heads, queries}, scalar_type<A>); };
  if (wanted >= Wanted::lse) {
    results.lse = rows();
    arguments.lse = view<A, 3>("lse", *results.lse);
  }
  if (wanted >= Wanted::statistics) {
    results.statistics = {rows(), rows(), rows(), rows()};
    const auto at = [&](std::size_t i) { return view<A, 3>("statistics", results.statistics[i]); };
    arguments.statistics = {.largest = at(0), .smallest = at(1), .sum_of_squares = at(2), .entropy = at(3)};
  }
  with_policies<A>(a, parameters, extents, [&](const auto& scaling, const auto& mask, const auto& score) {
    ssmax::attention<A>(arguments, scaling, mask, score, TorchThreads{});
  });
  return results;
}

}  // namespace ssmax_torch
