// Defines GradientVariant, the interface of mask, scaling and score function to the loops of the backward pass.
#pragma once

#include "../../../row.hpp"
#include "../../../score.hpp"
#include "variant.hpp"

SSMAX_BEGIN_SHARED

/// The gradients of the logits of one vector of queries, in the layout of Logits.
template <class Compute>
struct LogitGradients {
  Compute* u;      // ∂loss / ∂(c·z'), where z' is the score function's result
  double* sums;    // [vector length][sums_of_row]: dc, then the score's parameters
  index_t stride;  // of sums, from lane to lane
};

template <class Compute>
class GradientVariant : public Variant<Compute> {
 public:
  /// Does what `apply` does with a score function, and writes values for `differentiate`:
  ///
  /// | score function | logits.z | logits.slope |
  /// |---|---|---|
  /// | differentiated in the forward step | its result z' | dz'/dz |
  /// | differentiated key by key | its argument z | not written |
  virtual void apply_and_keep(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const = 0;
  /// Replaces u by ∂loss / ∂z. Adds dc and the gradients of the score's parameters to the sums of the queries.
  virtual void differentiate(const Logits<Compute>& logits, const LogitGradients<Compute>& gradients,
                             const TileScratch<Compute>& memory) const = 0;
  /// Returns the position with which the scaling is called.
  virtual index_t row_position(const Query& query) const = 0;
  /// Passes a query's sums to the scaling and the score function. `row` is the Row with which the scaling was
  /// called.
  virtual void accumulate(const Query& query, const Row& row, const double* sums) const = 0;
  /// Returns whether the scaling or the score function has parameters that need gradients.
  virtual bool wants_gradients() const = 0;
  /// Returns the number of parameters of the score function per query.
  virtual index_t parameters() const = 0;
  virtual Sharing sharing(const QueryShape& shape) const = 0;

 protected:
  SSMAX_INLINE GradientVariant(bool scores, bool predicates, bool runs, bool same_keys)
      : Variant<Compute>(scores, predicates, runs, same_keys) {}
  SSMAX_INLINE ~GradientVariant() = default;
};

SSMAX_END
