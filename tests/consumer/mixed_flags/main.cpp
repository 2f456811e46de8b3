// Units with other flags in one binary: each keeps its own copy of the library's code (the linker must not
// give AVX-512 code to the plain unit), and all compute the same.

#include <cmath>
#include <cstdio>
#include <vector>

#include "unit.hpp"

namespace {

using Normalize = void (*)(ssmax::View<const float, 2>, ssmax::View<float, 2>, const ssmax::SSMax<float>&);

constexpr ssmax::index_t rows = 7;
constexpr ssmax::index_t keys = 61;

bool all_good = true;
std::vector<UnitInterface> seen;
std::vector<float> expected;

void check(UnitInterface unit, Normalize normalize) {
  for (const UnitInterface& other : seen) {
    if (unit.library_code == other.library_code) {
      std::printf("%s and %s share one copy of the library\n", unit.name, other.name);
      all_good = false;
    }
  }
  seen.push_back(unit);

  std::vector<float> logits(static_cast<std::size_t>(rows * keys));
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = 5.0F * std::sin(static_cast<float>(i));
  std::vector<float> out(logits.size());
  normalize(ssmax::View<const float, 2>(logits.data(), {rows, keys}),
            ssmax::View<float, 2>(out.data(), {rows, keys}), ssmax::SSMax<float>{0.43F, 0.1F});

  if (expected.empty()) expected = out;
  float worst = 0.0F;
  for (std::size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::abs(out[i] - expected[i]));
  std::printf("%s: differs by at most %g\n", unit.name, static_cast<double>(worst));
  all_good = all_good && worst <= 1e-6F;
}

}  // namespace

int main() {
  check(describe_plain(), normalize_plain);
  check(describe_no_exceptions(), normalize_no_exceptions);
#ifdef MIXED_FLAGS_HAS_avx2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) check(describe_avx2(), normalize_avx2);
#endif
#ifdef MIXED_FLAGS_HAS_avx512
  if (__builtin_cpu_supports("avx512f")) check(describe_avx512(), normalize_avx512);
#endif
  return all_good ? 0 : 1;
}
