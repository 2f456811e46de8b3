// Divides the sums of dk and dv among ranks, and orders them.
//
// A single process adds the gradients of a key from 1920 rows of a kv head at a time (a row is a query of one
// of its heads). It then adds these sums in the order of the queries. Over ranks, the rank of the queries
// forms the sum and sends it to the owner of the keys. The owner adds the sums in the same order. If the
// queries of a sum are on several ranks, the first rank begins the sum and the next ranks continue it.
#pragma once

#include <algorithm>
#include <vector>

#include "../attention/backward/scratch.hpp"
#include "pieces.hpp"

SSMAX_BEGIN_DETAIL

/// The queries of one sum that are in one segment.
struct SumPart {
  Piece queries{};
  int from = -1;         // rank that sends the begun sum, or -1
  int to = -1;           // rank that continues the sum, or owner of the keys
  bool ends = true;      // true for the last part of a sum
  std::size_t next = 0;  // segment that continues the sum
};

/// The parts of the sums of each piece, and the order in which its owner adds the sums.
class SumOrder {
 public:
  /// `group` is the number of heads per kv head. If it does not divide 1920, sums have fewer rows than in a
  /// single-process run.
  SumOrder(const Pieces& pieces, index_t group)
      : pieces_(pieces), queries_(std::max<index_t>(1, query_block * blocks_per_sum / group)) {}

  [[nodiscard]] const Pieces& pieces() const { return pieces_; }

  /// Returns the number of queries per sum. A part of a segment (for_each_part) belongs to one sum.
  [[nodiscard]] index_t queries() const { return queries_; }

  /// Returns the parts that this rank computes for a piece. The parts that this rank begins for another rank
  /// come first, so that the other rank does not wait. The other parts follow in the order of the queries, in
  /// which the owner takes them.
  [[nodiscard]] std::vector<SumPart> parts(const Piece& piece) const {
    std::vector<SumPart> result;
    for (const Piece& segment : pieces_.segments()) {
      if (segment.rank != pieces_.rank() || !pieces_.sees(segment, piece)) continue;
      for_each_part(segment, queries_, [&](const Piece& queries) { result.push_back(part(queries, piece)); });
    }
    std::stable_partition(result.begin(), result.end(),
                          [](const SumPart& part) { return part.from < 0 && !part.ends; });
    return result;
  }

  /// Returns the ranks that send sums to the owner of a piece, in the order of the sums.
  [[nodiscard]] std::vector<int> senders(const Piece& piece) const {
    std::vector<int> result;
    index_t last = -1;
    for (const Piece& segment : pieces_.segments()) {
      if (!pieces_.sees(segment, piece)) continue;
      for_each_part(segment, queries_, [&](const Piece& queries) {
        if (queries.begin / queries_ == last) result.pop_back();
        last = queries.begin / queries_;
        result.push_back(segment.rank);
      });
    }
    return result;
  }

  /// Returns the largest number of parts of a rank.
  [[nodiscard]] index_t max_parts() const {
    std::vector<index_t> parts(static_cast<std::size_t>(pieces_.ranks()));
    for (const Piece& segment : pieces_.segments()) {
      for_each_part(segment, queries_,
                    [&](const Piece&) { ++parts[static_cast<std::size_t>(segment.rank)]; });
    }
    return *std::max_element(parts.begin(), parts.end());
  }

 private:
  [[nodiscard]] SumPart part(const Piece& queries, const Piece& piece) const {
    const std::vector<Piece>& segments = pieces_.segments();
    const index_t begin = queries.begin / queries_ * queries_, end = begin + queries_;
    SumPart result{.queries = queries, .to = piece.rank};
    for (std::size_t i = queries.index; i-- > 0 && segments[i].end > begin && result.from < 0;) {
      if (pieces_.sees(segments[i], piece)) result.from = segments[i].rank;
    }
    for (std::size_t i = queries.index + 1; i < segments.size() && segments[i].begin < end && result.ends;
         ++i) {
      if (!pieces_.sees(segments[i], piece)) continue;
      result.to = segments[i].rank;
      result.ends = false;
      result.next = i;
    }
    return result;
  }

  const Pieces& pieces_;
  index_t queries_;  // queries per sum
};

/// A range of kv heads that are computed at once.
struct HeadUnit {
  index_t first = 0, count = 0;
};

/// Returns units of at most `most` kv heads, as even as possible.
inline std::vector<HeadUnit> head_units(index_t kv_heads, index_t most) {
  const index_t units = (kv_heads + most - 1) / most;
  std::vector<HeadUnit> result;
  for (index_t i = 0; i < units; ++i) {
    const index_t first = kv_heads * i / units;
    result.push_back({first, kv_heads * (i + 1) / units - first});
  }
  return result;
}

SSMAX_END
