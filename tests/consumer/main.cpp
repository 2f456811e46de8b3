// The smallest user: one call on a vector, one functor, no flag. Says which target ran.

#include <cmath>
#include <cstdio>
#include <exception>
#include <ssmax/ssmax.hpp>
#include <vector>

int main() try {
  const std::vector<float> logits{1.0F, 2.0F, 3.0F, -1.0F};
  std::vector<float> probabilities(logits.size());
  ssmax::SSMax<float>{0.5F}(logits, probabilities);

  float sum = 0.0F;
  for (const float p : probabilities) sum += p;
  std::printf("%s: sum %g\n", ssmax::target_name(ssmax::active_target()), static_cast<double>(sum));
  return std::abs(sum - 1.0F) < 1e-6F ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
