// Which keys Documents shows, alone and joined with other masks, and where it puts them.

#include "mask_picture.hpp"
#include "test.hpp"

namespace mask_picture::mask_documents_test {

constexpr index_t unlimited = std::numeric_limits<index_t>::max();

/// All ways to cut `extent` into three documents, empty ones too.
std::vector<std::vector<index_t>> cuts(index_t extent) {
  std::vector<std::vector<index_t>> result;
  for (index_t first = 0; first <= extent; ++first) {
    for (index_t second = first; second <= extent; ++second) result.push_back({0, first, second, extent});
  }
  return result;
}

/// An element's document, and its place and the document's size in it.
struct InDocument {
  std::size_t document = 0;
  index_t offset = 0, size = 0;
};

InDocument in_document(const std::vector<index_t>& cumulative, index_t index) {
  std::size_t document = 0;
  while (index >= cumulative[document + 1]) ++document;
  return {document, index - cumulative[document], cumulative[document + 1] - cumulative[document]};
}

/// How far a key of the query's own document lies from the query's position in it.
struct Packed {
  std::vector<index_t> queries, keys;

  bool is_same(const Query& query, index_t key) const {
    return in_document(queries, query.index).document == in_document(keys, key).document;
  }
  index_t position(const Query& query) const {
    const InDocument at = in_document(queries, query.index);
    return at.offset + keys[at.document + 1] - keys[at.document] - at.size;
  }
  index_t distance(const Query& query, index_t key) const {
    return in_document(keys, key).offset - position(query);
  }
};

template <class Visit>
void for_each_packing(Visit visit) {
  for (const index_t queries : {0, 1, 4}) {
    for (const index_t keys : {0, 1, 5}) {
      for (const auto& cumulative_queries : cuts(queries)) {
        for (const auto& cumulative_keys : cuts(keys)) {
          visit(QueryShape{1, 2, queries, keys}, Packed{cumulative_queries, cumulative_keys});
        }
      }
    }
  }
}

TEST_CASE("documents see themselves only, with positions of their own", "[mask]") {
  for_each_packing([](const QueryShape& shape, const Packed& packed) {
    const Documents whole(packed.queries, packed.keys, false), causal(packed.queries, packed.keys, true);
    CHECK(refusal(whole, shape) == "");
    const auto is_same = [&](const Query& query, index_t key) { return packed.is_same(query, key); };
    const auto is_before = [&](const Query& query, index_t key) {
      return packed.is_same(query, key) && packed.distance(query, key) <= 0;
    };
    CHECK(picture(whole, shape) == expected_picture(shape, is_same));
    CHECK(picture(causal, shape) == expected_picture(shape, is_before));

    std::vector<index_t> positions, expected;
    for_each_query(shape, [&](const Query& query) {
      positions.push_back(ssmax::detail::query_position(causal, query));
      expected.push_back(packed.position(query));
      for (index_t key = 0; key < shape.keys; ++key) {
        positions.push_back(ssmax::detail::key_position(causal, query, key));
        expected.push_back(in_document(packed.keys, key).offset);
      }
    });
    CHECK(positions == expected);
  });
}

TEST_CASE("documents of one length list serve queries and keys", "[mask]") {
  const std::vector<index_t> cumulative{0, 2, 2, 3, 6};
  const QueryShape shape{1, 1, 6, 6};
  CHECK(picture(Documents(cumulative, true), shape) == "x.....\nxx....\n..x...\n...x..\n...xx.\n...xxx\n");
  CHECK(picture(Documents(cumulative, false), shape) == "xx....\nxx....\n..x...\n...xxx\n...xxx\n...xxx\n");
  std::vector<index_t> positions;
  for_each_query(shape, [&](const Query& query) {
    positions.push_back(ssmax::detail::query_position(Documents(cumulative, true), query));
  });
  CHECK(positions == std::vector<index_t>{0, 1, 0, 0, 1, 2});
  const std::vector<index_t> none{0};
  CHECK(refusal(Documents(none, true), {1, 1, 0, 0}) == "");
}

TEST_CASE("documents that do not fit are refused", "[mask]") {
  using Span = std::vector<index_t>;
  const QueryShape shape{1, 1, 6, 8};
  const Span queries{0, 2, 6}, keys{0, 5, 8};
  CHECK(refusal(Documents(queries, keys, true), shape) == "");

  const auto queries_refusal = [&](const Span& span) { return refusal(Documents(span, keys, true), shape); };
  const auto keys_refusal = [&](const Span& span) { return refusal(Documents(queries, span, true), shape); };
  const std::string start = "ssmax::Documents: ";
  CHECK(queries_refusal({}) == start + "cumulative_queries has extent 0, cumulative_keys has 3");
  CHECK(queries_refusal({0, 1, 2, 6}) == start + "cumulative_queries has extent 4, cumulative_keys has 3");
  CHECK(queries_refusal({1, 2, 6}) == start + "cumulative_queries begins with 1, must begin with 0");
  CHECK(queries_refusal({-1, 2, 6}) == start + "cumulative_queries begins with -1, must begin with 0");
  CHECK(queries_refusal({0, 2, 5}) == start + "cumulative_queries ends with 5, queries are 6");
  CHECK(queries_refusal({0, 7, 6}) == start + "cumulative_queries falls from 7 to 6 in document 1");
  CHECK(keys_refusal({2, 5, 8}) == start + "cumulative_keys begins with 2, must begin with 0");
  CHECK(keys_refusal({0, -1, 8}) == start + "cumulative_keys falls from 0 to -1 in document 0");
  CHECK(keys_refusal({0, 5, 9}) == start + "cumulative_keys ends with 9, keys are 8");
  const Span empty;
  CHECK(refusal(Documents(empty, true), {1, 1, 0, 0}) ==
        start + "cumulative_queries has extent 0, must be at least 1");
  CHECK(refusal(Documents(queries, true), shape) == start + "cumulative_keys ends with 6, keys are 8");
}

TEST_CASE("masks joined with Documents use the positions of the document", "[mask]") {
  const Where is_before([](const Query& query, index_t key) { return key <= query.position(); });
  for_each_packing([&](const QueryShape& shape, const Packed& packed) {
    const Documents whole(packed.queries, packed.keys, false), causal(packed.queries, packed.keys, true);
    const std::string expected = picture(causal, shape);
    CHECK(picture(whole & Causal{}, shape) == expected);
    CHECK(picture(Causal{} & whole, shape) == expected);
    CHECK(picture(whole & is_before, shape) == expected);
    CHECK(picture((Full{} & whole) & (is_before & Full{}), shape) == expected);
    for (const index_t reach : {0, 1, 2}) {
      const auto window = [&](const Query& query, index_t key) {
        const index_t distance = packed.is_same(query, key) ? packed.distance(query, key) : unlimited;
        return -reach <= distance && distance <= 1;
      };
      CHECK(picture(SlidingWindow(reach, 1) & whole, shape) == expected_picture(shape, window));
      CHECK(picture((whole & Full{}) & SlidingWindow(reach, 1), shape) == expected_picture(shape, window));
    }
  });
}

}  // namespace mask_picture::mask_documents_test
