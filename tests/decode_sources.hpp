// Compares decode over two sources of the same keys.
#pragma once

#include <algorithm>

#include "decode_problem.hpp"
#include "test_executors.hpp"

namespace decode_problem {

/// Checks that two outputs agree up to rounding.
template <class T>
void check_near(const Output<T>& a, const Output<T>& b) {
  Real worst = 0;
  for (std::size_t i = 0; i < a.lse.size(); ++i)
    worst = worse(worst, std::abs(Real(a.lse[i]) - Real(b.lse[i])));
  for (std::size_t i = 0; i < a.out.size(); ++i) {
    const Real x = reference::widen(a.out[i]), y = reference::widen(b.out[i]);
    worst = worse(worst, std::abs(x - y) - rounding<T> * 2 * std::abs(x));
  }
  CHECK(worst <= 8e-6L);
}

/// Checks decode over `keys` against decode over `cache`, which has the same keys. Results are bit-identical with
/// batch_invariant or more than 16 queries per kv head, and for any number of threads. Returns the explanation of a
/// call without batch_invariant.
template <class T, class X, class K, class M = Causal>
Explanation check_source(const Data<T>& data, const KvCache<X>& cache, const K& keys, const M& mask = {},
                         AttentionOptions<T> options = {}) {
  const ssmax::SSMax<Compute<T>> scaling{Compute<T>(0.4)};
  const Shape& s = data.shape;
  Explanation explanation;
  for (const bool invariant : {true, false}) {
    options.batch_invariant = invariant;
    const Output<T> expected = run(data, cache, scaling, mask, Identity{}, options);
    const Output<T> got = run(data, keys, scaling, mask, Identity{}, options);
    if (invariant || s.heads / s.kv_heads * s.queries > 16) {
      CHECK(got == expected);
    } else {
      check_near(got, expected);
    }
    CHECK(run(data, keys, scaling, mask, Identity{}, options, test_executors::Threads{3}) == got);
    CHECK(got.explanation.path == expected.explanation.path);
    explanation = got.explanation;
  }
  return explanation;
}

}  // namespace decode_problem
