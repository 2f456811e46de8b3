// A multiplier for each query, over ranks: c and dc cover all queries of the sequence on every rank. dc is
// bit-identical to one process.

#include <ssmax/mpi.hpp>

#include "../refusal.hpp"
#include "../test.hpp"
#include "mpi_problem.hpp"

namespace mpi_problem::mpi_per_query_test {

/// Multipliers [batch, heads, queries] of both signs.
struct Multipliers {
  std::array<index_t, 3> extents;
  std::vector<float> values;

  explicit Multipliers(const Shape& s)
      : extents{s.batch, s.heads, s.queries},
        values(reference::normals<float>(static_cast<std::size_t>(s.batch * s.heads * s.queries), 31, 0.8,
                                         0.7)) {}
  PerQuery<float> scaling() const { return PerQuery(View<const float, 3>(values.data(), extents)); }
};

void check(const Shape& shape, const Layout& layout) {
  const Problem<float> problem(shape);
  const Multipliers c(shape);
  const PerQuery<float> scaling = c.scaling();
  std::vector<float> dc(c.values.size()), dc_here = dc;
  const auto gradient = [&](std::vector<float>& to) {
    return scaling.gradient(View<float, 3>(to.data(), c.extents));
  };
  const Output<float> output = run<float>(problem, scaling, Causal{}, Identity{});
  const auto whole = backward<float>(problem, output, gradient(dc), Causal{}, Identity{});

  Share<float> share(problem, layout, world().rank());
  ssmax::mpi::attention(world(), layout, share.forward(), scaling, Causal{});
  ssmax::mpi::attention_backward(world(), layout, share.backward(), share.gradients(), gradient(dc_here),
                                 Causal{});
  share.check(problem, output, whole, layout);
  CHECK(everywhere(same_bits(dc_here, dc)));
}

TEST_CASE("a multiplier for each query is bit-identical to one process", "[mpi][backward][heads]") {
  const int ranks = world().ranks();
  const index_t n = 2 * 2048 + 300, shorter = 300;
  check({1, 2, 1, n, n, 8, 8}, Layout::zigzag(n, ranks));
  check({2, 4, 2, shorter, shorter, 8, 5}, Layout::zigzag(shorter, ranks, 1).by_heads());
}

TEST_CASE("decode with a multiplier for each query is bit-identical to decode with one cache",
          "[mpi][decode]") {
  const index_t n = 1024 + 300, queries = 3;
  const Shape shape{1, 2, 1, queries, n, 8, 8};
  const Problem<float> problem(shape);
  const Multipliers c(shape);
  const int rank = world().rank();
  const Layout layout = Layout::contiguous(n, world().ranks(), 1024);
  KvCache<float> whole({.width = 8, .capacity = n});
  KvCache<float> share({.width = 8, .capacity = std::max<index_t>(1, layout.count(rank))});
  whole.append(problem.k_view(), problem.v_view());
  ssmax::mpi::append(share, layout, rank, 0, problem.k_view(), problem.v_view());
  Output<float> one(shape), many(shape);
  const auto results = [&](Output<float>& to) {
    return AttentionArguments<float>{.q = problem.q_view(),
                                     .out = {to.out.data(), {1, 2, queries, 8}},
                                     .lse = {to.lse.data(), {1, 2, queries}}};
  };
  ssmax::attention(over(results(one), whole), c.scaling(), ssmax::Causal{});
  ssmax::mpi::attention(world(), layout, n, over(results(many), share), c.scaling(), ssmax::Causal{});
  CHECK(everywhere(one == many));
}

TEST_CASE("throws for multipliers that cover only the rank's own queries", "[mpi][errors]") {
  if (world().ranks() == 1) return;
  const Shape shape{1, 2, 1, 41, 41, 4, 4};
  const Problem<float> problem(shape);
  Share<float> share(problem, Layout::contiguous(41, world().ranks(), 1), world().rank());
  const auto refused = [&](const Multipliers& c) {
    return refusal([&] {
      ssmax::mpi::attention(world(), Layout::contiguous(41, world().ranks(), 1), share.forward(), c.scaling(),
                            Causal{});
    });
  };
  Shape of_share = shape;
  of_share.queries = share.shape.queries;
  const std::string too_few = refused(Multipliers(of_share));
  INFO(too_few);
  CHECK(everywhere(mentions(too_few, "c") && mentions(too_few, "41")));
  Multipliers others(shape);
  if (world().rank() == 0) others.values[0] += 1;
  CHECK(everywhere(mentions(refused(others), "scaling")));
}

}  // namespace mpi_problem::mpi_per_query_test
