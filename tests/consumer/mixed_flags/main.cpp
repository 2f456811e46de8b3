// Units with other flags in one binary: each keeps its own copy of the library's code (the linker must not
// give AVX-512 code to the plain unit), and all compute the same, whether they hold the kernels or link them.

#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

#include "unit.hpp"

namespace {

using Normalize = void (*)(ssmax::View<const float, 2>, ssmax::View<float, 2>, const ssmax::SSMax<float>&);
using Attend = void (*)(ssmax::View<const float, 4>, ssmax::View<const float, 4>, ssmax::View<float, 4>,
                        ssmax::ThreadPool&, ssmax::Workspace&);
using AttendCache = void (*)(ssmax::View<const float, 4>, ssmax::View<const float, 4>, ssmax::View<float, 4>);

constexpr ssmax::index_t rows = 7;
constexpr ssmax::index_t keys = 61;

bool all_good = true;
std::vector<UnitInterface> seen;
std::vector<float> expected;

// One pool and one workspace, made here, used by all units.
ssmax::ThreadPool pool(2);
ssmax::Workspace workspace;

void check(UnitInterface unit, Normalize normalize, Attend attend, AttendCache attend_cache) {
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

  std::vector<float> attended(logits.size());
  constexpr std::array<ssmax::index_t, 4> shape{1, 1, keys, rows};
  const ssmax::View<const float, 4> tensor(logits.data(), shape);
  const ssmax::View<float, 4> result(attended.data(), shape);
  attend(tensor, tensor, result, pool, workspace);
  out.insert(out.end(), attended.begin(), attended.end());
  attend_cache(tensor, tensor, result);
  out.insert(out.end(), attended.begin(), attended.end());

  if (expected.empty()) expected = out;
  float worst = 0.0F;
  for (std::size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::abs(out[i] - expected[i]));
  std::printf("%s: differs by at most %g\n", unit.name, static_cast<double>(worst));
  all_good = all_good && worst <= 1e-6F;
}

}  // namespace

#define check_unit(name) check(describe_##name(), normalize_##name, attend_##name, attend_cache_##name)

int main() {
#ifdef MIXED_FLAGS_HAS_avx2
  const ssmax::detail::Processor processor = ssmax::detail::ask_processor();
#endif
  check_unit(plain);
  check_unit(no_exceptions);
  check_unit(compiled);
  check_unit(compiled_no_exceptions);
#ifdef MIXED_FLAGS_HAS_avx2
  if (processor.avx2_fma_f16c) check_unit(avx2);
#endif
#ifdef MIXED_FLAGS_HAS_avx512
  if (processor.avx512f) {
    check_unit(avx512);
    check_unit(compiled_avx512);
  }
#endif
  return all_good ? 0 : 1;
}
