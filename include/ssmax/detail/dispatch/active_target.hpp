// Which targets there are, and which of them is in use: defined once, in every unit or in the library.
#pragma once

#include <cstdlib>
#include <cstring>

#include "../../target.hpp"
#include "instruction_sets.hpp"
#include "processor.hpp"

namespace ssmax {
inline namespace SSMAX_COMPILED_NAMESPACE {
namespace SSMAX_VISIBLE compiled {

SSMAX_ONCE bool is_available(Target target) {
  switch (target) {
    case Target::scalar:
      return true;
    case Target::neon:
#if defined(SSMAX_HAVE_NEON)
      return true;
#else
      return false;
#endif
    case Target::avx2:
#if defined(SSMAX_HAVE_AVX2)
      return detail::ask_processor().avx2_fma_f16c;
#else
      return false;
#endif
    case Target::avx512:
#if defined(SSMAX_AVX512_EMULATION)
      return true;
#elif defined(SSMAX_HAVE_AVX512)
      return detail::ask_processor().avx512f;
#else
      return false;
#endif
  }
  return false;
}

SSMAX_COLD SSMAX_ONCE Target initial_target() {
  const char* wanted = std::getenv("SSMAX_TARGET");
  const bool any = wanted == nullptr || *wanted == '\0';
  for (Target target : {Target::avx512, Target::avx2, Target::neon, Target::scalar}) {
    if (is_available(target) && (any || std::strcmp(wanted, target_name(target)) == 0)) return target;
  }
  detail::fail_target("SSMAX_TARGET", wanted);
}

SSMAX_ONCE std::atomic<Target>& active_target_cell() {
  static std::atomic<Target> cell{initial_target()};
  return cell;
}

}  // namespace compiled
}  // namespace SSMAX_COMPILED_NAMESPACE
}  // namespace ssmax
