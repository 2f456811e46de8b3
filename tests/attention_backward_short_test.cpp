// Gradients of many short sequences. dk and dv are summed directly in the outputs if the outputs have the kernels'
// layout and one sum covers all queries, and in partial sums otherwise.

#include "attention_backward_problem.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::attention_backward_short_test {

constexpr std::array<Shape, 9> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {40, 2, 2, 4, 24, 16, 16},
    {9, 4, 4, 16, 16, 16, 32},
    {3, 4, 2, 24, 24, 32, 16},
    {2, 2, 2, 7, 18, 16, 16},    // keys that do not fill a pass
    {2, 2, 1, 9, 24, 16, 20},    // channels that do not fill a vector
    {1, 2, 2, 500, 32, 16, 16},  // three query blocks, one sum
    {1, 1, 1, 2100, 8, 16, 16},  // nine query blocks, two sums
    {2, 1, 1, 5, 0, 16, 16},
    {2, 1, 1, 0, 8, 16, 16},
}};

TEST_CASE("gradients of short sequences", "[attention][backward][short][bfloat16]") {
  for (const Shape& shape : shapes) {
    check(Problem<float>(shape), Full{}, all_keys);
    check(Problem<float>(shape), Causal{}, before);
  }
  check(Problem<double>(shapes[0]), Full{}, all_keys);
  check(Problem<ssmax::bfloat16>(shapes[1]), Full{}, all_keys);
}

}  // namespace attention_problem::backward_problem::attention_backward_short_test
