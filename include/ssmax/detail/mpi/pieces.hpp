// Divides the keys into pieces, in which they are sent, and lists the pieces that each rank needs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../attention/terms/problem.hpp"
#include "agreement.hpp"

SSMAX_BEGIN_DETAIL

/// Pieces end at multiples of this number of positions in the sequence, or at the ends of segments. It is the
/// number of keys that backward adds up at a time (backward_key_block · blocks_per_sum) and two chunks of
/// forward.
inline constexpr index_t travel_keys = 2048;
/// Upper bound of a piece's bytes in forward. Exception: a piece of travel_keys positions may exceed it.
inline constexpr index_t travel_bytes = index_t{8} << 20;

inline index_t travel_unit(index_t bytes_of_key) {
  return travel_keys * std::max<index_t>(1, travel_bytes / std::max<index_t>(1, bytes_of_key) / travel_keys);
}

/// A segment of the layout and its first row in the arrays of its rank.
struct Share {
  mpi::Segment segment;
  index_t row = 0;
};

/// The part of one segment that is sent as one message.
struct Piece {
  mpi::Segment keys;
  index_t row = 0;        // row of its first key in the arrays of its rank
  std::size_t index = 0;  // index in Pieces::list()
};

/// A byte per travel_keys positions of the sequence: 1 if a query of a segment may see one of these keys.
using SeenBlocks = std::vector<std::uint8_t>;

/// The pieces of all ranks, and the segments whose queries may see them.
class Pieces {
 public:
  /// Collective. Pieces begin where segments begin and at multiples of `unit`. `unit` must be a multiple of
  /// travel_keys. `seen` holds the seen blocks of each segment of this rank.
  Pieces(const mpi::Communicator& comm, const mpi::Layout& layout, index_t unit,
         const std::vector<SeenBlocks>& seen)
      : rank_(comm.rank()), ranks_(comm.ranks()) {
    std::vector<index_t> rows(static_cast<std::size_t>(comm.ranks()));
    for (const mpi::Segment& segment : layout.segments()) {
      index_t& row = rows[static_cast<std::size_t>(segment.rank)];
      shares_.push_back({segment, row});
      for (index_t begin = segment.begin; begin < segment.end;) {
        const index_t end = std::min(segment.end, (begin / unit + 1) * unit);
        list_.push_back({{begin, end, segment.rank}, row, list_.size()});
        row += end - begin;
        begin = end;
      }
    }
    // Each rank sets entries for its own segments, and MPI combines the entries of all ranks.
    seen_.resize((shares_.size() * list_.size() + 63) / 64);
    std::size_t own = 0;
    for (std::size_t share = 0; share < shares_.size(); ++share) {
      if (shares_[share].segment.rank != rank_) continue;
      const SeenBlocks& blocks = seen[own++];
      for (const Piece& piece : list_) {
        const auto first = blocks.begin() + piece.keys.begin / travel_keys,
                   last = blocks.begin() + (piece.keys.end - 1) / travel_keys + 1;
        if (std::find(first, last, std::uint8_t{1}) == last) continue;
        const std::size_t bit = bit_of(share, piece);
        seen_[bit / 64] |= std::uint64_t{1} << bit % 64;
      }
    }
    check_mpi("MPI_Allreduce", MPI_Allreduce(MPI_IN_PLACE, seen_.data(), static_cast<int>(seen_.size()),
                                             MPI_UINT64_T, MPI_BOR, comm.handle()));
  }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int ranks() const { return ranks_; }
  /// Returns the segments in the order of their positions.
  [[nodiscard]] const std::vector<Share>& shares() const { return shares_; }
  [[nodiscard]] const std::vector<Piece>& list() const { return list_; }

  /// Returns true if queries of a segment may see keys of a piece.
  [[nodiscard]] bool sees(std::size_t share, const Piece& piece) const {
    const std::size_t bit = bit_of(share, piece);
    return (seen_[bit / 64] >> bit % 64 & 1) != 0;
  }
  /// Returns true if queries of a rank may see keys of a piece.
  [[nodiscard]] bool needs(int rank, const Piece& piece) const {
    for (std::size_t i = 0; i < shares_.size(); ++i) {
      if (shares_[i].segment.rank == rank && sees(i, piece)) return true;
    }
    return false;
  }
  /// Returns the number of positions of a rank.
  [[nodiscard]] index_t count(int rank) const {
    index_t count = 0;
    for (const Share& share : shares_) count += share.segment.rank == rank ? share.segment.size() : 0;
    return count;
  }
  /// Returns the number of segments of this rank.
  [[nodiscard]] index_t segments_of_rank() const {
    return std::ranges::count(shares_, rank_, [](const Share& share) { return share.segment.rank; });
  }
  [[nodiscard]] index_t longest() const {
    index_t longest = 0;
    for (const Piece& piece : list_) longest = std::max(longest, piece.keys.size());
    return longest;
  }

 private:
  [[nodiscard]] std::size_t bit_of(std::size_t share, const Piece& piece) const {
    return share * list_.size() + piece.index;
  }

  int rank_, ranks_;
  std::vector<Share> shares_;
  std::vector<Piece> list_;
  std::vector<std::uint64_t> seen_;  // one bit per share and piece
};

SSMAX_END
