// Defines BackwardScratch, one thread's memory for the tiles of the backward pass.
#pragma once

#include "../operands/operands.hpp"
#include "../terms/variant.hpp"
#include "../tile/scratch.hpp"

SSMAX_BEGIN_DETAIL

/// The sizes of the blocks of the backward pass: 240 queries of a kv head × 256 keys. 240 is a multiple of
/// tile_lanes on every target. On one thread, twice as many queries or keys are no faster (Zen 4, 1 MB of
/// second-level cache). On two threads they are slower: for one head of 2048 queries and keys, the second thread
/// gains a factor of 1.4 instead of 1.55.
inline constexpr index_t query_block = 240, backward_key_block = 256;

/// The number of blocks in a partial sum. The partial sum is then added to the whole sum: a longer partial sum would
/// lose digits.
inline constexpr index_t blocks_per_sum = 8;

/// The number of keys of a tile. The weights and gradients of a tile, 64 · 48 floats each, fit a first-level cache
/// of 32 KiB. 32 and 128 keys are as fast on Zen 4.
inline constexpr index_t tile_keys = 64;

/// Facts about a query that all of its blocks read.
template <class Compute>
struct QueryFacts {
  KeyRange keys{};         // visible and stored keys; empty if lse is -inf
  bool attends = false;    // some key is visible, in this call or in another part
  double multiplier = 0;   // c
  Compute lse{}, delta{};  // delta = ⟨dout, out⟩ - dlse
};

/// The memory that only the bf16 path uses.
template <class Compute, class Operand>
struct Bf16Scratch {
  Bf16Scratch() = default;
  Bf16Scratch(Arena& arena, index_t queries, index_t tile_lanes, index_t d_pitch, index_t dv_pitch,
              index_t product_depth)
      // A tile may begin at any lane, and products sum over whole depths. The row length is an odd number of cache
      // lines.
      : lanes((queries + product_depth + 31) / 64 * 64 + 32),
        weights(arena.take<Operand>(tile_keys * lanes)),
        gradients(arena.take<Operand>(tile_keys * lanes)),
        pairs(arena.take<Operand>(tile_keys * tile_lanes)),
        q_pairs(arena.take<Operand>(lanes * d_pitch)),
        dout_pairs(arena.take<Operand>(lanes * dv_pitch)),
        multiplier(arena.take<Compute>(queries)),
        offset(arena.take<Compute>(queries)),
        factor(arena.take<Compute>(queries)) {}

  index_t lanes = 0;  // lanes of the query block, plus the lanes past its end that products may read
  Operand *weights = nullptr, *gradients = nullptr;  // [tile_keys][lanes]
  Operand* pairs = nullptr;  // [tile_keys / 2][tile_lanes][2]: the gradients in pairs of keys
  Operand *q_pairs = nullptr, *dout_pairs = nullptr;  // [lanes / 2][pitch][2], with 0 for NaN and infinities
  Compute *multiplier = nullptr, *offset = nullptr;   // [queries]: members of Logits
  Compute* factor = nullptr;  // [queries]: factor of the gradients, in both of their products
};

struct Nothing {};

/// The scratch memory of one thread. Operand is the type of the products' operands.
template <class Compute, class Operand = Compute>
struct BackwardScratch : LaneScratch<Compute, Operand> {
  using LaneScratch<Compute, Operand>::arena;
  using LaneScratch<Compute, Operand>::tile_lanes;
  using LaneScratch<Compute, Operand>::tiles;
  using Op = Operands<Compute, Operand>;

  BackwardScratch(Arena& an_arena, const Problem<Compute>& problem, const GradientVariant<Compute>& variant)
      : LaneScratch<Compute, Operand>(
            an_arena, query_block, problem.width(),
            std::max(problem.value_width(), value_depth_of(problem) / tuple_size<Compute, Operand>),
            product_depth<Operand>(problem, detail::kernels<PrefillKernels<Compute, Operand>>().depth)),
        products(detail::kernels<PrefillKernels<Compute, Operand>>()),
        value_depth(value_depth_of(problem)),
        d_pitch(in_pitch(problem.width())),
        dv_pitch(in_pitch(problem.value_width())),
        sums_of_row(1 + variant.parameters()),
        z(arena.template take<Compute>(Op::is_bf16 || variant.has_score ? tile_keys * tile_lanes : 0)),
        slope(arena.template take<Compute>(variant.has_score ? tile_keys * tile_lanes : 0)) {
    if constexpr (Op::is_bf16) {
      bf16 = {arena, tiles * tile_lanes, tile_lanes, d_pitch, dv_pitch, products.depth};
      this->widened_row = arena.template take<Compute>(2 * d_pitch);
    }
  }

  /// Returns the number of channels that the product of dout and v sums over.
  static index_t value_depth_of(const Problem<Compute>& problem) {
    return round_up(problem.value_width(), detail::kernels<PrefillKernels<Compute, Operand>>().depth);
  }
  /// Returns the width rounded up to whole vectors of every target and whole passes of the products.
  index_t in_pitch(index_t width) const { return round_up(width, std::max<index_t>(16, products.pass)); }

  const PrefillKernels<Compute, Operand>& products;
  index_t value_depth;
  index_t d_pitch, dv_pitch;  // row lengths; channels past d and dv are 0
  index_t sums_of_row;
  /// Float, double: multiplied by scale and, without a score function, by c.
  Operand* q_rows = arena.template take<Operand>(tiles * tile_lanes * d_pitch);
  Operand* dout = arena.template take<Operand>(tiles * value_depth * tile_lanes);  // in tuples
  Operand* dout_rows = arena.template take<Operand>(tiles * tile_lanes * dv_pitch);
  Compute* s = arena.template take<Compute>(tile_keys * tile_lanes);  // logits; weights overwrite them
  Compute* u = arena.template take<Compute>(tile_keys * tile_lanes);  // dout·vᵀ; gradients overwrite it
  Compute *z, *slope;  // [tile_keys][tile_lanes]: members of Logits
  Compute* shift = arena.template take<Compute>(tiles * tile_lanes);
  Compute* delta = arena.template take<Compute>(tiles * tile_lanes);
  /// The gradients of irregular lanes.
  Compute* transposed_gradients = arena.template take<Compute>(this->kernels.width * tile_keys);
  double* base = arena.template take<double>(tiles * tile_lanes);  // lse in units of log2
  /// Lanes whose weights the kernels can compute.
  bool* regular = arena.template take<bool>(tiles * tile_lanes);
  bool* finite = arena.template take<bool>(tiles);  // whether q and dout are free of NaN and infinities
  /// Set for tiles that are not finite.
  bool* queries_are_finite = arena.template take<bool>(tiles * tile_lanes);
  double* sums = arena.template take<double>(tiles * tile_lanes * sums_of_row);  // over one pair of blocks
  std::conditional_t<Op::is_bf16, Bf16Scratch<Compute, Operand>, Nothing> bf16{};
};

SSMAX_END
