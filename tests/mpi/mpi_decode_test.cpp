// Decode with keys distributed over ranks is bit-identical to decode with one cache.

#include <ssmax/mpi.hpp>

#include "../refusal.hpp"
#include "../test.hpp"
#include "mpi_problem.hpp"

namespace mpi_problem::mpi_decode_test {

constexpr index_t all_positions = 2 * 1024 + 200;

/// Returns a policy, or the policy that a function returns for the shape of a call.
template <class P>
auto policy_of(const P& policy, const Shape& shape) {
  if constexpr (std::invocable<const P&, const Shape&>) {
    return policy(shape);
  } else {
    return policy;
  }
}

/// Appends `prefilled` positions at once, then a few at a time, in type X, over ranks and in one cache.
template <class X, class M, class C>
void check_decode(const M& mask, const C& score, const AttentionOptions<float>& options) {
  const index_t prefilled = all_positions - 100, heads = 4, kv_heads = 2, d = 8;
  const std::vector<float> s{0.4f, 0.5f, 0.3f, 0.2f};
  const SSMax<float> scaling{s};
  const ssmax::Rope<float>* rope = options.rotate_source_keys ? nullptr : options.rope;
  static const Problem<float> problem({2, heads, kv_heads, all_positions, all_positions, d, d});
  const int rank = world().rank();
  const Layout layout = Layout::zigzag(all_positions, world().ranks(), 1024);
  KvCache<X> whole({.batch = 2, .kv_heads = kv_heads, .width = d, .capacity = all_positions});
  KvCache<X> share(
      {.batch = 2, .kv_heads = kv_heads, .width = d, .capacity = std::max<index_t>(1, layout.count(rank))});
  index_t length = 0;
  for (const index_t step : {prefilled, index_t{1}, index_t{2}, all_positions - prefilled - 3}) {
    const auto rows = [&](const View<const float, 4>& view) {
      return ssmax::detail::rows_of(view, length, step);
    };
    whole.append(rows(problem.k_view()), rows(problem.v_view()), rope);
    ssmax::mpi::append(share, layout, rank, length, rows(problem.k_view()), rows(problem.v_view()), rope);
    length += step;
    const Shape shape{2, heads, kv_heads, step == prefilled ? 3 : step, length, d, d};
    const auto q = ssmax::detail::rows_of(problem.q_view(), length - shape.queries, shape.queries);
    const auto call_mask = policy_of(mask, shape);
    const auto call_score = policy_of(score, shape);
    Output<float> one(shape), many(shape);
    const auto arguments = [&](Output<float>& to, const KvCache<X>& cache) {
      return with({.q = q, .keys = cache, .out = to.out_view(), .lse = to.lse_view()}, options);
    };
    ssmax::attention(arguments(one, whole), scaling, call_mask, call_score);
    ssmax::mpi::attention(world(), layout, length, arguments(many, share), scaling, call_mask, call_score);
    CHECK(everywhere(one == many));
  }
}

TEST_CASE("decode over ranks is bit-identical to decode with one cache", "[mpi][decode]") {
  const std::vector<float> sinks{0.5f, -1, 0, 2};
  const ssmax::Rope<float> rope({.width = 8}, all_positions);
  const AttentionOptions<float> options{.rope = &rope, .sinks = sinks},
      scaled{.rope = &rope, .sinks = sinks, .scaled_sinks = true};
  check_decode<float>(Causal{}, Softcap{5}, options);
  check_decode<float>(Causal{}, Softcap{5}, scaled);
  check_decode<ssmax::bfloat16>(SlidingWindow{1200}, Softcap{5}, scaled);
}

TEST_CASE("decode over ranks with every kind of rope is bit-identical to one cache", "[mpi][decode]") {
  for (const ssmax::Rope<float>& rope : every_rope(all_positions)) {
    for (const bool in_call : {false, true})
      check_decode<float>(Causal{}, Identity{}, {.rope = &rope, .rotate_source_keys = in_call});
  }
}

TEST_CASE("decode over ranks with masks, scores and dropout is bit-identical to one cache", "[mpi][decode]") {
  const std::vector<double> slopes{0.5, -2, 1, -0.75};
  const std::vector<float> hidden = numbers_with_infinities({2, 4, 2, all_positions, all_positions, 8, 8});
  const auto modulo = ssmax::HeadsOfMatrix::modulo;
  const auto matrix_mask = [&](const Shape& s) { return ssmax::MatrixMask(matrix_of(hidden, s), modulo); };
  const auto matrix_runs = [&](const Shape& s) { return ssmax::MatrixRuns(matrix_of(hidden, s), modulo); };
  const auto sloped = [&](const Shape& s) { return ssmax::SlopedBias(matrix_of(hidden, s), slopes, modulo); };
  const auto bias = [&](const Shape& s) { return Bias(matrix_of(hidden, s), modulo); };
  const ssmax::Rope<float> rope({.width = 8}, all_positions);
  const AttentionOptions<float> rotated{.rope = &rope};
  check_decode<float>(ssmax::Chunks{700}, Identity{}, rotated);
  check_decode<float>(ssmax::CausalTopLeft{}, Identity{}, rotated);
  check_decode<float>(Full{}, Alibi(slopes, ssmax::AlibiDistance::absolute), rotated);
  check_decode<float>(matrix_mask, sloped, rotated);
  check_decode<float>(matrix_runs, bias, rotated);
  const std::array<std::uint64_t, 2> seeds{7, 5};
  check_decode<float>(Causal{}, Identity{}, {.dropout = {.p = 0.1, .seed = 1}});
  check_decode<float>(Causal{}, Identity{}, {.dropout = {.p = 0.3, .offset = 2, .seeds = seeds}});
}

TEST_CASE("mpi::attention over a cache throws for a cache that does not hold the keys of its rank",
          "[mpi][decode][errors]") {
  const Layout layout = Layout::contiguous(64, world().ranks(), 1);
  KvCache<float> cache({.width = 4, .capacity = 64});
  const std::vector<float> k(64 * 4, 1.0f);
  const View<const float, 4> rows{k.data(), {1, 1, 64, 4}};
  const auto append = [&](index_t first) {
    ssmax::mpi::append(cache, layout, world().rank(), first, rows, rows);
  };
  check_refused_with_words({"first", "1", "64"}, [&] { append(1); });
  // An error leaves the cache unchanged, also if the first segments of the rank would fit.
  const auto refused = [&](const View<const float, 4>& new_k, const View<const float, 4>& new_v,
                           std::initializer_list<std::string_view> words) {
    check_refused_with_words(words,
                             [&] { ssmax::mpi::append(cache, layout, world().rank(), 0, new_k, new_v); });
    CHECK(cache.length(0) == 0);
  };
  refused(rows, {k.data(), {1, 1, 63, 4}}, {"v", "63", "64"});
  refused(rows, {k.data(), {1, 1, 64, 3}}, {"v", "3", "4"});
  refused({k.data(), {1, 2, 32, 4}}, {k.data(), {1, 2, 32, 4}}, {"k", "2", "1"});
  KvCache<float> small({.width = 4, .capacity = 1});
  const Layout by_turns = Layout::contiguous(64, 1, 1);
  check_refused_with_words({"k", "64", "1"}, [&] { ssmax::mpi::append(small, by_turns, 0, 0, rows, rows); });
  CHECK(small.length(0) == 0);
  append(0);
  check_refused_with_words({"cache", "length"}, [&] { append(0); });
  std::vector<float> out(4);
  const std::string message = refusal([&] {
    ssmax::mpi::attention(world(), layout, 63,
                          {.q = {k.data(), {1, 1, 1, 4}}, .keys = cache, .out = {out.data(), {1, 1, 1, 4}}});
  });
  CHECK(everywhere(mentions(message, "cache")));
}

TEST_CASE("the places of states beyond 2 GiB are exact", "[mpi][decode]") {
  using ssmax::detail::StatePlaces;
  // Each of 3 ranks computes 1024 chunks. A state has 2^20 floats, so the states of a rank take 4 GiB.
  const index_t per_rank = index_t{1} << 20, size = index_t{1} << 20;
  const Layout layout = Layout::contiguous(3 * per_rank, 3, 1024);
  const auto chunks = ssmax::detail::chunks_of(layout, 3 * per_rank - 1024);
  const StatePlaces places(chunks, 3, size);
  CHECK(places.counts == std::vector<int>{1024, 1024, 1023});
  CHECK(places.first == std::vector<int>{0, 1024, 2048});
  for (const int rank : {0, 1, 2}) CHECK(places.offset(rank) == rank * 1024 * size);
  // Chunks of other ranks between those of a rank do not change its places.
  const StatePlaces zigzag(ssmax::detail::chunks_of(Layout::zigzag(8192, 2, 1024), 5000), 2, 3 * size);
  CHECK(zigzag.counts == std::vector<int>{2, 3});
  CHECK(zigzag.offset(1) == 6 * size);
}

TEST_CASE("a state that MPI cannot count is refused", "[mpi][decode][errors]") {
  const std::size_t most = std::numeric_limits<int>::max();
  CHECK(ssmax::detail::bytes_type(most).get() != MPI_DATATYPE_NULL);
  check_refused_with_words({"2147483648", "2147483647"}, [&] { (void)ssmax::detail::bytes_type(most + 1); });
}

TEST_CASE("mpi::attention over a cache throws for a ring that has overwritten keys",
          "[mpi][decode][errors]") {
  const index_t n = 64 * world().ranks();
  const Layout layout = Layout::contiguous(n, world().ranks(), 64);
  const std::vector<float> rows(static_cast<std::size_t>(n) * 4, 1.0f);
  const View<const float, 4> keys{rows.data(), {1, 1, n, 4}};
  std::vector<float> out(4);
  for (const index_t first : {0, 2}) {
    KvCache<float> ring({.width = 4, .capacity = 60, .ring = true, .first = first});
    ssmax::mpi::append(ring, layout, world().rank(), 0, keys, keys);
    const std::string message = refusal([&] {
      ssmax::mpi::attention(
          world(), layout, n,
          {.q = {rows.data(), {1, 1, 1, 4}}, .keys = ring, .out = {out.data(), {1, 1, 1, 4}}});
    });
    INFO(message);
    const std::string forgotten = "no longer stores keys [" + std::to_string(first) + ", ";
    CHECK(everywhere(message.find(forgotten) != std::string::npos &&
                     message.find("must store all 64") != std::string::npos));
  }
}

/// Fills caches with the keys of the ranks and of one process. Returns whether both give the same results.
template <class M>
bool paged_has_same_bits(index_t length, index_t queries, const M& mask) {
  const Problem<float> problem({1, 2, 1, queries, length, 8, 8});
  const Layout layout = Layout::zigzag(length, world().ranks(), 1024);
  ssmax::PagedKvCache<float> whole({.width = 8, .page = 32, .pages = 100}), share = whole;
  const index_t of_whole = whole.add(), of_share = share.add();
  for (const Segment& segment : layout.segments()) {
    const index_t count = segment.size();
    const auto rows = [&](const std::vector<float>& all) {
      return View<const float, 3>(all.data() + segment.begin * 8, {count, 1, 8});
    };
    const std::vector<index_t> tokens(static_cast<std::size_t>(count), of_whole);
    whole.append(rows(problem.k), rows(problem.v), tokens);
    if (segment.rank == world().rank()) share.append(rows(problem.k), rows(problem.v), tokens);
  }
  const std::vector<index_t> ids{of_whole}, ids_of_share{of_share};
  Output<float> one(problem.shape), many(problem.shape);
  const auto arguments = [&](Output<float>& to) {
    return AttentionArguments<float>{.q = problem.q_view(),
                                     .out = {to.out.data(), {1, 2, queries, 8}},
                                     .lse = {to.lse.data(), {1, 2, queries}},
                                     .more_queries_than_keys = true};
  };
  ssmax::attention(over(arguments(one), whole.source(ids)), mask);
  ssmax::mpi::attention(world(), layout, length, over(arguments(many), share.source(ids_of_share)), mask);
  return everywhere(one == many);
}

TEST_CASE("attention over ranks with a paged cache is bit-identical to one process", "[mpi][decode]") {
  CHECK(paged_has_same_bits(2 * 1024 + 300, 3, Causal{}));
  CHECK(paged_has_same_bits(2, 3, Causal{}));
  CHECK(paged_has_same_bits(1024, 2, ssmax::Full{}));
}

TEST_CASE("attention over a cache on ranks throws for missing keys, k, a missing mask and a short rope",
          "[mpi][decode][errors]") {
  const index_t n = 64;
  const Layout layout = Layout::contiguous(n, world().ranks(), 1);
  KvCache<float> cache({.width = 4, .capacity = n});
  const std::vector<float> rows(n * 4, 1.0f);
  const View<const float, 4> keys{rows.data(), {1, 1, n, 4}};
  ssmax::mpi::append(cache, layout, world().rank(), 0, keys, keys);
  std::vector<float> out(8);
  const AttentionArguments<float> valid{
      .q = {rows.data(), {1, 1, 2, 4}}, .keys = cache, .out = {out.data(), {1, 1, 2, 4}}};
  const auto refused = [&](const auto& change, const auto&... policies) {
    AttentionArguments<float> arguments = valid;
    change(arguments);
    return refusal([&] { ssmax::mpi::attention(world(), layout, n, arguments, policies...); });
  };
  CHECK(everywhere(mentions(refused([](auto& a) { a.keys = {}; }, Causal{}), "keys")));
  CHECK(everywhere(mentions(refused([&](auto& a) { a.k = keys; }, Causal{}), "k")));
  CHECK(everywhere(mentions(refused([](auto& a) { a.first_key = 1; }, Causal{}), "first_key")));
  CHECK(everywhere(mentions(refused([](auto&) {}), "mask")));
  const ssmax::Rope<float> late({.width = 4, .first_position = 1}, n);
  const auto rotate = [&](auto& a) { a.rope = &late, a.rotate_source_keys = true; };
  CHECK(everywhere(mentions(refused(rotate, Causal{}), "position 0, the rope's first is 1")));
  ssmax::mpi::attention(world(), layout, n, valid, Causal{});
  CHECK(everywhere(std::abs(out.back() - 1) < 1e-6f));
}

TEST_CASE("mpi::attention over a cache multiplies in float if float_products is set", "[mpi][decode]") {
  using ssmax::bfloat16;
  const index_t n = 2048, heads = 8, d = 64;
  const Problem<bfloat16> problem({1, heads, 1, n, n, d, d});
  const Layout layout = Layout::contiguous(n, world().ranks(), 1024);
  KvCache<bfloat16> whole({.width = d, .capacity = n}), share = whole;
  std::vector<float> k(problem.k.begin(), problem.k.end()), v(problem.v.begin(), problem.v.end());
  const View<const float, 4> k_rows{k.data(), {1, 1, n, d}}, v_rows{v.data(), {1, 1, n, d}};
  whole.append(k_rows, v_rows);
  ssmax::mpi::append(share, layout, world().rank(), 0, k_rows, v_rows);
  const Output<bfloat16> sizes({1, heads, 1, 1, 0, d, d});
  Output<bfloat16> one = sizes, many = sizes;
  const auto results = [&](Output<bfloat16>& to) {
    return AttentionArguments<float>{.q = ssmax::detail::rows_of(problem.q_view(), n - 1, 1),
                                     .out = {to.out.data(), {1, heads, 1, d}},
                                     .lse = {to.lse.data(), {1, heads, 1}}};
  };
  for (const bool float_products : {false, true}) {
    const AttentionOptions<bfloat16> options{.float_products = float_products};
    ssmax::attention(with(over(results(one), whole), options), SSMax<float>{0.4f}, Causal{});
    ssmax::mpi::attention(world(), layout, n, with(over(results(many), share), options), SSMax<float>{0.4f},
                          Causal{});
    CHECK(everywhere(one == many));
  }
}

TEST_CASE("mpi::attention over a cache throws for outputs in the cache's memory and for a key_position",
          "[mpi][decode][errors]") {
  const index_t n = 64;
  const Layout layout = Layout::contiguous(n, world().ranks(), 1);
  KvCache<float> cache({.width = 4, .capacity = n});
  const std::vector<float> rows(n * 4, 1.0f);
  const View<const float, 4> keys{rows.data(), {1, 1, n, 4}};
  ssmax::mpi::append(cache, layout, world().rank(), 0, keys, keys);
  std::vector<float> out(4);
  const auto refused = [&](float* to, float* lse, index_t key_position) {
    return refusal([&] {
      ssmax::mpi::attention(world(), layout, n,
                            {.q = {rows.data(), {1, 1, 1, 4}},
                             .keys = cache,
                             .out = {to, {1, 1, 1, 4}},
                             .lse = {lse, {1, 1, 1}},
                             .key_position = key_position});
    });
  };
  const auto [k, v] = cache.memory();
  float lse = 0;
  float *const in_k = const_cast<float*>(k.data()), *const in_v = const_cast<float*>(v.data());
  CHECK(everywhere(mentions(refused(in_k, &lse, 0), "out")));
  CHECK(everywhere(mentions(refused(out.data(), in_v, 0), "lse")));
  CHECK(everywhere(mentions(refused(out.data(), &lse, 1), "key_position")));
}

}  // namespace mpi_problem::mpi_decode_test
