/// @defgroup mpi_layout Layouts of a sequence over ranks (mpi_layout.hpp)
/// @ingroup mpi
/// Which positions of a sequence a rank holds.
///
/// A layout is a list of segments, each a range of positions of one rank. A rank keeps its segments one behind
/// the other, in the order of the positions: these are the rows of its q, k, v and out.
///
/// | layout | rank r of R holds |
/// |---|---|
/// | contiguous | the r-th of R ranges |
/// | zigzag | of 2R ranges the r-th and the (2R - 1 - r)-th: even work under a causal mask |
///
/// Ranges begin at multiples of `unit` positions, as even in length as that allows; the last one is shorter
/// where the unit does not divide the length, and ranges may be empty. Attention adds up 1024 keys at a time, its
/// backward 2048: with multiples of 2048 no sum is cut.
///
/// A layout also says what travels in a call of attention or of its backward. Left alone, keys do, to the queries that
/// see them. `layout.by_heads()` has the same rows, but in a call each rank gets all positions of some heads,
/// by an all-to-all, and gives the results back: for models with at least as many kv heads as there are ranks.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "detail/checks/error.hpp"

SSMAX_BEGIN_CODE
namespace mpi {
/// @addtogroup mpi_layout
/// @{

/// Positions [begin, end), held by one rank.
struct Segment {
  index_t begin = 0;  ///< The first position.
  index_t end = 0;    ///< Behind the last one.
  int rank = 0;       ///< Who holds them.

  /// The number of positions.
  [[nodiscard]] index_t size() const { return end - begin; }
};

/// The segments of a sequence: they follow each other from position 0 on, none of them empty.
class Layout {
 public:
  /// Any segments. Throws std::invalid_argument unless each begins where the one before ends, the first one at 0,
  /// and ranks are within [0, ranks). Empty segments are left out.
  Layout(std::span<const Segment> segments, int ranks) : ranks_(ranks), counts_(checked(ranks)) {
    for (const Segment& segment : segments) {
      if (segment.begin != positions()) {
        detail::fail_value("mpi::Layout", "a segment", "begins at", segment.begin, "the one before ends at",
                           positions());
      }
      if (segment.size() < 0) {
        detail::fail_value("mpi::Layout", "a segment", "ends at", segment.end, "must be at least",
                           segment.begin);
      }
      if (segment.rank < 0 || segment.rank >= ranks) {
        detail::fail_value("mpi::Layout", "a segment", "has rank", segment.rank, "ranks are", ranks);
      }
      if (segment.size() == 0) continue;
      segments_.push_back(segment);
      counts_[static_cast<std::size_t>(segment.rank)] += segment.size();
    }
  }

  /// One range for each rank, as even as whole units allow. Throws unless positions >= 0, ranks and unit >= 1.
  [[nodiscard]] static Layout contiguous(index_t positions, int ranks, index_t unit = 2048) {
    return even(positions, ranks, unit, checked_ranks(ranks), [](int i) { return i; });
  }

  /// One range for each rank, of the lengths that are given.
  [[nodiscard]] static Layout contiguous(std::span<const index_t> lengths) {
    std::vector<Segment> segments;
    index_t begin = 0;
    for (const index_t length : lengths) {
      segments.push_back({begin, begin + length, static_cast<int>(segments.size())});
      begin += length;
    }
    return {segments, static_cast<int>(lengths.size())};
  }

  /// Two ranges for each rank, the i-th from the front and the i-th from the back.
  [[nodiscard]] static Layout zigzag(index_t positions, int ranks, index_t unit = 2048) {
    return even(positions, ranks, unit, 2 * checked_ranks(ranks),
                [ranks](int i) { return i < ranks ? i : 2 * ranks - 1 - i; });
  }

  /// The length of the sequence.
  [[nodiscard]] index_t positions() const { return segments_.empty() ? 0 : segments_.back().end; }
  /// How many ranks share it.
  [[nodiscard]] int ranks() const { return ranks_; }
  /// How many positions a rank holds.
  [[nodiscard]] index_t count(int rank) const { return counts_[static_cast<std::size_t>(rank)]; }
  /// All segments, in the order of the positions.
  [[nodiscard]] std::span<const Segment> segments() const { return segments_; }

  /// The same segments, for attention by heads. (append and decode make no difference.)
  [[nodiscard]] Layout by_heads() const {
    Layout result = *this;
    result.is_by_heads_ = true;
    return result;
  }
  /// Whether heads are what travels.
  [[nodiscard]] bool is_by_heads() const { return is_by_heads_; }

 private:
  static int checked_ranks(int ranks) {
    if (ranks < 1 || ranks > 1 << 24) {
      detail::fail_value("mpi::Layout", "ranks", "are", ranks, "must be at least 1, at most", 1 << 24);
    }
    return ranks;
  }
  static std::vector<index_t> checked(int ranks) {
    return std::vector<index_t>(static_cast<std::size_t>(checked_ranks(ranks)));
  }

  template <class RankOf>
  static Layout even(index_t positions, int ranks, index_t unit, int ranges, const RankOf& rank_of) {
    if (positions < 0)
      detail::fail_value("mpi::Layout", "positions", "are", positions, "must be at least", 0);
    if (unit < 1) detail::fail_value("mpi::Layout", "unit", "is", unit, "must be at least", 1);
    const index_t units = positions / unit + (positions % unit == 0 ? 0 : 1), each = units / ranges,
                  rest = units % ranges;
    std::vector<Segment> segments;
    index_t begin = 0, taken = 0;
    for (int i = 0; i < ranges; ++i) {
      taken += each + (i < rest ? 1 : 0);
      const index_t end = taken == units ? positions : taken * unit;
      segments.push_back({begin, end, rank_of(i)});
      begin = end;
    }
    return {segments, ranks};
  }

  int ranks_;
  std::vector<index_t> counts_;  // [ranks]
  std::vector<Segment> segments_;
  bool is_by_heads_ = false;
};

/// @}
}  // namespace mpi

SSMAX_END
