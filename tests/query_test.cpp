// Queries, the ranges of keys, and where a query stands.

#include <ssmax/query.hpp>

#include "catch.hpp"

namespace query_test {

using namespace ssmax;

TEST_CASE("a query stands bottom-right: the last one at the last key", "[query]") {
  const QueryShape fewer{1, 1, 3, 10}, as_many{1, 1, 4, 4}, more{1, 1, 5, 2};
  CHECK(Query{0, 0, 0, fewer}.position() == 7);
  CHECK(Query{0, 0, 2, fewer}.position() == 9);
  CHECK(Query{0, 0, 1, as_many}.position() == 1);
  CHECK(Query{0, 0, 0, more}.position() == -3);
  CHECK(Query{0, 0, 4, more}.position() == 1);
  CHECK(Query{0, 0, 4, more, 2}.position() == 3);
}

TEST_CASE("rows are counted over batch entries and heads, keys by a range's ends", "[query]") {
  CHECK(QueryShape{2, 3, 5, 7}.rows() == 30);
  CHECK(QueryShape{2, 3, 0, 7}.rows() == 0);
  CHECK(KeyRange{3, 8}.size() == 5);
  CHECK(KeyRange{}.size() == 0);
}

struct FirstHalf {
  KeyRange keys(const Query& query) const { return {0, query.shape.keys / 2}; }
};
struct WithPositions : FirstHalf {
  index_t query_position(const Query& query) const { return 100 + query.index; }
  index_t key_position(const Query&, index_t key) const { return 50 + key; }
};

TEST_CASE("a mask's positions are taken where it gives them", "[query]") {
  const Query query{0, 0, 2, {1, 1, 3, 10}};
  CHECK(ssmax::detail::query_position(FirstHalf{}, query) == 9);
  CHECK(ssmax::detail::key_position(FirstHalf{}, query, 4) == 4);
  CHECK(ssmax::detail::query_position(WithPositions{}, query) == 102);
  CHECK(ssmax::detail::key_position(WithPositions{}, query, 4) == 54);
  CHECK(ssmax::detail::visible_keys(WithPositions{}, query).end == 5);
}

}  // namespace query_test
