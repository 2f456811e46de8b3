// Defines HeadSums, the memory in which the backward pass sums the gradients of a kv head.
#pragma once

#include <cstdint>

#include "../../kernels/prefill.hpp"
#include "../terms/backward_problem.hpp"
#include "scratch.hpp"

SSMAX_BEGIN_DETAIL

inline index_t query_blocks(const BackwardSequence& sequence) { return ceil_div(sequence.rows, query_block); }
inline index_t key_blocks(const BackwardSequence& sequence) {
  return ceil_div(sequence.keys, backward_key_block);
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

/// The sums of dk, or of dv, of one kv head.
template <class Compute>
struct KeySums {
  index_t width = 0, pitch = 0;  // channels; row length of partial sums
  Compute* partials = nullptr;   // [keys][pitch]; null: the whole sums are the partial sums
  Compute* wholes = nullptr;     // [keys][width]; null: `rows` hold the whole sums
  const OutputRows<Compute>* rows = nullptr;
  index_t entry = 0, kv_head = 0, first_row = 0;  // of the first key in `rows`

  Compute* partial(index_t key) const { return partials == nullptr ? whole(key) : partials + key * pitch; }
  Compute* whole(index_t key) const {
    return wholes == nullptr ? rows->in_place(entry, kv_head, first_row + key) : wholes + key * width;
  }
  /// Returns the stride of the whole sums.
  index_t stride() const { return wholes == nullptr ? rows->stride(2) : width; }
};

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
           index_t kv_head, const BackwardScratch<Compute, Operand>& memory)
      : has_arrays(!problem.stores_sums()),
        facts(arena.take<QueryFacts<Compute>>(sequence.rows)),
        seen(arena.take<KeyRange>(query_blocks(sequence))),
        visible_words(ceil_div(key_blocks(sequence), 32)),
        visible_blocks(arena.take<std::uint32_t>(query_blocks(sequence) * visible_words)),
        blocks_are_finite(arena.take<bool>(key_blocks(sequence))),
        keys_are_finite(arena.take<bool>(key_rows(sequence))),
        dq(arena.take<Compute>(query_blocks(sequence) * memory.tiles * memory.tile_lanes * memory.d_pitch)),
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
        all_dq(arena.take<Compute>(takes_all(problem) ? sequence.rows * problem.forward.width() : 0)) {
    const auto sums_of_keys = [&](const OutputRows<Compute>& gradient, const OutputRows<Compute>& of_stages,
                                  index_t pitch) {
      const index_t width = gradient.extent(3);
      return KeySums<Compute>{
          .width = width,
          .pitch = pitch,
          .partials = arena.take<Compute>(key_rows(sequence) * pitch),
          .wholes = takes_all(problem) ? arena.take<Compute>(sequence.keys * width) : nullptr,
          .rows = has_arrays ? &of_stages : &gradient,
          .entry = sequence.key_entry,
          .kv_head = kv_head,
          .first_row = sequence.first_key_row};
    };
    dk = sums_of_keys(problem.dk, problem.sums.dk, memory.d_pitch);
    dv = sums_of_keys(problem.dv, problem.sums.dv, memory.dv_pitch);
  }

  /// Returns the whole sum of the query at the cursor, which is row `row` of the kv head.
  Compute* query_sums(const BackwardProblem<Compute>& problem, const QueryCursor& at, index_t row) const {
    if (has_arrays && !problem.sums) return all_dq + row * problem.dq.extent(3);
    return (has_arrays ? problem.sums.dq : problem.dq).in_place(at.entry(), at.head(), at.row());
  }

  bool has_arrays = false;               // whether the results cannot hold sums
  QueryFacts<Compute>* facts = nullptr;  // [rows]
  KeyRange* seen = nullptr;              // [query blocks]: hull of the visible keys of the block
  index_t visible_words = 0;
  std::uint32_t* visible_blocks =
      nullptr;  // [query blocks][visible_words]: under a mask with runs, one bit per key block
  bool* blocks_are_finite = nullptr;  // [key blocks]: whether K is free of NaN and infinities
  bool* keys_are_finite = nullptr;    // [keys]: set for blocks that are not finite
  Compute* dq = nullptr;              // [query blocks][tiles][d_pitch][tile_lanes]: partial sums
  KeySums<Compute> dk{}, dv{};
  index_t k_stride = 0, v_stride = 0;  // row lengths of packed keys and values
  Operand *k = nullptr, *v = nullptr;  // [keys][k_stride], [keys][v_stride]: packed keys and values
  index_t panel = 0;                   // distance between two panels
  Operand* panels = nullptr;  // [key blocks][panels]: bf16 path: K packed for products that sum over keys

 private:
  static bool takes_all(const BackwardProblem<Compute>& problem) {
    return !problem.stores_sums() && !problem.sums;
  }

  Compute* all_dq = nullptr;  // [rows][width]: whole sums
};

SSMAX_END
