// Picks the path of a call. No other file decides which driver runs.
#pragma once

#include <concepts>

#include "../../dispatch/bf16.hpp"
#include "../terms/backward_problem.hpp"
#include "../terms/problem.hpp"

SSMAX_BEGIN_DETAIL

/// A path, and why no faster path takes the call ("" if no path is faster).
struct Route {
  Path path = Path::none;
  const char* reason = "";
};

/// The smallest number of rows of the short_keys path: with fewer rows, its vectors would be nearly empty.
inline constexpr index_t min_short_rows = 4;

/// The smallest number of rows of the decode_bf16 path. Exception: with batch_invariant, any number.
inline constexpr index_t min_bf16_decode_rows = 5;

/// The reason why a path does not take a call. Null if the path takes the call, "" if the path is not faster for
/// such calls.
using WhyNot = const char*;

/// Returns whether keys or values of this kind may be operands of the bf16 path.
SSMAX_INLINE constexpr bool may_be_bf16(ElementKind kind) {
  return kind == ElementKind::bfloat16 || kind == ElementKind::quantized;
}

/// Returns why the products of a call are not in bfloat16, for any number of rows.
template <class Compute>
WhyNot why_not_bf16(const Problem<Compute>& problem, const Bf16Capabilities& target) {
  const bool q_is_bf16 = problem.q.kind() == ElementKind::bfloat16,
             k_may_be_bf16 = may_be_bf16(problem.keys.k_kind());
  if (!q_is_bf16 || !k_may_be_bf16 || !may_be_bf16(problem.keys.v_kind())) {
    if (!target.has_products || std::same_as<Compute, double>) return "";
    if (!q_is_bf16) return "bfloat16: queries are stored in another type";
    return k_may_be_bf16 ? "bfloat16: values are stored in another type"
                         : "bfloat16: keys are stored in another type";
  }
  if (!target.has_products) return "bfloat16: this target has no bfloat16 products";
  if (problem.float_products) return "bfloat16: float_products is set";
  return nullptr;
}

/// Returns why the short_keys path does not take rows of a call. The path requires that the keys of every sequence of
/// the path are one block: most_keys() returns the largest number of keys.
/// Exception: the path takes no call with a state that continues.
/// Exception: the path takes a call over a cache only in place of prefill, which has the same bits. Otherwise the
/// result of a sequence would depend on the lengths of other sequences of the batch.
/// `explains` requests the texts of the exceptions.
template <class Compute, class MostKeys>
WhyNot why_not_short_keys(const Problem<Compute>& problem, const Result<Compute>& result,
                          const Bf16Capabilities& target, index_t rows, const MostKeys& most_keys,
                          bool explains) {
  if (rows < min_short_rows) return "";
  const bool differs = problem.in_cache && (rows <= decode_rows || why_not_bf16(problem, target) == nullptr);
  if ((differs || result.continues()) && !explains) return "";
  if (most_keys() > key_block) return "";
  if (differs) return "short_keys: keys are in a cache";
  if (result.continues()) return "short_keys: the state continues another one";
  if (problem.batch_invariant) return "short_keys: batch_invariant is set";
  return nullptr;
}

/// Returns why the products of few rows are not in bfloat16.
template <class Compute>
WhyNot why_not_bf16_decode(const Problem<Compute>& problem, const Bf16Capabilities& target, index_t rows) {
  if (const WhyNot why_not = why_not_bf16(problem, target)) return why_not;
  if (rows < min_bf16_decode_rows && !problem.batch_invariant)
    return "bfloat16: fewer than 5 rows per kv head";
  if (!target.has_pair_dots) return "bfloat16: this target has no pair dots";
  if (problem.rotates_keys()) return "bfloat16: keys are rotated in the call";
  return nullptr;
}

/// Returns whether the bf16 path of `rows` rows is prefill_bf16 rather than decode_bf16.
template <class Compute>
bool is_bf16_prefill(const Problem<Compute>& problem, const Bf16Capabilities& target, index_t rows) {
  if (rows > target.decode_rows_max) return true;
  return problem.batch_invariant && (!target.has_pair_dots || problem.rotates_keys());
}

/// Returns the path of rows of a call: the first path in this table without a reason against it. Rows are the queries
/// of a kv head: `rows` of a sequence, `rows_together` of the sequences that a task computes together. These take the
/// path of each sequence, or one with the same bits.
///
/// | path         | reasons against it   | condition                                                              |
/// |--------------|----------------------|------------------------------------------------------------------------|
/// | short_keys   | why_not_short_keys   | at most 128 keys, 4 rows or more, no state that continues; over a      |
/// |              |                      | cache: float products of more than 16 rows                             |
/// | prefill_bf16 | why_not_bf16         | bfloat16, the target's products; more than its decode_rows_max rows    |
/// | decode_bf16  | why_not_bf16_decode  | the same with pair dots; 5 rows or more; keys need no rotation         |
/// | decode       |                      | at most 16 rows                                                        |
/// | prefill      |                      | all other calls                                                        |
///
/// With dropout, a call takes prefill_bf16 if why_not_bf16 returns null, else prefill. With statistics, no call
/// takes short_keys, and prefill_bf16 replaces decode_bf16, which has the same bits.
///
/// With batch_invariant, a query takes the same products for any number of rows: prefill_bf16 or decode_bf16 if
/// why_not_bf16 returns null, else prefill.
///
/// The reason of the route is the reason against bfloat16. Exception: if that reason is empty, the reason of the
/// route is the one against short_keys or decode.
template <class Compute, class MostKeys>
Route route(const Problem<Compute>& problem, const Result<Compute>& result, index_t rows,
            index_t rows_together, const MostKeys& most_keys, bool explains) {
  const Bf16Capabilities target = bf16_capabilities(target_in_use());
  if (problem.dropout.p > 0) {
    const WhyNot not_bf16 = why_not_bf16(problem, target);
    return {not_bf16 == nullptr ? Path::prefill_bf16 : Path::prefill,
            not_bf16 == nullptr || *not_bf16 == '\0' ? "short_keys, decode: dropout is set" : not_bf16};
  }
  WhyNot not_short = why_not_short_keys(problem, result, target, rows, most_keys, explains);
  if (not_short == nullptr && problem.statistics != nullptr) not_short = "short_keys: statistics are given";
  if (not_short == nullptr) return {Path::short_keys, ""};
  const bool is_prefill = is_bf16_prefill(problem, target, rows);
  const WhyNot not_bf16 =
      is_prefill ? why_not_bf16(problem, target) : why_not_bf16_decode(problem, target, rows);
  if (not_bf16 == nullptr)
    return {is_bf16_prefill(problem, target, rows_together) || problem.statistics != nullptr
                ? Path::prefill_bf16
                : Path::decode_bf16,
            not_short};
  const bool are_few = rows <= decode_rows;
  const WhyNot not_decode = are_few && problem.batch_invariant ? "decode: batch_invariant is set" : "";
  const Path path = are_few && !problem.batch_invariant ? Path::decode : Path::prefill;
  if (*not_bf16 != '\0') return {path, not_bf16};
  return {path, *not_short != '\0' ? not_short : not_decode};
}

/// Returns the one path of all batch entries of a call.
template <class Compute>
Route route(const Problem<Compute>& problem, const Result<Compute>& result, bool explains) {
  const index_t rows = problem.q.extent(2) * problem.heads_per_kv_head();
  const auto most_keys = [&] {
    index_t most = 0;
    for (index_t b = 0; b < problem.sequences(); ++b) most = std::max(most, problem.keys.length(b));
    return most;
  };
  return route(problem, result, rows, rows, most_keys, explains);
}

/// Returns the path of `count` sequences like `sequence`, which a task computes together.
template <class Compute>
Route route(const Problem<Compute>& problem, const Result<Compute>& result, const Sequence& sequence,
            index_t count, bool explains) {
  const index_t rows = sequence.queries * problem.heads_per_kv_head();
  return route(
      problem, result, rows, count * rows, [&] { return sequence.shape.keys; }, explains);
}

template <class Compute>
Route route_backward(const BackwardProblem<Compute>& problem) {
  if (const WhyNot not_bf16 = why_not_bf16(problem.forward, bf16_capabilities(target_in_use())))
    return {Path::backward, not_bf16};
  if (problem.dout.kind() != ElementKind::bfloat16)
    return {Path::backward, "bfloat16: dout is stored in another type"};
  return {Path::backward_bf16, ""};
}

SSMAX_END
