// A piece of attention's backward whose products take bfloat16 (kernels/prefill_backward_pairs.inl). As block.hpp,
// but that
//
//   - q, k, v and dout go into the products as they are stored: what they are multiplied by goes into floats,
//     logits before, gradients after. A rotated row comes in two parts for the logits (parts.hpp), and by its
//     first for dq and dk.
//   - weights and gradients are rounded for the products that sum over queries or keys. Those over queries come
//     last, for all groups at once: fewer sums are loaded and stored.
//   - dc = scale · Σ u·z is summed up here, from floats.
#pragma once

#include "../tile/acquired_products.hpp"
#include "block.hpp"

SSMAX_BEGIN_DETAIL

template <class A, class E>
class RoundedBlock {
 public:
  RoundedBlock(const GradientVariant<A>& variant, const BackwardScratch<A, E>& memory, index_t d, index_t dv,
               index_t length, double scale, bool learns)
      : variant_(variant),
        products_(memory.products),
        rounded_kernels_(detail::kernels<RoundedBackwardKernels<A, E>>()),
        memory_(memory),
        d_(d),
        dv_(dv),
        length_(length),
        scale_(scale),
        learns_(learns) {}

  /// As BackwardBlock's.
  void attend(const BlockKeys<A, E>& keys, index_t queries, A* dq) const {
    const AcquiredProducts acquired(products_);
    const auto& rounded = memory_.rounded;
    const index_t group = memory_.group, groups = (queries + group - 1) / group;
    hide({groups * group, rounded.lanes}, {0, gradient_block});
    for (index_t at = 0; at < keys.range.size(); at += gradient_block) {
      KeyRange lanes{};  // of groups that see some of these keys
      for (index_t g = 0; g < groups; ++g) {
        if (!attend_group(keys, g, queries, at, dq + g * memory_.d_pitch * group)) continue;
        lanes = {lanes.size() == 0 ? g * group : lanes.begin, (g + 1) * group};
      }
      if (lanes.size() > 0) add_lanes(keys, lanes, at);
    }
  }

 private:
  static constexpr index_t tuple = tuple_size<A, E>;

  /// One group of queries against the next keys of the piece, up to what they give dk and dv. Returns whether
  /// it sees any.
  bool attend_group(const BlockKeys<A, E>& piece, index_t g, index_t queries, index_t at, A* dq) const {
    const Column* columns = memory_.columns + g * tile_vectors;
    const auto& rounded = memory_.rounded;
    const index_t group = memory_.group, width = products_.width;
    const KeyRange block{piece.range.begin + at,
                         std::min(piece.range.begin + at + gradient_block, piece.range.end)};
    const NeededKeys needed(columns, queries - g * group, width, block, products_.rows);
    bool any = false;
    for (index_t v = 0; v < tile_vectors; ++v) {
      const KeyRange lanes{g * group + v * width, g * group + (v + 1) * width},
          part = v < needed.vectors ? needed.of[v] : KeyRange{};
      hide(lanes, {0, part.size() > 0 ? part.begin : gradient_block});
      if (part.size() > 0) hide(lanes, {part.end, gradient_block});
      any = any || part.size() > 0;
    }
    if (!any) return false;
    const auto for_each_part = [&](const auto& f) { needed.for_each_rectangle(gradient_block, f); };
    for_each_part([&](index_t vectors, index_t vector, KeyRange keys) {
      const index_t lane = vector * width, row = at + keys.begin, tile = keys.begin * group + lane;
      products_.logits[vectors - 1](piece.k + row * piece.k_stride, piece.k_stride, memory_.depth,
                                    keys.size(), memory_.q + g * memory_.depth * group + lane * tuple,
                                    memory_.z + tile);
      products_.logits[vectors - 1](
          piece.v + row * piece.v_stride, piece.v_stride, memory_.value_depth, keys.size(),
          memory_.dout + g * memory_.value_depth * group + lane * tuple, memory_.u + tile);
    });
    for (index_t v = 0; v < needed.vectors; ++v) {
      if (needed.of[v].size() > 0) form_gradients(g * group + v * width, block, needed.of[v], columns[v]);
    }
    for_each_part([&](index_t vectors, index_t vector, KeyRange keys) {
      products_.accumulate[vectors - 1](piece.panels + (at + keys.begin) * products_.rows, products_.rows,
                                        piece.panel_stride, memory_.d_pitch / products_.rows,
                                        rounded.pairs + tuple_at<A, E>(keys.begin, vector * width, group),
                                        keys.size(), dq + vector * width);
      for (index_t key = keys.begin; !piece.finite && key < keys.end; ++key) {
        if (!piece.are_finite[at + key])
          add_key(piece, g, {vector * width, (vector + vectors) * width}, key, at, dq);
      }
    });
    return true;
  }

  /// Weights and gradients of 0.
  void hide(KeyRange lanes, KeyRange keys) const {
    const auto& rounded = memory_.rounded;
    for (index_t key = keys.begin; key < keys.end; ++key) {
      std::fill_n(rounded.weights + key * rounded.lanes + lanes.begin, lanes.size(), E{});
      std::fill_n(rounded.gradients + key * rounded.lanes + lanes.begin, lanes.size(), E{});
    }
  }

  /// One vector of queries, lanes from `lane` on, and keys `part` of the block.
  void form_gradients(index_t lane, KeyRange block, KeyRange part, const Column& column) const {
    const auto& rounded = memory_.rounded;
    const KeyRange keys{block.begin + part.begin, block.begin + part.end};
    const index_t group = memory_.group, tile = part.begin * group + lane % group,
                  stride = memory_.sums_of_row;
    A *s = memory_.s + tile, *u = memory_.u + tile, *z = memory_.z + tile, *slope = memory_.slope + tile;
    const A *multiplier = rounded.multiplier + lane, *offset = rounded.offset + lane;
    const QueryRow* rows = memory_.rows + lane;
    const TileColumn<A> logits{s, keys, rows, length_};
    double* sums = memory_.sums + lane * stride;
    A* dc = learns_ && !variant_.has_score ? memory_.lanes : nullptr;
    const index_t row = part.begin * rounded.lanes + lane;
    const RoundedGradients<A, E> to{
        rounded.weights + row, rounded.gradients + row,
        rounded.lanes,         rounded.pairs + tuple_at<A, E>(part.begin, lane % group, group),
        rounded.factor + lane, dc};
    const bool regular = std::all_of(memory_.regular + lane, memory_.regular + lane + products_.width,
                                     [](bool r) { return r; });
    const bool is_plain = !variant_.has_score && !variant_.has_predicate && !column.hides(keys);
    if (is_plain && regular) {
      rounded_kernels_.form(z, u, part.size(),
                            {multiplier, offset, memory_.shift + lane, memory_.delta + lane}, to);
    } else {
      if (variant_.has_score || variant_.has_predicate) {
        A *none = memory_.lanes, *one = memory_.lanes + group;
        std::fill_n(none, group, A{0});
        rounded_kernels_.place(z, part.size(), multiplier, none, s);
        if (variant_.has_score) {
          variant_.apply_and_keep(logits, z, slope, memory_);
        } else {
          variant_.apply(logits, memory_);
        }
        std::fill_n(one, group, A{1});
        rounded_kernels_.place(s, part.size(), one, offset, s);
      } else {
        rounded_kernels_.place(z, part.size(), multiplier, offset, s);
      }
      if (column.hides(keys)) hide_keys(memory_, s, keys, rows);
      if (regular) {
        rounded_kernels_.gradients(s, u, part.size(), memory_.shift + lane, memory_.delta + lane);
      } else {
        irregular_gradients(memory_, lane, part.size(), s, u);
      }
      if (variant_.has_score) variant_.differentiate(logits, {u, z, slope, sums, stride}, memory_);
      rounded_kernels_.round(s, u, z, part.size(), to);
    }
    for (index_t i = 0; dc != nullptr && i < products_.width; ++i) {
      sums[i * stride] += scale_ * static_cast<double>(dc[i]);
    }
  }

  /// Adds to dv and dk of the keys from row `at` of the piece on what these lanes give them.
  void add_lanes(const BlockKeys<A, E>& piece, KeyRange lanes, index_t at) const {
    const auto& rounded = memory_.rounded;
    const index_t keys = std::min(gradient_block, piece.range.size() - at), first = lanes.begin,
                  passes = (keys + products_.rows - 1) / products_.rows * products_.rows,
                  depth = (lanes.size() + products_.depth - 1) / products_.depth * products_.depth;
    A *dk = piece.dk + at * memory_.d_pitch, *dv = piece.dv + at * memory_.dv_pitch;
    rounded_kernels_.add_product(rounded.weights + first, rounded.lanes, depth, passes,
                                 rounded.dout_pairs + first * memory_.dv_pitch, memory_.dv_pitch, dv);
    rounded_kernels_.add_product(rounded.gradients + first, rounded.lanes, depth, passes,
                                 rounded.q_pairs + first * memory_.d_pitch, memory_.d_pitch, dk);
    for (index_t lane = lanes.begin; lane < lanes.end; ++lane) {
      if (memory_.finite[lane / memory_.group] || memory_.queries_are_finite[lane]) continue;
      add_lane(rounded.weights + lane, keys, memory_.dout_rows + lane * memory_.dv_pitch, dv_, dv,
               memory_.dv_pitch);
      add_lane(rounded.gradients + lane, keys, memory_.q_rows + lane * memory_.d_pitch, d_, dk,
               memory_.d_pitch);
    }
  }

  /// Adds what the products left out of a row that is not finite, where its factor is not 0.
  void add_lane(const E* factors, index_t keys, const E* row, index_t channels, A* sums,
                index_t pitch) const {
    for (index_t c = 0; c < channels; ++c) {
      const A value = static_cast<A>(row[c]);
      if (std::isfinite(value)) continue;
      for (index_t key = 0; key < keys; ++key) {
        const A factor = static_cast<A>(factors[key * memory_.rounded.lanes]);
        if (factor != 0) sums[key * pitch + c] += factor * value;
      }
    }
  }

  /// The same for a key whose row of K is not finite, and dq of some lanes of a group.
  void add_key(const BlockKeys<A, E>& piece, index_t g, KeyRange lanes, index_t key, index_t at,
               A* dq) const {
    const index_t group = memory_.group;
    const E* factors = memory_.rounded.gradients + key * memory_.rounded.lanes + g * group;
    for (index_t c = 0; c < d_; ++c) {
      const A value = static_cast<A>(piece.k[(at + key) * piece.k_stride + c]);
      if (std::isfinite(value)) continue;
      for (index_t lane = lanes.begin; lane < lanes.end; ++lane) {
        const A factor = static_cast<A>(factors[lane]);
        if (factor != 0) dq[c * group + lane] += factor * value;
      }
    }
  }

  const GradientVariant<A>& variant_;
  const PrefillKernels<A, E>& products_;
  const RoundedBackwardKernels<A, E>& rounded_kernels_;
  const BackwardScratch<A, E>& memory_;
  index_t d_, dv_;
  index_t length_;  // keys there are
  double scale_;
  bool learns_;
};

SSMAX_END
