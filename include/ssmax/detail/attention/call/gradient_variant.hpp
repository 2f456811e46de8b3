// What attention's backward asks of a mask, a scaling and a score besides what the forward asks.
#pragma once

#include "../../../row.hpp"
#include "../../../score.hpp"
#include "variant.hpp"

SSMAX_BEGIN_SHARED

/// One vector of queries behind a score, as the forward part of the backward left it. All are [key][group].
template <class A>
struct ScoredColumn {
  A* u;            // ∂loss / ∂(c·z')
  A *z, *slope;    // what apply_and_keep left: z' and dz'/dz, or z and nothing
  double* sums;    // [width][sums_of_row]: dc, then the score's parameters
  index_t stride;  // of sums, from lane to lane
};

template <class A>
class GradientVariant : public Variant<A> {
 public:
  /// `apply` for many queries of a score, keeping what `differentiate` needs in z and slope.
  virtual void apply_and_keep(const TileColumn<A>& column, A* z, A* slope,
                              const ColumnScratch<A>& memory) const = 0;
  /// u becomes ∂loss / ∂z; dc and the gradients of the score's parameters are added to the queries' sums.
  virtual void differentiate(const TileColumn<A>& column, const ScoredColumn<A>& scored,
                             const ColumnScratch<A>& memory) const = 0;
  /// Hands a query's sums to the scaling, which was asked about `row`, and the score.
  virtual void accumulate(const Query& query, const Row& row, const double* sums) const = 0;
  /// Whether there is anyone to hand them to.
  virtual bool learns() const = 0;
  /// Parameters of the score of one query.
  virtual index_t parameters() const = 0;
  virtual Sharing sharing(const QueryShape& shape) const = 0;

 protected:
  SSMAX_INLINE GradientVariant(bool scores, bool predicates, bool same_keys)
      : Variant<A>(scores, predicates, same_keys) {}
  SSMAX_INLINE ~GradientVariant() = default;
};

SSMAX_END
