// The gradient of a score that has a row for each query (a Bias): every rank gets all of it. A row that one rank adds
// to is that rank's; what several add to a row, one for many queries or heads, is added up rank by rank.
#pragma once

#include <algorithm>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "../../key.hpp"
#include "../../score.hpp"
#include "agreement.hpp"
#include "exchange.hpp"

SSMAX_BEGIN_DETAIL

/// Calls f for each part of a score that has rows to add to.
template <class C, class F>
void for_each_row_learner(const C& score, const F& f) {
  if constexpr (shared::is_composed<C>) {
    for_each_row_learner(score.first(), f);
    for_each_row_learner(score.second(), f);
  } else if constexpr (LearnsRow<C>) {
    f(score);
  }
}

/// A rank that adds to a row.
struct RowShare {
  void* row;
  std::size_t number;  // of the row, in the order of the queries that add to it first
  int rank;

  bool operator==(const RowShare&) const = default;
};

/// Who adds to which rows: row by row, the ranks in the order of their queries.
template <class C>
class LearntRows {
 public:
  /// The score must outlive it.
  explicit LearntRows(const C& score) : score_(score) {}

  /// rank_of(query) computes that query.
  template <class RankOf>
  void list(const QueryShape& shape, const RankOf& rank_of) {
    keys_ = static_cast<std::size_t>(shape.keys);
    for_each_row_learner(score_,
                         [&](const auto& part) { shares_.push_back(shares_of(part, shape, rank_of)); });
  }

  /// Of the list, not of the rows' addresses.
  [[nodiscard]] std::int64_t fingerprint() const {
    Fingerprint result;
    for (const std::vector<RowShare>& shares : shares_) {
      for (const RowShare& share : shares) result.add(share.number), result.add(share.rank);
    }
    return result.value();
  }

  /// Of a row that several ranks add to, the first goes on from what it holds, the others begin with 0.
  void begin(int rank) const {
    for_each_row([&](auto* row, const std::vector<int>& ranks, bool) {
      if (ranks.front() == rank || std::ranges::find(ranks, rank) == ranks.end()) return;
      std::fill_n(row, keys_, std::remove_pointer_t<decltype(row)>{});
    });
  }

  /// Collective: all rows on all ranks. Rows of the same ranks go together.
  void add_up(const mpi::Communicator& comm) const {
    std::vector<int> ranks_of_rows;
    std::vector<void*> rows;
    for_each_row([&](auto* row, const std::vector<int>& ranks, bool is_last) {
      using G = std::remove_pointer_t<decltype(row)>;
      const std::size_t most = std::max<std::size_t>(1, most_bytes / (keys_ * sizeof(G)));
      if (!rows.empty() && ranks != ranks_of_rows) add_up<G>(comm, rows, ranks_of_rows);
      ranks_of_rows = ranks;
      rows.push_back(row);
      if (rows.size() == most || is_last) add_up<G>(comm, rows, ranks_of_rows);
    });
  }

 private:
  static constexpr std::size_t most_bytes = std::size_t{1} << 20;  // that go together

  /// Rows on all ranks, as the sum of what these ranks have; then there are no more rows.
  template <class G>
  void add_up(const mpi::Communicator& comm, std::vector<void*>& rows, const std::vector<int>& ranks) const {
    std::vector<G> sums, next(rows.size() * keys_);
    const auto for_each = [&](const auto& f) {
      for (std::size_t i = 0; i < rows.size(); ++i) f(static_cast<G*>(rows[i]), i * keys_);
    };
    for (const int rank : ranks) {
      if (rank == comm.rank()) {
        for_each([&](const G* row, std::size_t at) { std::copy_n(row, keys_, next.data() + at); });
      }
      check_mpi("MPI_Bcast", MPI_Bcast(next.data(), Requests::count(next.size() * sizeof(G)), MPI_BYTE, rank,
                                       comm.handle()));
      if (rank == ranks.front()) {
        sums = next;
      } else {
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += next[i];
      }
    }
    for_each([&](G* row, std::size_t at) { std::copy_n(sums.data() + at, keys_, row); });
    rows.clear();
  }

  template <class Part, class RankOf>
  static std::vector<RowShare> shares_of(const Part& part, const QueryShape& shape, const RankOf& rank_of) {
    std::unordered_map<void*, std::size_t> numbers;
    std::vector<RowShare> all;
    for (Query query{0, 0, 0, shape}; query.batch < shape.batch; ++query.batch) {
      for (query.head = 0; query.head < shape.heads; ++query.head) {
        for (query.index = 0; query.index < shape.queries; ++query.index) {
          void* row = part.gradient_row(query);
          if (row == nullptr) continue;
          const RowShare share{row, numbers.try_emplace(row, numbers.size()).first->second, rank_of(query)};
          if (all.empty() || all.back() != share) all.push_back(share);
        }
      }
    }
    std::ranges::stable_sort(all, {}, &RowShare::number);
    std::vector<RowShare> once;
    auto first = once.begin();  // of its row
    once.reserve(all.size());
    for (const RowShare& share : all) {
      if (once.empty() || once.back().number != share.number) first = once.end();
      if (std::find(first, once.end(), share) == once.end()) once.push_back(share);
    }
    return once;
  }

  /// Calls f(row, ranks that add to it, whether it is its part's last).
  template <class F>
  void for_each_row(const F& f) const {
    std::size_t part_number = 0;
    for_each_row_learner(score_, [&](const auto& part) {
      using Row = decltype(part.gradient_row(Query{}));
      const std::vector<RowShare>& shares = shares_[part_number++];
      std::vector<int> ranks;
      for (std::size_t i = 0; i < shares.size(); ++i) {
        ranks.push_back(shares[i].rank);
        const bool is_last = i + 1 == shares.size();
        if (!is_last && shares[i + 1].number == shares[i].number) continue;
        f(static_cast<Row>(shares[i].row), ranks, is_last);
        ranks.clear();
      }
    });
  }

  const C& score_;
  std::size_t keys_ = 0;
  std::vector<std::vector<RowShare>> shares_;  // of each part
};

SSMAX_END
