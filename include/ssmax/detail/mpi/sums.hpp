// What scaling, score and sinks learn: every rank hands them the sums of all queries, in the order in which one
// process does.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "../attention/backward/problem.hpp"
#include "../attention/backward/variant.hpp"
#include "exchange.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// The sums of a segment's queries, [batch, heads, positions], as BackwardStage keeps them.
class KeptSums {
 public:
  KeptSums(bool wanted, index_t rows, index_t sums_of_row)
      : sums_(static_cast<std::size_t>(wanted ? rows * sums_of_row : 0)),
        reports_(static_cast<std::size_t>(wanted ? rows : 0)) {}
  [[nodiscard]] CallSums get() {
    if (sums_.empty()) return {};
    return {sums_.data(), reports_.data()};
  }

 private:
  std::vector<double> sums_;
  std::vector<QueryReport> reports_;
};

/// Collective, where anything is learnt. One head's segment is sent at a time; kept is [shares].
template <class A>
void hand_over_all(const mpi::Communicator& comm, const RingPlan& plan, const GradientVariant<A>& variant,
                   std::vector<KeptSums>& kept, const QueryShape& shape, std::span<A> dsinks) {
  const index_t sums_of_row = 1 + variant.parameters();
  std::vector<double> sums;
  std::vector<QueryReport> reports;
  const auto from_owner = [&](void* data, std::size_t bytes, int rank) {
    check_mpi("MPI_Bcast", MPI_Bcast(data, Requests::bytes(bytes), MPI_BYTE, rank, comm.handle()));
  };
  Query query{0, 0, 0, shape};
  for (query.batch = 0; query.batch < shape.batch; ++query.batch) {
    for (query.head = 0; query.head < shape.heads; ++query.head) {
      double dsink = 0;
      for (std::size_t s = 0; s < kept.size(); ++s) {
        const Share& share = plan.shares()[s];
        const auto count = static_cast<std::size_t>(share.segment.size());
        sums.resize(count * static_cast<std::size_t>(sums_of_row));
        reports.resize(count);
        if (share.segment.rank == plan.rank()) {
          const CallSums own = kept[s].get();
          const index_t first = (query.batch * shape.heads + query.head) * share.segment.size();
          std::copy_n(own.sums + first * sums_of_row, sums.size(), sums.data());
          std::copy_n(own.reports + first, count, reports.data());
        }
        from_owner(sums.data(), sums.size() * sizeof(double), share.segment.rank);
        from_owner(reports.data(), count * sizeof(QueryReport), share.segment.rank);
        for (std::size_t i = 0; i < count; ++i) {
          query.index = share.segment.begin + static_cast<index_t>(i);
          variant.accumulate(query, {query.head, reports[i].position, reports[i].n},
                             sums.data() + i * static_cast<std::size_t>(sums_of_row));
          dsink += reports[i].dsink;
        }
      }
      if (!dsinks.empty()) dsinks[static_cast<std::size_t>(query.head)] += static_cast<A>(dsink);
    }
  }
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
