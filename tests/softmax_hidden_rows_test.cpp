// Rows that see no key, in every function over rows: a mask is asked for positions of queries that see a key only,
// the scaling about rows with n >= 1 only, and what comes out is 0 (-inf in log form).

#include "reference.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace softmax_hidden_rows_test {

using reference::Real;
using namespace ssmax;

constexpr float inf = std::numeric_limits<float>::infinity();

/// Ranges of its own for every query, and a note of every query whose position it was asked for.
struct Recorder {
  std::span<const KeyRange> ranges;
  std::vector<index_t>* asked;

  KeyRange keys(const Query& query) const { return ranges[static_cast<std::size_t>(query.index)]; }
  index_t query_position(const Query& query) const {
    asked->push_back(query.index);
    return 100 + query.index;
  }
};

struct Result {
  std::vector<float> y, log_y, lse, dz, log_dz;
};

template <class Scaling, class Mask>
Result run_all(const std::vector<float>& logits, index_t rows, index_t n, const Scaling& scaling,
               const Mask& mask) {
  const std::vector<float> g = reference::normals<float>(logits.size(), 2);
  Result result;
  result.y.resize(logits.size(), 7);
  result.log_y = result.dz = result.log_dz = result.y;
  result.lse.resize(static_cast<std::size_t>(rows), 7);
  const auto constant = [&](const std::vector<float>& v) {
    return View<const float, 2>(v.data(), {rows, n});
  };
  const auto view = [&](std::vector<float>& v) { return View<float, 2>(v.data(), {rows, n}); };
  ssmax::softmax(constant(logits), view(result.y), scaling, mask);
  ssmax::log_softmax(constant(logits), view(result.log_y), scaling, mask);
  ssmax::logsumexp(constant(logits), View<float, 1>(result.lse), scaling, mask);
  ssmax::softmax_backward<float, 2>(
      {.out = constant(result.y), .dout = constant(g), .dlogits = view(result.dz)}, scaling, mask);
  ssmax::log_softmax_backward<float, 2>(
      {.out = constant(result.log_y), .dout = constant(g), .dlogits = view(result.log_dz)}, scaling, mask);
  return result;
}

/// Whether row r is what a row that sees keys [begin, end) must be; the rest of the row is hidden.
bool is_right(const Result& result, const std::vector<float>& logits, index_t r, index_t n, KeyRange seen) {
  const auto at = static_cast<std::size_t>(r * n);
  const std::span<const float> z = std::span<const float>(logits).subspan(at, static_cast<std::size_t>(n));
  const std::vector<Real> exact = reference::softmax(reference::Row<float>{z, 1, {seen.begin, seen.end}});
  bool right = true;
  for (index_t key = 0; key < n; ++key) {
    const auto i = at + static_cast<std::size_t>(key);
    const auto p = static_cast<float>(exact[static_cast<std::size_t>(key)]);
    if (key < seen.begin || key >= seen.end) {
      right =
          right && result.y[i] == 0 && result.log_y[i] == -inf && result.dz[i] == 0 && result.log_dz[i] == 0;
    } else {
      right = right && std::abs(result.y[i] - p) <= 1e-6f && std::abs(result.log_y[i] - std::log(p)) <= 1e-5f;
    }
  }
  const float lse = result.lse[static_cast<std::size_t>(r)];
  return right && (seen.size() == 0 ? lse == -inf : std::isfinite(lse));
}

TEST_CASE("a mask is called for positions of queries with a visible key only", "[softmax][hidden]") {
  constexpr index_t rows = 9, n = 5;
  // Empty at the front, in the middle, at the end, before it begins, outside; and ordinary rows between them.
  const std::array<KeyRange, rows> ranges{
      {{0, 0}, {0, 0}, {0, 3}, {2, 2}, {5, 5}, {1, 5}, {4, 2}, {-3, -1}, {0, 5}}};
  const std::vector<float> logits = reference::normals<float>(rows * n, 1);
  for_each_target([&](const std::string&) {
    std::vector<index_t> asked;
    bool scaled_right = true;
    const auto scaling = [&](const Row& row) {
      scaled_right = scaled_right && row.n >= 1 && row.position >= 100 && row.position < 100 + rows;
      return 1.0;
    };
    const Result result = run_all(logits, rows, n, scaling, Recorder{ranges, &asked});
    CHECK_FALSE(asked.empty());
    for (const index_t query : asked) {
      const KeyRange range = ranges[static_cast<std::size_t>(query)];
      CAPTURE(query);
      CHECK((range.begin < range.end && range.begin < n && range.end > 0));
    }
    CHECK(scaled_right);
    bool right = true;
    for (index_t r = 0; r < rows; ++r) {
      const KeyRange range = ranges[static_cast<std::size_t>(r)];
      const bool empty = range.end <= range.begin || range.end <= 0;
      right = right && is_right(result, logits, r, n, empty ? KeyRange{} : range);
    }
    CHECK(right);
  });
}

TEST_CASE("documents with more queries than keys, without keys, without queries", "[softmax][hidden]") {
  struct Case {
    std::vector<index_t> queries, keys;
  };
  // The first asked for what lies before its span; an address sanitizer stopped there.
  const std::vector<Case> cases{{{0, 3}, {0, 2}},
                                {{0, 2, 5}, {0, 0, 2}},
                                {{0, 3, 5}, {0, 2, 2}},
                                {{0, 0, 4}, {0, 2, 5}},
                                {{0, 4, 4}, {0, 1, 5}}};
  for_each_target([&](const std::string&) {
    for (const Case& documents : cases) {
      for (const bool causal : {true, false}) {
        const index_t rows = documents.queries.back(), n = documents.keys.back();
        const std::vector<float> logits = reference::normals<float>(static_cast<std::size_t>(rows * n), 3);
        // Vectors of their own, so that nothing readable lies before the first element.
        const std::vector<index_t> cumulative_queries = documents.queries, cumulative_keys = documents.keys;
        const Documents mask(cumulative_queries, cumulative_keys, causal);
        bool scaled_right = true;
        const auto scaling = [&](const Row& row) {
          scaled_right = scaled_right && row.n >= 1 && row.position >= 0 && row.position < n &&
                         (!causal || row.position == row.n - 1);
          return 1.0;
        };
        const Result result = run_all(logits, rows, n, scaling, mask);
        CHECK(scaled_right);
        bool right = true;
        for (index_t r = 0; r < rows; ++r) {
          std::size_t document = 0;
          while (documents.queries[document + 1] <= r) ++document;
          KeyRange seen{documents.keys[document], documents.keys[document + 1]};
          const index_t after = documents.queries[document + 1] - 1 - r;  // queries after this one
          if (causal) seen.end = std::max(seen.begin, seen.end - after);
          right = right && is_right(result, logits, r, n, seen.size() == 0 ? KeyRange{} : seen);
        }
        CHECK(right);
      }
    }
  });
}

}  // namespace softmax_hidden_rows_test
