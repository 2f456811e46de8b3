// Compares decode over two sources of the same keys.
#pragma once

#include "decode_problem.hpp"
#include "test_executors.hpp"

namespace decode_problem {

/// Checks that decode over `keys` is bit-identical to decode over `cache`, which has the same keys, for any number of
/// threads. Returns the explanation of a call without batch_invariant.
template <class T, class X, class K, class M = Causal>
Explanation check_source(const Data<T>& data, const KvCache<X>& cache, const K& keys, const M& mask = {},
                         AttentionOptions<T> options = {}) {
  const ssmax::SSMax<Compute<T>> scaling{Compute<T>(0.4)};
  Explanation explanation;
  for (const bool invariant : {true, false}) {
    options.batch_invariant = invariant;
    const Output<T> expected = run(data, cache, scaling, mask, Identity{}, options);
    const Output<T> got = run(data, keys, scaling, mask, Identity{}, options);
    CHECK(got == expected);
    CHECK(run(data, keys, scaling, mask, Identity{}, options, test_executors::Threads{3}) == got);
    CHECK(got.explanation.path == expected.explanation.path);
    explanation = got.explanation;
  }
  return explanation;
}

}  // namespace decode_problem
