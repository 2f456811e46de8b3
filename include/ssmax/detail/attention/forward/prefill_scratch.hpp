// Defines PrefillScratch, one thread's memory for prefill.
#pragma once

#include "../tile/queries.hpp"
#include "../tile/state.hpp"

SSMAX_BEGIN_DETAIL

/// The scratch memory of one thread. E is the type of the products' operands.
template <class A, class E = A>
struct PrefillScratch : LaneScratch<A, E> {
  using LaneScratch<A, E>::tile_lanes;
  using LaneScratch<A, E>::tiles;
  using Op = Operands<A, E>;

  PrefillScratch(Arena& arena, index_t queries, const Problem<A>& problem)
      : PrefillScratch(arena, queries, problem.width(), problem.value_width(),
                       product_depth<E>(problem, detail::kernels<PrefillKernels<A, E>>().depth),
                       detail::kernels<PrefillKernels<A, E>>()) {}

  PrefillScratch(Arena& arena, index_t queries, index_t d, index_t dv, index_t a_depth,
                 const PrefillKernels<A, E>& a_products)
      : LaneScratch<A, E>(arena, queries, d, dv, a_depth),
        products(a_products),
        depth(a_depth),
        channels((dv + products.rows - 1) / products.rows * products.rows),
        k(arena.take<E>(Op::held_keys * depth)),
        panel(Op::held_keys * products.rows + 64 / static_cast<index_t>(sizeof(E))),
        v(arena.take<E>(channels / products.rows * panel)),
        block_keys(Op::block_keys(depth, channels)),
        s(arena.take<A>(key_block * tile_lanes)) {
    if constexpr (Op::is_bf16) {
      multipliers = arena.take<A>(tiles * tile_lanes);
      widened_row = arena.take<A>(2 * d);
    }
    chunk = arena.take<A>(states_size());
    total = arena.take<A>(states_size());
  }

  /// Returns the size of the states of all tiles. The states are contiguous: one query per lane, o is
  /// [channel][tile_lanes].
  index_t states_size() const { return tiles * state_size(); }
  index_t state_size() const { return tile_lanes * (channels + 2); }
  SoftmaxState<A> state(A* states, index_t tile) const {
    A* at = states + tile * state_size();
    return {at, at + tile_lanes, at + 2 * tile_lanes};
  }

  const PrefillKernels<A, E>& products;
  index_t depth;     // channels of the product of q and k
  index_t channels;  // channels of V, rounded up to whole panels
  E* k;              // [held_keys][depth]
  index_t
      panel;  // stride of panels: a panel and one cache line, so that the panels of a row use different cache sets
  E* v;       // [panel][held_keys][rows of a panel]: the layout of pack_values
  index_t block_keys;
  /// [block_keys][tile_lanes]: logits. Weights, in tuples, overwrite the logits of the same keys, so that both stay
  /// in the first-level cache.
  A* s;
  A* multipliers = nullptr;  // bf16 path: [tiles · tile_lanes], multipliers of logits
  A* widened_row = nullptr;  // [2][d]: a row to be rotated, and its rounding error
  A *chunk, *total;          // states
};

SSMAX_END
