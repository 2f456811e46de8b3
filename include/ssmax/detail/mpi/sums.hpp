// Passes the gradients of scaling, score and sinks to every rank: each rank adds the sums of all queries in
// the order of a single-process run.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "../attention/terms/backward_problem.hpp"
#include "../attention/terms/variant.hpp"
#include "../memory/arena.hpp"
#include "exchange.hpp"

SSMAX_BEGIN_DETAIL

/// The sums of a rank's queries, in the layout of BackwardStage.
class KeptSums {
 public:
  KeptSums(Arena& arena, index_t rows, index_t sums_of_row)
      : sums_of_row_(sums_of_row),
        sums_{rows == 0 ? nullptr : arena.take<double>(rows * sums_of_row), arena.take<QueryReport>(rows)} {}
  /// Returns the sums from a row on, or an empty CallSums if sums are not kept.
  [[nodiscard]] CallSums from(index_t row) const {
    if (!sums_) return {};
    return {sums_.sums + row * sums_of_row_, sums_.reports + row};
  }

 private:
  index_t sums_of_row_;
  CallSums sums_;
};

/// Queries [begin, end) of a head whose sums are kept by one rank.
struct KeptQueries {
  mpi::Segment queries;
  CallSums sums{};  // sums of the first query, if this rank keeps them
};

/// Collective. Adds the parameter gradients of all queries on every rank. kept_of(batch, head) returns all
/// queries of a head, in order. The rank that keeps the sums of a KeptQueries broadcasts them.
template <class Compute, class KeptOf>
void hand_over_all(const mpi::Communicator& comm, const GradientVariant<Compute>& variant,
                   const QueryShape& shape, std::span<Compute> dsinks, const KeptOf& kept_of) {
  const index_t sums_of_row = 1 + variant.parameters();
  std::vector<double> sums;
  std::vector<QueryReport> reports;
  const auto from_owner = [&](void* data, std::size_t bytes, int rank) {
    check_mpi("MPI_Bcast", MPI_Bcast(data, Requests::count(bytes), MPI_BYTE, rank, comm.handle()));
  };
  Query query{0, 0, 0, shape};
  for (query.batch = 0; query.batch < shape.batch; ++query.batch) {
    for (query.head = 0; query.head < shape.heads; ++query.head) {
      double dsink = 0;
      for (const KeptQueries& kept : kept_of(query.batch, query.head)) {
        const auto count = static_cast<std::size_t>(kept.queries.size());
        sums.resize(count * static_cast<std::size_t>(sums_of_row));
        reports.resize(count);
        if (kept.queries.rank == comm.rank()) {
          std::copy_n(kept.sums.sums, sums.size(), sums.data());
          std::copy_n(kept.sums.reports, count, reports.data());
        }
        from_owner(sums.data(), sums.size() * sizeof(double), kept.queries.rank);
        from_owner(reports.data(), count * sizeof(QueryReport), kept.queries.rank);
        for (std::size_t i = 0; i < count; ++i) {
          query.index = kept.queries.begin + static_cast<index_t>(i);
          variant.accumulate(query, {query.head, reports[i].position, reports[i].n},
                             sums.data() + i * static_cast<std::size_t>(sums_of_row));
          dsink += reports[i].dsink;
        }
      }
      if (!dsinks.empty()) dsinks[static_cast<std::size_t>(query.head)] += static_cast<Compute>(dsink);
    }
  }
}

SSMAX_END
