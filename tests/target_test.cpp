// Which targets there are, and how one is chosen. SSMAX_TARGET itself is read once a process: the consumer
// tests run programs with it set.

#include <ssmax/detail/dispatch/bf16.hpp>
#include <ssmax/detail/dispatch/processor.hpp>
#include <ssmax/detail/kernels/decode.hpp>
#include <ssmax/detail/kernels/prefill.hpp>

#include "target_scope.hpp"
#include "test.hpp"

using ssmax::Target;

TEST_CASE("the scalar target is always there, and no target twice", "[target]") {
  const auto targets = ssmax::available_targets();
  REQUIRE_FALSE(targets.empty());
  CHECK(targets.front() == Target::scalar);
  CHECK(std::is_sorted(targets.begin(), targets.end()));
  CHECK(std::adjacent_find(targets.begin(), targets.end()) == targets.end());
}

#if SSMAX_IS_X86_64
TEST_CASE("the processor's own answers are those of the compiler's run-time library", "[target]") {
  __builtin_cpu_init();
  const auto processor = ssmax::detail::ask_processor();
  // (Not every compiler knows the name f16c; every processor with AVX2 and FMA has it.)
  CHECK(processor.avx2_fma_f16c ==
        (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0));
  CHECK(processor.avx512f == (__builtin_cpu_supports("avx512f") != 0));
  CHECK(processor.avx512_bf16 == (__builtin_cpu_supports("avx512bf16") != 0));
  CHECK(processor.is_intel == (__builtin_cpu_is("intel") != 0));
}
#endif

TEST_CASE("the active target is the one that was set", "[target]") {
  const TargetScope scope;
  for (const Target target : ssmax::available_targets()) {
    ssmax::set_active_target(target);
    CHECK(ssmax::active_target() == target);
  }
}

TEST_CASE("each target brings its own kernels", "[target]") {
  for_each_target_of<ssmax::bfloat16>([](const std::string& name) {
    const int width = ssmax::detail::kernels<ssmax::detail::RowKernels<float>>().width;
    CAPTURE(name);
    CHECK(width == (name == "scalar"                              ? 1
                    : name == "avx2"                              ? 8
                    : name.starts_with("avx512") || name == "amx" ? 16
                                                                  : 4));
    CHECK(ssmax::detail::kernels<ssmax::detail::RowKernels<double>>().width == std::max(1, width / 2));
  });
}

TEST_CASE("a target's tables have the products of bfloat16 that its capabilities name", "[target]") {
  using namespace ssmax::shared;
  using ssmax::bfloat16;
  const TargetScope scope;
  for (const Target target : ssmax::available_targets()) {
    ssmax::set_active_target(target);
    INFO(ssmax::target_name(target));
    const auto offers = ssmax::detail::bf16_capabilities(target);
    const auto& products = ssmax::detail::kernels<PrefillKernels<float, bfloat16>>();
    CHECK((products.pass > 0 && products.logits[0] != nullptr) == offers.has_products);
    const auto& pair_dots = ssmax::detail::kernels<PairDecodeKernels<float, bfloat16>>();
    CHECK((pair_dots.logits != nullptr) == offers.has_pair_dots);
  }
}

TEST_CASE("a target that is not there is refused by name", "[target]") {
  const auto targets = ssmax::available_targets();
  const Target before = ssmax::active_target();
  for (const Target target : {Target::neon, Target::neon_bf16, Target::simd128, Target::avx2, Target::avx512,
                              Target::avx512_bf16, Target::amx}) {
    if (std::find(targets.begin(), targets.end(), target) != targets.end()) continue;
    try {
      ssmax::set_active_target(target);
      FAIL("accepted " << ssmax::target_name(target));
    } catch (const std::invalid_argument& error) {
      CHECK(std::string(error.what()).find(ssmax::target_name(target)) != std::string::npos);
      CHECK(std::string(error.what()).find("scalar") != std::string::npos);
    }
  }
  CHECK(ssmax::active_target() == before);
}
