// One thread's memory for work on tiles.
#pragma once

#include <algorithm>
#include <limits>

#include "../../memory/arena.hpp"
#include "../call/variant.hpp"
#include "../tile/operands.hpp"
#include "../tile/scratch.hpp"
#include "../tile/state.hpp"

SSMAX_BEGIN_DETAIL

/// One thread's memory. E: see PrefillKernels.
template <class A, class E = A>
struct PrefillScratch : LaneScratch<A, E> {
  using LaneScratch<A, E>::group;
  using LaneScratch<A, E>::groups;

  template <class T, class X>
  PrefillScratch(Arena& arena, index_t queries, const Problem<T, X>& problem)
      : PrefillScratch(arena, queries, problem.width(), problem.value_width(),
                       product_depth<E>(problem, detail::kernels<PrefillKernels<A, E>>().depth),
                       detail::kernels<PrefillKernels<A, E>>()) {}

  PrefillScratch(Arena& arena, index_t queries, index_t d, index_t dv, index_t a_depth,
                 const PrefillKernels<A, E>& a_products)
      : LaneScratch<A, E>(arena, queries, d, dv, a_depth),
        products(a_products),
        depth(a_depth),
        channels((dv + products.rows - 1) / products.rows * products.rows),
        k(arena.take<E>(held_keys * depth)),
        panel(held_keys * products.rows + 64 / static_cast<index_t>(sizeof(E))),
        v(arena.take<E>(channels / products.rows * panel)),
        block_keys(std::same_as<A, E> || a_depth + channels > 128 ? key_block : key_block / 2),
        s(arena.take<A>(key_block * group)) {
    if constexpr (!std::same_as<A, E>) {
      multipliers = arena.take<A>(groups * group);
      wide = arena.take<A>(2 * d);
    }
    chunk = arena.take<A>(states_size());
    total = arena.take<A>(states_size());
  }

  /// The groups' states lie one behind the other: one query a lane, o is [channel][group].
  index_t states_size() const { return groups * state_size(); }
  index_t state_size() const { return group * (channels + 2); }
  SoftmaxState<A> state(A* states, index_t g) const {
    A* at = states + g * state_size();
    return {at, at + group, at + 2 * group};
  }

  /// Keys that are held ready at once, for all groups. Products in 16 bits wait for memory sooner, so a group takes
  /// several blocks before the next group does: its queries and its state stay in the first-level cache.
  static constexpr index_t held_keys = std::same_as<A, E> ? key_block : 512;
  static_assert(key_chunk % held_keys == 0 && held_keys % key_block == 0);

  const PrefillKernels<A, E>& products;
  index_t depth;     // of the product of queries and keys
  index_t channels;  // of V, filled up to whole panels
  E* k;              // [held_keys][depth]
  index_t
      panel;  // from one panel to the next: a cache line more than it holds, or a row's panels share a set
  E* v;       // [panel][held_keys][rows of a panel], as pack_values has it
  /// Of a block. Products in 16 bits of width 64 and 64 keys find all that they take in a first-level cache of 48 KiB;
  /// where they do not, 128 keys share a rescaling.
  index_t block_keys;
  A* s;                      // [key_block][group], block_keys of them used; then the weights, in tuples
  A* multipliers = nullptr;  // [groups · group]: of logits, where the queries do not have them
  A* wide = nullptr;         // [2][d]: a row that is rotated, and what rounding it loses
  A *chunk, *total;          // states
};

SSMAX_END
