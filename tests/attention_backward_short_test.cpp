// Gradients of short sequences, many of them: dk and dv are summed up in the results themselves where these
// have the kernels' layout and one sum takes all queries, and by parts elsewhere.

#include <array>
#include <ssmax/ssmax.hpp>

#include "attention_backward_problem.hpp"
#include "catch.hpp"

namespace attention_problem::backward_problem::attention_backward_short_test {

constexpr std::array<Shape, 9> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {40, 2, 2, 4, 24, 16, 16},
    {9, 4, 4, 16, 16, 16, 32},
    {3, 4, 2, 24, 24, 32, 16},
    {2, 2, 2, 7, 18, 16, 16},    // keys that fill no pass
    {2, 2, 1, 9, 24, 16, 20},    // channels that fill no vector
    {1, 2, 2, 500, 32, 16, 16},  // three pieces, one sum
    {1, 1, 1, 2100, 8, 16, 16},  // nine pieces, two sums
    {2, 1, 1, 5, 0, 16, 16},
    {2, 1, 1, 0, 8, 16, 16},
}};

TEST_CASE("gradients of short sequences", "[attention][backward][short]") {
  for (const Shape& shape : shapes) {
    check(Problem<float>(shape), Full{}, all_keys);
    check(Problem<float>(shape), Causal{}, before);
  }
  check(Problem<double>(shapes[0]), Full{}, all_keys);
  check(Problem<ssmax::bfloat16>(shapes[1]), Full{}, all_keys);
}

}  // namespace attention_problem::backward_problem::attention_backward_short_test
