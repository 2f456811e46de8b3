// NaN and infinity in keys, values and queries affect only the rows that see them.

#include <cstring>

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_nan_test {

TEMPLATE_TEST_CASE("NaN affects the result in visible keys and values only", "[attention]", float, double) {
  using T = TestType;
  const Shape s{1, 2, 1, 40, 300, 8, 5};
  const Problem<T> clean(s);
  for_each_target([&](const std::string&) {
    for (const double multiplier : {1.5, -1.5, 0.0}) {
      const Constant scaling{multiplier};
      const Output<T> expected = run(clean, scaling, Causal{});
      int leaked = 0, lost = 0;
      // Key 260 + i is the last key visible to query i. The keys below lie in the last visible block and after it.
      for (const index_t key : {5, 255, 256, 261, 270, 291, 292, 298, 299}) {
        for (const T poison : {nan<T>, std::numeric_limits<T>::infinity()}) {
          Problem<T> in_k = clean, in_v = clean;
          for (index_t i = 0; i < s.d; ++i) in_k.k[static_cast<std::size_t>(key * s.d + i)] = poison;
          for (index_t i = 0; i < s.dv; i += 2) in_v.v[static_cast<std::size_t>(key * s.dv + i)] = poison;
          const Output<T> of_k = run(in_k, scaling, Causal{}), of_v = run(in_v, scaling, Causal{});
          for (std::size_t row = 0; row < expected.lse.size(); ++row) {
            const bool sees = static_cast<index_t>(row) % s.queries + 260 >= key;
            const auto same = [](T a, T b) { return std::memcmp(&a, &b, sizeof(T)) == 0; };
            if (!same(of_v.lse[row], expected.lse[row])) ++leaked;
            if (!sees && !same(of_k.lse[row], expected.lse[row])) ++leaked;
            if (sees && std::isnan(poison) && !std::isnan(of_k.lse[row])) ++lost;
            for (std::size_t i = 0; i < 5; ++i) {
              const std::size_t at = row * 5 + i;
              if (!sees && !same(of_k.out[at], expected.out[at])) ++leaked;
              if (!(sees && i % 2 == 0) && !same(of_v.out[at], expected.out[at])) ++leaked;
              if (sees && std::isnan(poison) && !std::isnan(of_k.out[at])) ++lost;
              if (sees && i % 2 == 0 && std::isfinite(of_v.out[at])) ++lost;
            }
          }
        }
      }
      CHECK(leaked == 0);
      CHECK(lost == 0);
    }
  });
}

TEST_CASE("NaN in a query affects only its row, and only if a key is visible", "[attention]") {
  for_each_target([](const std::string&) {
    const Problem<float> clean({1, 1, 1, 40, 30, 8, 5});
    Problem<float> poisoned = clean;
    poisoned.q[3 * 8] = poisoned.q[25 * 8 + 7] = nan<float>;  // query 3 sees no key, query 25 sees keys
    const Output<float> expected = run(clean, Softmax{}, Causal{}),
                        output = run(poisoned, Softmax{}, Causal{});
    int wrong = 0;
    for (std::size_t i = 0; i < output.out.size(); ++i) {
      if (i / 5 == 25 ? !std::isnan(output.out[i]) : output.out[i] != expected.out[i]) ++wrong;
    }
    CHECK(wrong == 0);
    CHECK(std::isnan(output.lse[25]));
    CHECK(output.lse[3] == -std::numeric_limits<float>::infinity());
  });
}

TEST_CASE("padding that is masked for all queries does not affect the result", "[attention]") {
  for_each_target([](const std::string&) {
    const Problem<float> clean({1, 2, 2, 33, 600, 8, 5});
    Problem<float> padded = clean;
    for (index_t head = 0; head < 2; ++head) {
      std::fill_n(padded.k.begin() + (head * 600 + 250) * 8, 350 * 8, nan<float>);
      std::fill_n(padded.v.begin() + (head * 600 + 250) * 5, 350 * 5, nan<float>);
    }
    const std::vector<index_t> lengths(2 * 33, 250);
    const Output<float> expected = run(clean, SSMax<float>{}, Lengths{lengths});
    const Output<float> output = run(padded, SSMax<float>{}, Lengths{lengths});
    CHECK(same_bits(output.out, expected.out));
    CHECK(same_bits(output.lse, expected.lse));
    CHECK(std::ranges::all_of(output.out, [](float value) { return std::isfinite(value); }));
  });
}

}  // namespace attention_problem::attention_nan_test
