// A problem that every rank holds as a whole, the rank's rows of it, and the result of one process.
#pragma once

#include <mpi.h>

#include <ssmax/mpi.hpp>

#include "../attention_backward_problem.hpp"

namespace mpi_problem {

using namespace ssmax;
using attention_problem::Output;
using attention_problem::run;
using attention_problem::Shape;
using attention_problem::backward_problem::backward;
using attention_problem::backward_problem::Problem;
using attention_problem::backward_problem::Result;
using ssmax::mpi::Communicator;
using ssmax::mpi::Layout;
using ssmax::mpi::Segment;

inline Communicator& world() {
  static Communicator comm(MPI_COMM_WORLD);
  return comm;
}

/// Returns the rows [batch, heads, positions, channels] of a rank, its segments concatenated.
template <class X>
std::vector<X> share_of(const std::vector<X>& whole, index_t outer, index_t channels, const Layout& layout,
                        int rank) {
  std::vector<X> share;
  for (index_t o = 0; o < outer; ++o) {
    for (const Segment& segment : layout.segments()) {
      if (segment.rank != rank) continue;
      const auto at = whole.begin() + (o * layout.positions() + segment.begin) * channels;
      share.insert(share.end(), at, at + segment.size() * channels);
    }
  }
  return share;
}

/// Returns true if `here` is true on all ranks.
inline bool everywhere(bool here) {
  int all = here ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return all != 0;
}

/// Returns a rope of each kind, for rows of 8 channels and n positions. Two ropes have positions on two axes, the last
/// one those of two sequences.
inline std::vector<ssmax::Rope<float>> every_rope(index_t n) {
  using ssmax::RopeScaling;
  const std::array<double, 2> omega{0.7, 0.02};
  const std::array<index_t, 4> axes{0, 1, 1, 0};
  std::vector<index_t> positions(static_cast<std::size_t>(4 * n));
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<index_t>(i * 7919 % 1013);
  std::vector<ssmax::Rope<float>> ropes;
  ropes.emplace_back(
      ssmax::RopeOptions{.width = 4, .pairing = ssmax::Pairing::interleaved, .first_channel = 3}, n);
  ropes.emplace_back(ssmax::RopeOptions{.width = 4, .attention_factor = 1.3, .frequencies = omega}, n);
  ropes.emplace_back(ssmax::RopeOptions{.width = 8, .scaling = RopeScaling::yarn(4, 512)}, n);
  ropes.emplace_back(ssmax::RopeOptions{.width = 8, .scaling = RopeScaling::llama3(8, 512)}, n);
  ropes.emplace_back(ssmax::RopeOptions{.width = 8}, View<const index_t, 2>(positions.data(), {2, n}), axes);
  ropes.emplace_back(ssmax::RopeOptions{.width = 8}, View<const index_t, 3>(positions.data(), {2, 2, n}),
                     axes);
  return ropes;
}

/// Returns numbers for matrix_of. Three of seven numbers are -inf.
inline std::vector<float> numbers_with_infinities(const Shape& s) {
  std::vector<float> numbers(static_cast<std::size_t>(s.queries + s.keys + 3));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = i * i % 7 < 2 ? -attention_problem::infinity<float> : static_cast<float>(i % 17) / 8 - 1;
  return numbers;
}

/// Returns two matrices of queries and keys. An element depends on its matrix and on query + key.
inline View<const float, 4> matrix_of(const std::vector<float>& numbers, const Shape& s) {
  return {numbers.data(), {s.batch, 2, s.queries, s.keys}, {0, 3, 1, 1}};
}

template <class T>
struct Share {
  Shape shape;
  std::vector<T> q, k, v, out, dout, dq, dk, dv;
  std::vector<attention_problem::Compute<T>> lse, dlse, dsinks;

  Share(const Problem<T>& problem, const Layout& layout, int rank) : shape(problem.shape) {
    shape.queries = shape.keys = layout.count(rank);
    const auto cut = [&](const auto& whole, index_t heads, index_t channels) {
      return share_of(whole, shape.batch * heads, channels, layout, rank);
    };
    q = cut(problem.q, shape.heads, shape.d);
    k = cut(problem.k, shape.kv_heads, shape.d);
    v = cut(problem.v, shape.kv_heads, shape.dv);
    dout = cut(problem.dout, shape.heads, shape.dv);
    dlse = cut(problem.dlse, shape.heads, 1);
    out.assign(dout.size(), T(-77));
    lse.assign(dlse.size(), -77);
    dq.assign(q.size(), T(-77));
    dk.assign(k.size(), T(-77));
    dv.assign(v.size(), T(-77));
    dsinks.resize(static_cast<std::size_t>(shape.heads));
  }
  template <class X>
  View<X, 4> of_queries(X* data, index_t channels) const {
    return {data, {shape.batch, shape.heads, shape.queries, channels}};
  }
  template <class X>
  View<X, 4> of_keys(X* data, index_t channels) const {
    return {data, {shape.batch, shape.kv_heads, shape.keys, channels}};
  }
  template <class X>
  View<X, 3> of_rows(X* data) const {
    return {data, {shape.batch, shape.heads, shape.queries}};
  }
  AttentionArguments<attention_problem::Compute<T>> forward(const AttentionOptions<T>& options = {}) {
    return with(
        over_views(of_queries(q.data(), shape.d), of_keys(k.data(), shape.d), of_keys(v.data(), shape.dv),
                   of_queries(out.data(), shape.dv), of_rows(lse.data())),
        options);
  }
  BackwardArguments<attention_problem::Compute<T>> backward(const AttentionOptions<T>& options = {}) const {
    return backward_with(backward_over_views(of_queries(q.data(), shape.d), of_keys(k.data(), shape.d),
                                             of_keys(v.data(), shape.dv), of_queries(out.data(), shape.dv),
                                             of_rows(lse.data())),
                         options);
  }
  AttentionGradients<attention_problem::Compute<T>> gradients(bool has_sinks = false) {
    return {.dout = of_queries(dout.data(), shape.dv),
            .dlse = of_rows(dlse.data()),
            .dq = of_queries(dq.data(), shape.d),
            .dk = of_keys(dk.data(), shape.d),
            .dv = of_keys(dv.data(), shape.dv),
            .dsinks = std::span(dsinks).first(has_sinks ? dsinks.size() : 0)};
  }
  /// Checks that the results on each rank are its rows of the results of one process.
  void check(const Problem<T>& whole, const Output<T>& output, const Result<T>& result,
             const Layout& layout) const {
    const Shape& s = whole.shape;
    const auto same = [&](const auto& here, const auto& all, index_t heads, index_t channels) {
      const auto expected = share_of(all, s.batch * heads, channels, layout, world().rank());
      return everywhere(same_bits(here, expected));
    };
    CHECK(same(out, output.out, s.heads, s.dv));
    CHECK(same(lse, output.lse, s.heads, 1));
    CHECK(same(dq, result.dq, s.heads, s.d));
    CHECK(same(dk, result.dk, s.kv_heads, s.d));
    CHECK(same(dv, result.dv, s.kv_heads, s.dv));
  }
};

}  // namespace mpi_problem
