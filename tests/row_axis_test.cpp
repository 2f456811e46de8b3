// Rows along any dimension: a last stride other than 1. Bit-identical to the call over the transposed copy, for every
// function, mask, scaling and executor, in place, and with a stride in some of the arguments only.

#include "refusal.hpp"
#include "row_calls.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace row_axis_test {

using namespace ssmax;
using row_calls::Layout;

TEMPLATE_TEST_CASE(
    "rows along any dimension are bit-identical to the transposed copy: ROCm/rocm-libraries#11387",
    "[softmax][rows][reports]", float, double, bfloat16) {
  using T = TestType;
  for_each_target([](const std::string& target) {
    for (const std::array<index_t, 4>& extents : std::vector<std::array<index_t, 4>>{{1, 1, 1, 1},
                                                                                     {1, 1, 2, 2},
                                                                                     {2, 2, 67, 3},
                                                                                     {1, 1, 500, 8},
                                                                                     {2, 1, 5, 64},
                                                                                     {1, 2, 331, 47},
                                                                                     {1, 1, 16, 4096},
                                                                                     {1, 1, 70, 1500},
                                                                                     {1, 1, 3, 5003},
                                                                                     {2, 3, 0, 5},
                                                                                     {1, 1, 4, 0},
                                                                                     {0, 1, 4, 3},
                                                                                     {1, 1, 1000, 100}}) {
      const auto [batch, heads, queries, keys] = extents;
      CAPTURE(target, batch, heads, queries, keys);
      row_calls::Problem<T, 4, 3> problem(Layout<4>(extents), Layout<3>({batch, heads, queries}));
      for (std::size_t i = 40; i < problem.z.size(); i += 4099)
        problem.z[i] = T(i % 2 == 0 ? 3e4f : std::numeric_limits<float>::quiet_NaN());
      // [batch, head, key, query] in memory, with a gap after each key.
      const index_t gap = queries + 3;
      const Layout<4> strided(extents, {heads * gap * keys, gap * keys, 1, gap});
      check_layout(problem, strided, Full{});
      if (keys > 2000) continue;
      if constexpr (std::is_same_v<T, float>) {  // a mask meets strides where types do not matter
        check_layout(problem, strided, Causal{});
        const std::array<index_t, 5> query_ends{0, queries / 7, queries / 7, queries / 2, queries};
        const std::array<index_t, 5> key_ends{0, keys / 3, keys / 2, keys / 2, keys};
        check_layout(problem, strided, Documents{query_ends, key_ends, false});
      }
    }
  });
}

TEST_CASE("a matrix over its first dimension", "[softmax][rows]") {
  // [edges, heads] over the edges.
  const std::vector<float> z{0, 1, 2, 3, 4, 5};
  std::vector<float> y(6);
  softmax(View<const float, 2>(z.data(), {2, 3}, {1, 2}), View<float, 2>(y.data(), {2, 3}, {1, 2}));
  for (std::size_t i = 0; i < 6; ++i)
    CHECK(std::abs(y[i] - std::array{0.0158762f, 0.1173104f, 0.8668134f}[i / 2]) < 1e-6f);
  // A stride of 0 repeats a logit, a negative stride runs backward.
  softmax(View<const float, 2>(z.data() + 5, {2, 3}, {-1, 0}),
          View<float, 2>(y.data() + 5, {2, 3}, {-1, -2}));
  for (const float weight : y) CHECK(std::abs(weight - 1.0f / 3) < 1e-6f);
  check_refused({"ssmax::softmax: out is an output with stride 0"}, [&] {
    softmax(View<const float, 2>(z.data(), {2, 3}, {1, 2}), View<float, 2>(y.data(), {2, 3}, {1, 0}));
  });
}

}  // namespace row_axis_test
