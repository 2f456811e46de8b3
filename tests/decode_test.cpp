// decode against the long double reference and the naive loop in the same precision, on every target: one and
// a few new queries, sequences of their own lengths, 16-bit caches, layouts.

#include "decode_problem.hpp"
#include "test.hpp"

namespace decode_problem::decode_test {

// ---- Shapes -----------------------------------------------------------------------------------------------

/// The same with every key and value rounded to X.
template <class X, class T>
Data<T> rounded(Data<T> data) {
  for (T& x : data.k) x = static_cast<T>(X(x));
  for (T& x : data.v) x = static_cast<T>(X(x));
  return data;
}

const std::vector<Shape> shapes{
    // heads, kv_heads, queries, d, dv, lengths
    {1, 1, 1, 1, 1, {1}},
    {2, 1, 1, 3, 5, {2, 17}},
    {3, 1, 2, 16, 16, {129, 2, 40}},
    {4, 1, 1, 59, 64, {257}},
    {7, 1, 1, 64, 59, {300, 1}},
    {8, 1, 2, 64, 64, {255, 256}},
    {16, 1, 1, 128, 128, {258, 131}},
    {8, 2, 3, 111, 3, {140, 3}},
    {16, 1, 1, 576, 512, {135}},
    {6, 3, 1, 576, 64, {97, 130}},
    {1, 1, 16, 8, 111, {16, 1030}},
    {6, 2, 5, 64, 1, {260, 5}},
    {1, 1, 1, 16, 128, {2500}},
    {2, 2, 4, 111, 111, {1024, 1025, 4}},
    // From here on more than 16 queries of a kv head: the other kernels.
    {1, 1, 17, 3, 16, {17, 1030}},
    {7, 1, 3, 64, 59, {129, 3, 300}},
    {8, 2, 5, 59, 64, {5, 257}},
    {16, 1, 2, 128, 576, {131}},
    {4, 4, 70, 16, 3, {70, 300}},
};

/// Queries and result in T, cache in X. The reference knows only what the cache holds.
template <class T, class X>
void check_shapes() {
  std::vector<Data<T>> all;
  std::vector<Expected<T>> expected;
  for (const Shape& shape : shapes) {
    all.emplace_back(shape);
    expected.emplace_back(rounded<X>(all.back()), Plan{});
  }
  for_each_target_of<X>([&](const std::string& target) {
    Rule rule;
    for (std::size_t i = 0; i < all.size(); ++i) {
      rule.take(run(all[i], filled<X>(all[i])), expected[i], name_of(all[i].shape));
    }
    rule.check(target);
  });
}

TEST_CASE("decode is as good as a naive loop: float", "[decode][slow]") { check_shapes<float, float>(); }
TEST_CASE("decode is as good as a naive loop: double", "[decode][slow]") { check_shapes<double, double>(); }
TEST_CASE("decode from a 16-bit cache is as good as a naive loop in float on what it holds",
          "[decode][slow]") {
  SECTION("half") { check_shapes<float, half>(); }
  SECTION("bfloat16") { check_shapes<float, bfloat16>(); }
}
TEST_CASE("decode of 16-bit queries computes in float and rounds once", "[decode][bfloat16][slow]") {
  SECTION("half") { check_shapes<half, half>(); }
  SECTION("bfloat16") { check_shapes<bfloat16, bfloat16>(); }
}

/// The largest error of a row, in units of the row's largest value.
template <class T>
Real relative_error(const Output<T>& output, const Loops<Real>& exact, index_t dv) {
  const auto width = static_cast<std::size_t>(dv);
  Real worst = 0;
  for (std::size_t row = 0; row * width < exact.out.size(); ++row) {
    Real error = 0, size = 0;
    for (std::size_t i = row * width; i < (row + 1) * width; ++i) {
      error = worse(error, std::abs(reference::widen(output.out[i]) - exact.out[i]));
      size = std::max(size, std::abs(exact.out[i]));
    }
    worst = worse(worst, error / size);
  }
  return worst;
}

/// What storing K and V in 16 bits costs.
template <class X>
void check_cost_of_storage(Real bound) {
  std::vector<Data<float>> all;
  std::vector<Loops<Real>> expected;
  const ssmax::RopeOptions turn{.width = 64};
  const Rope<float> rope(turn, 600);
  for (const Shape& shape :
       {Shape{8, 1, 1, 64, 64, {1, 2, 3, 17, 129, 300}}, Shape{4, 2, 2, 128, 59, {2, 600}},
        Shape{16, 1, 1, 576, 512, {40}}, Shape{7, 1, 3, 64, 128, {3, 140}}}) {
    all.emplace_back(shape);
    expected.push_back(loops<Real>(all.back(), {.rope = &turn}));
  }
  for_each_target_of<X>([&](const std::string&) {
    Real worst = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Output<float> output = run(all[i], filled<X>(all[i], &rope), Softmax{}, Causal{}, Identity{},
                                       AttentionOptions<float>{.rope = &rope});
      worst = worse(worst, relative_error(output, expected[i], all[i].shape.dv));
    }
    CHECK(static_cast<double>(worst) <= static_cast<double>(bound));
  });
}

// bfloat16 has three bits less than half: what it stores alone may err by 2^-8 of its size.
TEST_CASE("a half cache costs a thousandth of a row's largest value, bfloat16 eight times that", "[decode]") {
  SECTION("half") { check_cost_of_storage<half>(1e-3L); }
  SECTION("bfloat16") { check_cost_of_storage<bfloat16>(8e-3L); }
}

TEST_CASE("decode is by default causal softmax", "[decode]") {
  const Data<float> data({4, 2, 3, 16, 8, {40, 300}});
  const KvCache<float> cache = filled<float>(data);
  Output<float> result(data.shape);
  attention({.q = data.q_view(), .keys = cache, .out = {result.out.data(), {2, 4, 3, 8}}}, Causal{});
  CHECK(same_bits(result.out, run(data, cache, Softmax{}, Causal{}).out));
  CHECK(std::ranges::all_of(result.lse, [](float x) { return x == -77; }));
}

TEST_CASE("decode accepts 0 queries, sequences and heads", "[decode]") {
  const Data<float> no_sequences({2, 1, 3, 8, 4, {}}), no_queries({2, 1, 0, 8, 4, {5, 0}}),
      no_heads({0, 1, 1, 8, 4, {3}});
  CHECK(run(no_sequences, filled<float>(no_sequences)).out.empty());
  CHECK(run(no_queries, filled<float>(no_queries)).out.empty());
  CHECK(run(no_heads, filled<float>(no_heads)).out.empty());
}

// ---- Layouts ----------------------------------------------------------------------------------------------

TEST_CASE("[batch, position, head, channel] is bit-identical and writes only the rows of out", "[decode]") {
  for_each_target([](const std::string&) {
    for (const Shape& shape : few_and_many) {
      const Data<float> data(shape);
      const KvCache<float> cache = filled<float>(data);
      const Output<float> expected = run(data, cache, LogN{});
      const index_t batch = shape.batch(), heads = shape.heads, queries = shape.queries, d = shape.d,
                    dv = shape.dv;
      const index_t q_pitch = heads * d + 5, out_pitch = heads * dv + 3;
      std::vector<float> q(static_cast<std::size_t>(batch * queries * q_pitch),
                           std::numeric_limits<float>::quiet_NaN());
      const float sentinel = -1234;
      std::vector<float> out(static_cast<std::size_t>(batch * queries * out_pitch), sentinel);
      const View<float, 4> q_view(q.data(), {batch, heads, queries, d}, {queries * q_pitch, d, q_pitch, 1});
      const View<float, 4> out_view(out.data(), {batch, heads, queries, dv},
                                    {queries * out_pitch, dv, out_pitch, 1});
      for (index_t row = 0; row < shape.rows(); ++row) {
        const index_t b = row / (heads * queries), h = row / queries % heads, i = row % queries;
        std::copy_n(data.q.data() + row * d, d, &q_view(b, h, i, 0));
      }
      attention({.q = q_view, .keys = cache, .out = out_view}, LogN{}, Causal{});
      std::vector<float> values;
      for (index_t row = 0; row < shape.rows(); ++row) {
        const index_t b = row / (heads * queries), h = row / queries % heads, i = row % queries;
        float* const at = &out_view(b, h, i, 0);
        values.insert(values.end(), at, at + dv);
        std::fill_n(at, dv, sentinel);
      }
      CHECK(same_bits(values, expected.out));
      CHECK(std::ranges::all_of(out, [&](float x) { return x == sentinel; }));
    }
  });
}

}  // namespace decode_problem::decode_test
