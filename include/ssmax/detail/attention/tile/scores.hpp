// Computes the logits of a tile: the product of q and k, the multipliers scale and c, the score function, and the
// mask.
#pragma once

#include <numbers>

#include "../operands/operands.hpp"
#include "scratch.hpp"
#include "visibility.hpp"

SSMAX_BEGIN_DETAIL

/// The multipliers scale and c. Without a score function, scale·c is one factor. A score function receives
/// scale·q·k, and its result is multiplied by c.
class Multipliers {
 public:
  template <class Compute>
  Multipliers(double scale, const Variant<Compute>& variant) : has_score(variant.has_score), scale_(scale) {}

  const bool has_score;

  /// Returns the factor of the product of q and k. The product times this factor is a logit in units of log2 or,
  /// with a score function, the argument of that function. Exception: without a visible key there is no c, and the
  /// factor is scale.
  [[nodiscard]] double of_product(const QueryRow& row) const {
    return scale_ * (has_score || row.keys.size() <= 0 ? 1 : row.multiplier * std::numbers::log2e);
  }
  /// Returns the factor of the backward pass's products with q and with k.
  [[nodiscard]] double of_gradient(double c) const { return has_score ? scale_ : scale_ * c; }

  /// Returns the multiplier of the softmax in the decode path. Its argument is the product or the score function's
  /// result.
  [[nodiscard]] double of_softmax(const QueryRow& row) const {
    return has_score ? row.multiplier : scale_ * row.multiplier;
  }

 private:
  double scale_;
};

/// Computes logits. V is Variant or, for the backward pass, GradientVariant. GradientVariant keeps z and slope for
/// the gradient.
template <class Compute, class Operand, class V>
class Scores {
 public:
  static constexpr bool is_backward =
      requires(const V& variant, const Logits<Compute>& logits, const TileScratch<Compute>& memory) {
    variant.apply_and_keep(logits, memory);
  };

  Scores(const V& variant, double scale, const PrefillKernels<Compute, Operand>& products,
         const LaneScratch<Compute, Operand>& memory)
      : multipliers(scale, variant), variant_(variant), products_(products), memory_(memory) {}

  const Multipliers multipliers;

  /// Returns whether the call has no score function and no mask that is applied key by key.
  [[nodiscard]] bool are_plain() const {
    return !multipliers.has_score && (!variant_.has_predicate || variant_.has_runs);
  }
  /// Returns whether the logits of the given keys are products times the multiplier, without score function or mask.
  [[nodiscard]] bool are_plain(const Hull& hull, KeyRange keys) const {
    return are_plain() && !hull.masks(keys);
  }

  /// Multiplies rows of K (or V) by the lanes of a tile (q or dout). Writes s[key][lane] for the needed keys of a
  /// block.
  void multiply(const NeededKeys& needed, index_t keys, StridedRows<const Operand> k, index_t depth,
                const Operand* lanes, Compute* s) const {
    const index_t tile_lanes = memory_.tile_lanes, width = products_.width;
    needed.for_each_rectangle(keys, [&](index_t vectors, index_t v, KeyRange part) {
      products_.logits[vectors - 1](k[part.begin], k.stride, depth, part.size(),
                                    lanes + v * width * Operands<Compute, Operand>::tuple,
                                    s + part.begin * tile_lanes + v * width);
    });
  }

  /// Turns products into logits in units of log2: applies the score function and the mask. Exception: in the forward
  /// pass a pending multiplier stays pending without a score function. The softmax then applies the multiplier, so that
  /// a mask takes the same products with and without runs.
  void form(Logits<Compute>& logits, const Hull& hull) const {
    if (multipliers.has_score) {
      apply_multiplier(logits);
      if constexpr (is_backward) {
        variant_.apply_and_keep(logits, memory_);
        if constexpr (Operands<Compute, Operand>::is_bf16)
          place(logits, logits.s, memory_.lane.one, logits.offset);
      } else {
        variant_.apply(logits, memory_);
      }
    } else {
      if constexpr (is_backward && Operands<Compute, Operand>::is_bf16)
        place(logits, logits.z, logits.multiplier, logits.offset);
      if (!are_plain()) variant_.apply(logits, memory_);
    }
    if (!hull.masks(logits.keys)) return;
    if (variant_.has_runs) return variant_.mask_runs(logits, memory_);
    mask_keys(memory_, logits);
  }

  void apply_multiplier(Logits<Compute>& logits) const {
    if constexpr (Operands<Compute, Operand>::is_bf16) {
      if constexpr (is_backward) {
        place(logits, logits.z, logits.multiplier, memory_.lane.zero);
      } else if (logits.multiplier != nullptr) {
        products_.multiply(logits.s, logits.keys.size(), logits.multiplier);
        logits.multiplier = nullptr;
      }
    }
  }

 private:
  void place(Logits<Compute>& logits, const Compute* from, const Compute* multiplier,
             const Compute* offset) const {
    products_.place(from, logits.keys.size(), multiplier, offset, logits.s);
  }

  const V& variant_;
  const PrefillKernels<Compute, Operand>& products_;
  const LaneScratch<Compute, Operand>& memory_;
};

SSMAX_END
