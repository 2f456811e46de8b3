// Who adds up what of dk and dv. One process sums up what 1920 rows of a kv head give a key (a row is a query of one of
// its heads), and then adds these sums, in the order of the queries. Over ranks it is the same: each such sum is formed
// where its queries are and sent to the owner of the keys, who adds them in that order. A sum whose queries
// lie on several ranks is begun by the first, and handed on.
#pragma once

#include <algorithm>
#include <vector>

#include "../attention/backward/scratch.hpp"
#include "plan.hpp"

SSMAX_BEGIN_DETAIL

/// The queries of one sum that are in one share.
struct SumPart {
  std::size_t share = 0;
  KeyRange queries{};
  int from = -1;         // who began the sum, or -1
  int to = -1;           // who goes on with it, or whose keys they are
  bool ends = true;      // the sum
  std::size_t next = 0;  // the share that goes on with it
};

class SumPlan {
 public:
  /// `group`: heads of a kv head. Where it does not divide 1920, sums have fewer rows than one process' have.
  SumPlan(const RingPlan& plan, index_t group)
      : plan_(plan), queries_(std::max<index_t>(1, query_block * blocks_per_sum / group)) {}

  /// Calls f(queries) for the parts of a share, in their order.
  template <class F>
  void for_each_part(const Share& share, const F& f) const {
    const mpi::Segment& segment = share.segment;
    for (index_t begin = segment.begin; begin < segment.end;) {
      const index_t end = std::min(segment.end, (begin / queries_ + 1) * queries_);
      f(KeyRange{begin, end});
      begin = end;
    }
  }

  /// What this rank does with a piece, in this order: first the parts that others go on with, so that these do not
  /// wait; then the rest in the order of the queries, in which the owner takes it.
  [[nodiscard]] std::vector<SumPart> parts(const Piece& piece) const {
    std::vector<SumPart> result;
    for (std::size_t i = 0; i < plan_.shares().size(); ++i) {
      if (plan_.shares()[i].segment.rank != plan_.rank() || !plan_.sees(i, piece)) continue;
      for_each_part(plan_.shares()[i], [&](KeyRange queries) { result.push_back(part(i, queries, piece)); });
    }
    std::stable_partition(result.begin(), result.end(),
                          [](const SumPart& part) { return part.from < 0 && !part.ends; });
    return result;
  }

  /// Who sends the owner of a piece its sums, in their order.
  [[nodiscard]] std::vector<int> senders(const Piece& piece) const {
    std::vector<int> result;
    index_t last = -1;
    for (std::size_t i = 0; i < plan_.shares().size(); ++i) {
      if (!plan_.sees(i, piece)) continue;
      for_each_part(plan_.shares()[i], [&](KeyRange queries) {
        if (queries.begin / queries_ == last) result.pop_back();
        last = queries.begin / queries_;
        result.push_back(plan_.shares()[i].segment.rank);
      });
    }
    return result;
  }

  /// The most parts that a rank has.
  [[nodiscard]] index_t most_parts() const {
    std::vector<index_t> parts(static_cast<std::size_t>(plan_.ranks()));
    for (const Share& share : plan_.shares()) {
      for_each_part(share, [&](KeyRange) { ++parts[static_cast<std::size_t>(share.segment.rank)]; });
    }
    return *std::max_element(parts.begin(), parts.end());
  }

 private:
  [[nodiscard]] SumPart part(std::size_t share, KeyRange queries, const Piece& piece) const {
    const std::vector<Share>& shares = plan_.shares();
    const index_t begin = queries.begin / queries_ * queries_, end = begin + queries_;
    SumPart result{.share = share, .queries = queries, .to = piece.keys.rank};
    for (std::size_t i = share; i-- > 0 && shares[i].segment.end > begin && result.from < 0;) {
      if (plan_.sees(i, piece)) result.from = shares[i].segment.rank;
    }
    for (std::size_t i = share + 1; i < shares.size() && shares[i].segment.begin < end && result.ends; ++i) {
      if (!plan_.sees(i, piece)) continue;
      result.to = shares[i].segment.rank;
      result.ends = false;
      result.next = i;
    }
    return result;
  }

  const RingPlan& plan_;
  index_t queries_;  // of a sum
};

/// kv heads that are computed at once: a range of them.
struct HeadUnit {
  index_t first = 0, count = 0;
};

/// As even as can be, in units of at most `most`.
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
