// Detects the features that a processor and its operating system offer to kernels: by CPUID on x86-64, by
// Linux's getauxval on AArch64. The compiler's __builtin_cpu_supports is not used, because some builds of the
// compiler's run-time library leave its table empty.
#pragma once

#include "instruction_sets.hpp"

#if SSMAX_IS_X86_64
#include <cpuid.h>

#include <cstdint>
#endif
#if SSMAX_HAVE_AMX && !defined(SSMAX_AVX512_EMULATION)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if SSMAX_HAVE_NEON_BF16
#include <sys/auxv.h>
#endif

SSMAX_BEGIN_DETAIL

#if SSMAX_IS_X86_64

/// The detected features of an x86-64. A feature is true if the processor has the instructions and the
/// operating system saves their registers.
struct Processor {
  bool avx2_fma_f16c = false;
  bool avx512f = false;
  bool avx512_bf16 = false;
  bool amx_bf16 = false;
  bool is_intel = false;
};

/// Returns XCR0, one bit for each kind of register that the operating system saves when it switches threads.
/// Requires that CPUID reports OSXSAVE.
inline std::uint64_t kept_registers() {
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

inline Processor ask_processor() {
  // CPUID leaf 1.
  constexpr unsigned ecx_fma = 1u << 12, ecx_osxsave = 1u << 27, ecx_avx = 1u << 28, ecx_f16c = 1u << 29;
  // CPUID leaf 7, subleaf 0.
  constexpr unsigned ebx_avx2 = 1u << 5, ebx_avx512f = 1u << 16, ebx_avx512dq_bw = 1u << 17 | 1u << 30;
  constexpr std::uint64_t ymm = 1u << 1 | 1u << 2;  // XMM and the upper halves of YMM
#if defined(__APPLE__)
  constexpr std::uint64_t zmm = ymm;  // macOS sets the other bits at a thread's first use
#else
  constexpr std::uint64_t zmm = ymm | 1u << 5 | 1u << 6 | 1u << 7;  // masks, upper halves of ZMM, ZMM16 to 31
#endif

  // CPUID leaf 7, subleaf 1.
  constexpr unsigned eax_avx512_bf16 = 1u << 5;
  constexpr unsigned edx_amx = 1u << 22 | 1u << 24;     // AMX-BF16, AMX-TILE
  constexpr std::uint64_t tiles = 1u << 17 | 1u << 18;  // tile configuration, tile data
  constexpr unsigned genu = 0x756E6547;                 // "Genu", the first letters of "GenuineIntel"

  Processor found;
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0) found.is_intel = ebx == genu;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & ecx_osxsave) == 0) return found;
  const std::uint64_t kept = kept_registers();
  if ((kept & ymm) != ymm || (ecx & ecx_avx) == 0) return found;
  const bool fma_f16c = (ecx & ecx_fma) != 0 && (ecx & ecx_f16c) != 0;

  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return found;
  found.avx2_fma_f16c = fma_f16c && (ebx & ebx_avx2) != 0;
  found.avx512f = (kept & zmm) == zmm && (ebx & ebx_avx512f) != 0;
  const bool has_dq_bw = found.avx512f && (ebx & ebx_avx512dq_bw) == ebx_avx512dq_bw;
  const bool has_tiles = (kept & tiles) == tiles && (edx & edx_amx) == edx_amx;
  if (eax < 1 || __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0) return found;
  found.avx512_bf16 = has_dq_bw && (eax & eax_avx512_bf16) != 0;
  found.amx_bf16 = found.avx512_bf16 && has_tiles;
  return found;
}

#if SSMAX_HAVE_AMX && !defined(SSMAX_AVX512_EMULATION)
/// Returns true if Linux allows this process to use tiles. One request covers all threads of the process.
/// Linux refuses if a thread has an alternate signal stack that is too small for the tiles.
inline bool may_use_tiles() {
  constexpr long request_permission = 0x1023, tile_data = 18;
  static const bool granted = ::syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return granted;
}
#endif

#endif

/// Returns true if this processor can run a target of the build.
inline bool processor_runs([[maybe_unused]] Target target) {
#if SSMAX_IS_X86_64
  if (target == Target::avx2) return ask_processor().avx2_fma_f16c;
#if !defined(SSMAX_AVX512_EMULATION)
  if (target == Target::avx512) return ask_processor().avx512f;
  if (target == Target::avx512_bf16) return ask_processor().avx512_bf16;
#if SSMAX_HAVE_AMX
  if (target == Target::amx) return ask_processor().amx_bf16 && may_use_tiles();
#endif
#endif
#endif
#if SSMAX_HAVE_NEON_BF16
  constexpr unsigned long hwcap2_bf16 = 1ul << 14;
  if (target == Target::neon_bf16) return (::getauxval(AT_HWCAP2) & hwcap2_bf16) != 0;
#endif
  return true;
}

/// Returns true if the library should choose a supported target by default. A pair dot does twice the work of
/// a multiply-add. AMD's processors start both at the same rate. Intel's start pair dots at half that rate,
/// and avx512_bf16 was slower than avx512 on Sapphire Rapids.
inline bool is_worth_it([[maybe_unused]] Target target) {
#if SSMAX_IS_X86_64 && !defined(SSMAX_AVX512_EMULATION)
  if (target == Target::avx512_bf16) return !ask_processor().is_intel;
#endif
  return true;
}

SSMAX_END
