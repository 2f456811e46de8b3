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

/// A mask of any type. What the library asks of a mask is known to it by type: RangeMask and those below say
/// so.
class AnyMask {
 public:
  virtual ~AnyMask() = default;
  virtual KeyRange keys(const Query& query) const = 0;
  virtual bool sees(const Query& query, index_t key) const = 0;
  virtual index_t query_position(const Query& query) const = 0;
  virtual index_t key_position(const Query& query, index_t key) const = 0;
  virtual Query aligned(const Query& query) const = 0;
  virtual void check(const QueryShape& shape) const = 0;
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

/// What a mask may be for: rows take ranges only; a ring has forgotten the first keys.
struct MaskNeeds {
  bool ranges_only = false;
  index_t ring = 0;  // keys that are held of each sequence, where that is a ring
};

struct DrawnMask {
  std::string words;
  bool full = false, predicate = false, positions = false;
  std::shared_ptr<const AnyMask> mask;

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
