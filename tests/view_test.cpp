#include <numeric>

#include "test.hpp"

using ssmax::View;

TEST_CASE("a contiguous view is row-major", "[view]") {
  std::vector<int> data(24);
  std::iota(data.begin(), data.end(), 0);
  const View<int, 3> view(data.data(), {2, 3, 4});
  CHECK(view.stride(0) == 12);
  CHECK(view.stride(1) == 4);
  CHECK(view.stride(2) == 1);
  CHECK(view.size() == 24);
  CHECK(view(1, 2, 3) == 23);
  CHECK(view(0, 1, 2) == 6);
  CHECK(view.rank() == 3);
}

TEST_CASE("strides are free, zero and negative ones included", "[view]") {
  std::vector<int> data{0, 1, 2, 3, 4, 5};
  const View<int, 2> transposed(data.data(), {3, 2}, {1, 3});
  CHECK(transposed(2, 1) == 5);
  const View<int, 2> broadcast(data.data(), {4, 6}, {0, 1});
  CHECK(broadcast(3, 5) == 5);
  const View<int, 1> reversed(data.data() + 5, {6}, {-1});
  CHECK(reversed(5) == 0);
}

TEST_CASE("anything contiguous is a row", "[view]") {
  std::vector<float> vector{1, 2, 3};
  std::array<float, 2> array{4, 5};
  const View<float, 1> from_vector = vector, from_array = array;
  const View<const float, 1> constant = vector;
  CHECK(from_vector.extent(0) == 3);
  CHECK(from_array(1) == 5);
  CHECK(constant.data_handle() == vector.data());
}

TEST_CASE("a view converts to one of const elements, not back", "[view]") {
  static_assert(std::is_convertible_v<View<float, 2>, View<const float, 2>>);
  static_assert(!std::is_convertible_v<View<const float, 2>, View<float, 2>>);
  static_assert(!std::is_constructible_v<View<float, 1>, const std::vector<float>&>);
  static_assert(std::is_trivially_copyable_v<View<double, 4>>);
  CHECK(View<float, 2>{}.empty());
  CHECK(View<float, 2>(nullptr, {0, 5}).empty());
}

TEST_CASE("integers are of at most 64 bits", "[view]") {
  static_assert(std::is_constructible_v<ssmax::Integers, const std::vector<std::int16_t>&>);
#if defined(__SIZEOF_INT128__)
  __extension__ using Wide = __int128;
  static_assert(!std::is_constructible_v<ssmax::Integers, const std::vector<Wide>&>);
#endif
  SUCCEED();
}
