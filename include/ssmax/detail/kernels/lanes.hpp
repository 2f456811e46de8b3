// Declares what the texts of all kernels use: partial vectors, reductions and transposition.
#pragma once

#include "../dispatch/kernels.hpp"

SSMAX_BEGIN_SHARED

/// Number of vectors of queries in a group (prefill.inl).
inline constexpr int tile_vectors = 3;

SSMAX_END

#define SSMAX_KERNELS "../kernels/lanes.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
