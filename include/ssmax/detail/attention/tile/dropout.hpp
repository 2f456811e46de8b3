// Drops weights of tiles: which sequence, head, query and key a weight belongs to determines whether it is dropped.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../terms/problem.hpp"

SSMAX_BEGIN_DETAIL

/// Drops weights of the queries of one sequence.
template <class Compute>
class WeightDropper {
 public:
  /// Requires that p is above 0.
  WeightDropper(const DropoutOption<Compute>& dropout, index_t sequence) : p_(dropout.p) {
    constexpr double all = 65536;
    lanes_.threshold = static_cast<std::uint32_t>(std::min(std::rint(p_ * all), all - 1));
    factor_ = static_cast<Compute>(all / (all - lanes_.threshold));
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    const bool has_seeds = !dropout.seeds.empty();
    const std::uint64_t seed = has_seeds ? dropout.seeds[static_cast<std::size_t>(sequence)] : dropout.seed;
    const auto key = philox({low(dropout.offset), low(dropout.offset >> 32),
                             has_seeds ? 0 : low(static_cast<std::uint64_t>(sequence)), 1},
                            {low(seed), low(seed >> 32)});
    lanes_.key[0] = key[0];
    lanes_.key[1] = key[1];
  }

  /// Returns the factor of the weights that are kept.
  [[nodiscard]] Compute factor() const { return factor_; }

  /// Multiplies numbers of one vector of queries by 0 or by the factor of the weights that are kept. x[0] belongs to
  /// key `first`.
  void drop(Compute* x, index_t group, const QueryRow* rows, index_t width, index_t first, index_t keys) {
    take(rows, width);
    p_.kernels().drop(x, group, first, keys, lanes_, factor_);
  }
  /// Sets the dropped weights of one vector of queries to 0. Weights are floats, or bfloat16 in pairs of keys.
  void clear(Compute* x, index_t group, const QueryRow* rows, index_t width, index_t first, index_t keys) {
    take(rows, width);
    p_.kernels().drop(x, group, first, keys, lanes_, Compute{1});
  }
  void clear(bfloat16* x, index_t group, const QueryRow* rows, index_t width, index_t first, index_t keys) {
    take(rows, width);
    p_.pair_kernels().clear(x, group, first, keys, lanes_);
  }

 private:
  void take(const QueryRow* rows, index_t width) {
    for (index_t lane = 0; lane < width; ++lane) {
      query_[lane] = static_cast<std::uint32_t>(rows[lane].query.position());
      head_[lane] = static_cast<std::uint32_t>(rows[lane].query.head);
    }
    lanes_.query = query_;
    lanes_.head = head_;
  }

  static constexpr index_t most_lanes = 16;

  const DropoutProbability<Compute> p_;
  Compute factor_ = 1;
  std::uint32_t query_[most_lanes], head_[most_lanes];
  DropLanes lanes_{};
};

SSMAX_END
