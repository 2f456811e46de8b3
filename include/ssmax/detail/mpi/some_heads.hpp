// Mask, scaling and score as a rank asks them that computes some of the heads: the drivers count its heads from 0, the
// policies are asked about the heads that they are among all.
#pragma once

#include <algorithm>
#include <array>

#include "../attention/call/gradient_variant.hpp"

SSMAX_BEGIN_DETAIL

/// `Interface` is Variant<A> or GradientVariant<A>.
template <class A, class Interface>
class SomeHeads : public Interface {
 public:
  /// Heads from `first` on, of `heads`.
  SomeHeads(const Interface& variant, index_t first, index_t heads)
      : Interface(variant.has_score, variant.has_predicate, variant.shows_same_keys),
        all(variant),
        first_(first),
        heads_(heads) {}

  QueryRow row(const Query& query, KeyRange stored) const override {
    QueryRow result = all.row(among_all(query), stored);
    result.query = query;
    return result;
  }
  index_t query_position(const Query& query) const override { return all.query_position(among_all(query)); }
  index_t key_position(const Query& query, index_t key) const override {
    return all.key_position(among_all(query), key);
  }
  bool sees(const Query& query, index_t key) const override { return all.sees(among_all(query), key); }
  void apply(const TileColumn<A>& column, const ColumnScratch<A>& memory) const override {
    with_rows(column, memory, [&](const TileColumn<A>& renamed) { all.apply(renamed, memory); });
  }
  void apply(A* s, KeyRange keys, const QueryRow& row) const override { all.apply(s, keys, among_all(row)); }

 protected:
  const Interface& all;

  [[nodiscard]] Query among_all(Query query) const {
    query.head += first_;
    query.shape.heads = heads_;
    return query;
  }
  [[nodiscard]] QueryShape among_all(QueryShape shape) const {
    shape.heads = heads_;
    return shape;
  }

  /// Calls f with the column, its queries being those of all heads.
  template <class F>
  void with_rows(const TileColumn<A>& column, const ColumnScratch<A>& memory, const F& f) const {
    constexpr index_t most_lanes = 16;  // of the widest vectors: AVX-512, float
    const index_t lanes = memory.kernels.width;
    SSMAX_ASSERT(lanes <= most_lanes);
    std::array<QueryRow, most_lanes> rows;
    std::transform(column.rows, column.rows + lanes, rows.begin(),
                   [&](const QueryRow& row) { return among_all(row); });
    TileColumn<A> renamed = column;
    renamed.rows = rows.data();
    f(renamed);
  }

 private:
  [[nodiscard]] QueryRow among_all(QueryRow row) const {
    row.query = among_all(row.query);
    return row;
  }

  index_t first_, heads_;
};

template <class A>
class SomeHeadsGradient final : public SomeHeads<A, GradientVariant<A>> {
  using Base = SomeHeads<A, GradientVariant<A>>;
  using Base::all;

 public:
  using Base::Base;

  void apply_and_keep(const TileColumn<A>& column, A* z, A* slope,
                      const ColumnScratch<A>& memory) const override {
    Base::with_rows(column, memory,
                    [&](const TileColumn<A>& renamed) { all.apply_and_keep(renamed, z, slope, memory); });
  }
  void differentiate(const TileColumn<A>& column, const ScoredColumn<A>& scored,
                     const ColumnScratch<A>& memory) const override {
    Base::with_rows(column, memory,
                    [&](const TileColumn<A>& renamed) { all.differentiate(renamed, scored, memory); });
  }
  void accumulate(const Query& query, const Row& row, const double* sums) const override {
    const Query named = Base::among_all(query);
    all.accumulate(named, {named.head, row.position, row.n}, sums);
  }
  bool learns() const override { return all.learns(); }
  index_t parameters() const override { return all.parameters(); }
  Sharing sharing(const QueryShape& shape) const override { return all.sharing(Base::among_all(shape)); }
};

SSMAX_END
