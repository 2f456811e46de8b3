/// @defgroup mpi_layout Layouts of a sequence over ranks (mpi_layout.hpp)
/// @ingroup mpi
/// Layouts: the positions of a sequence that each rank holds.
///
/// A layout is a list of segments. A segment is a range of positions on one rank. The rows of a rank's q, k, v and
/// out are those of its segments, in the order of the positions.
///
/// | layout | positions of rank r of R |
/// |---|---|
/// | contiguous | the r-th of R ranges |
/// | zigzag | the r-th and the (2R - 1 - r)-th of 2R ranges: equal work under a causal mask |
///
/// Ranges begin at multiples of `unit` positions and have lengths as equal as this allows. The last range is shorter
/// if `unit` does not divide the length. Ranges may be empty. Attention adds products in chunks of 1024 keys, its
/// backward in chunks of 2048 keys: multiples of 2048 do not cut a chunk.
///
/// By default, keys and values travel to the queries that attend to them. With `layout.by_heads()`, each rank
/// receives all positions of some heads in an all-to-all, computes them and returns the results. Use it for models
/// with at least as many kv heads as ranks. The rows are the same.

/// @defgroup mpi_communicator Communicators (mpi_layout.hpp)
/// @ingroup mpi
/// The ranks that share a sequence, and statistics of what they exchanged.
#pragma once

#include <mpi.h>

#include <span>
#include <vector>

#include "detail/checks/error.hpp"
#include "detail/checks/mpi.hpp"
#include "view.hpp"
#include "workspace.hpp"

SSMAX_BEGIN_CODE
namespace mpi {
/// @addtogroup mpi_layout
/// @{

/// The positions [begin, end) on one rank.
struct Segment {
  index_t begin = 0;  ///< First position.
  index_t end = 0;    ///< End of the range: the last position + 1.
  int rank = 0;       ///< Rank that holds the positions.

  /// Returns the number of positions.
  [[nodiscard]] index_t size() const { return end - begin; }
};

/// The segments of a sequence, contiguous from position 0 on. Every stored segment has positions.
class Layout {
 public:
  /// Makes a layout of the given segments and omits empty ones. Throws std::invalid_argument unless the first segment
  /// begins at 0, each one begins at the end of the previous one, and ranks are in [0, ranks).
  Layout(std::span<const Segment> segments, int ranks) : ranks_(ranks), counts_(checked(ranks)) {
    for (const Segment& segment : segments) {
      detail::check_equal("mpi::Layout", "a segment", "begins at", segment.begin, "the one before ends at",
                          positions());
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

  /// Returns one range per rank, as equal as whole units allow. Throws unless positions >= 0, ranks >= 1 and unit >=
  /// 1.
  [[nodiscard]] static Layout contiguous(index_t positions, int ranks, index_t unit = 2048) {
    return even(positions, ranks, unit, checked_ranks(ranks), [](int i) { return i; });
  }

  /// Returns one range per rank, with the given lengths. Throws std::invalid_argument if `lengths` is empty or a length
  /// is negative.
  [[nodiscard]] static Layout contiguous(Integers lengths) {
    std::vector<Segment> segments;
    index_t begin = 0;
    for (const index_t length : lengths) {
      segments.push_back({begin, begin + length, static_cast<int>(segments.size())});
      begin += length;
    }
    return {segments, static_cast<int>(lengths.size())};
  }

  /// Returns two ranges per rank: the i-th from the start and the i-th from the end.
  [[nodiscard]] static Layout zigzag(index_t positions, int ranks, index_t unit = 2048) {
    return even(positions, ranks, unit, 2 * checked_ranks(ranks),
                [ranks](int i) { return i < ranks ? i : 2 * ranks - 1 - i; });
  }

  /// Returns the length of the sequence.
  [[nodiscard]] index_t positions() const { return segments_.empty() ? 0 : segments_.back().end; }
  /// Returns the number of ranks.
  [[nodiscard]] int ranks() const { return ranks_; }
  /// Returns the number of positions of a rank. Requires a rank from 0 to ranks() - 1.
  [[nodiscard]] index_t count(int rank) const { return counts_[static_cast<std::size_t>(rank)]; }
  /// Returns all segments, in the order of the positions.
  [[nodiscard]] std::span<const Segment> segments() const { return segments_; }

  /// Returns the layout with attention by heads. `append`, and `attention` over a cache, treat both
  /// layouts in the same way.
  [[nodiscard]] Layout by_heads() const {
    Layout result = *this;
    result.is_by_heads_ = true;
    return result;
  }
  /// Returns true if heads travel in place of keys.
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

SSMAX_BEGIN_CODE
namespace mpi {
/// @addtogroup mpi_communicator
/// @{

/// The bytes that a rank has sent and the time that it has waited since its Communicator was made.
struct Traffic {
  double bytes_sent = 0;       ///< Bytes of tensors and states sent to other ranks.
  double seconds_waiting = 0;  ///< Time without work to compute, in s.
};

/// The ranks of an MPI communicator. The constructor duplicates the communicator, so the library's messages do not
/// mix with yours. Functions that take a Communicator are collective. Call them from one thread
/// (MPI_THREAD_FUNNELED): the threads of the executor do not call MPI. An MPI error throws std::runtime_error with
/// MPI's text. Exception: an error during an exchange aborts (mpi.hpp).
class Communicator {
 public:
  /// Duplicates `comm`. Collective over `comm`. Requires that MPI is initialised.
  explicit Communicator(MPI_Comm comm = MPI_COMM_WORLD) {
    detail::check_mpi("MPI_Comm_dup", MPI_Comm_dup(comm, &comm_));
    detail::check_mpi("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    detail::check_mpi("MPI_Comm_rank", MPI_Comm_rank(comm_, &rank_));
    detail::check_mpi("MPI_Comm_size", MPI_Comm_size(comm_, &ranks_));
  }
  /// Frees the duplicate. Collective. Exception: after MPI_Finalize, it does not call MPI.
  ~Communicator() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) MPI_Comm_free(&comm_);
  }
  /// Deleted.
  Communicator(const Communicator&) = delete;
  /// Deleted.
  Communicator& operator=(const Communicator&) = delete;

  /// Returns the index of this rank.
  [[nodiscard]] int rank() const { return rank_; }
  /// Returns the number of ranks.
  [[nodiscard]] int ranks() const { return ranks_; }
  /// Returns the duplicate of the communicator.
  [[nodiscard]] MPI_Comm handle() const { return comm_; }
  /// Returns the statistics so far.
  [[nodiscard]] const Traffic& traffic() const { return traffic_; }
  /// Returns the statistics, for the functions of mpi.hpp, which update them.
  [[nodiscard]] Traffic& traffic() { return traffic_; }
  /// Returns the buffers of the functions of mpi.hpp for calls without a workspace. Calls reuse the buffers.
  [[nodiscard]] Workspace& buffers() { return buffers_; }
  /// Returns the scratch memory of the kernels, which every step of a call reuses.
  [[nodiscard]] Workspace& scratch() { return scratch_; }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, ranks_ = 1;
  Traffic traffic_{};
  Workspace buffers_, scratch_;
};

/// @}
}  // namespace mpi

SSMAX_END
