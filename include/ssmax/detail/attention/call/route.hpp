// Picks the path of a call. No other file decides which driver runs.
#pragma once

#include <concepts>

#include "../../dispatch/bf16.hpp"
#include "problem.hpp"

SSMAX_BEGIN_DETAIL

/// The drivers of the forward, with the operands of their products.
enum class Path { short_keys, prefill, prefill_bf16, decode, decode_bf16 };

/// Most rows (queries of a kv head) of the decode path. From 17 rows on a vector of queries is full, and the products'
/// FMAs cost more than copying K and V into tiles.
inline constexpr index_t decode_rows = 16;

/// Fewest rows of the short_keys path: with fewer, its vectors would be nearly empty.
inline constexpr index_t least_short_rows = 4;

/// Fewest rows of the decode_bf16 path. Float is faster for fewer: four heads on one kv head take 95 ms in float and
/// 110 ms by pair dots (Zen 5, 32 heads, 4096 keys).
inline constexpr index_t least_bf16_decode_rows = 5;

/// Returns whether a call may take the bf16 path. The backward takes that path for any number of rows.
template <class A>
bool allows_bf16(const Problem<A>& problem, const Bf16Capabilities& target) {
  const bool are_stored =
      problem.q.kind() == ElementKind::bfloat16 && problem.keys.kind() == ElementKind::bfloat16;
  return are_stored && target.has_products && !problem.float_products;
}

/// Returns whether the short_keys path takes a call: every batch entry's keys are one block. Exception: a cache, so
/// that the bits of a sequence do not depend on the lengths of the others in the batch. Exception: a state that
/// continues.
template <class A>
bool has_short_keys(const Problem<A>& problem, const Result<A>& result) {
  if (problem.rows() < least_short_rows || !problem.rotate_keys || result.continues) return false;
  for (index_t batch = 0; batch < problem.q.extent(0); ++batch) {
    if (problem.keys.length(batch) > key_block) return false;
  }
  return true;
}

/// Returns the path of a call: the first in this table whose condition holds. Rows are the queries of a kv head.
///
/// | path         | condition                                                                              |
/// |--------------|----------------------------------------------------------------------------------------|
/// | short_keys   | has_short_keys: at most 128 keys, 4 rows or more, no cache, no state that continues    |
/// | prefill_bf16 | allows_bf16; more than the target's decode_rows_max rows                               |
/// | decode_bf16  | allows_bf16; the target has pair dots; 5 rows or more; keys need no rotation           |
/// | decode       | at most 16 rows                                                                        |
/// | prefill      | all other calls                                                                        |
template <class A>
Path route(const Problem<A>& problem, const Result<A>& result) {
  const index_t rows = problem.rows();
  if (has_short_keys(problem, result)) return Path::short_keys;
  const Bf16Capabilities target = bf16_capabilities(active_target());
  if (allows_bf16(problem, target)) {
    if (rows > target.decode_rows_max) return Path::prefill_bf16;
    const bool rotates_keys = problem.has_rope() && problem.rotate_keys;
    if (target.has_pair_dots && rows >= least_bf16_decode_rows && !rotates_keys) return Path::decode_bf16;
  }
  return rows <= decode_rows ? Path::decode : Path::prefill;
}

/// Returns whether the backward multiplies in bfloat16.
template <class A>
bool routes_backward_to_bf16(const Problem<A>& forward) {
  return allows_bf16(forward, bf16_capabilities(active_target()));
}

SSMAX_END
