// Masks that show any set of keys: matrices, additive masks, functions.

#include <memory>
#include <random>

#include "mask_picture.hpp"
#include "test.hpp"

namespace mask_picture::mask_matrix_test {

/// Bits in an order that no mask has.
std::vector<unsigned char> some_bits(std::size_t count) {
  std::mt19937 random(7);
  std::vector<unsigned char> result(count);
  for (unsigned char& bit : result) bit = static_cast<unsigned char>((random() >> 7) & 1u);
  return result;
}

/// The strides of [batch, heads, queries, keys] with those left out that `kept` marks 0.
std::array<index_t, 4> strides_of(const QueryShape& shape, const std::array<int, 4>& kept) {
  const std::array<index_t, 4> extents{shape.batch, shape.heads, shape.queries, shape.keys};
  std::array<index_t, 4> result{};
  index_t stride = 1;
  for (std::size_t i = 4; i-- > 0;) {
    result[i] = kept[i] == 0 ? 0 : stride;
    if (kept[i] != 0) stride *= extents[i];
  }
  return result;
}

TEST_CASE("a matrix, an additive mask and a function show what they say, broadcast or not", "[mask]") {
  const std::vector<std::array<int, 4>> broadcasts{{1, 1, 1, 1}, {0, 0, 1, 1}, {1, 0, 0, 1},
                                                   {0, 1, 1, 1}, {1, 1, 1, 0}, {0, 0, 0, 0}};
  for_each_shape([&](const QueryShape& shape) {
    const std::vector<unsigned char> bits =
        some_bits(static_cast<std::size_t>(shape.rows() * shape.keys) + 1);
    const std::array<index_t, 4> extents{shape.batch, shape.heads, shape.queries, shape.keys};
    const auto storage = std::make_unique<bool[]>(bits.size());
    std::vector<float> floats(bits.size());
    std::vector<double> doubles(bits.size());
    std::vector<ssmax::half> halves(bits.size());
    std::vector<ssmax::bfloat16> bfloats(bits.size());
    for (std::size_t i = 0; i < bits.size(); ++i) {
      storage[i] = bits[i] != 0;
      floats[i] = bits[i] != 0 ? static_cast<float>(i) - 3.0f : -std::numeric_limits<float>::infinity();
      doubles[i] = static_cast<double>(floats[i]);
      halves[i] = ssmax::half(floats[i]);
      bfloats[i] = ssmax::bfloat16(floats[i]);
    }
    for (const auto& kept : broadcasts) {
      const auto strides = strides_of(shape, kept);
      const auto sees = [&](const Query& query, index_t key) {
        const index_t at =
            query.batch * strides[0] + query.head * strides[1] + query.index * strides[2] + key * strides[3];
        return bits[static_cast<std::size_t>(at)] != 0;
      };
      const std::string expected = expected_picture(shape, sees);
      const MatrixMask matrix(View<const bool, 4>(storage.get(), extents, strides));
      CHECK(refusal(matrix, shape) == "");
      CHECK(picture(matrix, shape) == expected);
      CHECK(picture(Where(sees), shape) == expected);
      CHECK(picture(MatrixMask(View<float, 4>(floats.data(), extents, strides)), shape) == expected);
      CHECK(picture(MatrixMask(View<const double, 4>(doubles.data(), extents, strides)), shape) == expected);
      CHECK(picture(MatrixMask(View<ssmax::half, 4>(halves.data(), extents, strides)), shape) == expected);
      CHECK(picture(MatrixMask(View<ssmax::bfloat16, 4>(bfloats.data(), extents, strides)), shape) ==
            expected);
    }
  });
}

bool is_even(const Query&, index_t key) { return key % 2 == 0; }

TEST_CASE("a plain function is a mask", "[mask]") {
  CHECK(picture(Where(is_even), {1, 1, 1, 5}) == "x.x.x\n");
}

TEST_CASE("an additive mask hides by -inf alone", "[mask]") {
  using Limits = std::numeric_limits<double>;
  const std::array<double, 6> values{-Limits::infinity(), Limits::lowest(),    Limits::quiet_NaN(),
                                     Limits::infinity(),  -Limits::infinity(), 0};
  CHECK(picture(MatrixMask(View<const double, 4>(values.data(), {1, 1, 1, 6})), {1, 1, 1, 6}) == ".xxx.x\n");
}

TEST_CASE("matrices of another shape are refused", "[mask]") {
  const std::array<bool, 24> bits{};
  const std::array<float, 24> values{};
  const QueryShape shape{1, 2, 3, 4};
  const auto matrix = [&](const std::array<index_t, 4>& extents) {
    return refusal(MatrixMask(View<const bool, 4>(bits.data(), extents)), shape);
  };
  CHECK(matrix({1, 2, 3, 4}) == "");
  CHECK(matrix({2, 2, 3, 4}) == "ssmax::MatrixMask: matrix has extent 2 in dimension 0, the attention has 1");
  CHECK(matrix({1, 1, 3, 4}) ==
        "ssmax::MatrixMask: matrix has extent 1 in dimension 1, the attention has 2 (stride 0 broadcasts)");
  CHECK(matrix({1, 2, 4, 3}) == "ssmax::MatrixMask: matrix has extent 4 in dimension 2, the attention has 3");
  CHECK(matrix({1, 2, 3, 0}) == "ssmax::MatrixMask: matrix has extent 0 in dimension 3, the attention has 4");
  CHECK(refusal(MatrixMask(View<const float, 4>(values.data(), {1, 2, 3, 5})), shape) ==
        "ssmax::MatrixMask: matrix has extent 5 in dimension 3, the attention has 4");
  CHECK(refusal(MatrixMask(View<const float, 4>(values.data(), {1, 2, 3, 4}, {0, 0, 1, 3})), shape) ==
        "ssmax::MatrixMask: matrix has last stride 3, must be 0 or 1");
  CHECK(refusal(MatrixMask(View<const bool, 4>(nullptr, {1, 2, 3, 4})), shape) ==
        "ssmax::MatrixMask: matrix is null but has size 24, must be 0");
  CHECK(refusal(MatrixMask(View<const bool, 4>(nullptr, {1, 2, 0, 4})), {1, 2, 0, 4}) == "");
}

}  // namespace mask_picture::mask_matrix_test
