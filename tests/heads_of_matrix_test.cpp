// Fewer matrices than heads: head h of a mask or a score reads matrix h % matrices.

#include "mask_picture.hpp"
#include "refusal.hpp"
#include "same_bits.hpp"
#include "score_formulas.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::heads_of_matrix_test {

using Extents = std::array<index_t, 4>;

/// All have four heads: a path of few queries, of short keys, of many queries, and the bf16 path.
constexpr std::array<Shape, 4> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 3, 150, 8, 5},
    {2, 4, 4, 33, 67, 9, 6},
    {1, 4, 2, 61, 300, 8, 9},
    {1, 4, 1, 1, 1, 3, 1},
}};

/// Matrices for some of the heads. `strides` are contiguous, or 0 along the keys.
template <class B>
struct Matrices {
  Extents extents, strides;
  std::vector<B> values;

  Matrices(const Shape& s, index_t matrices, bool has_keys = true)
      : extents{s.batch, matrices, s.queries, s.keys},
        strides{matrices * s.queries * s.keys, s.queries * s.keys, has_keys ? s.keys : 1, has_keys ? 1 : 0},
        values(reference::normals<B>(static_cast<std::size_t>(s.batch * strides[0]), 5)) {}
  View<const B, 4> view() const { return {values.data(), extents, strides}; }
};

/// The formula of a Bias, or of a SlopedBias with slopes.
template <class B>
struct Repeated {
  View<const B, 4> bias;
  std::vector<double> slopes{};

  template <class Z>
  Z operator()(Z z, const Query& query, index_t key) const {
    const Z slope = slopes.empty() ? Z{1} : static_cast<Z>(slopes[static_cast<std::size_t>(query.head)]);
    return z + slope * static_cast<Z>(bias(query.batch, query.head % bias.extent(1), query.index, key));
  }
  template <class Z>
  Z derivative(Z, const Query&, index_t) const {
    return 1;
  }
  template <class Z>
  void collect(Z, Z dz, Z size, const Query& query, index_t key, Gradients<Z>& into) const {
    const index_t head = query.head % bias.extent(1);
    into.dbias.add(static_cast<std::size_t>(query.batch * bias.stride(0) + head * bias.stride(1) +
                                            query.index * bias.stride(2) + key * bias.stride(3)),
                   dz, size);
  }
};

template <class T, class B>
void check_bias(const Shape& shape, index_t matrices, bool has_keys) {
  INFO(matrices << " matrices, " << (has_keys ? "with" : "without") << " keys");
  const Matrices<B> bias(shape, matrices, has_keys);
  ScoreGradients<double> learnt{{}, std::vector<double>(bias.values.size())};
  const View<double, 4> dbias(learnt.dbias.data(), bias.extents, bias.strides);
  const Bias score(bias.view(), HeadsOfMatrix::modulo);
  const Repeated<B> formula{bias.view()};
  const Problem<T> problem(shape);
  check_score(problem, Causal{}, keys_before, score, formula);
  check(problem, Causal{}, keys_before, score.gradient(dbias), formula, {}, {}, &learnt);
}

TEST_CASE("heads of a bias by modulo, and the gradient of the bias",
          "[attention][backward][bfloat16][scores]") {
  for (const Shape& shape : shapes) {
    for (const index_t matrices : {1, 2, 4}) {
      check_bias<float, float>(shape, matrices, true);
      check_bias<double, half>(shape, matrices, false);
    }
    check_bias<bfloat16, bfloat16>(shape, 2, true);
  }
}

TEST_CASE("heads of a sloped bias by modulo", "[attention][backward][scores]") {
  const std::vector<double> slopes{0.5, -2, 1, -0.75};
  for (const Shape& shape : shapes) {
    for (const index_t matrices : {1, 2}) {
      const Matrices<half> matrix(shape, matrices);
      const SlopedBias score(matrix.view(), slopes, HeadsOfMatrix::modulo);
      const Repeated<half> formula{matrix.view(), slopes};
      check_score(Problem<float>(shape), Causal{}, keys_before, score, formula);
      check(Problem<float>(shape), Full{}, all_keys, score, formula);
    }
  }
}

TEST_CASE("heads of a mask by modulo", "[attention][backward][bfloat16][mask]") {
  for (const Shape& shape : shapes) {
    for (const index_t matrices : {1, 2, 4}) {
      Matrices<float> matrix(shape, matrices);
      for (std::size_t i = 0; i < matrix.values.size(); ++i) {
        if (i * i % 13 < 6) matrix.values[i] = -infinity<float>;
      }
      const View<const float, 4> view = matrix.view();
      const Visible visible([view](const Query& query, index_t key) {
        return view(query.batch, query.head % view.extent(1), query.index, key) != -infinity<float>;
      });
      const MatrixMask mask(view, HeadsOfMatrix::modulo);
      const MatrixRuns runs(view, HeadsOfMatrix::modulo);
      check_mask<float>(shape, mask, visible);
      check_mask<bfloat16>(shape, runs, visible);
      check(Problem<float>(shape), mask, visible);
      check(Problem<float>(shape), runs, visible);
    }
  }
}

TEST_CASE("the gradient of a bias for several heads has the same bits for any number of threads",
          "[attention][backward][scores][threads]") {
  ThreadPool pool(3);
  for (const Shape& shape : shapes) {
    const Matrices<float> bias(shape, 2);
    const Problem<float> problem(shape);
    const auto by = [&](auto&& executor) {
      std::vector<float> sums(bias.values.size());
      const View<float, 4> dbias(sums.data(), bias.extents);
      run_backward(problem, SSMax<float>{}, Causal{},
                   Bias(bias.view(), HeadsOfMatrix::modulo).gradient(dbias), {}, executor);
      return sums;
    };
    CHECK(same_bits(by(pool), by(Serial{})));
  }
}

TEST_CASE("an extent that does not divide the heads is refused", "[mask][scores][errors]") {
  const std::vector<float> values(48);
  const QueryShape shape{1, 4, 3, 4}, no_heads{1, 0, 3, 4};
  const std::vector<double> slopes(4);
  const auto view = [&](index_t matrices) {
    return View<const float, 4>(values.data(), {1, matrices, 3, 4});
  };
  const std::string refused = " has extent 3 in dimension 1, must divide the heads of the attention, 4";
  const auto modulo = HeadsOfMatrix::modulo;
  CHECK(mask_picture::refusal(MatrixMask(view(3), modulo), shape) == "ssmax::MatrixMask: matrix" + refused);
  CHECK(refusal([&] { Bias(view(3), modulo).check(shape); }) == "ssmax::Bias: bias" + refused);
  CHECK(refusal([&] { SlopedBias(view(3), slopes, modulo).check(shape); }) ==
        "ssmax::SlopedBias: matrix" + refused);
  CHECK(mask_picture::refusal(MatrixRuns(view(3), modulo), shape) ==
        "ssmax::MatrixRuns: the matrix has extent 3, heads are 4 (must be a multiple)");
  for (const index_t matrices : {1, 2, 4}) {
    CHECK(mask_picture::refusal(MatrixMask(view(matrices), modulo), shape) == "");
    CHECK(mask_picture::refusal(MatrixRuns(view(matrices), modulo), shape) == "");
  }
  CHECK(mask_picture::refusal(MatrixMask(view(0), modulo), shape) ==
        "ssmax::MatrixMask: matrix has extent 0 in dimension 1, must divide the heads of the attention, 4");
  CHECK(mask_picture::refusal(MatrixMask(view(0), modulo), no_heads) == "");
  // Without modulo, each head has a matrix.
  CHECK(mask_picture::refusal(MatrixMask(view(2)), shape) ==
        "ssmax::MatrixMask: matrix has extent 2 in dimension 1, the attention has 4");
  std::vector<double> sums(48);
  CHECK(refusal([&] {
          Bias(view(2), modulo).gradient(View<double, 4>(sums.data(), {1, 4, 3, 4})).check(shape);
        }) == "ssmax::Bias: dbias has extent 4 in dimension 1, bias has 2");
}

}  // namespace attention_problem::backward_problem::heads_of_matrix_test
