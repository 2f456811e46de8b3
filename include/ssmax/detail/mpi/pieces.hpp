// Divides the keys into pieces, in which they are sent, and lists the pieces that each rank needs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
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

/// A segment of the layout, or a part of one that is sent as one message or computed at once.
struct Piece : mpi::Segment {
  index_t row = 0;        // of its first position, in the arrays of its rank
  std::size_t index = 0;  // index in the list of its kind
};

/// Returns the segments of a layout.
inline std::vector<Piece> segments_of(const mpi::Layout& layout) {
  std::vector<Piece> result;
  std::vector<index_t> rows(static_cast<std::size_t>(layout.ranks()));
  for (const mpi::Segment& segment : layout.segments()) {
    index_t& row = rows[static_cast<std::size_t>(segment.rank)];
    result.push_back({segment, row, result.size()});
    row += segment.size();
  }
  return result;
}

/// Calls f for the parts of a piece, which end at multiples of `unit` positions in the sequence. The parts keep the
/// index of the piece.
template <class F>
void for_each_part(const Piece& piece, index_t unit, const F& f) {
  for (Piece part = piece; part.begin < piece.end; part.begin = part.end) {
    part.row = piece.row + part.begin - piece.begin;
    part.end = std::min(piece.end, (part.begin / unit + 1) * unit);
    f(std::as_const(part));
  }
}

/// A byte per travel_keys positions of the sequence: 1 if a query of a segment may see one of these keys.
using SeenBlocks = std::vector<std::uint8_t>;

/// The pieces of all ranks, and the segments whose queries may see them.
class Pieces {
 public:
  /// Collective. Pieces begin where segments begin and at multiples of `unit`. `unit` must be a multiple of
  /// travel_keys. `seen` holds the seen blocks of each segment of this rank.
  Pieces(const mpi::Communicator& comm, const mpi::Layout& layout, index_t unit,
         const std::vector<SeenBlocks>& seen)
      : rank_(comm.rank()), ranks_(comm.ranks()), segments_(segments_of(layout)) {
    for (const Piece& segment : segments_) {
      for_each_part(segment, unit, [&](const Piece& piece) {
        list_.push_back({piece, piece.row, list_.size()});
      });
    }
    // Each rank sets entries for its own segments, and MPI combines the entries of all ranks.
    seen_.resize((segments_.size() * list_.size() + 63) / 64);
    std::size_t own = 0;
    for (const Piece& segment : segments_) {
      if (segment.rank != rank_) continue;
      const SeenBlocks& blocks = seen[own++];
      for (const Piece& piece : list_) {
        const auto first = blocks.begin() + piece.begin / travel_keys,
                   last = blocks.begin() + (piece.end - 1) / travel_keys + 1;
        if (std::find(first, last, std::uint8_t{1}) == last) continue;
        const std::size_t bit = bit_of(segment, piece);
        seen_[bit / 64] |= std::uint64_t{1} << bit % 64;
      }
    }
    check_mpi("MPI_Allreduce", MPI_Allreduce(MPI_IN_PLACE, seen_.data(), static_cast<int>(seen_.size()),
                                             MPI_UINT64_T, MPI_BOR, comm.handle()));
  }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int ranks() const { return ranks_; }
  /// Returns the segments in the order of their positions.
  [[nodiscard]] const std::vector<Piece>& segments() const { return segments_; }
  [[nodiscard]] const std::vector<Piece>& list() const { return list_; }

  /// Returns true if queries of a segment may see keys of a piece.
  [[nodiscard]] bool sees(const Piece& segment, const Piece& piece) const {
    const std::size_t bit = bit_of(segment, piece);
    return (seen_[bit / 64] >> bit % 64 & 1) != 0;
  }
  /// Returns true if queries of a rank may see keys of a piece.
  [[nodiscard]] bool needs(int rank, const Piece& piece) const {
    return std::ranges::any_of(
        segments_, [&](const Piece& segment) { return segment.rank == rank && sees(segment, piece); });
  }
  /// Returns the number of segments of this rank.
  [[nodiscard]] index_t segments_of_rank() const {
    return std::ranges::count(segments_, rank_, &Piece::rank);
  }
  [[nodiscard]] index_t longest() const {
    index_t longest = 0;
    for (const Piece& piece : list_) longest = std::max(longest, piece.size());
    return longest;
  }

 private:
  [[nodiscard]] std::size_t bit_of(const Piece& segment, const Piece& piece) const {
    return segment.index * list_.size() + piece.index;
  }

  int rank_, ranks_;
  std::vector<Piece> segments_, list_;
  std::vector<std::uint64_t> seen_;  // one bit per segment and piece
};

SSMAX_END
