// The instruction sets that a build holds kernels for: SSMAX_HAVE_NEON, SSMAX_HAVE_AVX2, SSMAX_HAVE_AVX512.
#pragma once

#include "../../config.hpp"

#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
// SSMAX_AVX512_EMULATION, in a test build, is a header whose names replace the intrinsics of AVX-512: those of AVX2 stay
// out.
#if !defined(SSMAX_AVX512_EMULATION)
#define SSMAX_HAVE_AVX2 1
#endif
#define SSMAX_HAVE_AVX512 1
#elif (defined(__GNUC__) || defined(__clang__)) && defined(__aarch64__)
#define SSMAX_HAVE_NEON 1
#endif
