// Exchanges shares of positions for whole heads and back: one all-to-all per kv head of a rank. Datatypes
// that describe the tensors let MPI read and write rows in place, without packing.
#pragma once

#include <vector>

#include "../attention/terms/tensors.hpp"
#include "datatype.hpp"
#include "exchange.hpp"

SSMAX_BEGIN_DETAIL

/// Returns a datatype for `heads` heads of a tensor from `head` on, in all batch entries: the rows of `ranges`
/// of each head. The datatype contains the tensor's address.
inline Datatype rows_type(const Rows& tensor, index_t head, index_t heads,
                          const std::vector<KeyRange>& ranges) {
  const auto stride_of = [&](int i) {
    return static_cast<MPI_Aint>(tensor.stride(i) * tensor.element_bytes());
  };
  const auto repeated = [](const Datatype& type, index_t times, MPI_Aint stride) {
    const int count = Requests::count(static_cast<std::size_t>(times));
    return make_datatype("MPI_Type_create_hvector", [&](MPI_Datatype* to) {
      return MPI_Type_create_hvector(count, 1, stride, type.get(), to);
    });
  };
  const auto placed = [](const std::vector<Datatype>& types, const std::vector<MPI_Aint>& places) {
    const std::vector<int> ones(types.size(), 1);
    std::vector<MPI_Datatype> handles;
    for (const Datatype& type : types) handles.push_back(type.get());
    return make_datatype("MPI_Type_create_struct", [&](MPI_Datatype* to) {
      return MPI_Type_create_struct(static_cast<int>(ones.size()), ones.data(), places.data(), handles.data(),
                                    to);
    });
  };
  const Datatype row = bytes_type(static_cast<std::size_t>(tensor.extent(3) * tensor.element_bytes()));
  std::vector<Datatype> rows;
  std::vector<MPI_Aint> places;
  for (const KeyRange& range : ranges) {
    rows.push_back(repeated(row, range.size(), stride_of(2)));
    places.push_back(range.begin * stride_of(2));
  }
  const Datatype of_head = placed(rows, places), of_heads = repeated(of_head, heads, stride_of(1));
  std::vector<Datatype> all;
  all.push_back(repeated(of_heads, tensor.extent(0), stride_of(0)));
  MPI_Aint address = 0;
  check_mpi("MPI_Get_address", MPI_Get_address(tensor.row(0, head, 0), &address));
  return placed(all, {address});
}

/// A division of kv heads among ranks. Each rank computes a range of kv heads, and the ranges are as even as
/// possible. In each round, a rank computes at most one kv head.
class HeadExchange {
 public:
  HeadExchange(mpi::Communicator& comm, const mpi::Layout& layout, index_t kv_heads)
      : comm_(comm), layout_(layout), kv_heads_(kv_heads) {}

  [[nodiscard]] index_t rounds() const { return (kv_heads_ + comm_.ranks() - 1) / comm_.ranks(); }
  /// Returns the first kv head of a rank. The rank's range ends at first_of(rank + 1).
  [[nodiscard]] index_t first_of(int rank) const { return kv_heads_ * rank / comm_.ranks(); }
  [[nodiscard]] bool has_head(int rank, index_t round) const {
    return first_of(rank) + round < first_of(rank + 1);
  }
  /// Returns the rank that computes a kv head.
  [[nodiscard]] int rank_of(index_t kv_head) const {
    return static_cast<int>(((kv_head + 1) * comm_.ranks() - 1) / kv_heads_);
  }

  /// Collective. Sends `share` [batch, heads, own positions, …] to the ranks that compute its heads in this
  /// round. Writes `whole` [batch, heads per kv head, all positions, …] for the head that this rank computes.
  void gather(const Rows& share, const Rows& whole, index_t round) {
    const index_t group = whole.extent(1);
    index_t rows = 0;  // sent to other ranks
    for (int r = 0; r < comm_.ranks(); ++r) {
      if (r != comm_.rank() && has_head(r, round)) rows += share.extent(2) * group;
    }
    move(types_of_share(share, group, round), types_of_whole(whole, round), rows * bytes_of_row(share));
  }
  /// Collective. Sends `whole` back to the ranks that own the positions, which write it to `share`.
  void scatter(const Rows& whole, const Rows& share, index_t round) {
    const index_t group = whole.extent(1), others = layout_.positions() - share.extent(2);
    const index_t rows = has_head(comm_.rank(), round) ? others * group : 0;
    move(types_of_whole(whole, round), types_of_share(share, group, round), rows * bytes_of_row(share));
  }

 private:
  using Types = std::vector<Datatype>;  // [ranks]

  /// Returns, for each rank, the datatype of the heads in `share` that the rank computes.
  [[nodiscard]] Types types_of_share(const Rows& share, index_t group, index_t round) const {
    Types types(static_cast<std::size_t>(comm_.ranks()));
    if (AnyView(share).empty()) return types;
    for (int r = 0; r < comm_.ranks(); ++r) {
      if (!has_head(r, round)) continue;
      types[static_cast<std::size_t>(r)] =
          rows_type(share, (first_of(r) + round) * group, group, {{0, share.extent(2)}});
    }
    return types;
  }
  /// Returns, for each rank, the datatype of the positions in `whole` that the rank owns.
  [[nodiscard]] Types types_of_whole(const Rows& whole, index_t round) const {
    Types types(static_cast<std::size_t>(comm_.ranks()));
    if (AnyView(whole).empty() || !has_head(comm_.rank(), round)) return types;
    for (int r = 0; r < comm_.ranks(); ++r) {
      std::vector<KeyRange> ranges;
      for (const mpi::Segment& segment : layout_.segments()) {
        if (segment.rank == r) ranges.push_back({segment.begin, segment.end});
      }
      if (ranges.empty()) continue;
      types[static_cast<std::size_t>(r)] = rows_type(whole, 0, whole.extent(1), ranges);
    }
    return types;
  }

  static index_t bytes_of_row(const Rows& tensor) {
    return tensor.extent(0) * tensor.extent(3) * tensor.element_bytes();
  }

  /// The send or receive arguments of MPI_Ialltoallw: one entry per rank.
  struct Side {
    explicit Side(const Types& types) : counts(types.size()), zeros(types.size()), handles(types.size()) {
      for (std::size_t r = 0; r < types.size(); ++r) {
        counts[r] = types[r].get() == MPI_DATATYPE_NULL ? 0 : 1;
        handles[r] = counts[r] == 0 ? MPI_BYTE : types[r].get();
      }
    }
    std::vector<int> counts, zeros;
    std::vector<MPI_Datatype> handles;
  };

  void move(const Types& from, const Types& to, index_t bytes_to_others) {
    const Side out(from), in(to);
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi("MPI_Ialltoallw",
              MPI_Ialltoallw(MPI_BOTTOM, out.counts.data(), out.zeros.data(), out.handles.data(), MPI_BOTTOM,
                             in.counts.data(), in.zeros.data(), in.handles.data(), comm_.handle(), &request));
    Requests(comm_).wait([&] { return Requests::test(request); });
    comm_.traffic().bytes_sent += static_cast<double>(bytes_to_others);
  }

  mpi::Communicator& comm_;
  const mpi::Layout& layout_;
  index_t kv_heads_;
};

SSMAX_END
