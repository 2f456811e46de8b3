// Which keys each mask shows, where it puts them, and what it takes to be one.

#include <concepts>
#include <cstdint>
#include <vector>

#include "mask_picture.hpp"
#include "test.hpp"

namespace mask_picture::mask_test {

constexpr index_t unlimited = std::numeric_limits<index_t>::max();

struct Window {
  index_t width;
  KeyRange keys(const Query& query) const {
    const KeyRange causal = Causal{}.keys(query);
    return {std::max<index_t>(0, causal.end - width), causal.end};
  }
};
struct SameKeys {
  KeyRange keys(const Query&) const { return {1, 2}; }
};
/// Has what SameKeys has but for the fast path, which it does not inherit.
struct ByQuery : SameKeys {
  KeyRange keys(const Query& query) const { return {0, query.index}; }
};

}  // namespace mask_picture::mask_test

template <>
inline constexpr bool ssmax::same_keys<mask_picture::mask_test::SameKeys> = true;

namespace mask_picture::mask_test {

static_assert(ssmax::Mask<Full> && ssmax::Mask<Causal> && ssmax::Mask<Lengths>);
static_assert(ssmax::Mask<Window> && ssmax::Mask<SameKeys> && ssmax::Mask<ByQuery>);
static_assert(!ssmax::Mask<int> && !ssmax::Mask<KeyRange>);

static_assert(ssmax::same_keys<Full> && ssmax::same_keys<SameKeys>);
static_assert(!ssmax::same_keys<Causal> && !ssmax::same_keys<Lengths> && !ssmax::same_keys<Window> &&
              !ssmax::same_keys<ByQuery>);

static_assert(ssmax::Mask<SlidingWindow<>> && ssmax::Mask<PrefixLM> && ssmax::Mask<KeyLengths> &&
              ssmax::Mask<Documents> && ssmax::Mask<MatrixMask<bool>> && ssmax::Mask<MatrixMask<float>>);
static_assert(ssmax::Mask<decltype(Causal{} & Window{3})>);

static_assert(ssmax::detail::has_predicate<MatrixMask<bool>> &&
              ssmax::detail::has_predicate<SlidingWindow<true>>);
static_assert(ssmax::detail::has_predicate<ssmax::Both<Causal, MatrixMask<bool>>> &&
              ssmax::detail::has_predicate<ssmax::Both<MatrixMask<bool>, Causal>>);
static_assert(!ssmax::detail::has_predicate<Causal> && !ssmax::detail::has_predicate<Documents> &&
              !ssmax::detail::has_predicate<ssmax::Both<Causal, Documents>>);
static_assert(ssmax::same_keys<ssmax::Both<Full, SameKeys>> && !ssmax::same_keys<ssmax::Both<Full, Causal>>);

static_assert(KeyRange{}.size() == 0 && KeyRange{3, 10}.size() == 7);
static_assert(QueryShape{2, 3, 5, 7}.rows() == 30);
static_assert(Causal{}.keys({0, 0, 2, {1, 1, 3, 5}}).end == 5);
static_assert(Query{0, 0, 2, {1, 1, 3, 5}}.position() == 4 && Query{0, 0, 0, {1, 1, 5, 3}}.position() == -2);
static_assert(ssmax::detail::visible_keys(Causal{} & SlidingWindow(1), {0, 0, 1, {1, 1, 3, 5}}).begin == 2);

/// The keys that the queries see, all of which must begin at 0.
template <class M>
std::vector<index_t> ends(const M& mask, const QueryShape& shape) {
  std::vector<index_t> result;
  for_each_query(shape, [&](const Query& query) {
    const KeyRange keys = mask.keys(query);
    result.push_back(keys.begin == 0 ? keys.end : -1);
  });
  return result;
}

using Ends = std::vector<index_t>;

TEST_CASE("BlockSparse with blocks whose product overflows", "[mask]") {
  constexpr index_t large = index_t{1} << 62;
  const ssmax::SparseBlocks blocks{
      .query_block = large, .key_block = large, .query_blocks = 1, .key_blocks = 64};
  const std::vector<std::uint64_t> bitmap{~std::uint64_t{0}};
  const ssmax::BlockSparse mask(blocks, bitmap);
  const Query query{.index = 3, .shape = {1, 1, 10, 10}};
  CHECK(mask.run(query, 0).end == 10);
  CHECK(mask.run(query, 7).begin == 7);
  CHECK(mask.count(query) == 10);
}

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

// ---- Every mask against what its definition says of each query and key. -----------------------------------

/// The key that a query stands at, bottom-right.
index_t stands_at(const Query& query) { return query.shape.keys - query.shape.queries + query.index; }

TEST_CASE("full and causal masks show what their definitions say", "[mask]") {
  for_each_shape([](const QueryShape& shape) {
    CHECK(picture(Full{}, shape) == expected_picture(shape, [](const Query&, index_t) { return true; }));
    CHECK(picture(Causal{}, shape) ==
          expected_picture(shape, [](const Query& query, index_t key) { return key <= stands_at(query); }));
  });
}

TEST_CASE("a sliding window shows the keys around the query's position", "[mask]") {
  const std::vector<index_t> reaches{0, 1, 2, 3, 7, 100, unlimited - 1, unlimited};
  for_each_shape([&](const QueryShape& shape) {
    for (const index_t left : reaches) {
      for (const index_t right : reaches) {
        const SlidingWindow window(left, right);
        INFO(left << " before, " << right << " after");
        CHECK(refusal(window, shape) == "");
        CHECK(picture(window, shape) == expected_picture(shape, [&](const Query& query, index_t key) {
                const index_t distance = key - stands_at(query);
                return distance <= right && -distance <= left;
              }));
      }
    }
    CHECK(picture(SlidingWindow(unlimited), shape) == picture(Causal{}, shape));
    CHECK(picture(SlidingWindow(unlimited, unlimited), shape) == picture(Full{}, shape));
  });
}

TEST_CASE("windows of no and of one key to the left", "[mask]") {
  CHECK(picture(SlidingWindow(0), {1, 1, 3, 3}) == "x..\n.x.\n..x\n");
  CHECK(picture(SlidingWindow(1), {1, 1, 3, 3}) == "x..\nxx.\n.xx\n");
  CHECK(picture(SlidingWindow(0, 1), {1, 1, 3, 3}) == "xx.\n.xx\n..x\n");
  CHECK(picture(SlidingWindow(1), {1, 1, 2, 4}) == ".xx.\n..xx\n");
  CHECK(picture(SlidingWindow(1), {1, 1, 4, 2}) == "..\n..\nx.\nxx\n");
}

TEST_CASE("chunks show the keys of the query's chunk up to the query", "[mask]") {
  for_each_shape([](const QueryShape& shape) {
    for (const index_t size : {index_t{1}, index_t{2}, index_t{3}, index_t{7}, unlimited}) {
      INFO("chunks of " << size);
      CHECK(refusal(Chunks(size), shape) == "");
      CHECK(picture(Chunks(size), shape) == expected_picture(shape, [&](const Query& query, index_t key) {
              return key <= stands_at(query) && key / size == stands_at(query) / size;
            }));
    }
    CHECK(picture(Chunks(1), shape) == picture(SlidingWindow(0), shape));
    CHECK(picture(Chunks(unlimited), shape) == picture(Causal{}, shape));
  });
  CHECK(picture(Chunks(2), {1, 1, 3, 5}) == "..x..\n..xx.\n....x\n");
  CHECK(picture(Chunks(2), {1, 1, 4, 2}) == "..\n..\nx.\nxx\n");
  // Chunks count from the first key of the sequence, documents do not move them.
  const std::vector<index_t> cumulative{0, 3, 5};
  CHECK(picture(Chunks(2) & Documents(cumulative, false), {1, 1, 5, 5}) ==
        "x....\nxx...\n..x..\n...x.\n....x\n");
}

TEST_CASE("a top-left causal mask counts queries from the first key, also for joined masks", "[mask]") {
  for_each_shape([](const QueryShape& shape) {
    CHECK(picture(CausalTopLeft{}, shape) ==
          expected_picture(shape, [](const Query& query, index_t key) { return key <= query.index; }));
    if (shape.queries > shape.keys) return;  // the window of a query after the keys is outside of them
    CHECK(picture(CausalTopLeft{} & SlidingWindow(1), shape) ==
          expected_picture(shape, [](const Query& query, index_t key) {
            return key <= query.index && key >= query.index - 1;
          }));
  });
  CHECK(picture(CausalTopLeft{}, {1, 1, 2, 4}) == "x...\nxx..\n");
  CHECK(picture(CausalTopLeft{}, {1, 1, 3, 2}) == "x.\nxx\nxx\n");
  CHECK(ssmax::detail::query_position(Full{} & CausalTopLeft{}, {0, 0, 1, {1, 1, 3, 9}}) == 1);
}

TEST_CASE("a prefix is seen by all queries, the rest causally", "[mask]") {
  for_each_shape([](const QueryShape& shape) {
    for (index_t length = -2; length <= 12; ++length) {
      const std::vector<index_t> prefix{length, 3};
      CHECK(refusal(PrefixLM(prefix), shape) == "");
      CHECK(picture(PrefixLM(prefix), shape) == expected_picture(shape, [&](const Query& query, index_t key) {
              return key <= stands_at(query) || key < prefix[static_cast<std::size_t>(query.batch)];
            }));
    }
  });
  const std::vector<index_t> extreme{unlimited, std::numeric_limits<index_t>::min()};
  CHECK(picture(PrefixLM(extreme), {2, 1, 2, 2}) == "xx\nxx\nx.\nxx\n");
  // A query that another mask places beyond the keys.
  Query beyond{.shape = {2, 1, 2, 2}};
  beyond.shift = 5;
  CHECK(PrefixLM(extreme).keys(beyond).end == Causal{}.keys(beyond).end);
}

TEST_CASE("KeyLengths masks the keys after the length of each batch entry", "[mask]") {
  for_each_shape([](const QueryShape& shape) {
    for (index_t length = -2; length <= 12; ++length) {
      const std::vector<index_t> lengths{2, length};
      CHECK(refusal(KeyLengths(lengths), shape) == "");
      CHECK(picture(KeyLengths(lengths), shape) ==
            expected_picture(shape, [&](const Query& query, index_t key) {
              return key < lengths[static_cast<std::size_t>(query.batch)];
            }));
    }
  });
  const std::vector<index_t> extreme{unlimited, std::numeric_limits<index_t>::min()};
  CHECK(picture(KeyLengths(extreme), {2, 1, 1, 3}) == "xxx\n...\n");
  // The mask itself cuts the range: a joined mask may read it.
  CHECK(KeyLengths(extreme).keys({.batch = 0, .shape = {2, 1, 1, 3}}).end == 3);
  CHECK(KeyLengths(extreme).keys({.batch = 1, .shape = {2, 1, 1, 3}}).end == 0);
}

TEST_CASE("windows and spans that do not fit are refused by name", "[mask]") {
  const QueryShape shape{3, 2, 4, 5};
  const std::vector<index_t> two(2, 1);
  CHECK(refusal(SlidingWindow(-1), shape) == "ssmax::SlidingWindow: left is -1, must be at least 0");
  CHECK(refusal(SlidingWindow(2, -1), shape) == "ssmax::SlidingWindow: right is -1, must be at least 0");
  CHECK(refusal(Chunks(0), shape) == "ssmax::Chunks: size is 0, must be at least 1");
  CHECK(refusal(PrefixLM(two), shape) == "ssmax::PrefixLM: prefix has extent 2, batch entries are 3");
  CHECK(refusal(KeyLengths(two), shape) == "ssmax::KeyLengths: lengths has extent 2, batch entries are 3");
  CHECK(refusal(Causal{} & SlidingWindow(-1), shape) != "");
  CHECK(refusal(SlidingWindow(-1) & Causal{}, shape) != "");
  CHECK(refusal(Causal{} & SlidingWindow(1), shape) == "");
}

// ---- Two masks at once. -----------------------------------------------------------------------------------

/// Where both pictures have an x.
std::string overlay(const std::string& a, const std::string& b) {
  REQUIRE(a.size() == b.size());
  std::string result = a;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (b[i] != 'x') result[i] = b[i];
  }
  return result;
}

template <class A, class B>
void check_both(const A& a, const B& b, const QueryShape& shape) {
  const std::string expected = overlay(picture(a, shape), picture(b, shape));
  CHECK(picture(a & b, shape) == expected);
  CHECK(picture(b & a, shape) == expected);
}

TEST_CASE("two masks show what both show", "[mask]") {
  const std::vector<index_t> lengths{2, 7}, prefix{3, 1};
  const Where odd([](const Query& query, index_t key) { return (query.index + query.head + key) % 2 == 1; });
  const Where third([](const Query& query, index_t key) { return (query.index + 2 * key) % 3 == 0; });
  for_each_shape([&](const QueryShape& shape) {
    check_both(Full{}, Causal{}, shape);
    check_both(SlidingWindow(2, 3), KeyLengths(lengths), shape);
    check_both(SlidingWindow(2), PrefixLM(prefix), shape);
    check_both(Causal{}, odd, shape);
    check_both(third, odd, shape);
    check_both(Causal{} & odd, third & KeyLengths(lengths), shape);
    check_both(SlidingWindow(0) & Full{}, PrefixLM(prefix) & KeyLengths(lengths), shape);
  });
}

TEST_CASE("ranges that do not intersect show no key", "[mask]") {
  const std::vector<index_t> lengths{1};
  CHECK(picture(SlidingWindow(0) & KeyLengths(lengths), {1, 1, 3, 3}) == "x..\n...\n...\n");
  CHECK(picture(SlidingWindow(0) & SlidingWindow(1), {1, 1, 2, 2}) == "x.\n.x\n");
}

/// Says where positions are, and no more.
struct Offset {
  KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
  index_t query_position(const Query& query) const { return query.index + 100; }
  index_t key_position(const Query& query, index_t key) const { return key + 10 * query.head; }
};

TEST_CASE("positions are those of the mask that defines them", "[mask]") {
  using ssmax::detail::key_position;
  using ssmax::detail::query_position;
  const Query query{0, 2, 1, {1, 3, 4, 9}};
  CHECK(query_position(Causal{}, query) == 6);
  CHECK(key_position(Causal{}, query, 5) == 5);
  CHECK(query_position(Causal{} & Full{}, query) == 6);
  CHECK(key_position(Causal{} & Full{}, query, 5) == 5);
  CHECK(query_position(Offset{}, query) == 101);
  CHECK(key_position(Offset{}, query, 5) == 25);
  CHECK(query_position(Offset{} & Causal{}, query) == 101);
  CHECK(query_position(Causal{} & Offset{}, query) == 101);
  CHECK(key_position((Causal{} & Offset{}) & Full{}, query, 5) == 25);
  CHECK(key_position(Full{} & (Offset{} & Causal{}), query, 5) == 25);
}

/// More than there is, and less than nothing.
struct Careless {
  KeyRange wanted;
  KeyRange keys(const Query&) const { return wanted; }
};

TEST_CASE("a careless mask's range is cut to the keys", "[mask]") {
  const Query query{0, 0, 0, {1, 1, 1, 5}};
  const auto cut = [&](index_t begin, index_t end) {
    const KeyRange range = ssmax::detail::visible_keys(Careless{{begin, end}}, query);
    const KeyRange both = ssmax::detail::visible_keys(Full{} & Careless{{begin, end}}, query);
    CHECK((both.size() == range.size() && (range.size() == 0 || both.begin == range.begin)));
    return std::array<index_t, 2>{range.begin, range.end};
  };
  CHECK(cut(-3, 9) == std::array<index_t, 2>{0, 5});
  CHECK(cut(3, 1) == std::array<index_t, 2>{3, 3});
  CHECK(cut(7, 9) == std::array<index_t, 2>{5, 5});
  CHECK(cut(-9, -7) == std::array<index_t, 2>{0, 0});
}

}  // namespace mask_picture::mask_test
