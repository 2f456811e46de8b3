// Rows with a stride and rows in place have the bits of contiguous rows, except for lengths that share vectors.

#include "reference.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace row_strides_test {

using namespace ssmax;

constexpr index_t rows = 37;

template <class T>
std::vector<T> copied(const std::vector<T>& x, index_t n, index_t stride) {
  std::vector<T> result(static_cast<std::size_t>(rows * stride), T(-7));
  for (index_t i = 0; i < rows * n; ++i)
    result[static_cast<std::size_t>(i / n * stride + i % n)] = x[static_cast<std::size_t>(i)];
  return result;
}

/// Writes y = softmax(c·x) and the gradient dx of dy = x, with rows at a distance of `stride`.
template <class T>
void compute(const std::vector<T>& x, index_t n, index_t stride, std::vector<T>& y, std::vector<T>& dx) {
  const SSMax<T> scaling(T(0.43));
  const auto view = [&]<class U>(U* data) { return View<U, 2>(data, {rows, n}, {stride, 1}); };
  softmax(view(x.data()), view(y.data()), scaling);
  softmax_backward<T, 2>({.out = view(y.data()), .dout = view(x.data()), .dlogits = view(dx.data())},
                         scaling);
}

TEMPLATE_TEST_CASE("bits of rows with a stride and of rows in place", "[rows]", float, double) {
  using T = TestType;
  for_each_target([](const std::string& target) {
    for (index_t n = 1; n < 70; n += n < 20 ? 1 : 7) {
      INFO(target << ", n " << n);
      const std::vector<T> x =
          reference::normals<T>(static_cast<std::size_t>(rows * n), static_cast<unsigned>(n));
      std::vector<T> y(x.size()), dx(x.size()), in_place = x;
      compute(x, n, n, y, dx);
      compute(in_place, n, n, in_place, dx);
      CHECK(same_bits(in_place, y));
      compute(x, n, n, y, dx);
      const bool shares_vectors = n == 2 || n == 4 || (n == 8 && std::is_same_v<T, float>);
      if (shares_vectors) continue;
      const index_t stride = n + 3;
      const std::vector<T> wide_x = copied(x, n, stride);
      std::vector<T> wide_y = copied(std::vector<T>(x.size()), n, stride), wide_dx = wide_y;
      compute(wide_x, n, stride, wide_y, wide_dx);
      CHECK(same_bits(wide_y, copied(y, n, stride)));
      CHECK(same_bits(wide_dx, copied(dx, n, stride)));
    }
  });
}

}  // namespace row_strides_test
