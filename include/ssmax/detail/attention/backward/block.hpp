// Computes the backward pass of a query block against a key block, tile by tile. Queries and dout are stored twice:
// in lanes (one query per lane of a vector) and in rows.
//
//     p = 2^(s - lse)                                          the forward's weights; s as in prefill
//     u = p·(dout·vᵀ - delta),  delta = ⟨dout, out⟩ - dlse      the gradient of c·z
//     dq̃ += u·k    dk += uᵀ·(c·scale·q)    dv += pᵀ·dout
//
// With dropout, dout·vᵀ in u and p in dv are multiplied by 0 or by the factor of the weights that are kept.
//
// With a score function, u is multiplied by c·score' and so becomes the gradient of z. dk then uses scale·q, without
// c.
//
// The bf16 path (kernels/prefill_backward_pairs.inl) differs in four ways:
// - q, k, v and dout are multiplied in their storage type. Logits are multiplied by scale and c before the weights
//   are computed, gradients after.
// - dq and dk use the first part of a rotated row (operands.hpp).
// - Weights and gradients are rounded for the products that sum over queries or keys. dc = scale · Σ u·z is summed
//   from the floats before rounding.
// - The products that sum over queries come last, for all tiles at once: fewer sums are loaded and stored.
#pragma once

#include <algorithm>
#include <optional>

#include "../terms/variant.hpp"
#include "../tile/dropout.hpp"
#include "../tile/scores.hpp"
#include "irregular.hpp"
#include "scratch.hpp"

SSMAX_BEGIN_DETAIL

/// A key block. Operand is the type of the products' operands.
template <class Compute, class Operand = Compute>
struct BlockKeys {
  KeyRange range{};
  index_t length = 0;  // keys of the sequence
  StridedRows<const Operand> k{}, v{};
  const Operand* panels =
      nullptr;  // bf16 path: K in the layout of pack_values, with 0 for NaN and infinities
  index_t panel_stride = 0;
  Compute *dk = nullptr, *dv = nullptr;  // [keys][d_pitch], [keys][dv_pitch]
  bool finite = true;                    // whether all of K is finite
  const bool* are_finite = nullptr;      // [keys]: per key, if `finite` is false
};

template <class Compute, class Operand>
class BackwardBlock {
 public:
  /// sums_dc: requests that the sums of the queries include dc. Exception: with a score function, the score's
  /// derivative adds dc.
  BackwardBlock(const GradientVariant<Compute>& variant, const BackwardScratch<Compute, Operand>& memory,
                index_t d, index_t dv, double scale, const DropoutOption<Compute>& dropout, bool sums_dc)
      : variant_(variant),
        gradient_kernels_(detail::kernels<GradientKernels>()),
        memory_(memory),
        scores_(variant, scale, memory.products, memory),
        d_(d),
        dv_(dv),
        scale_(scale),
        dropout_(dropout),
        sums_dc_(sums_dc && !scores_.multipliers.has_score) {}

  /// Adds the products of the loaded queries and the keys to dq [tiles][d_pitch][tile_lanes], dk and dv.
  void attend(const BlockKeys<Compute, Operand>& keys, index_t queries, Compute* dq) {
    if (dropout_.p > 0) dropper_.emplace(dropout_, memory_.rows->query.batch);
    const AcquiredProducts acquired(memory_.products);
    const index_t tile_lanes = memory_.tile_lanes, tiles = ceil_div(queries, tile_lanes);
    if constexpr (Op::is_bf16) clear({tiles * tile_lanes, memory_.bf16.lanes}, {0, tile_keys});
    for (index_t at = 0; at < keys.range.size(); at += tile_keys) {
      KeyRange lanes{};  // neighbouring tiles to which some of the keys are visible
      for (index_t tile = 0; tile < tiles; ++tile) {
        if (attend_tile(keys, tile, queries, at, dq + tile * memory_.d_pitch * tile_lanes)) {
          lanes = {lanes.size() == 0 ? tile * tile_lanes : lanes.begin, (tile + 1) * tile_lanes};
        } else {
          add_tiles(keys, lanes, tiles, at);
          lanes = {};
        }
      }
      add_tiles(keys, lanes, tiles, at);
    }
  }

 private:
  using Op = Operands<Compute, Operand>;
  using GradientKernels = std::conditional_t<Op::is_bf16, RoundedBackwardKernels<Compute, Operand>,
                                             PrefillBackwardKernels<Compute>>;

  /// Computes one tile: queries against at most tile_keys keys, from row `at` of the block on. Returns whether one
  /// of the keys is visible to a query.
  bool attend_tile(const BlockKeys<Compute, Operand>& block, index_t tile, index_t queries, index_t at,
                   Compute* dq) {
    const index_t tile_lanes = memory_.tile_lanes, width = memory_.products.width, first = tile * tile_lanes;
    const KeyRange keys{block.range.begin + at,
                        std::min(block.range.begin + at + tile_keys, block.range.end)};
    const Hull* hulls = hulls_of<Compute>(variant_, memory_, tile, queries - first, keys);
    const NeededKeys needed(hulls, queries - first, width, keys, memory_.products.pass);
    if (!needed.any()) return false;
    if constexpr (Op::is_bf16) clear_unneeded(needed, first);
    // 1. Multiply q·kᵀ and dout·vᵀ.
    scores_.multiply(needed, tile_keys, {block.k[at], block.k.stride}, memory_.depth,
                     memory_.q + first * memory_.depth, Op::is_bf16 ? memory_.z : memory_.s);
    scores_.multiply(needed, tile_keys, {block.v[at], block.v.stride}, memory_.value_depth,
                     memory_.dout + first * memory_.value_depth, memory_.u);
    // 2. Compute weights and gradients.
    for (index_t v = 0; v < needed.vectors; ++v) {
      if (needed.of[v].size() > 0)
        form_gradients(block, first + v * width, keys.begin, needed.of[v], hulls[v]);
    }
    // 3. Add the products of weights and gradients.
    needed.for_each_rectangle(tile_keys, [&](index_t vectors, index_t v, KeyRange part) {
      const KeyRange lanes{v * width, (v + vectors) * width};
      if constexpr (!Op::is_bf16) {
        for_each_finite_run(
            {lanes.begin, std::min(lanes.end, queries - first)}, memory_.queries_are_finite + first,
            memory_.finite[tile], [&](KeyRange run) { add_lanes(block, first, run, part, at); },
            [&](index_t lane) { add_lane(block, first, lane, part, at); });
      }
      add_keys(block, first, lanes, part, at, dq);
    });
    return true;
  }

  /// Replaces the logits of one vector of queries by weights, and dout·vᵀ by gradients. The vector starts at lane
  /// `lane`.
  void form_gradients(const BlockKeys<Compute, Operand>& block, index_t lane, index_t first_key,
                      KeyRange part, const Hull& hull) {
    const index_t tile_lanes = memory_.tile_lanes, stride = memory_.sums_of_row, count = part.size();
    const index_t tile = part.begin * tile_lanes + lane % tile_lanes;
    Compute* u = memory_.u + tile;
    const Compute *shift = memory_.shift + lane, *delta = memory_.delta + lane;
    Logits<Compute> logits{.s = memory_.s + tile,
                           .keys = {first_key + part.begin, first_key + part.end},
                           .rows = memory_.rows + lane,
                           .length = block.length,
                           .z = memory_.z + tile,
                           .slope = memory_.slope + tile};
    const bool regular = std::all_of(memory_.regular + lane, memory_.regular + lane + memory_.products.width,
                                     [](bool r) { return r; });
    double* sums = memory_.sums + lane * stride;
    const auto drop = [&](Compute* x) {
      if (dropper_)
        dropper_->drop(x, tile_lanes, memory_.rows + lane, memory_.products.width, logits.keys.begin, count);
    };
    drop(u);
    if constexpr (Op::is_bf16) {
      logits.multiplier = memory_.bf16.multiplier + lane;
      logits.offset = memory_.bf16.offset + lane;
      if (!dropper_ && regular && scores_.are_plain(hull, logits.keys)) {
        const auto to = rounded_gradients(lane, part);
        gradient_kernels_.form(logits.z, u, count, {logits.multiplier, logits.offset, shift, delta}, to);
        return add_dc(to.dc, sums);
      }
    }
    scores_.form(logits, hull);
    if (regular) {
      gradient_kernels_.gradients(logits.s, u, count, shift, delta);
    } else {
      irregular_gradients(memory_, lane, count, logits.s, u);
    }
    if (scores_.multipliers.has_score) variant_.differentiate(logits, {u, sums, stride}, memory_);
    drop(logits.s);
    if constexpr (Op::is_bf16) {
      const auto to = rounded_gradients(lane, part);
      gradient_kernels_.round(logits.s, u, logits.z, count, to);
      add_dc(to.dc, sums);
    }
  }

  // ---- Float, double: sums over the queries of one tile ---------------------------------------------------

  /// Adds the products of some lanes of a tile to dv and dk of the keys `part`.
  void add_lanes(const BlockKeys<Compute, Operand>& block, index_t first, KeyRange lanes, KeyRange part,
                 index_t at) const {
    const index_t tile = part.begin * memory_.tile_lanes + lanes.begin, row = at + part.begin,
                  query = first + lanes.begin;
    gradient_kernels_.add_product(memory_.s + tile, lanes.size(), part.size(),
                                  memory_.dout_rows + query * memory_.dv_pitch, memory_.dv_pitch,
                                  block.dv + row * memory_.dv_pitch);
    gradient_kernels_.add_product(memory_.u + tile, lanes.size(), part.size(),
                                  memory_.q_rows + query * memory_.d_pitch, memory_.d_pitch,
                                  block.dk + row * memory_.d_pitch);
  }

  /// Adds the products of one lane whose q or dout is not finite to dv and dk of the keys `part`.
  void add_lane(const BlockKeys<Compute, Operand>& block, index_t first, index_t lane, KeyRange part,
                index_t at) const {
    const index_t tile_lanes = memory_.tile_lanes, query = first + lane;
    const auto add = [&](const Compute* tile, const Compute* row, index_t channels, Compute* all,
                         index_t pitch) {
      const Compute* factors = tile + part.begin * tile_lanes + lane;
      Compute* sums = all + (at + part.begin) * pitch;
      gradient_kernels_.add_product(factors, 1, part.size(), finite_part(memory_, row, channels), pitch,
                                    sums);
      add_nonfinite<Compute>({factors, tile_lanes}, part.size(), row, channels, {sums, pitch}, 1);
    };
    add(memory_.s, memory_.dout_rows + query * memory_.dv_pitch, dv_, block.dv, memory_.dv_pitch);
    add(memory_.u, memory_.q_rows + query * memory_.d_pitch, d_, block.dk, memory_.d_pitch);
  }

  /// Adds the products of the keys `part` to dq of some lanes of a tile.
  void add_keys(const BlockKeys<Compute, Operand>& block, index_t first, KeyRange lanes, KeyRange part,
                index_t at, Compute* dq) const {
    const index_t tile_lanes = memory_.tile_lanes, rows = memory_.products.pass;
    const auto accumulate = memory_.products.accumulate[lanes.size() / memory_.products.width - 1];
    Compute* sums = dq + lanes.begin;
    if constexpr (Op::is_bf16) {
      accumulate({block.panels + (at + part.begin) * rows, rows, block.panel_stride, memory_.d_pitch / rows},
                 memory_.bf16.pairs + tuple_at<Compute, Operand>(part.begin, lanes.begin, tile_lanes),
                 part.size(), sums);
      for (index_t key = part.begin; !block.finite && key < part.end; ++key) {
        if (block.are_finite[at + key]) continue;
        add_nonfinite<Compute>({memory_.bf16.gradients + key * memory_.bf16.lanes + first + lanes.begin, 1},
                               lanes.size(), block.k[at + key], d_, {sums, 1}, tile_lanes);
      }
    } else {
      const index_t panels = ceil_div(d_, rows);
      for_each_finite_run(
          part, block.are_finite + at, block.finite,
          [&](KeyRange run) {
            accumulate({block.k[at + run.begin], block.k.stride, rows, panels},
                       memory_.u + run.begin * tile_lanes + lanes.begin, run.size(), sums);
          },
          [&](index_t key) {
            const Compute* k = block.k[at + key];
            const Compute* factors = memory_.u + key * tile_lanes + lanes.begin;
            accumulate({finite_part(memory_, k, d_), 0, rows, panels}, factors, 1, sums);
            add_nonfinite<Compute>({factors, 1}, lanes.size(), k, d_, {sums, 1}, tile_lanes);
          });
    }
  }

  // ---- The bf16 path: sums over the queries of all tiles --------------------------------------------------

  RoundedGradients<Compute, Operand> rounded_gradients(index_t lane, KeyRange part) const {
    const auto& bf16 = memory_.bf16;
    const index_t row = part.begin * bf16.lanes + lane, tile_lanes = memory_.tile_lanes;
    return {bf16.weights + row,
            bf16.gradients + row,
            bf16.lanes,
            bf16.pairs + tuple_at<Compute, Operand>(part.begin, lane % tile_lanes, tile_lanes),
            bf16.factor + lane,
            sums_dc_ ? memory_.lane.dc : nullptr};
  }
  void add_dc(const Compute* dc, double* sums) const {
    for (index_t i = 0; dc != nullptr && i < memory_.products.width; ++i) {
      sums[i * memory_.sums_of_row] += scale_ * static_cast<double>(dc[i]);
    }
  }

  /// Sets weights and gradients to 0.
  void clear(KeyRange lanes, KeyRange keys) const {
    if (lanes.size() <= 0) return;
    for (index_t key = keys.begin; key < keys.end; ++key) {
      std::fill_n(memory_.bf16.weights + key * memory_.bf16.lanes + lanes.begin, lanes.size(), Operand{});
      std::fill_n(memory_.bf16.gradients + key * memory_.bf16.lanes + lanes.begin, lanes.size(), Operand{});
    }
  }

  /// Sets weights and gradients to 0 for the keys that a vector of a tile does not need.
  void clear_unneeded(const NeededKeys& needed, index_t first) const {
    for (index_t v = 0; v < tile_vectors; ++v) {
      const KeyRange lanes{first + v * memory_.products.width, first + (v + 1) * memory_.products.width},
          part = v < needed.vectors ? needed.of[v] : KeyRange{};
      clear(lanes, {0, part.size() > 0 ? part.begin : tile_keys});
      if (part.size() > 0) clear(lanes, {part.end, tile_keys});
    }
  }

  /// Adds the sums over the lanes of neighbouring tiles to dv and dk of the keys from row `at` of the block on. Has no
  /// effect in float and double, which add tile by tile.
  void add_tiles([[maybe_unused]] const BlockKeys<Compute, Operand>& block, [[maybe_unused]] KeyRange lanes,
                 [[maybe_unused]] index_t tiles, [[maybe_unused]] index_t at) const {
    if constexpr (Op::is_bf16) {
      if (lanes.size() == 0) return;
      // A product sums over whole depths. Lanes past the last tile stay 0.
      const index_t depth = round_up(lanes.size(), memory_.products.depth), first = lanes.begin;
      clear({lanes.end, std::min(first + depth, tiles * memory_.tile_lanes)}, {0, tile_keys});
      const auto& bf16 = memory_.bf16;
      const index_t keys = std::min(tile_keys, block.range.size() - at),
                    passes = round_up(keys, memory_.products.pass);
      Compute *dk = block.dk + at * memory_.d_pitch, *dv = block.dv + at * memory_.dv_pitch;
      gradient_kernels_.add_product(bf16.weights + first, bf16.lanes, depth, passes,
                                    bf16.dout_pairs + first * memory_.dv_pitch, memory_.dv_pitch, dv);
      gradient_kernels_.add_product(bf16.gradients + first, bf16.lanes, depth, passes,
                                    bf16.q_pairs + first * memory_.d_pitch, memory_.d_pitch, dk);
      for (index_t lane = lanes.begin; lane < lanes.end; ++lane) {
        if (memory_.finite[lane / memory_.tile_lanes] || memory_.queries_are_finite[lane]) continue;
        add_nonfinite<Compute>({bf16.weights + lane, bf16.lanes}, keys,
                               memory_.dout_rows + lane * memory_.dv_pitch, dv_, {dv, memory_.dv_pitch}, 1);
        add_nonfinite<Compute>({bf16.gradients + lane, bf16.lanes}, keys,
                               memory_.q_rows + lane * memory_.d_pitch, d_, {dk, memory_.d_pitch}, 1);
      }
    }
  }

  const GradientVariant<Compute>& variant_;
  const GradientKernels& gradient_kernels_;
  const BackwardScratch<Compute, Operand>& memory_;
  const Scores<Compute, Operand, GradientVariant<Compute>> scores_;
  index_t d_, dv_;
  double scale_;
  const DropoutOption<Compute>& dropout_;
  bool sums_dc_;
  std::optional<WeightDropper<Compute>> dropper_{};
};

SSMAX_END
