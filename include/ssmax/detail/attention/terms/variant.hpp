// Defines Variant and GradientVariant, the interfaces of mask, scaling and score function to the loops of attention and
// of its backward pass. The interfaces let the loops be compiled once per element type instead of once per combination
// of the three. A virtual call costs about 2 ns, once per query or per vector of a tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../../../row.hpp"
#include "../../../score.hpp"
#include "../../kernels/prefill.hpp"
#include "problem.hpp"

SSMAX_BEGIN_SHARED

/// The logits of one vector of queries against some keys. The logit of (key, lane) is s[(key - keys.begin) ·
/// tile_lanes + lane]. The other arrays over keys have the layout of s.
template <class Compute>
struct Logits {
  Compute* s;
  KeyRange keys;         // whole passes of the kernels; keys from `length` on do not exist
  const QueryRow* rows;  // [vector length]
  index_t length;        // number of keys of the sequence
  /// The backward pass only. z is the logit that the score function returned, or its argument (see apply_and_keep).
  /// slope is the score function's derivative. Exception: without a score function, the bf16 path stores the product
  /// in z.
  Compute *z = nullptr, *slope = nullptr;
  /// Pending operations, if given, one number per lane: s·multiplier or, with an offset, z·multiplier - offset.
  const Compute *multiplier = nullptr, *offset = nullptr;
};

/// One number per lane of a tile, [tile_lanes] each. The name says which step writes and reads the numbers.
template <class Compute>
struct LaneNumbers {
  Compute *q_factor, *row_factor;          // factors of queries that are loaded into lanes, and into rows
  Compute* rescale;                        // states: factors of earlier sums
  Compute *multiplier, *slope, *distance;  // score functions
  Compute *first, *last;                   // masks: the visible keys of a lane
  Compute* dc;                             // gradients of the multipliers
  Compute *zero, *one;                     // constants
};

/// The scratch memory of one thread for one vector of queries.
template <class Compute>
struct TileScratch {
  const PrefillKernels<Compute>& kernels;
  index_t tile_lanes;
  const Compute** in;  // [vector length]: rows to be transposed
  Compute* wide;       // [vector length][key_block]: rows to be transposed that are not stored as Compute
  LaneNumbers<Compute> lane;
  Compute*
      transposed;  // [vector length][key_block]: numbers per key and lane, and weights that the kernels cannot compute
};

/// The hull of the visible keys of some queries.
struct Hull {
  // Before the first query is added, `any` is empty and `all` is unbounded.
  KeyRange any{std::numeric_limits<index_t>::max(), 0};  // first to last key visible to a query
  KeyRange all{0, std::numeric_limits<index_t>::max()};  // keys that are visible to all queries

  SSMAX_INLINE constexpr Hull() = default;
  SSMAX_INLINE void add(KeyRange keys) {
    all = {std::max(all.begin, keys.begin), std::min(all.end, keys.end)};
    if (keys.size() > 0) any = {std::min(any.begin, keys.begin), std::max(any.end, keys.end)};
  }
  SSMAX_INLINE void add(const Hull& other) {
    all = {std::max(all.begin, other.all.begin), std::min(all.end, other.all.end)};
    any = {std::min(any.begin, other.any.begin), std::max(any.end, other.any.end)};
  }
  /// Returns whether a key of the block is masked for some query.
  SSMAX_INLINE bool masks(KeyRange block) const { return block.begin < all.begin || block.end > all.end; }
};

/// Facts about the types of mask, scaling and score function.
struct VariantFacts {
  const bool has_score;
  const bool has_predicate;         // some keys of a query's range may be masked
  const bool has_runs;              // such a mask gives its runs, so that `sees` is not called per logit
  const bool shows_same_keys;       // all queries of a batch entry and head have the same visible keys and c
  const bool has_positions;         // the mask defines positions
  const bool rotated_to_positions;  // as the mask's member
  const bool refuses_lengths;       // the mask counts the rows of a call without lengths
};

template <class Compute>
class Variant : public VariantFacts {
 public:
  Variant(const Variant&) = delete;
  Variant& operator=(const Variant&) = delete;

  /// Returns the keys of `stored` that may be visible to a query, the multiplier c, and n.
  virtual QueryRow row(const Query& query, KeyRange stored) const = 0;
  virtual index_t query_position(const Query& query) const = 0;
  /// Returns the position with which the scaling is called.
  SSMAX_INLINE index_t row_position(const Query& query) const {
    return std::max<index_t>(0, query_position(query));
  }
  virtual index_t key_position(const Query& query, index_t key) const = 0;
  virtual bool sees(const Query& query, index_t key) const = 0;
  /// Applies the score function in place, if there is one, and multiplies its results by c·log2(e). Without a score
  /// function, the queries were multiplied by this factor. The results are logits in units of log2. Sets the logits
  /// of keys that the mask's member `sees` rejects to -inf.
  virtual void apply(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const = 0;
  /// Does what the function above does for the contiguous logits of one query, but without the multiplier.
  virtual void apply(Compute* s, KeyRange keys, const QueryRow& row) const = 0;

  // The functions below require a mask with runs. They read `count` rows, or only the first row if has_same_runs
  // returned true.
  /// Returns whether all rows are known to have the same visible keys.
  virtual bool has_same_runs(const QueryRow* rows, index_t count) const = 0;
  /// Returns the first key at or after `from` that is visible to some row, or the largest index_t if no key is.
  virtual index_t next_visible(const QueryRow* rows, index_t count, index_t from) const = 0;
  /// Returns one bit per block of `block_keys` keys, from keys.begin on. The bit is set if a key of the block is
  /// visible to some row.
  virtual std::uint32_t visible_blocks(const QueryRow* rows, index_t count, KeyRange keys,
                                       index_t block_keys) const = 0;
  /// Returns the hull of the runs that begin in `keys` or before. Runs are cut at keys.begin, not at keys.end. If a
  /// row has several runs there, `all` is empty.
  virtual Hull hull(const QueryRow* rows, index_t count, KeyRange keys) const = 0;
  /// Sets the logits of masked keys to -inf.
  virtual void mask_runs(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const = 0;

  // Checks call the functions below.
  /// Throws unless the mask fits.
  virtual void check_mask(const QueryShape& shape) const = 0;
  /// Throws unless scaling and score function fit.
  virtual void check_logits(const char* function, const QueryShape& shape) const = 0;
  /// Returns the first key of a range that is visible to a query, or the end of the range.
  virtual index_t first_visible(const Query& query, KeyRange range) const = 0;

 protected:
  SSMAX_INLINE explicit Variant(const VariantFacts& facts) : VariantFacts(facts) {}
  SSMAX_INLINE ~Variant() = default;
};

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
  /// Passes a query's sums to the scaling and the score function. `row` is the Row with which the scaling was
  /// called.
  virtual void accumulate(const Query& query, const Row& row, const double* sums) const = 0;
  /// Returns whether the scaling or the score function has parameters that need gradients.
  virtual bool wants_gradients() const = 0;
  /// Returns the number of parameters of the score function per query.
  virtual index_t parameters() const = 0;
  virtual Sharing sharing(const QueryShape& shape) const = 0;

 protected:
  SSMAX_INLINE explicit GradientVariant(const VariantFacts& facts) : Variant<Compute>(facts) {}
  SSMAX_INLINE ~GradientVariant() = default;
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Returns where a query is rotated to.
template <class Compute>
RopePlace rope_place(const Problem<Compute>& problem, const Variant<Compute>& variant, const Query& query) {
  const bool by_mask = problem.rotation != Rotation::stored;
  return {problem.key_position + (by_mask ? variant.query_position(query) : query.position()), query.batch};
}

SSMAX_END
