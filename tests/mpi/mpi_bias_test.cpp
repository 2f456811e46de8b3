// The gradient of a Bias over ranks: every rank gets the whole gradient. A row is bit-identical to one process
// if one rank has all its queries.

#include <ssmax/mpi.hpp>

#include "../refusal.hpp"
#include "../test.hpp"
#include "mpi_problem.hpp"

namespace mpi_problem::mpi_bias_test {

using Strides = std::array<index_t, 4>;

const std::vector<float> strength{0.4f, 0.5f, 0.3f, 0.2f};

/// A bias of [batch, matrices, n, n] and its gradient, with the same strides. Heads read the matrices by modulo.
struct Matrix {
  std::array<index_t, 4> extents;
  Strides strides;
  ssmax::HeadsOfMatrix kind;
  std::vector<float> bias, gradient;

  Matrix(const Shape& s, const Strides& of_both, index_t matrices)
      : extents{s.batch, matrices, s.queries, s.keys},
        strides(of_both),
        kind(matrices == s.heads ? ssmax::HeadsOfMatrix::each : ssmax::HeadsOfMatrix::modulo) {
    index_t count = 1;
    for (std::size_t i = 0; i < 4; ++i) count += (extents[i] - 1) * strides[i];
    bias = reference::normals<float>(static_cast<std::size_t>(count), 41);
    gradient.assign(bias.size(), 0.25f);
  }
  auto score() {
    return Bias(View<const float, 4>(bias.data(), extents, strides), kind)
        .gradient(View<float, 4>(gradient.data(), extents, strides));
  }
};

/// Returns the gradient of one process and the gradient over ranks. then(score) returns the score.
template <class Then>
std::array<std::vector<float>, 2> gradients(const Shape& shape, const Layout& layout, const Strides& strides,
                                            index_t matrices, const Then& then) {
  const Problem<float> problem(shape);
  Matrix whole(shape, strides, matrices), here = whole;
  const SSMax<float> scaling{std::span(strength).first(static_cast<std::size_t>(shape.heads))};
  const auto output = run<float>(problem, scaling, Causal{}, then(whole.score()));
  backward<float>(problem, output, scaling, Causal{}, then(whole.score()));
  Share<float> share(problem, layout, world().rank());
  ssmax::mpi::attention(world(), layout, share.forward(), scaling, Causal{}, then(here.score()));
  ssmax::mpi::attention_backward(world(), layout, share.backward(), share.gradients(), scaling, Causal{},
                                 then(here.score()));
  return {whole.gradient, here.gradient};
}

const auto alone = [](const auto& bias) { return bias; };
const auto capped = [](const auto& bias) { return bias | Softcap{5}; };

void check_same(const Shape& shape, const Layout& layout, const Strides& strides) {
  const auto check = [](const std::array<std::vector<float>, 2>& both) {
    CHECK(everywhere(same_bits(both[1], both[0])));
  };
  check(gradients(shape, layout, strides, shape.heads, alone));
  check(gradients(shape, layout, strides, shape.heads, capped));
}

/// Checks that the gradient is within rounding of one process and equal on all ranks.
void check_close(const Shape& shape, const Layout& layout, const Strides& strides, index_t matrices) {
  const auto both = gradients(shape, layout, strides, matrices, alone);
  float worst = 0;
  for (std::size_t i = 0; i < both[0].size(); ++i) worst = std::max(worst, std::abs(both[1][i] - both[0][i]));
  CHECK(everywhere(worst < 2e-5f));
  std::vector<float> first = both[1];
  MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  CHECK(everywhere(same_bits(first, both[1])));
}

TEST_CASE("every rank gets the gradient of a Bias by keys, bit-identical to one process", "[mpi][backward]") {
  const index_t n = 1024 + 200;
  const Layout layout = Layout::contiguous(n, world().ranks(), 1024);
  check_same({1, 2, 1, n, n, 8, 8}, layout, {2 * n * n, n * n, n, 1});
  check_same({2, 2, 1, n, n, 8, 8}, layout, {0, n * n, n, 1});
  check_same({1, 4, 2, n, n, 8, 8}, layout, {0, 0, n, 1});
}

TEST_CASE("every rank gets the gradient of a Bias by heads, bit-identical to one process",
          "[mpi][backward][heads]") {
  const index_t n = 130;
  const Layout layout = Layout::zigzag(n, world().ranks(), 1).by_heads();
  check_same({2, 4, 4, n, n, 8, 8}, layout, {4 * n * n, n * n, n, 1});
  check_same({2, 4, 2, n, n, 8, 8}, layout, {0, n, 0, 1});
}

TEST_CASE("a row of the gradient of a Bias is the sum of the contributions of all ranks",
          "[mpi][backward][heads]") {
  const index_t n = 130;
  const Layout layout = Layout::zigzag(n, world().ranks(), 1);
  check_close({2, 4, 2, n, n, 8, 8}, layout, {0, n, 0, 1}, 4);
  check_close({2, 4, 2, n, n, 8, 8}, layout, {0, 0, 0, 1}, 4);
  check_close({2, 4, 2, n, n, 8, 8}, layout.by_heads(), {n * n, 0, n, 1}, 4);
  for (const Layout& any : {layout, layout.by_heads()})
    check_close({2, 4, 4, n, n, 8, 8}, any, {2 * n * n, n * n, n, 1}, 2);
}

TEST_CASE("throws if ranks sum the gradient of a Bias over different dimensions", "[mpi][backward][errors]") {
  if (world().ranks() == 1) return;
  const index_t n = 40;
  const Shape shape{1, 2, 1, n, n, 4, 4};
  const Layout layout = Layout::zigzag(n, world().ranks(), 1);
  Share<float> share(Problem<float>(shape), layout, world().rank());
  Matrix matrix(shape, {0, n, 0, 1}, 2);
  const View<float, 4> dbias(matrix.gradient.data(), matrix.extents, {0, world().rank() == 0 ? n : 0, 0, 1});
  const auto score =
      Bias(View<const float, 4>(matrix.bias.data(), matrix.extents, matrix.strides)).gradient(dbias);
  const std::string message = refusal([&] {
    ssmax::mpi::attention_backward(world(), layout, share.backward(), share.gradients(), ssmax::Softmax{},
                                   Causal{}, score);
  });
  INFO(message);
  CHECK(everywhere(mentions(message, "gradient row of the score")));
}

}  // namespace mpi_problem::mpi_bias_test
