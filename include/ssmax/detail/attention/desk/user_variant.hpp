// Implements Variant with the user's mask, scaling and score function. A class for each of them, so that combinations
// share the code of their masks and score functions.
#pragma once

#include "user_score.hpp"

SSMAX_BEGIN_DETAIL

/// `Base` is UserScore or UserGradientScore.
template <class Compute, class S, class M, class C, class Base = UserScore<Compute, M, C>>
class UserVariant : public Base {
 public:
  const S& scaling;

  UserVariant(const S& a_scaling, const M& a_mask, const C& a_score)
      : Base(facts_with(facts_of_mask(a_mask)), a_mask, a_score), scaling(a_scaling) {}

  QueryRow row(const Query& query, KeyRange stored) const override {
    Row scaled{};
    QueryRow result = this->masked_row(query, stored, scaled);
    if (scaled.n != 0)
      result.multiplier = static_cast<double>(scaling(PlacedRow{scaled, query.batch, query.index}));
    return result;
  }

  void check_logits(const char* function, const QueryShape& shape) const override {
    check_score(this->score, shape);
    check_scaling(function, scaling, shape);
  }

 private:
  /// Returns the facts about the mask, with those about score function and scaling.
  static VariantFacts facts_with(const VariantFacts& of_mask) {
    return {.has_score = !std::same_as<C, Identity>,
            .has_predicate = of_mask.has_predicate,
            .has_runs = of_mask.has_runs,
            .shows_same_keys = of_mask.shows_same_keys && detail::depends_on_size_only<S>,
            .has_positions = of_mask.has_positions,
            .rotated_to_positions = of_mask.rotated_to_positions,
            .refuses_lengths = of_mask.refuses_lengths};
  }
};

SSMAX_END
