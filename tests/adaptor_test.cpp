// Types that the functors accept as one row, and types with their own adaptor.

#include <concepts>

#include "test.hpp"

namespace adaptor_test {

/// A contiguous matrix. It converts to std::span, but it is not one row.
struct Grid {
  std::vector<float> cells;

  auto begin() const { return cells.begin(); }
  auto end() const { return cells.end(); }
  std::ptrdiff_t cols() const { return 2; }
};

template <class X>
concept AnyGrid = std::derived_from<X, Grid>;

}  // namespace adaptor_test

template <adaptor_test::AnyGrid X>
struct ssmax::Adaptor<X> {
  template <class S>
  static X apply(const S& scaling, const X& in, ssmax::Axis) {
    X out = in;
    const auto rows = static_cast<ssmax::index_t>(in.cells.size()) / in.cols();
    ssmax::softmax(ssmax::View<const float, 2>(in.cells.data(), {rows, in.cols()}),
                   ssmax::View<float, 2>(out.cells.data(), {rows, in.cols()}), scaling);
    return out;
  }
};

TEST_CASE("any contiguous range is one row", "[adaptor]") {
  const std::vector<float> quarters(4, 0.25F);
  const std::vector<float> vector(4, 1.0F);
  const std::array<float, 4> array{1.0F, 1.0F, 1.0F, 1.0F};
  const float plain[4] = {1.0F, 1.0F, 1.0F, 1.0F};
  CHECK(ssmax::Softmax{}(vector) == quarters);
  CHECK(ssmax::Softmax{}(array) == quarters);
  CHECK(ssmax::Softmax{}(plain) == quarters);
  CHECK(ssmax::Softmax{}(std::span(vector)) == quarters);

  std::vector<float> out(4);
  ssmax::softmax(array, std::span(out));
  CHECK(out == quarters);
  float log_out[4];
  ssmax::log_softmax(vector, log_out);
  CHECK(std::abs(log_out[3] + 1.3862944F) < 1e-6F);
}

TEST_CASE("a contiguous matrix uses its own adaptor", "[adaptor]") {
  const adaptor_test::Grid grid{std::vector<float>(4, 1.0F)};
  CHECK(ssmax::Softmax{}(grid).cells == std::vector<float>(4, 0.5F));
}
