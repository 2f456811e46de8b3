// Implements GradientVariant with the user's mask, scaling and score function.
//
// | gradients of the score function | how the score function is differentiated |
// |---|---|
// | no parameters, no gradients | in the forward step: dz'/dz is the product of the parts' derivatives |
// | only a row of its last part (a Bias) | in the forward step, if the part has a row for its gradients |
// | all others | in the backward step: part by part, key by key |
#pragma once

#include "../../kernels/prefill_backward.hpp"
#include "../terms/variant.hpp"
#include "user_variant.hpp"

SSMAX_BEGIN_DETAIL

/// The types of the parts of a Composed score function.
template <class C>
using FirstOf = std::remove_cvref_t<decltype(std::declval<const C&>().first())>;
template <class C>
using SecondOf = std::remove_cvref_t<decltype(std::declval<const C&>().second())>;

/// Returns the number of parameters of a score function per query.
template <class C>
constexpr index_t parameters_of() {
  if constexpr (shared::is_composed<C>) return parameters_of<FirstOf<C>>() + parameters_of<SecondOf<C>>();
  return HasParameterGradient<C> ? 1 : 0;
}

template <class C>
constexpr bool has_logit_gradients() {
  if constexpr (shared::is_composed<C>)
    return has_logit_gradients<FirstOf<C>>() || has_logit_gradients<SecondOf<C>>();
  return HasLogitGradients<C>;
}

/// Returns whether the row of its last part is the only gradient of a score function.
template <class C>
constexpr bool has_row_gradient() {
  if constexpr (shared::is_composed<C>) {
    return parameters_of<FirstOf<C>>() == 0 && !has_logit_gradients<FirstOf<C>>() &&
           has_row_gradient<SecondOf<C>>();
  }
  return HasRowGradient<C>;
}

template <class C>
Sharing sharing_of(const C& score, const QueryShape& shape) {
  if constexpr (shared::is_composed<C>)
    return std::max(sharing_of(score.first(), shape), sharing_of(score.second(), shape));
  if constexpr (has_sharing<C>) return score.sharing(shape);
  return HasLogitGradients<C> ? Sharing::any : Sharing::one_head;
}

/// The functions that depend on mask and score function, but not on the scaling.
template <class Compute, class M, class C>
class UserGradientScore : public UserScore<Compute, M, C, GradientVariant<Compute>> {
  using Base = UserScore<Compute, M, C, GradientVariant<Compute>>;
  static constexpr bool score_has_gradients = parameters_of<C>() > 0 || has_logit_gradients<C>();

 public:
  using Base::score;

  void apply_and_keep(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const override {
    const index_t tile_lanes = memory.tile_lanes, width = memory.kernels.width;
    const auto keep = [&] {
      for (index_t at = 0; at < logits.keys.size(); ++at) {
        std::copy_n(logits.s + at * tile_lanes, width, logits.z + at * tile_lanes);
      }
    };
    if constexpr (!score_has_gradients || has_row_gradient<C>()) {
      if (is_vectorized(logits)) {
        for (index_t at = 0; at < logits.keys.size(); ++at)
          std::fill_n(logits.slope + at * tile_lanes, width, Compute{1});
        apply_and_differentiate(score, logits, memory);
        keep();
      }
    }
    if constexpr (score_has_gradients) {
      if (!is_vectorized(logits)) {
        keep();
        this->apply_score(score, logits, memory);
      }
    }
    this->multiply(logits, memory);
    this->mask_single(logits, memory);
  }

  void differentiate(const Logits<Compute>& logits, const LogitGradients<Compute>& gradients,
                     const TileScratch<Compute>& memory) const override {
    if constexpr (!score_has_gradients || has_row_gradient<C>()) {
      if (is_vectorized(logits)) differentiate_vectors(logits, gradients, memory);
    }
    if constexpr (score_has_gradients) {
      if (!is_vectorized(logits)) differentiate_each(logits, gradients, memory);
    }
  }

  index_t parameters() const override { return parameters_of<C>(); }
  Sharing sharing(const QueryShape& shape) const override { return sharing_of(score, shape); }

 protected:
  using Base::Base;

  template <class Part>
  static void accumulate_score(const Part& part, const Query& query, const double* parameters) {
    if constexpr (shared::is_composed<Part>) {
      accumulate_score(part.first(), query, parameters);
      accumulate_score(part.second(), query, parameters + parameters_of<FirstOf<Part>>());
    } else if constexpr (HasParameterGradient<Part>) {
      part.accumulate(query, *parameters);
    }
  }

 private:
  bool is_vectorized([[maybe_unused]] const Logits<Compute>& logits) const {
    if constexpr (has_row_gradient<C>()) return gradient_row(score, logits.rows[0].query) != nullptr;
    return !score_has_gradients;
  }

  /// Returns the row to which the gradients dz' of the query's keys are added, or null.
  template <class Part>
  static auto* gradient_row(const Part& part, const Query& query) {
    if constexpr (shared::is_composed<Part>) {
      return gradient_row(part.second(), query);
    } else {
      return part.gradient_row(query);
    }
  }

  void differentiate_vectors(const Logits<Compute>& logits, const LogitGradients<Compute>& gradients,
                             const TileScratch<Compute>& memory) const {
    const index_t width = memory.kernels.width;
    Compute *multiplier = memory.lane.multiplier, *dc = memory.lane.dc;
    for (index_t lane = 0; lane < width; ++lane) {
      multiplier[lane] = static_cast<Compute>(logits.rows[lane].multiplier);
    }
    if constexpr (has_row_gradient<C>())
      add_rows_of_gradient(logits, gradients.u, multiplier, memory.tile_lanes, width);
    kernels<PrefillBackwardKernels<Compute>>().score_gradients(gradients.u, logits.keys.size(), logits.z,
                                                               logits.slope, multiplier, dc);
    for (index_t lane = 0; lane < width; ++lane) {
      gradients.sums[lane * gradients.stride] += static_cast<double>(dc[lane]);
    }
  }

  /// Adds dz' = c·u of each query's keys to the query's row.
  void add_rows_of_gradient(const Logits<Compute>& logits, const Compute* u, const Compute* multiplier,
                            index_t tile_lanes, index_t width) const {
    for (index_t lane = 0; lane < width; ++lane) {
      const QueryRow& row = logits.rows[lane];
      const index_t last = std::min(logits.keys.end, row.keys.end);
      auto* gradients = gradient_row(score, row.query);
      for (index_t key = std::max(logits.keys.begin, row.keys.begin); key < last; ++key) {
        const Compute du = u[(key - logits.keys.begin) * tile_lanes + lane];
        // u is 0 if the key is masked, also if c is infinite.
        if (du != 0)
          gradients[key] += static_cast<std::remove_pointer_t<decltype(gradients)>>(multiplier[lane] * du);
      }
    }
  }

  void differentiate_each(const Logits<Compute>& logits, const LogitGradients<Compute>& gradients,
                          const TileScratch<Compute>& memory) const {
    const index_t tile_lanes = memory.tile_lanes;
    for_each_visible(
        logits, memory.kernels.width, [&](index_t at, index_t lane, const Query& query, index_t key) {
          Compute& u = gradients.u[at * tile_lanes + lane];
          if (u == 0) return;
          double* sums = gradients.sums + lane * gradients.stride;
          const Key seen = Base::key_of(query, key);
          const Compute dz = static_cast<Compute>(logits.rows[lane].multiplier) * u;
          Compute value{};
          const Compute before =
              differentiate_key(score, logits.z[at * tile_lanes + lane], dz, seen, sums + 1, value);
          sums[0] += static_cast<double>(u) * static_cast<double>(value);
          u = before;
        });
  }

  template <class Part>
  void apply_and_differentiate(const Part& part, const Logits<Compute>& logits,
                               const TileScratch<Compute>& memory) const {
    if constexpr (shared::is_composed<Part>) {
      apply_and_differentiate(part.first(), logits, memory);
      apply_and_differentiate(part.second(), logits, memory);
    } else {
      this->with_moves_keys(
          [&](auto moves) { apply_and_differentiate_part<moves.value>(part, logits, memory); });
    }
  }

  template <bool moves_keys, class Part>
  void apply_and_differentiate_part(const Part& part, const Logits<Compute>& logits,
                                    const TileScratch<Compute>& memory) const {
    Compute* slope = logits.slope;
    const index_t tile_lanes = memory.tile_lanes;
    if constexpr (has_slope_kernel<Part> || by_row<Part>) {
      this->apply_score(part, logits, memory);  // z plus a term: the derivative is 1
    } else if constexpr (Base::template uses_lanes<Part, moves_keys>) {
      Base::template for_each_key_lanes<Part>(logits, memory, [&](index_t at, const auto& lanes) {
        part.apply(lanes);
        using Made = std::conditional_t<reads_place<Part>, PlacedLanes<const Compute>, Lanes<const Compute>>;
        part.differentiate(Made(lanes), slope + at * tile_lanes);
      });
    } else if constexpr (Base::template scales_by_distance<Part, moves_keys>) {
      this->scale_by_distance(part, logits, slope, memory);
    } else {
      for_each_visible(logits, memory.kernels.width,
                       [&](index_t at, index_t lane, const Query& query, index_t key) {
                         if (!Base::sees(query, key)) return;
                         Compute& z = logits.s[at * tile_lanes + lane];
                         const Key seen = Base::key_of(query, key);
                         slope[at * tile_lanes + lane] *= static_cast<Compute>(part.derivative(z, seen));
                         z = static_cast<Compute>(part(z, seen));
                       });
    }
  }

  /// Returns ∂loss/∂z at one key, computed from dz = ∂loss/∂z'. Sets `value` to z'.
  template <class Part>
  static Compute differentiate_key(const Part& part, Compute z, Compute dz, const Key& key,
                                   double* parameters, Compute& value) {
    if constexpr (shared::is_composed<Part>) {
      Compute between{};
      const Compute inner = differentiate_key(part.second(), static_cast<Compute>(part.first()(z, key)), dz,
                                              key, parameters + parameters_of<FirstOf<Part>>(), value);
      return differentiate_key(part.first(), z, inner, key, parameters, between);
    } else {
      value = static_cast<Compute>(part(z, key));
      if constexpr (HasParameterGradient<Part>) {
        *parameters += static_cast<double>(dz) * static_cast<double>(part.parameter_derivative(z, key));
      }
      if constexpr (HasLogitGradients<Part>) part.accumulate(key, static_cast<double>(dz));
      return dz * static_cast<Compute>(part.derivative(z, key));
    }
  }
};

template <class Compute, class S, class M, class C>
class UserGradientVariant final : public UserVariant<Compute, S, M, C, UserGradientScore<Compute, M, C>> {
  using Base = UserVariant<Compute, S, M, C, UserGradientScore<Compute, M, C>>;

 public:
  using Base::Base;

  void accumulate(const Query& query, const Row& row, const double* sums) const override {
    if constexpr (LearnableScaling<S>) {
      if (row.n > 0) this->scaling.accumulate(PlacedRow{row, query.batch, query.index}, sums[0]);
    }
    Base::accumulate_score(this->score, query, sums + 1);
  }

  bool wants_gradients() const override { return LearnableScaling<S> || parameters_of<C>() > 0; }
};

/// The variant of a backward pass with these policies.
template <class A, class Given>
using GradientVariantOf = UserGradientVariant<A, typename Given::S, typename Given::M, typename Given::C>;

SSMAX_END
