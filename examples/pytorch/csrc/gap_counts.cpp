// Counts of keys within gaps of each query's largest logit.
#include "call.hpp"
#include "executor.hpp"
#include "operators.hpp"

namespace ssmax_torch {
namespace {

template <class T>
std::pair<Tensor, Tensor> counts_of(const Tensor& query, const Tensor& key, const std::vector<double>& gaps,
                                    const Arguments& a) {
  using A = Compute<T>;
  const Extents extents = check_inputs(query, key, key);
  const auto [batch, heads, queries, keys] = extents;
  const Parameters parameters(a, heads);
  const Options<A> options(a, extents);
  std::vector<A> computed_gaps;
  for (double gap : gaps) {
    const bool is_large = gap > static_cast<double>(std::numeric_limits<A>::max());
    computed_gaps.push_back(is_large ? std::numeric_limits<A>::infinity() : static_cast<A>(gap));
  }

  const Tensor largest = new_tensor(std::array{batch, heads, queries}, scalar_type<A>);
  const Tensor counts = new_tensor(std::array{std::ssize(gaps), batch, heads, queries}, scalar_type<A>);
  ssmax::AttentionArguments<A> arguments{.q = view<const T, 4>("query", query),
                                         .k = view<const T, 4>("key", key)};
  options.write_to(arguments);
  const ssmax::GapCounts<A> results{.gaps = computed_gaps,
                                    .largest = view<A, 3>("largest", largest),
                                    .counts = view<A, 4>("counts", counts)};
  with_mask<A>(a, extents, [&](const auto& mask) {
    with_score<A>(a, parameters, extents, [&](const auto& score) {
      ssmax::count_within_gaps<A>(arguments, results, mask, score, TorchThreads{});
    });
  });
  return {largest, counts};
}

}  // namespace

std::pair<Tensor, Tensor> count_within_gaps(const Tensor& query, const Tensor& key,
                                            const std::vector<double>& gaps, const Arguments& a) {
  return with_type("query", query,
                   [&]<class T>(std::type_identity<T>) { return counts_of<T>(query, key, gaps, a); });
}

}  // namespace ssmax_torch
