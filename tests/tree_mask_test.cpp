// Tree: attention computes what the definition of the tree says, over views and caches. A cache that keeps an accepted
// branch continues like a cache that only had the branch.

#include <functional>
#include <memory>
#include <random>

#include "attention_backward_problem.hpp"
#include "mask_members.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace attention_problem::tree_mask_test {

constexpr index_t unbounded = std::numeric_limits<index_t>::max();

/// Trees of candidates, and the definition of their mask.
struct Trees {
  index_t trees, candidates, window = unbounded;
  std::vector<index_t> parents{}, depths{};  // [trees][candidates]
  std::vector<bool> branches{};              // [trees][candidates][candidates]

  /// Adds the next candidate of a tree.
  void add(index_t parent) {
    const index_t row = std::ssize(parents), first = row / candidates * candidates;
    parents.push_back(parent);
    depths.push_back(parent < 0 ? 1 : depths[static_cast<std::size_t>(first + parent)] + 1);
    for (index_t i = 0; i < candidates; ++i)
      branches.push_back(first + i == row || (parent >= 0 && is_on_branch(first + parent, i)));
  }
  bool is_on_branch(index_t row, index_t candidate) const {
    return branches[static_cast<std::size_t>(row * candidates + candidate)];
  }
  index_t row(const Query& query, index_t candidate) const {
    return (trees == 1 ? 0 : query.batch) * candidates + candidate;
  }
  index_t position(const Query& query, index_t key) const {
    const index_t committed = query.shape.keys - query.shape.queries;
    if (key < committed) return key;
    return committed + depths[static_cast<std::size_t>(row(query, key - committed))] - 1;
  }
  index_t position(const Query& query) const {
    return position(query, query.shape.keys - query.shape.queries + query.index);
  }
  bool shows(const Query& query, index_t key) const {
    const index_t candidate = key - (query.shape.keys - query.shape.queries);
    return position(query) - position(query, key) < window &&
           (candidate < 0 || is_on_branch(row(query, query.index), candidate));
  }
  auto visible() const {
    return [this](const Query& query, index_t key) { return shows(query, key); };
  }
  Positions positions() const {
    return {[this](const Query& query) { return position(query); },
            [this](const Query& query, index_t key) { return position(query, key); }};
  }
  Tree mask() const { return Tree(View<const index_t, 2>(parents.data(), {trees, candidates}), window); }
};

/// Returns trees in which parent(i) is the parent of candidate i.
template <class F>
Trees make(index_t trees, index_t candidates, const F& parent) {
  Trees result{trees, candidates};
  for (index_t tree = 0; tree < trees; ++tree) {
    for (index_t i = 0; i < candidates; ++i) result.add(parent(i));
  }
  return result;
}

Trees chain(index_t candidates) {
  return make(1, candidates, [](index_t i) { return i - 1; });
}

Trees random_trees(index_t trees, index_t candidates, unsigned seed) {
  std::mt19937 random(seed);
  return make(trees, candidates,
              [&](index_t i) { return static_cast<index_t>(random() % static_cast<unsigned>(i + 1)) - 1; });
}

/// Returns chains, stars, binary trees and random trees.
std::vector<Trees> all_kinds(index_t trees, index_t candidates) {
  std::vector<Trees> result{chain(candidates)};
  result.push_back(make(1, candidates, [](index_t) { return -1; }));
  result.push_back(make(trees, candidates, [](index_t i) { return i == 0 ? -1 : (i - 1) / 2; }));
  result.push_back(random_trees(trees, candidates, 1));
  result.push_back(random_trees(trees, candidates, 3));
  result.back().window = 3;
  return result;
}

/// A matrix of bool of the same tree.
struct Matrix {
  std::unique_ptr<bool[]> values;
  View<const bool, 4> view;

  Matrix(const Trees& trees, const QueryShape& shape)
      : values(std::make_unique<bool[]>(static_cast<std::size_t>(shape.rows() * shape.keys))),
        view(values.get(), {shape.batch, shape.heads, shape.queries, shape.keys}) {
    bool* at = values.get();
    for (index_t row = 0; row < shape.rows(); ++row) {
      const Query query{row / shape.queries / shape.heads, row / shape.queries % shape.heads,
                        row % shape.queries, shape};
      for (index_t key = 0; key < shape.keys; ++key) *at++ = trees.shows(query, key);
    }
  }
};

constexpr std::array<index_t, 6> sizes{1, 2, 7, 64, 65, 130};

TEST_CASE("the members of Tree agree with the definition of the tree", "[attention][mask]") {
  for (const index_t candidates : sizes) {
    for (const index_t committed : {0, 1, 70}) {
      const QueryShape shape{2, 2, candidates, committed + candidates};
      for (const Trees& trees : all_kinds(2, candidates)) {
        const Tree mask = trees.mask();
        mask_members::check_members(shape, mask, "Tree");
        mask_members::check_members(shape, mask & SlidingWindow{5, 2}, "Tree & SlidingWindow");
        const Query query{1, 1, candidates - 1, shape};
        bool same = mask.query_position(query) == trees.position(query);
        for (index_t key = 0; key < shape.keys; ++key) {
          same &= mask.sees(query, key) == trees.shows(query, key) || key < mask.keys(query).begin;
          same &= mask.key_position(query, key) == trees.position(query, key);
        }
        CHECK(same);
      }
    }
  }
}

TEST_CASE("Tree returns the offset of each candidate", "[mask]") {
  const std::vector<std::int32_t> parents{-1, 0, 0, 2, -1, 4};
  CHECK(std::ranges::equal(Tree(View<const std::int32_t, 2>(parents.data(), {1, 6})).offsets(),
                           std::array{0, 1, 1, 2, 0, 1}));
  const std::vector<index_t> two{-1, 0, 1, -1, -1, 0};
  CHECK(std::ranges::equal(Tree(two).offsets(), std::array{0, 1, 2, 0, 0, 1}));
  CHECK(std::ranges::equal(Tree(View<const index_t, 2>(two.data(), {2, 3})).offsets(),
                           std::array{0, 1, 2, 0, 0, 1}));
}

TEST_CASE("attention under Tree", "[attention][masks][bfloat16]") {
  for (const index_t candidates : sizes) {
    const Shape shape{2, 4, 2, candidates, candidates + 150, 8, 5};
    for (const Trees& trees : all_kinds(2, candidates)) {
      check_mask<float>(shape, trees.mask(), trees.visible(), {}, trees.positions());
      check_mask<bfloat16>(shape, trees.mask(), trees.visible(), {}, trees.positions());
      check_mask<double>(shape, trees.mask(), trees.visible(), {}, trees.positions());
    }
  }
}

TEST_CASE("attention under Tree, more than a key chunk of committed keys", "[attention][masks][bfloat16]") {
  for (const index_t committed : {1000, 1024, 2100}) {
    const Trees trees = random_trees(1, 61, 4);
    const Shape shape{1, 4, 1, 61, committed + 61, 8, 5};
    check_mask<float>(shape, trees.mask(), trees.visible(), {}, trees.positions());
    check_mask<bfloat16>(shape, trees.mask(), trees.visible(), {}, trees.positions());
  }
}

TEST_CASE("attention under Tree and another mask", "[attention][masks]") {
  const Trees trees = random_trees(2, 20, 5);
  const Shape shape{2, 4, 2, 20, 170, 8, 5};
  check_mask<float>(
      shape, trees.mask() & SlidingWindow{30},
      [&](const Query& query, index_t key) {
        return trees.shows(query, key) && query.position() - key <= 30;
      },
      {}, trees.positions());
  const std::vector<index_t> lengths{170, 100};
  check_mask<float>(
      shape, KeyLengths(lengths) & trees.mask(),
      [&](const Query& query, index_t key) {
        return trees.shows(query, key) && key < lengths[static_cast<std::size_t>(query.batch)];
      },
      {}, trees.positions());
}

TEST_CASE("attention under Tree is bit-identical to attention under its matrix", "[attention][masks]") {
  const FourHeads<float> heads;
  for (const index_t candidates : sizes) {
    const Problem<float> problem({2, 4, 2, candidates, candidates + 150, 8, 5});
    for (const Trees& trees : all_kinds(2, candidates)) {
      const Matrix matrix(trees, problem.query_shape());
      for_each_target([&](const std::string& target) {
        INFO(target << ' ' << candidates);
        CHECK(run(problem, heads.scaling(), trees.mask()) ==
              run(problem, heads.scaling(), MatrixRuns(matrix.view)));
      });
    }
  }
}

TEST_CASE("rope and scores follow the positions of Tree", "[attention][masks][score]") {
  const Rope<float> rope({.width = 8}, 400);
  const Rope<double> rope_of_double({.width = 8}, 400);
  const std::vector<double> slopes = Alibi::slopes(4);
  for (const index_t candidates : {7, 65}) {
    const Shape shape{2, 4, 2, candidates, candidates + 150, 8, 5};
    for (const Trees& trees : all_kinds(2, candidates)) {
      check_mask<float>(shape, trees.mask(), trees.visible(), {.rope = &rope}, trees.positions());
      check_mask<double>(shape, trees.mask(), trees.visible(), {.rope = &rope_of_double}, trees.positions());
      const auto formula = [&](Real z, const Query& query, index_t key) {
        return z + Real(slopes[static_cast<std::size_t>(query.head)]) *
                       static_cast<Real>(trees.position(query, key) - trees.position(query));
      };
      check_score(Problem<float>(shape), trees.mask(), trees.visible(), Alibi(slopes), formula, {},
                  trees.positions());
    }
  }
}

TEST_CASE("gradients under Tree", "[attention][backward][masks][bfloat16]") {
  const Rope<float> rope({.width = 8}, 400);
  for (const index_t candidates : {7, 65}) {
    const Shape shape{2, 4, 2, candidates, candidates + 150, 8, 5};
    for (const Trees& trees : all_kinds(2, candidates)) {
      backward_problem::check(backward_problem::Problem<float>(shape), trees.mask(), trees.visible(), {}, {},
                              {.rope = &rope}, trees.positions());
      backward_problem::check(backward_problem::Problem<bfloat16>(shape), trees.mask(), trees.visible(), {},
                              {}, {}, trees.positions());
    }
  }
}

TEST_CASE("Tree of a chain is bit-identical to Causal", "[attention][masks][bfloat16]") {
  const Rope<float> rope({.width = 8}, 400);
  const FourHeads<float> heads;
  const auto check = [&]<class T>(const Problem<T>& problem, const Tree& tree) {
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ' ' << name_of(problem.shape));
      CHECK(run(problem, heads.scaling(), tree, {.rope = &rope}) ==
            run(problem, heads.scaling(), Causal{}, {.rope = &rope}));
    });
  };
  for (const index_t candidates : sizes) {
    for (const index_t committed : {0, 30, 200}) {
      const Shape shape{2, 4, 2, candidates, candidates + committed, 8, 5};
      check(Problem<float>(shape), chain(candidates).mask());
      check(Problem<bfloat16>(shape), chain(candidates).mask());
    }
  }
}

// ---- Caches -----------------------------------------------------------------------------------------------

/// Returns positions [begin, end) of all keys or values.
template <class T>
View<const T, 4> part(const View<const T, 4>& all, index_t begin, index_t end) {
  return {&all(0, 0, 0, 0) + begin * all.stride(2),
          {all.extent(0), all.extent(1), end - begin, all.extent(3)},
          {all.stride(0), all.stride(1), all.stride(2), 1}};
}

/// Returns a cache with the problem's keys, the last ones with the offsets of the tree.
template <class T>
KvCache<T> filled(const Problem<T>& problem, const Tree& tree, const Rope<Compute<T>>* rope) {
  const Shape& s = problem.shape;
  KvCache<T> cache(
      {.batch = s.batch, .kv_heads = s.kv_heads, .width = s.d, .value_width = s.dv, .capacity = s.keys + 10});
  const auto k = problem.k_view(), v = problem.v_view();
  const index_t committed = s.keys - s.queries;
  cache.append(part(k, 0, committed), part(v, 0, committed), rope);
  cache.append(part(k, committed, s.keys), part(v, committed, s.keys), rope, {}, tree.offsets());
  return cache;
}

template <class T, class K, class S, class M>
Output<T> decoded(const Problem<T>& problem, const K& keys, const S& scaling, const M& mask,
                  const AttentionOptions<T>& options) {
  Output<T> result(problem.shape);
  attention<Compute<T>>(
      with({.q = problem.q_view(), .keys = keys, .out = result.out_view(), .lse = result.lse_view()},
           options),
      scaling, mask);
  return result;
}

/// Checks decode over a cache against the reference: keys that append has rotated, or that decode rotates.
template <class T>
void check_decode(const Shape& shape, const Trees& trees, const Rope<Compute<T>>& rope) {
  const FourHeads<Compute<T>> heads(shape.heads);
  const Problem<T> problem(shape);
  const Tree tree = trees.mask();
  AttentionOptions<T> options{.rope = &rope};
  const Expected<T> expected =
      expect(problem, trees.visible(), heads.multiplier(), options, {}, trees.positions());
  for_each_target_of<T>([&](const std::string& target) {
    Rules<T> rules;
    options.rotate_source_keys = true;
    rules.take(decoded(problem, filled(problem, tree, nullptr), heads.scaling(), tree, options), expected,
               name_of(shape));
    // A bfloat16 cache rounds rotated keys: the result is another one.
    if constexpr (!std::same_as<T, bfloat16>) {
      options.rotate_source_keys = false;
      rules.take(decoded(problem, filled(problem, tree, &rope), heads.scaling(), tree, options), expected,
                 name_of(shape));
    }
    rules.check(target);
  });
}

TEST_CASE("decode under Tree over a cache", "[decode][masks][bfloat16]") {
  const Rope<float> rope({.width = 8}, 400);
  const Rope<double> rope_of_double({.width = 8}, 400);
  for (const index_t candidates : {1, 2, 7, 65}) {
    const Shape shape{2, 4, 2, candidates, candidates + 150, 8, 5};
    for (const Trees& trees : all_kinds(2, candidates)) {
      check_decode<float>(shape, trees, rope);
      check_decode<bfloat16>(shape, trees, rope);
      check_decode<double>(shape, trees, rope_of_double);
    }
  }
}

TEST_CASE("decode under Tree over pages is bit-identical to a cache", "[decode][masks][paged_keys]") {
  const Rope<float> rope({.width = 8}, 400);
  const Trees trees = random_trees(1, 30, 6);
  const Problem<float> problem({1, 4, 2, 30, 90, 8, 8});
  const KvCache<float> cache =
      filled(problem, trees.mask(), &rope);  // [kv head][10 pages of 10 keys][channel]
  const auto [k, v] = cache.memory();
  const View<const float, 4> k_pool(k.data(), {10, 10, 2, 8}, {80, 8, 800, 1}),
      v_pool(v.data(), {10, 10, 2, 8}, {80, 8, 800, 1});
  const std::vector<index_t> pages{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, lengths{90};
  const PagedKeys keys(k_pool, v_pool,
                       PageTable<index_t>(View<const index_t, 2>(pages.data(), {1, 10}), lengths));
  for_each_target([&](const std::string&) {
    const AttentionOptions<float> options{.rope = &rope, .batch_invariant = true};
    CHECK(decoded(problem, keys, SSMax<float>{0.5f}, trees.mask(), options) ==
          decoded(problem, cache, SSMax<float>{0.5f}, trees.mask(), options));
  });
}

/// The parts of a step of a server: sequences with trees and committed keys of their own.
struct Server {
  static constexpr index_t heads = 4, kv_heads = 2, d = 8;
  std::vector<index_t> lengths, candidates;  // committed keys, and candidates
  std::vector<index_t> begins{0};            // [sequences + 1]: of the packed candidates
  std::vector<float> q, k, v;                // packed: committed keys of all sequences, then candidates

  Server(std::vector<index_t> of_lengths, std::vector<index_t> of_candidates)
      : lengths(std::move(of_lengths)), candidates(std::move(of_candidates)) {
    for (const index_t count : candidates) begins.push_back(begins.back() + count);
    q = reference::normals<float>(static_cast<std::size_t>(begins.back() * heads * d), 1);
    k = reference::normals<float>(static_cast<std::size_t>(1000 * kv_heads * d), 2);
    v = reference::normals<float>(static_cast<std::size_t>(1000 * kv_heads * d), 3);
  }
  View<const float, 3> rows(const std::vector<float>& of, index_t first, index_t count) const {
    return {of.data() + first * kv_heads * d, {count, kv_heads, d}};
  }
};

TEST_CASE("sequences with trees of their own, in one call over pages", "[decode][masks][paged_kv_cache]") {
  const Rope<float> rope({.width = Server::d}, 400);
  const Server server({37, 100, 3}, {9, 30, 1});
  const Trees trees = random_trees(3, 30, 8);
  const Tree tree = trees.mask();
  PagedKvCache<float> pages({.kv_heads = 2, .width = Server::d, .page = 16, .pages = 40});
  std::vector<index_t> ids, tokens, offsets;
  std::vector<float> separate;
  for (std::size_t b = 0; b < 3; ++b) {
    ids.push_back(pages.add());
    const index_t first = 200 * static_cast<index_t>(b), length = server.lengths[b],
                  count = server.candidates[b], begin = server.begins[b];
    pages.append(server.rows(server.k, first, length), server.rows(server.v, first, length),
                 std::vector<index_t>(static_cast<std::size_t>(length), ids[b]), &rope);
    const auto own = tree.offsets().subspan(30 * b, static_cast<std::size_t>(count));
    tokens.insert(tokens.end(), own.size(), ids[b]);
    offsets.insert(offsets.end(), own.begin(), own.end());
    // The same sequence alone, in a KvCache.
    KvCache<float> cache({.kv_heads = 2, .width = Server::d, .capacity = 200});
    const auto append = [&](index_t from, index_t n, std::span<const index_t> of) {
      const View<const float, 2> k_rows(&server.k[static_cast<std::size_t>(from * 16)], {n, 16}),
          v_rows(&server.v[static_cast<std::size_t>(from * 16)], {n, 16});
      cache.append(heads_view(k_rows, 2), heads_view(v_rows, 2), &rope, {}, of);
    };
    append(first, length, {});
    append(600 + begin, count, own);
    const std::span parents = std::span(trees.parents).subspan(30 * b, own.size());
    std::vector<float> out(static_cast<std::size_t>(count * 32));
    const View<const float, 2> q(server.q.data() + begin * 32, {count, 32});
    attention({.q = heads_view(q, 4),
               .keys = cache,
               .out = heads_view(View<float, 2>(out.data(), {count, 32}), 4),
               .rope = &rope,
               .batch_invariant = true},
              SSMax<float>{0.5f}, Tree(parents));
    separate.insert(separate.end(), out.begin(), out.end());
  }
  pages.append(server.rows(server.k, 600, 40), server.rows(server.v, 600, 40), tokens, &rope, offsets);
  std::vector<float> out(separate.size());
  const View<const float, 2> q(server.q.data(), {40, 32});
  attention({.q = heads_view(q, 4),
             .keys = pages.source(ids),
             .out = heads_view(View<float, 2>(out.data(), {40, 32}), 4),
             .rope = &rope,
             .batch_invariant = true,
             .lengths = SequenceLengths::packed_queries(server.begins)},
            SSMax<float>{0.5f}, tree);
  CHECK(same_bits(out, separate));
}

/// Returns the branch of a candidate, as keys of the cache.
std::vector<index_t> branch_of(const Trees& trees, index_t committed, index_t candidate) {
  std::vector<index_t> result;
  for (index_t i = candidate; i >= 0; i = trees.parents[static_cast<std::size_t>(i)])
    result.push_back(committed + i);
  std::ranges::reverse(result);
  return result;
}

TEST_CASE("a cache that keeps a branch continues like a cache of the branch",
          "[decode][kv_cache][bfloat16][tile_product]") {
  const index_t committed = 50, candidates = 40;
  const Rope<float> rope({.width = 8}, 400);
  const auto check = [&]<class T>(const Problem<T>& problem, const Trees& trees, index_t candidate) {
    const auto k = problem.k_view(), v = problem.v_view();
    const std::vector<index_t> branch = branch_of(trees, committed, candidate);
    KvCache<T> cache = filled(problem, trees.mask(), &rope);
    KvCache<T> expected(cache.options());
    expected.append(part(k, 0, committed), part(v, 0, committed), &rope);
    for (const index_t key : branch) expected.append(part(k, key, key + 1), part(v, key, key + 1), &rope);
    for (index_t b = 0; b < 2; ++b) cache.keep(b, committed, branch);
    const Problem<T> next({2, 4, 2, 3, 3, 8, 5});
    for (KvCache<T>* each : {&cache, &expected}) each->append(next.k_view(), next.v_view(), &rope);
    CHECK(cache.length(1) == expected.length(1));
    CHECK(decoded(next, cache, SSMax<float>{0.5f}, Causal{}, {.rope = &rope}) ==
          decoded(next, expected, SSMax<float>{0.5f}, Causal{}, {.rope = &rope}));
  };
  const Shape shape{2, 4, 2, candidates, committed + candidates, 8, 5};
  for (const Trees& trees : all_kinds(1, candidates)) {
    for (const index_t candidate : {-1, 0, 1, 20, 39}) {
      check(Problem<float>(shape), trees, candidate);
      check(Problem<bfloat16>(shape), trees, candidate);
    }
  }
}

TEST_CASE("a ring keeps a branch until it has forgotten keys", "[kv_cache][errors]") {
  KvCache<float> ring({.width = 1, .capacity = 6, .ring = true, .first = 2});
  std::vector<float> rows{0, 1, 2, 3, 4, 5};
  const View<const float, 4> view(rows.data(), {1, 1, 6, 1});
  ring.append(view, view);
  ring.keep(0, 1, std::array<index_t, 2>{2, 5});
  CHECK(ring.length(0) == 3);
  CHECK(ring.run(0, 0, 1).k[0] == 2);
  CHECK(ring.run(0, 0, 2).v[0] == 5);
  ring.append(view, view);
  check_refused({"ssmax::KvCache::keep: length is 1, but the ring has forgotten keys before 5"},
                [&] { ring.keep(0, 1, {}); });
}

// ---- Errors -----------------------------------------------------------------------------------------------

TEST_CASE("Tree refuses parents and calls that do not fit", "[mask][errors]") {
  using Parents = std::vector<index_t>;
  const auto refused = [](std::string_view message, const Parents& parents) {
    check_refused({message}, [&] { Tree{parents}; });
  };
  refused("ssmax::Tree: parents of tree 0 has 0 for candidate 0, must be -1 to -1", {0});
  refused("ssmax::Tree: parents of tree 0 has 3 for candidate 2, must be -1 to 1", {-1, 0, 3});
  refused("ssmax::Tree: parents of tree 0 has -2 for candidate 1, must be -1 to 0", {-1, -2});
  check_refused({"ssmax::Tree: window is 0, must be at least 1"}, [] { Tree(Parents{-1}, 0); });
  const Parents parents{-1, 0, -1, 1};
  const View<const index_t, 2> both(parents.data(), {2, 2}), null(nullptr, {2, 2}),
      strided(parents.data(), {1, 2}, {4, 2});
  check_refused({"ssmax::Tree: parents of tree 1 has 1 for candidate 1, must be -1 to 0"},
                [&] { Tree{both}; });
  check_refused({"ssmax::Tree: parents is null", "4"}, [&] { Tree{null}; });
  check_refused({"ssmax::Tree: parents has last stride 2"}, [&] { Tree{strided}; });
  const Tree two(View<const index_t, 2>(parents.data(), {2, 2}, {0, 1}));
  CHECK_NOTHROW(two.check({2, 4, 2, 2}));
  CHECK_NOTHROW(Tree(Parents{}).check({2, 4, 0, 9}));
  check_refused({"ssmax::Tree: parents has trees 2, batch entries are 3"}, [&] { two.check({3, 4, 2, 9}); });
  check_refused({"ssmax::Tree: parents has candidates 2, queries are 3"}, [&] { two.check({2, 4, 3, 9}); });
  check_refused({"ssmax::Tree: parents has candidates 2, queries are 1"}, [&] { two.check({2, 4, 1, 9}); });
  check_refused({"ssmax::Tree: parents has candidates 2, keys are 1"}, [&] { two.check({2, 4, 2, 1}); });
}

TEST_CASE("append refuses offsets that do not fit", "[kv_cache][paged_kv_cache][errors]") {
  const Rope<float> rope({.width = 2}, 10);
  const std::vector<float> rows(2 * 3 * 2);
  const View<const float, 4> k(rows.data(), {2, 1, 3, 2});
  KvCache<float> cache({.batch = 2, .width = 2, .capacity = 20});
  const auto append = [&](const Rope<float>* with, std::vector<index_t> offsets) {
    cache.append(k, k, with, {}, offsets);
  };
  const auto refused = [&](const std::string& message, const Rope<float>* with,
                           const std::vector<index_t>& offsets) {
    check_refused({"ssmax::KvCache::append: " + message}, [&] { append(with, offsets); });
  };
  for (const Rope<float>* with : {static_cast<const Rope<float>*>(nullptr), &rope}) {
    for (const std::size_t extent : {1U, 2U, 4U, 5U, 7U}) {
      refused("offsets has extent " + std::to_string(extent) + ", new positions are 3", with,
              std::vector<index_t>(extent));
    }
  }
  refused("k has position 10, the rope's last is 9", &rope, {0, 1, 10});
  refused("k has position -1, the rope's first is 0", &rope, {0, 1, 2, 0, -1, 1});
  refused("offsets has " + std::to_string(unbounded), &rope, {0, 1, unbounded});
  CHECK(cache.length(0) == 0);
  CHECK(cache.length(1) == 0);
  append(nullptr, {0, 1, 100});
  append(&rope, {0, 1, 1});
  CHECK(cache.length(1) == 6);

  PagedKvCache<float> pages({.width = 2, .page = 4, .pages = 3});
  const std::vector<index_t> ids(3, pages.add());
  const View<const float, 3> tokens(rows.data(), {3, 1, 2});
  const auto append_paged = [&](std::vector<index_t> offsets) {
    pages.append(tokens, tokens, ids, &rope, offsets);
  };
  const auto paged_refused = [&](const std::string& message, const std::vector<index_t>& offsets) {
    check_refused({"ssmax::PagedKvCache::append: " + message}, [&] { append_paged(offsets); });
  };
  paged_refused("offsets has extent 2, sequences has 3", {0, 1});
  paged_refused("k has position 10, the rope's last is 9", {0, 10, 1});
  paged_refused("offsets has " + std::to_string(unbounded), {unbounded, 0, 1});
  CHECK(pages.length(ids[0]) == 0);
  append_paged({0, 1, 1});
  paged_refused("k has position 10, the rope's last is 9", {0, 7, 1});
}

TEST_CASE("keep refuses keys that do not fit", "[kv_cache][paged_kv_cache][errors]") {
  const std::vector<float> rows(6);
  KvCache<float> cache({.batch = 1, .width = 1, .capacity = 20});
  cache.append({rows.data(), {1, 1, 6, 1}}, {rows.data(), {1, 1, 6, 1}});
  PagedKvCache<float> pages({.width = 1, .page = 4, .pages = 3});
  const index_t id = pages.add();
  pages.append({rows.data(), {6, 1, 1}}, {rows.data(), {6, 1, 1}}, std::vector<index_t>(6, id));
  const auto refused = [&](index_t length, const std::vector<index_t>& kept, const std::string& message) {
    check_refused({"ssmax::KvCache::keep: " + message}, [&] { cache.keep(0, length, kept); });
    check_refused({"ssmax::PagedKvCache::keep: " + message}, [&] { pages.keep(id, length, kept); });
    CHECK(cache.length(0) == 6);
    CHECK(pages.length(id) == 6);
  };
  refused(-1, {}, "length is -1, must be within 0 and 6");
  refused(7, {}, "length is 7, must be within 0 and 6");
  refused(2, {1}, "kept has key 1, must rise and be at least 2");
  refused(2, {4, 4}, "kept has key 4, must rise and be at least 5");
  refused(2, {4, 3}, "kept has key 3, must rise and be at least 5");
  refused(2, {2, 6}, "kept has key 6, stored keys are 6");
  check_refused({"ssmax::KvCache::keep: b is 1, sequences are 1"}, [&] { cache.keep(1, 0, {}); });
  check_refused({"ssmax::PagedKvCache::keep: id names sequence 3"}, [&] { pages.keep(3, 0, {}); });
}

}  // namespace attention_problem::tree_mask_test
