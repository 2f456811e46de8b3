// Parts of vectors, and reductions: what the texts of all kernels build on.
#pragma once

#include "../dispatch/kernels.hpp"

SSMAX_BEGIN
inline namespace SSMAX_DATA_NAMESPACE {
namespace SSMAX_VISIBLE shared {

/// Vectors of queries in a group (prefill.inl).
inline constexpr int tile_vectors = 3;

}  // namespace shared
}  // namespace SSMAX_DATA_NAMESPACE
SSMAX_END

#define SSMAX_KERNELS "../kernels/lanes.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
