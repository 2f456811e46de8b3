// What attention's backward asks of a mask, a scaling and a score besides what the forward asks.
#pragma once

#include "../../../row.hpp"
#include "../../../score.hpp"
#include "variant.hpp"

SSMAX_BEGIN_SHARED

/// The gradients of one vector of queries' logits, in the layout of Logits.
template <class A>
struct LogitGradients {
  A* u;            // ∂loss / ∂(c·z'), where z' is the score function's result
  double* sums;    // [vector length][sums_of_row]: dc, then the score's parameters
  index_t stride;  // of sums, from lane to lane
};

template <class A>
class GradientVariant : public Variant<A> {
 public:
  /// `apply` with a score function. Writes logits.z and logits.slope for `differentiate`: z' and dz'/dz or, for scores
  /// that are differentiated key by key, z alone.
  virtual void apply_and_keep(const Logits<A>& logits, const TileScratch<A>& memory) const = 0;
  /// u becomes ∂loss / ∂z; dc and the gradients of the score's parameters are added to the queries' sums.
  virtual void differentiate(const Logits<A>& logits, const LogitGradients<A>& gradients,
                             const TileScratch<A>& memory) const = 0;
  /// Hands a query's sums to the scaling, which was asked about `row`, and the score.
  virtual void accumulate(const Query& query, const Row& row, const double* sums) const = 0;
  /// Whether there is anyone to hand them to.
  virtual bool learns() const = 0;
  /// Parameters of the score of one query.
  virtual index_t parameters() const = 0;
  virtual Sharing sharing(const QueryShape& shape) const = 0;

 protected:
  SSMAX_INLINE GradientVariant(bool scores, bool predicates, bool runs, bool same_keys)
      : Variant<A>(scores, predicates, runs, same_keys) {}
  SSMAX_INLINE ~GradientVariant() = default;
};

SSMAX_END
