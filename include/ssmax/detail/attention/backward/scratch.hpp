// One thread's memory for the tiles of the backward.
#pragma once

#include "../forward/prefill_scratch.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

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

template <class A>
struct BackwardScratch : LaneScratch<A> {
  using LaneScratch<A>::group;
  using LaneScratch<A>::groups;

  BackwardScratch(Arena& arena, index_t d, index_t value_width, index_t sums_count, bool has_score)
      : LaneScratch<A>(arena, piece_queries, d, value_width, d),
        d_pitch((d + 15) / 16 * 16),
        dv_pitch((value_width + 15) / 16 * 16),
        q_rows(arena.take<A>(groups * group * d_pitch)),
        dout(arena.take<A>(groups * value_width * group)),
        dout_rows(arena.take<A>(groups * group * dv_pitch)),
        s(arena.take<A>(gradient_block * group)),
        u(arena.take<A>(gradient_block * group)),
        z(arena.take<A>(has_score ? gradient_block * group : 0)),
        slope(arena.take<A>(has_score ? gradient_block * group : 0)),
        shift(arena.take<A>(groups * group)),
        delta(arena.take<A>(groups * group)),
        apart_gradients(arena.take<A>(this->kernels.width * key_block)),
        base(arena.take<double>(groups * group)),
        regular(arena.take<bool>(groups * group)),
        finite(arena.take<bool>(groups)),
        queries_are_finite(arena.take<bool>(groups * group)),
        sums_of_row(sums_count),
        sums(arena.take<double>(groups * group * sums_count)) {}

  index_t d_pitch, dv_pitch;  // whole vectors of every target; what is past d and dv is 0
  A* q_rows;                  // [queries][d_pitch], times scale and, without a score, c
  A *dout, *dout_rows;        // [groups][dv][group], [queries][dv_pitch]
  A *s, *u;                   // [gradient_block][group]: logits, then weights; dout·V, then gradients
  A *z, *slope;               // the same, of a score
  A *shift, *delta;           // [queries]
  A* apart_gradients;         // [width][key_block]: of lanes that the kernels cannot do
  double* base;               // [queries]: lse in units of log2
  bool* regular;              // [queries]: the kernels can do it
  bool* finite;               // [groups]: q and dout hold no NaN or infinity
  bool* queries_are_finite;   // [queries]: where some of the group's are not
  index_t sums_of_row;
  double* sums;  // [queries][sums_of_row]: of this piece
};

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
