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
        layout{.tiles = tiles, .rows = tile_lanes, .channels = channels, .in_lanes = true},
        k(arena.take<Operand>(held_keys * depth)),
        panel(held_keys * products.pass + 64 / static_cast<index_t>(sizeof(Operand))),
        v(arena.take<Operand>(channels / products.pass * panel)),
        k_rows(arena.take<const std::byte*>(2 * key_block)),
        v_rows(arena.take<const std::byte*>(2 * key_block)) {
    chunk = arena.take<Compute>(layout.size());
    total = arena.take<Compute>(layout.size());
  }

  static constexpr bool in_lanes = true;  // states: one query per lane
  void merge_outputs(Compute* o, const Compute* other, index_t, const Compute* factors,
                     const Compute* other_factors) const {
    products.merge(o, other, channels, factors, other_factors);
  }

  index_t held_keys;  // keys that are loaded at once
  StateLayout layout;
  Operand* k;  // [held_keys][depth]
  index_t
      panel;  // stride of panels: a panel and one cache line, so that the panels of a row use different cache sets
  Operand* v;                          // [panel][held_keys][rows of a panel]: the layout of pack_values
  const std::byte **k_rows, **v_rows;  // [2][key_block]: rows of a single tile's key blocks
  Compute *chunk, *total;              // states
};

SSMAX_END
