// Defines HeadSums, the memory in which the backward pass sums the gradients of a kv head.
#pragma once

#include <cstdint>

#include "../../kernels/prefill.hpp"
#include "../terms/backward_problem.hpp"
#include "scratch.hpp"

SSMAX_BEGIN_DETAIL

inline index_t query_blocks(const BackwardSequence& sequence) {
  return (sequence.rows + query_block - 1) / query_block;
}
inline index_t key_blocks(const BackwardSequence& sequence) {
  return (sequence.keys + backward_key_block - 1) / backward_key_block;
}

inline index_t key_rows(const BackwardSequence& sequence) {
  return key_blocks(sequence) * backward_key_block;
}

/// Returns whether K and V must be copied into rows of HeadSums. The kernels read K and V in place if neither is
/// converted or rotated and all passes are full: keys and channels of K are multiples of kernels.pass.
template <class Compute>
bool packs_keys(const BackwardProblem<Compute>& problem, const BackwardSequence& sequence,
                const PrefillKernels<Compute>& kernels) {
  if (!problem.forward.keys.are_both(ElementKind::compute)) return true;
  if (problem.forward.rotates_keys()) return true;
  return sequence.keys % kernels.pass != 0 || problem.forward.width() % kernels.pass != 0;
}

/// The sums of one kv head's gradients. A partial sum adds blocks_per_sum blocks in the layout of the kernels. The
/// whole sum adds all partial sums. Operand is the type of the products' operands.
///
/// | call | memory of the whole sums |
/// |---|---|
/// | results can hold sums | the results |
/// | results cannot hold sums | arrays of Compute in HeadSums |
/// | results cannot hold sums, backward in stages | the caller's arrays (StageSums) |
template <class Compute, class Operand = Compute>
struct HeadSums {
  HeadSums() = default;
  HeadSums(Arena& arena, const BackwardProblem<Compute>& problem, const BackwardSequence& sequence,
           const BackwardScratch<Compute, Operand>& memory)
      : has_arrays(!problem.stores_sums()),
        facts(arena.take<QueryFacts<Compute>>(sequence.rows)),
        seen(arena.take<KeyRange>(query_blocks(sequence))),
        visible_words((key_blocks(sequence) + 31) / 32),
        visible_blocks(arena.take<std::uint32_t>(query_blocks(sequence) * visible_words)),
        blocks_are_finite(arena.take<bool>(key_blocks(sequence))),
        keys_are_finite(arena.take<bool>(key_rows(sequence))),
        dq(arena.take<Compute>(query_blocks(sequence) * memory.tiles * memory.tile_lanes * memory.d_pitch)),
        dk(arena.take<Compute>(key_rows(sequence) * memory.d_pitch)),
        dvalues(arena.take<Compute>(key_rows(sequence) * memory.dv_pitch)),
        k_stride(Operands<Compute, Operand>::is_bf16 ? memory.depth : memory.d_pitch),
        v_stride(Operands<Compute, Operand>::is_bf16 ? memory.value_depth : memory.dv_pitch),
        k(arena.take<Operand>(packs_keys(problem, sequence, memory.kernels) ? key_rows(sequence) * k_stride
                                                                            : 0)),
        v(arena.take<Operand>(packs_keys(problem, sequence, memory.kernels) ? key_rows(sequence) * v_stride
                                                                            : 0)),
        panel(backward_key_block * memory.products.pass + 64 / static_cast<index_t>(sizeof(Operand))),
        panels(
            arena.take<Operand>(Operands<Compute, Operand>::is_bf16
                                    ? key_blocks(sequence) * (memory.d_pitch / memory.products.pass) * panel
                                    : 0)),
        all_dq(arena.take<Compute>(takes_all(problem) ? sequence.rows * problem.forward.width() : 0)),
        all_dk(arena.take<Compute>(takes_all(problem) ? sequence.keys * problem.forward.width() : 0)),
        all_dvalues(
            arena.take<Compute>(takes_all(problem) ? sequence.keys * problem.forward.value_width() : 0)) {}

  /// Returns the whole sum of the query at the cursor, which is row `row` of the kv head. key_sums and value_sums
  /// return the sums of a key.
  Compute* query_sums(const BackwardProblem<Compute>& problem, const QueryCursor& at, index_t row) const {
    if (has_arrays && !problem.sums) return all_dq + row * problem.dq.extent(3);
    return (has_arrays ? problem.sums.dq : problem.dq).in_place(at.entry(), at.head(), at.row());
  }
  Compute* key_sums(const BackwardProblem<Compute>& problem, const BackwardSequence& sequence,
                    index_t kv_head, index_t key) const {
    if (has_arrays && !problem.sums) return all_dk + key * problem.dk.extent(3);
    const OutputRows<Compute>& sums = has_arrays ? problem.sums.dk : problem.dk;
    return sums.in_place(sequence.key_entry, kv_head, sequence.first_key_row + key);
  }
  Compute* value_sums(const BackwardProblem<Compute>& problem, const BackwardSequence& sequence,
                      index_t kv_head, index_t key) const {
    if (has_arrays && !problem.sums) return all_dvalues + key * problem.dv.extent(3);
    const OutputRows<Compute>& sums = has_arrays ? problem.sums.dv : problem.dv;
    return sums.in_place(sequence.key_entry, kv_head, sequence.first_key_row + key);
  }
  /// Returns the stride of the whole sums of keys.
  index_t key_stride(const OutputRows<Compute>& gradient) const {
    return has_arrays ? gradient.extent(3) : gradient.stride(2);
  }

  bool has_arrays = false;               // whether the results cannot hold sums
  QueryFacts<Compute>* facts = nullptr;  // [rows]
  KeyRange* seen = nullptr;              // [query blocks]: hull of the visible keys of the block
  index_t visible_words = 0;
  std::uint32_t* visible_blocks =
      nullptr;  // [query blocks][visible_words]: under a mask with runs, one bit per key block
  bool* blocks_are_finite = nullptr;          // [key blocks]: whether K is free of NaN and infinities
  bool* keys_are_finite = nullptr;            // [keys]: set for blocks that are not finite
  Compute* dq = nullptr;                      // [query blocks][tiles][d_pitch][tile_lanes]: partial sums
  Compute *dk = nullptr, *dvalues = nullptr;  // [keys][d_pitch], [keys][dv_pitch]: partial sums
  index_t k_stride = 0, v_stride = 0;         // row lengths of packed keys and values
  Operand *k = nullptr, *v = nullptr;         // [keys][k_stride], [keys][v_stride]: packed keys and values
  index_t panel = 0;                          // distance between two panels
  Operand* panels = nullptr;  // [key blocks][panels]: bf16 path: K packed for products that sum over keys

 private:
  static bool takes_all(const BackwardProblem<Compute>& problem) {
    return !problem.stores_sums() && !problem.sums;
  }

  Compute *all_dq = nullptr, *all_dk = nullptr, *all_dvalues = nullptr;
};

SSMAX_END
