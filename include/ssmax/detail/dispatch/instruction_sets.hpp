// SSMAX_HAVE_…: the instruction sets that a build holds kernels for. SSMAX_COMPILES_…: those whose
// kernels this unit compiles. Header-only that is all of them; with SSMAX_COMPILED none, but one in each of
// the library's units of kernels.
#pragma once

#include "../../config.hpp"

#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
// SSMAX_AVX512_EMULATION, in a test build, is a header whose names replace the intrinsics of AVX-512. Kernels
// for AVX2 then stay out.
#if !defined(SSMAX_AVX512_EMULATION) && !defined(SSMAX_NO_AVX2)
#define SSMAX_HAVE_AVX2 1
#endif
#if !defined(SSMAX_NO_AVX512)
#define SSMAX_HAVE_AVX512 1
#endif
#elif (defined(__GNUC__) || defined(__clang__)) && defined(__aarch64__) && !defined(SSMAX_NO_NEON)
#define SSMAX_HAVE_NEON 1
#endif

#if !defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_SCALAR)
#define SSMAX_COMPILES_SCALAR 1
#endif
#if defined(SSMAX_HAVE_NEON) && (!defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_NEON))
#define SSMAX_COMPILES_NEON 1
#endif
#if defined(SSMAX_HAVE_AVX2) && (!defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_AVX2))
#define SSMAX_COMPILES_AVX2 1
#endif
#if defined(SSMAX_HAVE_AVX512) && (!defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_AVX512))
#define SSMAX_COMPILES_AVX512 1
#endif
