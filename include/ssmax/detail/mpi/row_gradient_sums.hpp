// Adds up the gradient of a score that has a row per query (a Bias), so that every rank holds the whole
// gradient. If one rank adds to a row, every rank receives that rank's row. If several ranks add to a row
// (one row for many queries or heads), their rows are added rank by rank.
#pragma once

#include <algorithm>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "../../score.hpp"
#include "agreement.hpp"
#include "exchange.hpp"

SSMAX_BEGIN_DETAIL

/// Calls f for each part of a score that has gradient rows.
template <class C, class F>
void for_each_row_gradient(const C& score, const F& f) {
  if constexpr (shared::is_composed<C>) {
    for_each_row_gradient(score.first(), f);
    for_each_row_gradient(score.second(), f);
  } else if constexpr (HasRowGradient<C>) {
    f(score);
  }
}

/// A rank that adds to a gradient row.
struct RowShare {
  void* row;
  std::size_t number;  // of the row, in the order of the first queries that add to the rows
  int rank;

  bool operator==(const RowShare&) const = default;
};

/// A list of the ranks that add to each row: row by row, with the ranks in the order of their queries.
template <class C>
class RowGradientSums {
 public:
  /// Requires that the score outlives this object.
  explicit RowGradientSums(const C& score) : score_(score) {}

  /// Fills the list. rank_of(query) returns the rank that computes a query.
  template <class RankOf>
  void list(const QueryShape& shape, const RankOf& rank_of) {
    keys_ = static_cast<std::size_t>(shape.keys);
    for_each_row_gradient(score_,
                          [&](const auto& part) { shares_.push_back(shares_of(part, shape, rank_of)); });
  }

  /// Returns a hash of the row numbers and ranks of the list. The addresses of rows are not part of it.
  [[nodiscard]] std::int64_t fingerprint() const {
    Fingerprint result;
    for (const std::vector<RowShare>& shares : shares_) {
      for (const RowShare& share : shares) result.add(share.number, share.rank);
    }
    return result.value();
  }

  /// Prepares the rows that several ranks add to. The first rank keeps the values of the row, the other ranks
  /// set the row to 0.
  void begin(int rank) const {
    for_each_row([&](auto* row, const std::vector<int>& ranks, bool) {
      if (ranks.front() == rank || std::ranges::find(ranks, rank) == ranks.end()) return;
      std::fill_n(row, keys_, std::remove_pointer_t<decltype(row)>{});
    });
  }

  /// Collective. Adds up all rows and writes the sums on all ranks. One message holds consecutive rows of the
  /// same ranks.
  void add_up(const mpi::Communicator& comm) const {
    std::vector<int> ranks_of_rows;
    std::vector<void*> rows;
    for_each_row([&](auto* row, const std::vector<int>& ranks, bool is_last) {
      using G = std::remove_pointer_t<decltype(row)>;
      const std::size_t most = std::max<std::size_t>(1, max_bytes / (keys_ * sizeof(G)));
      if (!rows.empty() && ranks != ranks_of_rows) add_up<G>(comm, rows, ranks_of_rows);
      ranks_of_rows = ranks;
      rows.push_back(row);
      if (rows.size() == most || is_last) add_up<G>(comm, rows, ranks_of_rows);
    });
  }

 private:
  static constexpr std::size_t max_bytes = std::size_t{1} << 20;  // most bytes per message

  /// Writes the sum of the rows of `ranks` on all ranks, then clears `rows`.
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
    for_each_query(shape, [&](const Query& query) {
      void* row = part.gradient_row(query);
      if (row == nullptr) return;
      const RowShare share{row, numbers.try_emplace(row, numbers.size()).first->second, rank_of(query)};
      if (all.empty() || all.back() != share) all.push_back(share);
    });
    std::ranges::stable_sort(all, {}, &RowShare::number);
    std::vector<RowShare> once;
    auto first = once.begin();  // first entry of the current row
    once.reserve(all.size());
    for (const RowShare& share : all) {
      if (once.empty() || once.back().number != share.number) first = once.end();
      if (std::find(first, once.end(), share) == once.end()) once.push_back(share);
    }
    return once;
  }

  /// Calls f(row, ranks that add to it, true for the last row of its part).
  template <class F>
  void for_each_row(const F& f) const {
    std::size_t part_number = 0;
    for_each_row_gradient(score_, [&](const auto& part) {
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
  std::vector<std::vector<RowShare>> shares_;  // one list per part
};

SSMAX_END
