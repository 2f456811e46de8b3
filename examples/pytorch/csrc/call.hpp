// What the calls of the library have in common.
#pragma once

#include <ssmax/attention.hpp>

#include "masks.hpp"
#include "operators.hpp"
#include "rope.hpp"
#include "scores.hpp"

namespace ssmax_torch {

template <class T>
using Compute = ssmax::ComputeType<T>;

/// Checks that query, key and value fit each other; returns [batch, heads, queries, keys].
Extents check_inputs(const Tensor& query, const Tensor& key, const Tensor& value);

/// The options of a call that computes in A, and what they point at.
template <class A>
struct Options {
  /// Sinks have one number per head. The last position is that of the last key or, under CausalTopLeft, query. The
  /// call rotates no query or key before the position `begin`.
  Options(const Arguments& a, const Extents& extents, index_t begin = 0) {
    const auto [batch, heads, queries, keys] = extents;
    const index_t positions = a.top_left ? std::max(queries, keys) : keys;
    const index_t first = rope_key_position(a.rope);
    if (first < 0 || first > ssmax::detail::max_counted - positions) {
      fail("rope has " + std::to_string(first) + " for the position of the first key");
    }
    rope = rope_tables<A>(a.rope, first + begin, positions - begin);
    if (a.sinks) {
      check_shape("sinks", *a.sinks, std::array{heads});
      for (double sink : doubles("sinks", *a.sinks)) sinks.push_back(static_cast<A>(sink));
    }
    if (a.dropout_p != 0) {
      const auto given = integers("dropout_seed", a.dropout_seed);
      if (given.size() != 1 && std::ssize(given) != batch) {
        fail("dropout_seed has " + std::to_string(given.size()) + " numbers, must have 1 or " +
             std::to_string(batch));
      }
      dropout = {.p = a.dropout_p, .offset = static_cast<std::uint64_t>(a.dropout_offset)};
      if (given.size() == 1) {
        dropout.seed = static_cast<std::uint64_t>(given[0]);
      } else {
        seeds.assign(given.begin(), given.end());
        dropout.seeds = seeds;
      }
    }
    scale = a.scale;
    key_position = rope ? first : 0;
    scaled_sinks = a.scaled_sinks;
  }
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  /// Writes the options to the arguments of a call. The options must outlive the arguments.
  template <class CallArguments>
  void write_to(CallArguments& arguments) const {
    arguments.scale = scale;
    arguments.rope = rope.get();
    arguments.key_position = key_position;
    arguments.sinks = sinks;
    arguments.scaled_sinks = scaled_sinks;
    arguments.dropout = dropout;
  }

  std::optional<double> scale;
  std::shared_ptr<const ssmax::Rope<A>> rope;
  index_t key_position = 0;
  std::vector<A> sinks;
  bool scaled_sinks = false;
  std::vector<std::uint64_t> seeds;  // that dropout refers to
  ssmax::Dropout dropout;
};

/// Makes the results that are wanted, and writes their views to the arguments of a call with queries of type T.
template <class T, class A>
Results make_results(const Tensor& query, index_t value_width, Wanted wanted,
                     ssmax::AttentionArguments<A>& arguments) {
  const std::array rows{query.size(0), query.size(1), query.size(2)};
  Results results{.out = new_tensor_like(query, {rows[0], rows[1], rows[2], value_width})};
  arguments.out = view<T, 4>("out", results.out);
  const auto number_per_row = [&] { return new_tensor(rows, scalar_type<A>); };
  if (wanted >= Wanted::lse) {
    results.lse = number_per_row();
    arguments.lse = view<A, 3>("lse", *results.lse);
  }
  if (wanted >= Wanted::statistics) {
    for (int i = 0; i < 4; ++i) results.statistics.push_back(number_per_row());
    const auto at = [&](std::size_t i) { return view<A, 3>("statistics", results.statistics[i]); };
    arguments.statistics = {.largest = at(0), .smallest = at(1), .sum_of_squares = at(2), .entropy = at(3)};
  }
  return results;
}

/// Calls f(scaling, mask, score), none of which learns.
template <class A, class F>
void with_policies(const Arguments& a, const Parameters& parameters, const Extents& extents, const F& f) {
  with_mask<A>(a, extents, [&]<class M>(const M& mask) {
    using Any = std::conditional_t<ssmax::same_keys<M>, RowScaling, QueryScaling<A>>;
    const auto scaling = adjusted(a, make_scaling<Any, A>(a, parameters, extents));
    with_score<A>(a, parameters, extents, [&](const auto& score) { f(scaling, mask, score); });
  });
}

/// The same for a backward: scaling and score learn what `gradients` have room for.
template <class A, class F>
void with_learning_policies(const Arguments& a, const Parameters& parameters, const Extents& extents,
                            const ParameterGradients<A>& gradients, const F& f) {
  with_mask<A>(a, extents, [&]<class M>(const M& mask) {
    constexpr bool same_keys = ssmax::same_keys<M>;
    using Any = std::conditional_t<same_keys, RowScaling, QueryScaling<A>>;
    using Learning = std::conditional_t<same_keys, LearningRowScaling, LearningQueryScaling<A>>;
    const auto run = [&](const auto& scaling) {
      with_learning_score<A>(a, parameters, extents, gradients,
                             [&](const auto& score) { f(scaling, mask, score); });
    };
    gradients.scaling_learns()
        ? run(adjusted(a, make_learning_scaling<Learning, A>(a, parameters, extents, gradients)))
        : run(adjusted(a, make_scaling<Any, A>(a, parameters, extents)));
  });
}

}  // namespace ssmax_torch
