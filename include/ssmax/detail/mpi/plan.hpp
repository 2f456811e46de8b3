// Who needs which keys: the pieces that keys travel in, and the steps of a rank.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "../attention/call/problem.hpp"
#include "agreement.hpp"

SSMAX_BEGIN_DETAIL

/// Keys travel in pieces of whole multiples of this many positions, counted over the sequence. It is what the
/// backward adds up at a time (backward_key_block · blocks_per_sum), and two chunks of the forward.
inline constexpr index_t travel_keys = 2048;
/// In the forward, so many of them as make up at most this, or one.
inline constexpr index_t travel_bytes = index_t{8} << 20;

inline index_t travel_unit(index_t bytes_of_key) {
  return travel_keys * std::max<index_t>(1, travel_bytes / std::max<index_t>(1, bytes_of_key) / travel_keys);
}

/// One segment of the layout, from where on its rows lie in the arrays of its rank.
struct Share {
  mpi::Segment segment;
  index_t row = 0;
};

/// The part of one segment that is sent as one message.
struct Piece {
  mpi::Segment keys;
  index_t row = 0;  // of its first key in the arrays of its rank
};

class RingPlan {
 public:
  /// Collective. Pieces begin at multiples of `unit`, and where segments do. `seen` has, for each own segment, a range
  /// that holds every key that the segment's queries see.
  RingPlan(const mpi::Communicator& comm, const mpi::Layout& layout, index_t unit,
           const std::vector<KeyRange>& seen)
      : rank_(comm.rank()), ranks_(comm.ranks()) {
    std::vector<index_t> rows(static_cast<std::size_t>(comm.ranks()));
    std::size_t own = 0;
    std::vector<std::int64_t> ranges;  // -begin and end of each segment's, so that the maximum joins them
    for (const mpi::Segment& segment : layout.segments()) {
      index_t& row = rows[static_cast<std::size_t>(segment.rank)];
      shares_.push_back({segment, row});
      for (index_t begin = segment.begin; begin < segment.end;) {
        const index_t end = std::min(segment.end, (begin / unit + 1) * unit);
        pieces_.push_back({{begin, end, segment.rank}, row});
        row += end - begin;
        begin = end;
      }
      const KeyRange range = segment.rank == rank_ ? seen[own++] : KeyRange{};
      const bool any = range.size() > 0;
      ranges.push_back(any ? -range.begin : std::numeric_limits<std::int64_t>::min());
      ranges.push_back(any ? range.end : std::numeric_limits<std::int64_t>::min());
    }
    check_mpi("MPI_Allreduce", MPI_Allreduce(MPI_IN_PLACE, ranges.data(), static_cast<int>(ranges.size()),
                                             MPI_INT64_T, MPI_MAX, comm.handle()));
    for (std::size_t i = 0; i < shares_.size(); ++i) {
      const bool any = ranges[2 * i + 1] > 0;
      seen_.push_back(
          any ? KeyRange{static_cast<index_t>(-ranges[2 * i]), static_cast<index_t>(ranges[2 * i + 1])}
              : KeyRange{});
    }
  }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int ranks() const { return ranks_; }
  /// In the order of the positions.
  [[nodiscard]] const std::vector<Share>& shares() const { return shares_; }
  [[nodiscard]] const std::vector<Piece>& pieces() const { return pieces_; }

  /// Whether queries of a segment may see keys of a piece.
  [[nodiscard]] bool sees(std::size_t share, const Piece& piece) const {
    return seen_[share].begin < piece.keys.end && seen_[share].end > piece.keys.begin;
  }
  /// Whether a rank's queries may.
  [[nodiscard]] bool needs(int rank, const Piece& piece) const {
    for (std::size_t i = 0; i < shares_.size(); ++i) {
      if (shares_[i].segment.rank == rank && sees(i, piece)) return true;
    }
    return false;
  }
  /// Positions of a rank.
  [[nodiscard]] index_t count(int rank) const {
    index_t count = 0;
    for (const Share& share : shares_) count += share.segment.rank == rank ? share.segment.size() : 0;
    return count;
  }
  /// Segments of this rank.
  [[nodiscard]] index_t segments_of_rank() const {
    return std::ranges::count(shares_, rank_, [](const Share& share) { return share.segment.rank; });
  }
  [[nodiscard]] index_t longest_piece() const {
    index_t longest = 0;
    for (const Piece& piece : pieces_) longest = std::max(longest, piece.keys.size());
    return longest;
  }

 private:
  int rank_, ranks_;
  std::vector<Share> shares_;
  std::vector<Piece> pieces_;
  std::vector<KeyRange> seen_;  // [shares]
};

SSMAX_END
