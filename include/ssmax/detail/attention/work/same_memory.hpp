// Compares the memory in which the keys of two sequences lie.
#pragma once

#include <algorithm>
#include <functional>
#include <tuple>

#include "list.hpp"

SSMAX_BEGIN_DETAIL

/// Where the first key of a run lies: key, value and their factors, and the strides if the run has several keys.
inline auto place_of(const AnyKeyRun& run, bool has_several) {
  const auto of_factors = [&](const StoredFactors& factors) {
    return std::tuple(factors.rows, factors.channels, has_several ? factors.rows_stride : 0);
  };
  return std::tuple(run.k, run.v, has_several ? run.k_stride : 0, has_several ? run.v_stride : 0,
                    of_factors(run.k_factors), of_factors(run.v_factors));
}

/// The comparison of the memory in which the keys of two sequences lie.
struct KeysCompared {
  index_t common = 0;    // first keys in the same memory
  bool is_less = false;  // the order of the memory of the next key
};

/// Compares the memory of the first `end` keys of two sequences, run by run.
template <class Compute>
KeysCompared compare_keys(const AnyKeys<Compute>& keys, index_t a, index_t b, index_t end) {
  index_t key = 0;
  while (key < end) {
    const AnyKeyRun run = keys.run(a, 0, key), other = keys.run(b, 0, key);
    const index_t count = std::min({run.count, other.count, end - key});
    const auto place = place_of(run, count > 1), other_place = place_of(other, count > 1);
    if (place != other_place) return {key, std::less<>()(place, other_place)};
    key += count;
  }
  return {end, false};
}

/// Returns the first sequence of a list whose shared keys do not lie in the memory of its group, in the source of a
/// problem. Returns -1 if all do.
template <class Compute>
index_t find_unshared(const WorkList<Compute>& list, const Problem<Compute>& problem) {
  for (index_t i = 0; i < list.group_count; ++i) {
    const SharingGroup& group = list.groups[i];
    const Sequence* const members = list.members + group.first;
    for (index_t m = 1; m < group.count; ++m) {
      const index_t end = members[m].stored.end;
      if (compare_keys(problem.keys, members[0].batch, members[m].batch, end).common < end)
        return members[m].batch;
    }
  }
  return -1;
}

SSMAX_END
