// Results do not depend on the floating-point flags of the unit that holds the kernels.
#include "fast_math.hpp"

#include <cstdio>
#include <ssmax/target.hpp>

int main() {
  bool all_good = true;
  for (const ssmax::Target target : ssmax::available_targets()) {
    const char* name = ssmax::target_name(target);
    const auto expected = results_compiled(name), actual = results_fast_math(name);
    std::size_t differing = expected.size() != actual.size();
    for (std::size_t i = 0; i < expected.size() && i < actual.size(); ++i)
      differing += expected[i] != actual[i];
    std::printf("%s: %zu of %zu numbers differ\n", name, differing, expected.size());
    all_good = all_good && differing == 0;
  }
  return all_good ? 0 : 1;
}
