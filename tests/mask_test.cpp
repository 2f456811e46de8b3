// Which keys each mask shows, and what it takes to be one.

#include <algorithm>
#include <array>
#include <concepts>
#include <span>
#include <ssmax/mask.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"

namespace {

using ssmax::Causal;
using ssmax::Full;
using ssmax::index_t;
using ssmax::KeyRange;
using ssmax::Lengths;
using ssmax::Query;
using ssmax::QueryShape;

struct Window {
  index_t width;
  KeyRange keys(const Query& query) const {
    const KeyRange causal = Causal{}.keys(query);
    return {std::max<index_t>(0, causal.end - width), causal.end};
  }
};
struct ReturnsLength {
  index_t keys(const Query&) const { return 0; }
};
struct ChangesItself {
  KeyRange keys(const Query&) { return {}; }
};
struct Uniform {
  static constexpr bool uniform = true;
  KeyRange keys(const Query&) const { return {1, 2}; }
};

static_assert(ssmax::Mask<Full> && ssmax::Mask<Causal> && ssmax::Mask<Lengths>);
static_assert(ssmax::Mask<Window> && ssmax::Mask<Uniform>);
static_assert(!ssmax::Mask<ReturnsLength> && !ssmax::Mask<ChangesItself> && !ssmax::Mask<int>);

static_assert(ssmax::detail::is_uniform<Full>() && ssmax::detail::is_uniform<Uniform>());
static_assert(!ssmax::detail::is_uniform<Causal>() && !ssmax::detail::is_uniform<Lengths>() &&
              !ssmax::detail::is_uniform<Window>());

static_assert(KeyRange{}.size() == 0 && KeyRange{3, 10}.size() == 7);
static_assert(QueryShape{2, 3, 5, 7}.rows() == 30);
static_assert(Causal{}.keys({0, 0, 2, {1, 1, 3, 5}}).end == 5);

/// The keys that the queries see, all of which must begin at 0.
template <class M>
std::vector<index_t> ends(const M& mask, const QueryShape& shape) {
  std::vector<index_t> result;
  for (index_t batch = 0; batch < shape.batch; ++batch) {
    for (index_t head = 0; head < shape.heads; ++head) {
      for (index_t query = 0; query < shape.queries; ++query) {
        const KeyRange keys = mask.keys(Query{batch, head, query, shape});
        result.push_back(keys.begin == 0 ? keys.end : -1);
      }
    }
  }
  return result;
}

using Ends = std::vector<index_t>;

TEST_CASE("a full mask shows every key", "[mask]") {
  CHECK(ends(Full{}, {1, 1, 3, 5}) == Ends{5, 5, 5});
  CHECK(ends(Full{}, {2, 1, 2, 1}) == Ends{1, 1, 1, 1});
  CHECK(ends(Full{}, {1, 1, 2, 0}) == Ends{0, 0});
}

TEST_CASE("a causal mask shows the last query the last key", "[mask]") {
  CHECK(ends(Causal{}, {1, 1, 4, 4}) == Ends{1, 2, 3, 4});
  CHECK(ends(Causal{}, {1, 1, 3, 5}) == Ends{3, 4, 5});
  CHECK(ends(Causal{}, {1, 1, 1, 7}) == Ends{7});
  CHECK(ends(Causal{}, {1, 1, 5, 3}) == Ends{0, 0, 1, 2, 3});
  CHECK(ends(Causal{}, {1, 1, 3, 0}) == Ends{0, 0, 0});
  CHECK(ends(Causal{}, {2, 2, 2, 2}) == Ends{1, 2, 1, 2, 1, 2, 1, 2});
}

TEST_CASE("lengths are counted over batch, head and query, and cut to the keys", "[mask]") {
  const std::vector<index_t> lengths{0, 1, 2, 3, 4, 5, 6, 7, -1, -100, 1000, 3};
  CHECK(ends(Lengths{lengths}, {2, 3, 2, 6}) == Ends{0, 1, 2, 3, 4, 5, 6, 6, 0, 0, 6, 3});
  CHECK(ends(Lengths{lengths}, {1, 1, 12, 0}) == Ends(12, 0));
  CHECK(Lengths{lengths}.keys({1, 2, 1, {2, 3, 2, 6}}).end == 3);
}

std::string refusal(const Lengths& mask, const QueryShape& shape) {
  try {
    ssmax::detail::check_mask(mask, shape);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("lengths for another number of rows are refused", "[mask]") {
  const std::vector<index_t> lengths(12, 1);
  CHECK(refusal(Lengths{lengths}, {2, 3, 2, 6}) == "");
  CHECK(refusal(Lengths{lengths}, {1, 1, 12, 6}) == "");
  for (const index_t queries : {0, 11, 13, 24}) {
    const std::string message = refusal(Lengths{lengths}, {1, 1, queries, 6});
    INFO(message);
    CHECK(message.find("visible") != std::string::npos);
    CHECK(message.find("12") != std::string::npos);
    CHECK(message.find(std::to_string(queries)) != std::string::npos);
  }
}

TEST_CASE("a mask without a check accepts every shape", "[mask]") {
  CHECK_NOTHROW(ssmax::detail::check_mask(Window{3}, {1, 1, 2, 3}));
  CHECK_NOTHROW(ssmax::detail::check_mask(Causal{}, {1, 1, 5, 3}));
}

TEST_CASE("a mask of one's own need not begin at the first key", "[mask]") {
  const QueryShape shape{1, 1, 4, 5};
  std::array<index_t, 4> begins{}, sizes{};
  for (index_t query = 0; query < 4; ++query) {
    const KeyRange keys = Window{3}.keys({0, 0, query, shape});
    begins[static_cast<std::size_t>(query)] = keys.begin;
    sizes[static_cast<std::size_t>(query)] = keys.size();
  }
  CHECK(begins == std::array<index_t, 4>{0, 0, 1, 2});
  CHECK(sizes == std::array<index_t, 4>{2, 3, 3, 3});
}

}  // namespace
