// The error bounds of the tests themselves: a wrong row fails, however small it is beside the other rows.

#include "attention_problem.hpp"

namespace attention_problem::error_bounds_test {

TEST_CASE("a small row that is wrong by a percent exceeds the bound of its row", "[error_bounds]") {
  const std::vector<Real> exact{30000, -20000, 0.02L, 0.01L}, terms{50000, 50000, 0.03L, 0.03L};
  const std::vector<float> naive{30000.01F, -20000, 0.02F, 0.01F};
  const auto excess = [&](const std::vector<float>& computed, index_t width, const std::vector<Real>& sizes) {
    Rule<float> rule;
    rule.take(computed, naive, exact, width, "rows", {}, sizes);
    return rule.excess;
  };
  const std::vector<float> right{30000, -20000, 0.02F, 0.01F}, wrong{30000, -20000, 0.0202F, 0.01F};
  CHECK(excess(right, 2, {}) <= 0);
  CHECK(excess(right, 2, terms) <= 0);
  CHECK(excess(wrong, 2, {}) > 0);
  CHECK(excess(wrong, 2, terms) > 0);
  CHECK(excess(wrong, 4, {}) <= 0);  // one row: what the bound of a whole tensor misses
}

}  // namespace attention_problem::error_bounds_test
