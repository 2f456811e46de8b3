// The option batch_invariant: a prompt cut into calls of any number of queries has the bits of one call, over views
// and over a cache.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::batch_invariant_test {

using ssmax::KvCache;
using ssmax::Rope;
using ssmax::View;

struct EveryThirdKeyIsHidden {
  KeyRange keys(const Query& query) const { return {0, query.position() + 1}; }
  bool sees(const Query&, index_t key) const { return key % 3 != 0; }
};

/// Numbers of queries of the calls that a prompt is cut into. Their sum is `queries`.
constexpr std::array<index_t, 12> pieces{1, 2, 17, 1, 3, 1, 5, 24, 1, 16, 4, 1};
constexpr index_t queries = 76;

/// Heads of rows, contiguous. `part` returns rows [first, first + count) of every head.
template <class T>
struct Heads {
  index_t heads, rows, width;
  std::vector<T> numbers;

  Heads(index_t a_heads, index_t a_rows, index_t a_width, unsigned seed, double deviation = 1)
      : heads(a_heads),
        rows(a_rows),
        width(a_width),
        numbers(reference::normals<T>(static_cast<std::size_t>(heads * rows * width), seed, deviation)) {}

  View<const T, 4> part(index_t first, index_t count) const {
    return {numbers.data() + first * width, {1, heads, count, width}, strides()};
  }
  View<T, 4> part(index_t first, index_t count) {
    return {numbers.data() + first * width, {1, heads, count, width}, strides()};
  }

 private:
  std::array<index_t, 4> strides() const { return {heads * rows * width, rows * width, width, 1}; }
};

struct Case {
  index_t heads, kv_heads, keys, d, dv;
};

constexpr std::array<Case, 5> cases{{
    {1, 1, 76, 64, 64},    // short_keys would take a call of at most 128 keys
    {2, 1, 300, 40, 33},   // 34 rows and 2
    {4, 2, 1500, 16, 16},  // more than one key chunk
    {16, 2, 420, 64, 64},  // eight rows per query
    {3, 3, 200, 33, 5},    // odd width
}};

template <class T>
struct Result {
  Heads<T> out;
  std::vector<Compute<T>> lse;
  std::vector<Path> paths;

  explicit Result(const Case& c)
      : out(c.heads, queries, c.dv, 9), lse(static_cast<std::size_t>(c.heads * queries)) {}
  View<Compute<T>, 3> lse_part(index_t first, index_t count) {
    return {lse.data() + first, {1, out.heads, count}, {out.heads * queries, queries, 1}};
  }
  bool operator==(const Result& other) const {
    return same_bits(out.numbers, other.out.numbers) && same_bits(lse, other.lse);
  }
};

/// Calls attend(first query, number of queries, executor, result) for one piece, or for each piece of the prompt.
template <class T, class Attend>
Result<T> computed(const Case& c, bool is_cut, const Attend& attend) {
  Result<T> result(c);
  if (!is_cut) {
    attend(index_t{0}, queries, ssmax::Serial{}, result);
    return result;
  }
  ssmax::ThreadPool pool(3);
  index_t first = 0;
  for (const index_t count : pieces) {
    if (first % 2 == 0)
      attend(first, count, ssmax::Serial{}, result);
    else
      attend(first, count, pool, result);
    first += count;
  }
  REQUIRE(first == queries);
  return result;
}

template <class T>
AttentionOptions<T> options_of(const Rope<Compute<T>>* rope, Explanation& explanation) {
  return {.rope = rope, .batch_invariant = true, .explanation = &explanation};
}

template <class T, class M, class C>
void compare(const Case& c, const Rope<Compute<T>>* rope, const M& mask, const C& score) {
  const Heads<T> q(c.heads, queries, c.d, 1, 2), k(c.kv_heads, c.keys, c.d, 2, 2),
      v(c.kv_heads, c.keys, c.dv, 3);
  const std::vector<Compute<T>> s(static_cast<std::size_t>(c.heads), Compute<T>(0.43));
  const ssmax::SSMax<Compute<T>> scaling{s};
  const index_t before = c.keys - queries;

  // Adds the queries and results to the arguments, which have the keys.
  const auto attend = [&](AttentionArguments<Compute<T>> arguments, index_t first, index_t count,
                          auto&& executor, Result<T>& result) {
    Explanation explanation;
    arguments.q = q.part(first, count);
    arguments.out = result.out.part(first, count);
    arguments.lse = result.lse_part(first, count);
    ssmax::attention<Compute<T>>(with(arguments, options_of<T>(rope, explanation)), scaling, mask, score,
                                 executor);
    result.paths.push_back(explanation.path);
  };
  const auto over_views = [&](index_t first, index_t count, auto&& executor, Result<T>& result) {
    const index_t seen = before + first + count;
    attend({.k = k.part(0, seen), .v = v.part(0, seen)}, first, count, executor, result);
  };
  const Result<T> whole = computed<T>(c, false, over_views);
  const Result<T> cut = computed<T>(c, true, over_views);
  CHECK(whole == cut);
  const bool is_bf16 = std::same_as<T, bfloat16> && has_bfloat16_products();
  CHECK(whole.paths == std::vector{is_bf16 ? Path::prefill_bf16 : Path::prefill});
  for (const Path path : cut.paths) {
    CHECK((is_bf16 ? path == Path::prefill_bf16 || path == Path::decode_bf16 : path == Path::prefill));
  }

  const auto over_cache = [&](KvCache<T>& cache) {
    return [&](index_t first, index_t count, auto&& executor, Result<T>& result) {
      const index_t stored = cache.length(0), added = before + first + count - stored;
      cache.append(k.part(stored, added), v.part(stored, added), rope);
      attend({.keys = cache}, first, count, executor, result);
    };
  };
  const ssmax::KvCacheOptions of_cache{
      .batch = 1, .kv_heads = c.kv_heads, .width = c.d, .value_width = c.dv, .capacity = c.keys};
  KvCache<T> for_whole(of_cache), for_cut(of_cache);
  const Result<T> decoded = computed<T>(c, false, over_cache(for_whole));
  CHECK(decoded == computed<T>(c, true, over_cache(for_cut)));
  // A cache rounds rotated keys of 16 bits.
  if (rope == nullptr || sizeof(T) != 2) CHECK(decoded == whole);
}

TEMPLATE_TEST_CASE("batch_invariant: a cut prompt is bit-identical to one call",
                   "[attention][decode][batch_invariant][bfloat16][slow]", float, double, ssmax::half,
                   bfloat16) {
  using T = TestType;
  for (const Case& c : cases) {
    const Rope<Compute<T>> rope({.width = c.d / 2 * 2}, c.keys);
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ' ' << c.heads << ' ' << c.keys << ' ' << c.d);
      compare<T>(c, nullptr, Causal{}, ssmax::Identity{});
      compare<T>(c, &rope, Causal{}, ssmax::Softcap{20});
      compare<T>(c, nullptr, EveryThirdKeyIsHidden{}, ssmax::Identity{});
      compare<T>(c, &rope, ssmax::SlidingWindow{50}, ssmax::Identity{});
    });
  }
}

/// Attends with one query, and with 40 copies of it, of `heads` heads over one kv head. `special` is added to a value and
/// subtracted from another one.
template <class T>
void compare_one_to_many(index_t heads, index_t keys, index_t d, index_t dv, T special) {
  constexpr index_t many = 40;
  const Heads<T> one(heads, 1, d, 1), k(1, keys, d, 2);
  Heads<T> v(1, keys, dv, 3), q(heads, many, d, 1), out_of_one(heads, 1, dv, 4), out(heads, many, dv, 5);
  for (index_t i = 0; i < std::ssize(q.numbers); ++i)
    q.numbers[static_cast<std::size_t>(i)] =
        one.numbers[static_cast<std::size_t>(i / (many * d) * d + i % d)];
  v.numbers[0] += special;
  v.numbers[v.numbers.size() - 2] -= special;
  const auto attend = [&](const Heads<T>& queries_of, Heads<T>& to) {
    ssmax::attention<T>({.q = queries_of.part(0, queries_of.rows),
                         .k = k.part(0, keys),
                         .v = v.part(0, keys),
                         .out = to.part(0, to.rows),
                         .batch_invariant = true});
  };
  for_each_target([&](const std::string& target) {
    INFO(target << ' ' << heads << ' ' << keys << ' ' << d << ' ' << dv << ' ' << special);
    attend(one, out_of_one);
    attend(q, out);
    std::vector<T> of_each_head;
    for (index_t head = 0; head < heads; ++head) {
      const auto row = out.numbers.begin() + (head * many + 33) * dv;
      of_each_head.insert(of_each_head.end(), row, row + dv);
    }
    CHECK(same_bits(out_of_one.numbers, of_each_head));
    CHECK(std::isinf(out_of_one.numbers[0]) == (special != 0));
  });
}

TEMPLATE_TEST_CASE(
    "batch_invariant: one query is bit-identical to itself among many, also with infinite values",
    "[attention][batch_invariant]", float, double) {
  for (const TestType special : {TestType(0), std::numeric_limits<TestType>::infinity()}) {
    for (const index_t keys : {1, 7, 129, 300}) {
      compare_one_to_many<TestType>(2, keys, 5, 3, special);
      compare_one_to_many<TestType>(1, keys, 33, 130, special);
    }
  }
}

}  // namespace attention_problem::batch_invariant_test
