// Masks drawn at random: the library's own behind one interface, and beside it which keys each query sees by
// the mask's definition, key by key.
#pragma once

#include <memory>
#include <ssmax/mask.hpp>
#include <string>
#include <vector>

#include "random.hpp"

namespace fuzz {

using ssmax::KeyRange;
using ssmax::Query;
using ssmax::QueryShape;

/// A mask of any type. What the library asks of a mask is known to it by type: RangeMask and those below say so.
class AnyMask {
 public:
  virtual ~AnyMask() = default;
  virtual KeyRange keys(const Query& query) const = 0;
  virtual bool sees(const Query& query, index_t key) const = 0;
  virtual index_t query_position(const Query& query) const = 0;
  virtual index_t key_position(const Query& query, index_t key) const = 0;
  virtual Query aligned(const Query& query) const = 0;
  virtual KeyRange run(const Query& query, index_t from) const = 0;
  virtual index_t count(const Query& query) const = 0;
  virtual bool same_runs(const Query& query, const Query& other) const = 0;
  virtual void check(const QueryShape& shape) const = 0;
};

/// The library's or the user's mask M, and what its spans point to.
template <class M>
class Held final : public AnyMask {
 public:
  Held(M mask, std::shared_ptr<const void> memory) : mask_(std::move(mask)), memory_(std::move(memory)) {}

  KeyRange keys(const Query& query) const override { return mask_.keys(query); }
  bool sees(const Query& query, index_t key) const override { return ssmax::detail::sees(mask_, query, key); }
  index_t query_position(const Query& query) const override {
    return ssmax::detail::query_position(mask_, query);
  }
  index_t key_position(const Query& query, index_t key) const override {
    return ssmax::detail::key_position(mask_, query, key);
  }
  Query aligned(const Query& query) const override { return ssmax::detail::aligned(mask_, query); }
  KeyRange run(const Query& query, index_t from) const override {
    return ssmax::detail::next_run(mask_, query, from);
  }
  index_t count(const Query& query) const override {
    return ssmax::detail::visible_count(mask_, query, ssmax::detail::visible_keys(mask_, query));
  }
  bool same_runs(const Query& query, const Query& other) const override {
    return ssmax::detail::same_runs(mask_, query, other);
  }
  void check(const QueryShape& shape) const override { ssmax::detail::check_mask(mask_, shape); }

 private:
  M mask_;
  std::shared_ptr<const void> memory_;
};

struct RangeMask {
  const AnyMask* mask;
  KeyRange keys(const Query& query) const { return mask->keys(query); }
  void check(const QueryShape& shape) const { mask->check(shape); }
};
struct PredicateMask : RangeMask {
  bool sees(const Query& query, index_t key) const { return mask->sees(query, key); }
};
struct PositionMask : RangeMask {
  index_t query_position(const Query& query) const { return mask->query_position(query); }
  index_t key_position(const Query& query, index_t key) const { return mask->key_position(query, key); }
  Query aligned(const Query& query) const { return mask->aligned(query); }
};
struct PositionPredicateMask : PositionMask {
  bool sees(const Query& query, index_t key) const { return mask->sees(query, key); }
};
/// Of a mask that finds its runs.
template <class Base>
struct WithRuns : Base {
  KeyRange run(const Query& query, index_t from) const { return this->mask->run(query, from); }
  index_t count(const Query& query) const { return this->mask->count(query); }
  bool same_runs(const Query& query, const Query& other) const { return this->mask->same_runs(query, other); }
};

/// What a mask may be for: rows take ranges only; a ring has forgotten the first keys.
struct MaskNeeds {
  bool ranges_only = false;
  index_t ring = 0;   // keys that are held of each sequence, where that is a ring
  bool runs = false;  // a mask that finds its runs
};

struct DrawnMask {
  std::string words;
  bool full = false, predicate = false, positions = false;
  std::shared_ptr<const AnyMask> mask;
  std::shared_ptr<const AnyMask> repeated;  // with a matrix for each head in place of modulo, or null

  QueryShape shape;               // with the most keys of any batch entry
  std::vector<index_t> keys;      // of each batch entry
  std::vector<char> visible;      // [batch, head, query, key]
  std::vector<index_t> of_query;  // positions, [batch, head, query]
  std::vector<index_t> of_key;    // [batch, key]

  std::size_t row(const Query& q) const {
    return static_cast<std::size_t>((q.batch * shape.heads + q.head) * shape.queries + q.index);
  }
  bool sees(const Query& q, index_t key) const {
    return visible[row(q) * static_cast<std::size_t>(shape.keys) + static_cast<std::size_t>(key)] != 0;
  }
  index_t query_position(const Query& q) const { return of_query[row(q)]; }
  /// The position that a scaling receives.
  index_t row_position(const Query& q) const { return std::max<index_t>(0, query_position(q)); }
  index_t key_position(index_t batch, index_t key) const {
    return of_key[static_cast<std::size_t>(batch * shape.keys + key)];
  }
};

template <class M>
void hold(DrawnMask& drawn, const M& mask, std::shared_ptr<const void> memory = nullptr) {
  drawn.mask = std::make_shared<Held<M>>(mask, std::move(memory));
  drawn.full = std::is_same_v<M, ssmax::Full>;
  drawn.predicate = ssmax::detail::has_predicate<M>;
  drawn.positions = ssmax::detail::defines_positions<M>;
}

/// The matrices of a mask or a score. Where they are fewer than heads, head h reads matrix h % count.
struct MatrixHeads {
  index_t count = 0;
  ssmax::HeadsOfMatrix kind = ssmax::HeadsOfMatrix::each;

  std::string words() const {
    return kind == ssmax::HeadsOfMatrix::each ? "" : " of " + std::to_string(count) + " matrices by modulo";
  }
};
MatrixHeads draw_matrix_heads(Random& random, index_t heads);

/// Rising bounds of `documents` documents in `extent` elements; some are empty.
std::vector<index_t> draw_bounds(Random& random, index_t documents, index_t extent);

/// Which masks with runs a call may have.
enum class RunMasks {
  of_any_queries,  // whose sequences differ in queries and keys
  of_any_keys,     // whose sequences have the same number of queries
  all
};
/// Draws the mask and its words alone.
DrawnMask draw_run_mask(Random& random, const QueryShape& shape, RunMasks masks);

DrawnMask draw_mask(Random& random, QueryShape shape, const std::vector<index_t>& keys,
                    const MaskNeeds& needs);

/// Calls f(mask) with the mask as the type that offers what it has.
template <class F>
void with_mask(const DrawnMask& drawn, const F& f) {
  const AnyMask* mask = drawn.mask.get();
  if (drawn.positions && drawn.predicate) {
    f(PositionPredicateMask{{{mask}}});
  } else if (drawn.positions) {
    f(PositionMask{{mask}});
  } else if (drawn.predicate) {
    f(PredicateMask{{mask}});
  } else if (drawn.full) {
    f(ssmax::Full{});
  } else {
    f(RangeMask{mask});
  }
}

}  // namespace fuzz
