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
  const auto q = view<const T, 4>("query", query), k = view<const T, 4>("key", key),
             v = view<const T, 4>("value", value);
  const Parameters parameters(a, extents[1]);
  const Options<A> options(a, extents);

  ssmax::AttentionArguments<A> arguments{.q = q, .k = k, .v = v};
  options.write_to(arguments);
  Results results = make_results<T>(query, value.size(3), wanted, arguments);
  with_policies<A>(a, parameters, extents, [&](const auto& scaling, const auto& mask, const auto& score) {
    ssmax::attention<A>(arguments, scaling, mask, score, TorchThreads{});
  });
  return results;
}

}  // namespace ssmax_torch
