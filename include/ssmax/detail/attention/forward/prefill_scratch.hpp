// Defines PrefillScratch, one thread's memory for prefill.
#pragma once

#include "../tile/queries.hpp"
#include "../tile/softmax.hpp"

SSMAX_BEGIN_DETAIL

/// The scratch memory of one thread. Operand is the type of the products' operands.
template <class Compute, class Operand = Compute>
struct PrefillScratch : ForwardScratch<Compute, Operand> {
  using Base = ForwardScratch<Compute, Operand>;
  using Base::channels, Base::depth, Base::products, Base::tile_lanes, Base::tiles;
  using Op = Operands<Compute, Operand>;

  PrefillScratch(Arena& arena, index_t queries, const Problem<Compute>& problem)
      : PrefillScratch(
            arena, queries, problem.width(), problem.value_width(),
            product_depth<Operand>(problem, detail::kernels<PrefillKernels<Compute, Operand>>().depth),
            detail::kernels<PrefillKernels<Compute, Operand>>()) {}

  PrefillScratch(Arena& arena, index_t queries, index_t d, index_t dv, index_t a_depth,
                 const PrefillKernels<Compute, Operand>& a_products)
      : Base(arena, queries, d, dv, a_depth, a_products),
        held_keys(Op::held_keys(depth, channels)),
        k(arena.take<Operand>(held_keys * depth)),
        panel(held_keys * products.rows + 64 / static_cast<index_t>(sizeof(Operand))),
        v(arena.take<Operand>(channels / products.rows * panel)),
        k_rows(arena.take<const std::byte*>(2 * key_block)),
        v_rows(arena.take<const std::byte*>(2 * key_block)) {
    chunk = arena.take<Compute>(states_size());
    total = arena.take<Compute>(states_size());
  }

  /// Returns the size of the states of all tiles. The states are contiguous: one query per lane, o is
  /// [channel][tile_lanes].
  index_t states_size() const { return tiles * state_size(); }
  index_t state_size() const { return tile_lanes * (channels + 2); }
  SoftmaxState<Compute> state(Compute* states, index_t tile) const {
    Compute* at = states + tile * state_size();
    return {at, at + tile_lanes, at + 2 * tile_lanes};
  }

  index_t held_keys;  // keys that are loaded at once
  Operand* k;         // [held_keys][depth]
  index_t
      panel;  // stride of panels: a panel and one cache line, so that the panels of a row use different cache sets
  Operand* v;                          // [panel][held_keys][rows of a panel]: the layout of pack_values
  const std::byte **k_rows, **v_rows;  // [2][key_block]: rows of a single tile's key blocks
  Compute *chunk, *total;              // states
};

SSMAX_END
