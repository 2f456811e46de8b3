// One thread's memory for the tiles of the backward.
#pragma once

#include "../forward/prefill_scratch.hpp"

SSMAX_BEGIN_DETAIL

/// A piece of the backward: 240 queries of a kv head × 256 keys. 240 is a multiple of every target's group.
/// Twice as many queries or keys are no faster on one thread (Zen 4, 1 MB of second-level cache), and slower
/// on two: for one head of 2048 queries and keys, a second thread then gains a factor of 1.4 instead of 1.55.
inline constexpr index_t piece_queries = 240, piece_keys = 256;

/// A sum over this many pieces is formed by itself and then added to the whole sum: longer ones
/// would lose digits.
inline constexpr index_t pieces_of_sum = 8;

/// Keys of a tile. Its weights and their gradients, 64 · 48 floats each, lie in a first-level cache of
/// 32 KiB. (32 and 128 keys are as fast on Zen 4.)
inline constexpr index_t gradient_block = 64;

/// What is known of a query before its pieces are gone through.
template <class A>
struct QueryFacts {
  KeyRange keys{};        // that it may see; none, if there is nothing to differentiate
  bool attends = false;   // it sees some key, of these or of other parts
  double multiplier = 0;  // c
  A lse{}, delta{};       // delta = ⟨dout, out⟩ - dlse
};

/// What a backward whose products take E needs besides.
template <class A, class E>
struct RoundedScratch {
  RoundedScratch() = default;
  RoundedScratch(Arena& arena, index_t queries, index_t group, index_t d_pitch, index_t dv_pitch,
                 index_t product_depth)
      // A group may begin anywhere, and its products take whole depths. An odd number of cache lines.
      : lanes((queries + product_depth + 31) / 64 * 64 + 32),
        weights(arena.take<E>(gradient_block * lanes)),
        gradients(arena.take<E>(gradient_block * lanes)),
        pairs(arena.take<E>(gradient_block * group)),
        q_pairs(arena.take<E>(lanes * d_pitch)),
        dout_pairs(arena.take<E>(lanes * dv_pitch)),
        wide(arena.take<A>(2 * d_pitch)),
        multiplier(arena.take<A>(queries)),
        offset(arena.take<A>(queries)),
        factor(arena.take<A>(queries)) {}

  index_t lanes = 0;  // queries of the piece, and what its products may read past them
  E *weights = nullptr, *gradients = nullptr;   // [gradient_block][lanes]
  E* pairs = nullptr;                           // [gradient_block / 2][group][2]: the gradients once more
  E *q_pairs = nullptr, *dout_pairs = nullptr;  // [lanes / 2][pitch][2]: 0 for what is not finite
  A* wide = nullptr;                            // [2][d]: a row that is rotated, and what rounding it loses
  A *multiplier = nullptr, *offset = nullptr;   // [queries]: from z to s
  A* factor = nullptr;                          // [queries]: of gradients, for both of their products
};

struct Nothing {};

/// E: see PrefillKernels.
template <class A, class E = A>
struct BackwardScratch : LaneScratch<A, E> {
  using LaneScratch<A, E>::group;
  using LaneScratch<A, E>::groups;
  static constexpr bool in_16_bits = !std::same_as<A, E>;

  /// A product of queries and keys sums over a_depth channels, one of dout and values over a_value_depth.
  BackwardScratch(Arena& arena, index_t d, index_t value_width, index_t a_depth, index_t a_value_depth,
                  index_t sums_count, bool has_score)
      : LaneScratch<A, E>(arena, piece_queries, d, std::max(value_width, a_value_depth / tuple_size<A, E>),
                          a_depth),
        products(detail::kernels<PrefillKernels<A, E>>()),
        depth(a_depth),
        value_depth(a_value_depth),
        d_pitch(in_pitch(d)),
        dv_pitch(in_pitch(value_width)),
        q_rows(arena.take<E>(groups * group * d_pitch)),
        dout(arena.take<E>(groups * value_depth * group)),
        dout_rows(arena.take<E>(groups * group * dv_pitch)),
        s(arena.take<A>(gradient_block * group)),
        u(arena.take<A>(gradient_block * group)),
        z(arena.take<A>(in_16_bits || has_score ? gradient_block * group : 0)),
        slope(arena.take<A>(has_score ? gradient_block * group : 0)),
        shift(arena.take<A>(groups * group)),
        delta(arena.take<A>(groups * group)),
        apart_gradients(arena.take<A>(this->kernels.width * key_block)),
        base(arena.take<double>(groups * group)),
        regular(arena.take<bool>(groups * group)),
        finite(arena.take<bool>(groups)),
        queries_are_finite(arena.take<bool>(groups * group)),
        sums_of_row(sums_count),
        sums(arena.take<double>(groups * group * sums_count)) {
    if constexpr (in_16_bits) rounded = {arena, groups * group, group, d_pitch, dv_pitch, products.depth};
  }

  /// Whole vectors of every target, and whole passes of the products.
  index_t in_pitch(index_t width) const {
    const index_t unit = std::max<index_t>(16, products.rows);
    return (width + unit - 1) / unit * unit;
  }

  const PrefillKernels<A, E>& products;
  index_t depth, value_depth;
  index_t d_pitch, dv_pitch;  // what is past d and dv is 0
  E* q_rows;                  // [queries][d_pitch], in A times scale and, without a score, c
  E *dout, *dout_rows;        // [groups][dv][group] in tuples, [queries][dv_pitch]
  A *s, *u;                   // [gradient_block][group]: logits, then weights; dout·V, then gradients
  A *z, *slope;               // the same, of a score; z also where logits are multiplied after their product
  A *shift, *delta;           // [queries]
  A* apart_gradients;         // [width][key_block]: of lanes that the kernels cannot do
  double* base;               // [queries]: lse in units of log2
  bool* regular;              // [queries]: the kernels can do it
  bool* finite;               // [groups]: q and dout hold no NaN or infinity
  bool* queries_are_finite;   // [queries]: where some of the group's are not
  index_t sums_of_row;
  double* sums;  // [queries][sums_of_row]: of this piece
  std::conditional_t<in_16_bits, RoundedScratch<A, E>, Nothing> rounded{};
};

SSMAX_END
