// Sequences with common pages: the driver computes their common keys once. Results are bit-identical to those of the
// same source without the member shares_keys.

#include <random>

#include "allocation_count.hpp"
#include "attention_problem.hpp"
#include "test.hpp"
#include "test_executors.hpp"
#include "wrapped_source.hpp"

namespace shared_keys_test {

using namespace ssmax;

template <class X>
using Compute = ssmax::ComputeType<X>;

/// The keys of a sequence: `common` keys of prompt `prompt`, then keys of its own.
struct Sequence {
  index_t prompt, common, length;
};

/// Sequences in pages. Pages of a prompt are common to its sequences.
template <class X>
struct Pool {
  index_t page, kv_heads, d, dv, most = 0;
  std::vector<index_t> table, lengths;
  std::vector<X> k, v;

  Pool(index_t a_page, index_t a_kv_heads, index_t width, index_t value_width,
       const std::vector<Sequence>& sequences)
      : page(a_page), kv_heads(a_kv_heads), d(width), dv(value_width) {
    for (const Sequence& s : sequences) most = std::max(most, (s.length + page - 1) / page);
    const index_t prompts = 3;
    index_t pages = prompts * most;  // the prompts' pages come first
    for (const Sequence& s : sequences) {
      lengths.push_back(s.length);
      for (index_t i = 0; i < most; ++i) table.push_back(i < s.common / page ? s.prompt * most + i : pages++);
    }
    // A random order of pages, so that runs end with them.
    std::vector<index_t> order(static_cast<std::size_t>(pages));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<index_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(5));
    for (index_t& entry : table) entry = order[static_cast<std::size_t>(entry)];
    k = reference::normals<X>(static_cast<std::size_t>(pages * page * kv_heads * d), 1);
    v = reference::normals<X>(static_cast<std::size_t>(pages * page * kv_heads * dv), 2);
  }

  index_t batch() const { return static_cast<index_t>(lengths.size()); }
  auto keys() const {
    const index_t pages = static_cast<index_t>(k.size()) / (page * kv_heads * d);
    return PagedKeys(View<const X, 4>(k.data(), {pages, page, kv_heads, d}),
                     View<const X, 4>(v.data(), {pages, page, kv_heads, dv}),
                     PageTable<index_t>(View<const index_t, 2>(table.data(), {batch(), most}), lengths));
  }
  /// Returns the place of an element of a value.
  std::size_t place_of_value(index_t b, index_t key, index_t head) const {
    const index_t entry = table[static_cast<std::size_t>(b * most + key / page)];
    return static_cast<std::size_t>(((entry * page + key % page) * kv_heads + head) * dv);
  }
};

template <class T>
struct Output {
  std::vector<T> out;
  std::vector<Compute<T>> lse;
  Explanation explanation{};

  bool operator==(const Output& other) const {
    return same_bits(out, other.out) && same_bits(lse, other.lse);
  }
};

/// q is [batch, heads, queries, d]; with cumulative numbers of queries: [1, heads, all, d].
template <class T, class K, class S, class M, class C, class E = Serial>
Output<T> run(const K& keys, index_t heads, index_t queries, const S& scaling, const M& mask, const C& score,
              bool batch_invariant, E&& executor = {}, std::span<const index_t> cumulative = {}) {
  const KeySourceShape shape = keys.shape();
  const index_t batch = cumulative.empty() ? shape.batch : 1,
                rows = cumulative.empty() ? queries : cumulative.back();
  const std::vector<T> q =
      reference::normals<T>(static_cast<std::size_t>(batch * heads * rows * shape.width), 9);
  Output<T> result;
  result.out.assign(static_cast<std::size_t>(batch * heads * rows * shape.value_width), T(-77.F));
  result.lse.assign(static_cast<std::size_t>(batch * heads * rows), -77);
  AttentionOptions<T> options;
  options.batch_invariant = batch_invariant;
  options.explanation = &result.explanation;
  if (!cumulative.empty()) options.lengths = SequenceLengths::packed_queries(cumulative);
  attention<Compute<T>>(with({.q = {q.data(), {batch, heads, rows, shape.width}},
                              .keys = keys,
                              .out = {result.out.data(), {batch, heads, rows, shape.value_width}},
                              .lse = {result.lse.data(), {batch, heads, rows}}},
                             options),
                        scaling, mask, score, executor);
  return result;
}

/// Compares calls with and without the pass of shared keys.
template <class T, class K, class S, class M, class C>
void compare(const K& keys, index_t heads, index_t queries, index_t sharing, const S& scaling, const M& mask,
             const C& score, std::span<const index_t> cumulative = {}) {
  for (const bool invariant : {false, true}) {
    const Serial serial;
    const Output<T> expected =
        run<T>(WrappedSource<K>{keys}, heads, queries, scaling, mask, score, invariant, serial, cumulative);
    const Output<T> got = run<T>(keys, heads, queries, scaling, mask, score, invariant, serial, cumulative);
    CHECK(expected.explanation.shared_sequences == 0);
    CHECK(got.explanation.shared_sequences == sharing);
    CHECK(got.explanation.path == expected.explanation.path);
    CHECK(got == expected);
    CHECK(run<T>(keys, heads, queries, scaling, mask, score, invariant, test_executors::Threads{3},
                 cumulative) == expected);
    CHECK(run<T>(keys, heads, queries, scaling, mask, score, invariant, test_executors::Reverse{40},
                 cumulative) == expected);
  }
}

/// Two groups; a sequence that is too short, one with common keys of less than a chunk, one without any.
const std::vector<Sequence> sequences{{0, 2048, 2300}, {1, 1536, 1600}, {0, 1200, 1300},
                                      {0, 900, 950},   {1, 1536, 1537}, {2, 600, 1800},
                                      {0, 2048, 2049}, {2, 600, 1100},  {1, 0, 1500}};
constexpr index_t sharing_sequences = 5;

struct Every3rdKeyIsMasked {
  KeyRange keys(const Query& query) const { return {0, query.position() + 1}; }
  bool sees(const Query&, index_t key) const { return key % 3 != 0; }
};

template <class T, class X>
void check_types(index_t heads, index_t kv_heads, index_t d, index_t dv, index_t page) {
  const Pool<X> pool(page, kv_heads, d, dv, sequences);
  for_each_target_of<X>([&](const std::string& target) {
    INFO(target << " " << heads << " on " << kv_heads << ", " << d << ", " << dv);
    const auto keys = pool.keys();
    const SSMax<Compute<T>> scaling{Compute<T>(0.3)};
    for (const index_t queries : {1, 2}) {
      const index_t sharing = heads / kv_heads * queries > 16 ? 0 : sharing_sequences;
      compare<T>(keys, heads, queries, sharing, scaling, Causal{}, Identity{});
    }
  });
}

TEST_CASE("common pages: results are bit-identical with and without the pass of shared keys",
          "[attention][source][shared_keys][bfloat16][slow]") {
  check_types<float, float>(3, 3, 24, 9, 16);
  check_types<float, float>(16, 2, 64, 64, 96);
  check_types<bfloat16, bfloat16>(3, 3, 24, 9, 16);
  check_types<bfloat16, bfloat16>(16, 2, 64, 64, 96);
  check_types<bfloat16, bfloat16>(16, 1, 33, 5, 64);
  check_types<half, half>(4, 2, 16, 16, 64);
  check_types<float, bfloat16>(6, 2, 40, 40, 64);
  check_types<double, double>(4, 2, 16, 7, 64);
}

TEST_CASE("common pages: masks, scores and scalings", "[attention][source][shared_keys][bfloat16][slow]") {
  const std::vector<double> slopes{0.5, 0.1, 0.02, 0.3};
  const std::vector<float> s{0.2f, 0.4f, -0.1f, 0.f}, b{1, 0.5f, 0, 2};
  const auto check = [&]<class X>(X) {
    const Pool<X> pool(48, 2, 32, 17, sequences);
    const auto keys = pool.keys();
    const auto same = [&](const auto& scaling, const auto& mask, const auto& score) {
      for_each_target_of<X>([&](const std::string&) {
        compare<X>(keys, 4, 1, sharing_sequences, scaling, mask, score);
        compare<X>(keys, 4, 3, sharing_sequences, scaling, mask, score);
      });
    };
    same(Softmax{}, Full{}, Identity{});
    same(SSMax<float>{std::span(s), std::span(b)}, SlidingWindow{1100}, Identity{});
    same(Softmax{}, SlidingWindow{5}, Identity{});
    same(SSMax<float>{0.4f}, SlidingWindow{299, 0, 4}, Identity{});
    same(SSMax<float>{0.4f}, Every3rdKeyIsMasked{}, Identity{});
    same(Softmax{}, Causal{}, Alibi{slopes});
    same(SSMax<float>{0.1f}, Causal{}, Softcap{5});
  };
  check(0.f);
  check(bfloat16{});
}

TEST_CASE("common pages: sequences with their own numbers of queries",
          "[attention][source][shared_keys][bfloat16]") {
  // Sequences 1, 4 and 2, 6 share keys. The prompt of 40 queries and the sequence with 2 queries do not take part.
  const std::vector<index_t> cumulative{0, 40, 41, 42, 42, 43, 44, 45, 45, 47};
  for_each_target_of<bfloat16>([&](const std::string&) {
    const auto check = [&]<class X>(X) {
      const Pool<X> pool(64, 2, 24, 24, sequences);
      compare<X>(pool.keys(), 8, 0, 4, SSMax<float>{0.3f}, Causal{}, Identity{}, cumulative);
    };
    check(0.f);
    check(bfloat16{});
  });
}

TEST_CASE("common pages: all keys of two sequences are common", "[attention][source][shared_keys]") {
  const std::vector<Sequence> twins{{0, 2048, 2048}, {0, 2048, 2048}, {0, 1024, 1024}};
  const Pool<float> pool(64, 2, 24, 24, twins);
  compare<float>(pool.keys(), 4, 1, 3, SSMax<float>{0.3f}, Causal{}, Identity{});
  compare<float>(pool.keys(), 4, 4, 3, SSMax<float>{0.3f}, Causal{}, Identity{});
}

TEST_CASE("common pages: NaN affects only the sequences that see it", "[attention][source][shared_keys]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for_each_target([&](const std::string&) {
    Pool<float> pool(64, 2, 24, 24, sequences);
    const auto clean = run<float>(pool.keys(), 4, 1, Softmax{}, Causal{}, Identity{}, false);
    pool.v[pool.place_of_value(0, 2200, 0)] = nan;  // a key that sequence 0 has for itself
    const auto own = run<float>(pool.keys(), 4, 1, Softmax{}, Causal{}, Identity{}, false);
    CHECK(own.explanation.shared_sequences == sharing_sequences);
    CHECK(std::isnan(own.out[0]));
    const std::size_t of_sequence = 4 * 24;
    CHECK(std::equal(own.out.begin() + of_sequence, own.out.end(), clean.out.begin() + of_sequence));
    pool.v[pool.place_of_value(0, 100, 1)] = nan;  // a common key that the window masks
    compare<float>(pool.keys(), 4, 1, sharing_sequences, Softmax{}, SlidingWindow{1150}, Identity{});
    compare<float>(pool.keys(), 4, 1, sharing_sequences, Softmax{}, Causal{}, Identity{});
  });
}

TEST_CASE("common pages: forks of a PagedKvCache",
          "[attention][source][shared_keys][bfloat16][tile_product]") {
  PagedKvCache<bfloat16> cache({.kv_heads = 2, .width = 16, .page = 64, .pages = 80});
  const std::vector<float> numbers = reference::normals<float>(2 * 2100 * 16, 3);
  const auto append = [&](index_t id, index_t count) {
    const View<const float, 3> rows(numbers.data(), {count, 2, 16});
    cache.append(rows, rows, std::vector<index_t>(static_cast<std::size_t>(count), id));
  };
  std::vector<index_t> ids{cache.add()};
  append(ids[0], 2100);
  for (const index_t more : {1, 40, 100}) {
    ids.push_back(cache.fork(ids[0]));
    append(ids.back(), more);
  }
  compare<bfloat16>(cache.source(ids), 8, 1, 4, SSMax<float>{0.3f}, Causal{}, Identity{});
}

TEST_CASE("common pages: a plan and a workspace have the memory of the pass",
          "[attention][source][shared_keys]") {
  const Pool<float> pool(64, 2, 24, 24, sequences);
  const auto keys = pool.keys();
  const index_t batch = pool.batch();
  const SSMax<float> scaling{0.3f};
  const Output<float> expected = run<float>(keys, 4, 1, scaling, Causal{}, Identity{}, false);
  const std::vector<float> q = reference::normals<float>(static_cast<std::size_t>(batch * 4 * 24), 9);
  std::vector<float> out(q.size());
  const AttentionArguments<float> arguments{.q = {q.data(), {batch, 4, 1, 24}},
                                            .out = {out.data(), {batch, 4, 1, 24}}};

  const Plan plan(over(arguments, keys), 1, Causal{});
  CHECK(plan.explanation().shared_sequences == sharing_sequences);
  Workspace memory;
  const std::span<std::byte> planned(memory.reserve(plan.bytes()), plan.bytes());
  plan.bind(over(arguments, keys), scaling).run(planned);
  CHECK(same_bits(out, expected.out));

  Explanation explanation;
  Workspace workspace;
  AttentionOptions<float> options;
  options.workspace = &workspace;
  options.explanation = &explanation;
  attention(with(over(arguments, keys), options), scaling, Causal{});
  CHECK(explanation.workspace_bytes == workspace.size());
  CHECK(plan.bytes() < workspace.size());  // the plan has the list
  CHECK(allocations([&] { attention(with(over(arguments, keys), options), scaling, Causal{}); }) == 0);
  CHECK(same_bits(out, expected.out));
  for (const index_t threads : {1, 7}) {  // one run per phase, and one for split keys
    index_t runs = 0;
    attention(with(over(arguments, keys), options), scaling, Causal{},
              test_executors::Reverse{threads, &runs});
    CHECK(runs <= (threads == 1 ? 2 : 4));
    CHECK(same_bits(out, expected.out));
  }
}

TEST_CASE("common pages: sinks", "[attention][source][shared_keys]") {
  const Pool<float> pool(64, 2, 24, 24, sequences);
  const auto keys = pool.keys();
  const std::vector<float> sinks{0.5f, -1, 3, 0}, q = reference::normals<float>(9 * 4 * 24, 9);
  std::vector<float> out(q.size()), expected(q.size());
  Explanation explanation;
  for (const bool scaled : {false, true}) {
    AttentionOptions<float> options;
    options.sinks = sinks;
    options.scaled_sinks = scaled;
    options.explanation = &explanation;
    const auto attend = [&](const auto& source, std::vector<float>& to) {
      attention(
          with({.q = {q.data(), {9, 4, 1, 24}}, .keys = source, .out = {to.data(), {9, 4, 1, 24}}}, options),
          SSMax<float>{0.3f}, Causal{});
    };
    attend(WrappedSource<std::remove_cvref_t<decltype(keys)>>{keys}, expected);
    attend(keys, out);
    CHECK(explanation.shared_sequences == sharing_sequences);
    CHECK(same_bits(out, expected));
  }
}

}  // namespace shared_keys_test
