// A piece of attention's backward: some queries against some keys, tile by tile. Queries and dout are at hand
// twice, in lanes (one query per lane of a vector) and in rows.
//
//   p = 2^(s - lse)                                          the forward's weights; s as prefill computes it
//   u = p·(dout·vᵀ - delta),  delta = ⟨dout, out⟩ - dlse      the gradient of c·z
//   dq̃ += u·k    dk += uᵀ·(c·scale·q)    dv += pᵀ·dout
//
// With a score, u is multiplied by c·score' and so becomes the gradient of z itself; dk then takes
// scale·q, without c.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../kernels/prefill_backward.hpp"
#include "../call/gradient_variant.hpp"
#include "../nonfinite/gradients.hpp"
#include "../nonfinite/rows.hpp"
#include "../tile/visibility.hpp"
#include "scratch.hpp"

SSMAX_BEGIN_DETAIL

/// The keys of a piece. E: see PrefillKernels.
template <class A, class E = A>
struct BlockKeys {
  KeyRange range{};
  const E* k = nullptr;
  index_t k_stride = 0;
  const E* v = nullptr;
  index_t v_stride = 0;
  const E* panels = nullptr;  // K once more, as pack_values has it, with 0 for what is not finite: in 16 bits
  index_t panel_stride = 0;
  A *dk = nullptr, *dv = nullptr;    // [keys][d_pitch], [keys][dv_pitch]
  bool finite = true;                // all of K
  const bool* are_finite = nullptr;  // [keys], if not
};

template <class A>
class BackwardBlock {
 public:
  BackwardBlock(const GradientVariant<A>& variant, const BackwardScratch<A>& memory, index_t d, index_t dv,
                index_t length)
      : variant_(variant),
        kernels_(memory.kernels),
        gradient_kernels_(detail::kernels<PrefillBackwardKernels<A>>()),
        memory_(memory),
        d_(d),
        dv_(dv),
        length_(length) {}

  /// Adds what the memory's queries and the keys give each other; dq is [groups][d_pitch][group].
  void attend(const BlockKeys<A>& keys, index_t queries, A* dq) const {
    const index_t group = memory_.group;
    for (index_t at = 0; at < keys.range.size(); at += gradient_block) {
      for (index_t g = 0; g * group < queries; ++g) {
        attend_block(keys, g, queries, at, dq + g * memory_.d_pitch * group);
      }
    }
  }

 private:
  /// One group of queries against the next keys of the piece, from its row `at` on: at most gradient_block,
  /// as a tile has room for.
  void attend_block(const BlockKeys<A>& piece, index_t g, index_t queries, index_t at, A* dq) const {
    const Column* columns = memory_.columns + g * tile_vectors;
    const index_t group = memory_.group, width = kernels_.width;
    const KeyRange block{piece.range.begin + at,
                         std::min(piece.range.begin + at + gradient_block, piece.range.end)};
    const NeededKeys needed(columns, queries - g * group, width, block, kernels_.rows);
    const auto for_each_part = [&](const auto& f) { needed.for_each_rectangle(gradient_block, f); };
    for_each_part([&](index_t vectors, index_t vector, KeyRange keys) {
      const index_t lane = vector * width, row = at + keys.begin;
      kernels_.logits[vectors - 1](piece.k + row * piece.k_stride, piece.k_stride, d_, keys.size(),
                                   memory_.q + g * d_ * group + lane, memory_.s + keys.begin * group + lane);
      kernels_.logits[vectors - 1](piece.v + row * piece.v_stride, piece.v_stride, dv_, keys.size(),
                                   memory_.dout + g * dv_ * group + lane,
                                   memory_.u + keys.begin * group + lane);
    });
    for (index_t vector = 0; vector < needed.vectors; ++vector) {
      const KeyRange& part = needed.of[vector];
      if (part.size() == 0) continue;
      form_gradients(g * group + vector * width, {block.begin + part.begin, block.begin + part.end},
                     part.begin * group + vector * width, columns[vector]);
    }
    for_each_part([&](index_t vectors, index_t vector, KeyRange keys) {
      const index_t lane = vector * width;
      for_each_finite_run(
          {lane, std::min(lane + vectors * width, queries - g * group)},
          memory_.queries_are_finite + g * group, memory_.finite[g],
          [&](KeyRange lanes) { add_lanes(piece, g, lanes, keys, at); },
          [&](index_t i) { add_lane(piece, g, i, keys, at); });
      for_each_finite_run(
          keys, piece.are_finite + at, piece.finite,
          [&](KeyRange run) {
            kernels_.accumulate[vectors - 1](piece.k + (at + run.begin) * piece.k_stride, piece.k_stride,
                                             kernels_.rows, panels(), memory_.u + run.begin * group + lane,
                                             run.size(), dq + lane);
          },
          [&](index_t key) { add_key(piece, key, lane, vectors, at, dq); });
    });
  }

  /// Adds to dv and dk of `keys` what the queries in these lanes of group g give them. Sums of these keys
  /// begin at row `at` + keys.begin of the piece's.
  void add_lanes(const BlockKeys<A>& piece, index_t g, KeyRange lanes, KeyRange keys, index_t at) const {
    const index_t group = memory_.group, tile = keys.begin * group + lanes.begin, row = at + keys.begin,
                  query = g * group + lanes.begin;
    gradient_kernels_.add_product(memory_.s + tile, lanes.size(), keys.size(),
                                  memory_.dout_rows + query * memory_.dv_pitch, memory_.dv_pitch,
                                  piece.dv + row * memory_.dv_pitch);
    gradient_kernels_.add_product(memory_.u + tile, lanes.size(), keys.size(),
                                  memory_.q_rows + query * memory_.d_pitch, memory_.d_pitch,
                                  piece.dk + row * memory_.d_pitch);
  }

  /// The same for one lane whose q or dout is not finite: finite elements first, then each other element
  /// where its factor is not 0 (nonfinite/rows.hpp).
  void add_lane(const BlockKeys<A>& piece, index_t g, index_t lane, KeyRange keys, index_t at) const {
    const index_t group = memory_.group, query = g * group + lane;
    const auto add = [&](const A* tile, const A* row, index_t channels, A* sums, index_t pitch) {
      const A* factors = tile + keys.begin * group + lane;
      A* first = sums + (at + keys.begin) * pitch;
      gradient_kernels_.add_product(factors, 1, keys.size(), finite_part(memory_, row, channels), pitch,
                                    first);
      for (index_t c = 0; c < channels; ++c) {
        if (std::isfinite(row[c])) continue;
        for (index_t key = 0; key < keys.size(); ++key) {
          if (factors[key * group] != 0) first[key * pitch + c] += factors[key * group] * row[c];
        }
      }
    };
    add(memory_.s, memory_.dout_rows + query * memory_.dv_pitch, dv_, piece.dv, memory_.dv_pitch);
    add(memory_.u, memory_.q_rows + query * memory_.d_pitch, d_, piece.dk, memory_.d_pitch);
  }

  /// Adds to dq, of `vectors` vectors of queries, what one key gives whose row of K is not finite.
  void add_key(const BlockKeys<A>& piece, index_t key, index_t lane, index_t vectors, index_t at,
               A* dq) const {
    const index_t group = memory_.group;
    const A* k = piece.k + (at + key) * piece.k_stride;
    const A* factors = memory_.u + key * group + lane;
    kernels_.accumulate[vectors - 1](finite_part(memory_, k, d_), 0, kernels_.rows, panels(), factors, 1,
                                     dq + lane);
    for (index_t c = 0; c < d_; ++c) {
      if (std::isfinite(k[c])) continue;
      for (index_t i = 0; i < vectors * kernels_.width; ++i) {
        if (factors[i] != 0) dq[c * group + lane + i] += factors[i] * k[c];
      }
    }
  }

  /// Passes over the channels of K.
  index_t panels() const { return (d_ + kernels_.rows - 1) / kernels_.rows; }

  /// One vector of queries, lanes from `lane` on; its column begins at element `tile` of the tiles. s becomes
  /// weights, u becomes gradients.
  void form_gradients(index_t lane, KeyRange keys, index_t tile, const Column& column) const {
    A *s = memory_.s + tile, *u = memory_.u + tile, *z = memory_.z + tile, *slope = memory_.slope + tile;
    const QueryRow* rows = memory_.rows + lane;
    const TileColumn<A> logits{s, keys, rows, length_};
    if (variant_.has_score) {
      variant_.apply_and_keep(logits, z, slope, memory_);
    } else if (variant_.has_predicate) {
      variant_.apply(logits, memory_);
    }
    if (column.hides(keys)) hide_keys(memory_, s, keys, rows);
    const bool regular = std::all_of(memory_.regular + lane, memory_.regular + lane + kernels_.width,
                                     [](bool r) { return r; });
    if (regular) {
      gradient_kernels_.gradients(s, u, keys.size(), memory_.shift + lane, memory_.delta + lane);
    } else {
      irregular_gradients(memory_, lane, keys.size(), s, u);
    }
    if (variant_.has_score) {
      const index_t stride = memory_.sums_of_row;
      variant_.differentiate(logits, {u, z, slope, memory_.sums + lane * stride, stride}, memory_);
    }
  }

  const GradientVariant<A>& variant_;
  const PrefillKernels<A>& kernels_;
  const PrefillBackwardKernels<A>& gradient_kernels_;
  const BackwardScratch<A>& memory_;
  index_t d_, dv_;
  index_t length_;  // keys there are
};

SSMAX_END
