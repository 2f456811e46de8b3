// Counts the keys within gaps of the largest logit over ranks: passes of attention over ranks whose values have no
// channels.
#pragma once

#include <algorithm>
#include <vector>

#include "../attention/desk/gap_counts.hpp"
#include "ring_forward.hpp"
#include "spread_keys.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the largest logit of a query of this rank, by the query's position in the sequence.
template <class A>
struct LargestOfSegment {
  View<A, 3> largest;
  const std::vector<Piece>& segments;  // of all ranks, in the order of their positions

  A operator()(const QueryRow& row) const {
    const Query& query = row.query;
    const auto segment = std::ranges::upper_bound(segments, query.index, {}, &Piece::end);
    return largest(query.batch, query.head, segment->row + query.index - segment->begin);
  }
};

template <class A>
std::int64_t fingerprint_of_gaps(const GapCounts<A>& to) {
  return Fingerprint().add_bytes(to.gaps.data(), to.gaps.size_bytes()).value();
}

SSMAX_END
