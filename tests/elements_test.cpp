// Calls whose tensors have different storage types: bit-identical to a call in float on widened tensors, whose results
// are rounded to the types of the outputs. Exception: q, k and v of bfloat16 take the bf16 path whatever out is.

#include "call.hpp"
#include "own_int8.hpp"
#include "reference.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace elements_test {

using namespace ssmax;
using test_executors::Threads;

struct Extents {
  index_t batch, heads, kv_heads, queries, keys, d, dv;

  std::array<index_t, 4> q() const { return {batch, heads, queries, d}; }
  std::array<index_t, 4> k() const { return {batch, kv_heads, keys, d}; }
  std::array<index_t, 4> v() const { return {batch, kv_heads, keys, dv}; }
  std::array<index_t, 4> out() const { return {batch, heads, queries, dv}; }
  std::array<index_t, 3> rows() const { return {batch, heads, queries}; }
};

constexpr std::array<Extents, 7> shapes{{
    {2, 4, 2, 37, 300, 16, 32},  // prefill
    {1, 4, 2, 61, 150, 9, 7},    // prefill
    {2, 2, 1, 20, 64, 16, 16},   // short keys
    {1, 3, 3, 7, 101, 5, 3},     // short keys
    {2, 4, 2, 1, 1100, 24, 17},  // decode
    {1, 4, 2, 5, 300, 16, 16},   // decode
    {1, 1, 1, 1, 1, 1, 1},
}};

std::size_t size_of(const std::array<index_t, 4>& extents) {
  return static_cast<std::size_t>(extents[0] * extents[1] * extents[2] * extents[3]);
}
std::size_t size_of(const std::array<index_t, 3>& extents) {
  return static_cast<std::size_t>(extents[0] * extents[1] * extents[2]);
}

template <class To, class From>
std::vector<To> as(const std::vector<From>& numbers) {
  std::vector<To> result;
  for (const From x : numbers) result.push_back(static_cast<To>(static_cast<float>(x)));
  return result;
}

/// Tensors of a forward and a backward.
template <class Q, class K, class V, class Out>
struct Tensors {
  Extents extents;
  std::vector<Q> q, dq;
  std::vector<K> k, dk;
  std::vector<V> v, dv;
  std::vector<Out> out, dout;
  std::vector<float> lse, ds;
  Explanation explanation{}, backward_explanation{};

  explicit Tensors(const Extents& e)
      : extents(e),
        q(as<Q>(reference::normals<float>(size_of(e.q()), 1))),
        dq(size_of(e.q())),
        k(as<K>(reference::normals<float>(size_of(e.k()), 2))),
        dk(size_of(e.k())),
        v(as<V>(reference::normals<float>(size_of(e.v()), 3))),
        dv(size_of(e.v())),
        out(size_of(e.out())),
        dout(as<Out>(reference::normals<float>(size_of(e.out()), 4))),
        lse(size_of(e.rows())),
        ds(static_cast<std::size_t>(e.heads), 0.f) {}

  /// The same numbers in float.
  Tensors<float, float, float, float> widened() const {
    Tensors<float, float, float, float> result(extents);
    result.q = as<float>(q), result.k = as<float>(k), result.v = as<float>(v);
    result.out = as<float>(out), result.dout = as<float>(dout), result.lse = lse;
    result.dq = as<float>(dq), result.dk = as<float>(dk), result.dv = as<float>(dv);
    return result;
  }

  SSMax<float> scaling() const { return SSMax<float>{0.4f}; }

  template <class E = Serial>
  void attend(const AttentionOptions<float>& options = {}, E&& executor = {}) {
    AttentionOptions<float> explained = options;
    explained.explanation = &explanation;
    attention(with({.q = {q.data(), extents.q()},
                    .k = {k.data(), extents.k()},
                    .v = {v.data(), extents.v()},
                    .out = {out.data(), extents.out()},
                    .lse = {lse.data(), extents.rows()}},
                   explained),
              scaling(), Causal{}, executor);
  }
  template <class E = Serial>
  void differentiate(bool accumulate, E&& executor = {}) {
    std::fill(ds.begin(), ds.end(), 0.f);
    const std::vector<float> factors(ds.size(), 0.4f), offsets(ds.size(), 0.f);
    attention_backward(backward_with({.q = {q.data(), extents.q()},
                                      .k = {k.data(), extents.k()},
                                      .v = {v.data(), extents.v()},
                                      .out = {out.data(), extents.out()},
                                      .lse = {lse.data(), extents.rows()}},
                                     AttentionOptions<float>{.explanation = &backward_explanation}),
                       {.dout = {dout.data(), extents.out()},
                        .dq = {dq.data(), extents.q()},
                        .dk = {dk.data(), extents.k()},
                        .dv = {dv.data(), extents.v()},
                        .accumulate = accumulate},
                       SSMax<float>{factors, offsets}.gradient(ds, {}), Causal{}, executor);
  }
};

/// Calls test(a Tensors object) for every mixture.
template <class Test>
void for_each_mixture(const Extents& extents, const Test& test) {
  test(Tensors<float, half, half, float>(extents));
  test(Tensors<float, half, bfloat16, float>(extents));
  test(Tensors<float, float, half, half>(extents));
  test(Tensors<half, float, float, bfloat16>(extents));
  test(Tensors<bfloat16, bfloat16, half, bfloat16>(extents));
  test(Tensors<bfloat16, float, bfloat16, float>(extents));
  test(Tensors<half, half, half, float>(extents));
}

void check_is_float(const Explanation& e) {
  INFO(to_string(e));
  CHECK(std::string_view(e.operands) == "float");
}

TEST_CASE("attention of tensors of different types is bit-identical to float", "[attention][elements]") {
  for (const Extents& extents : shapes) {
    for_each_target_of<bfloat16>([&](const std::string& target) {
      for_each_mixture(extents, [&](auto tensors) {
        INFO(target << ", queries " << extents.queries << ", keys " << extents.keys);
        auto wide = tensors.widened();
        wide.attend();
        tensors.attend();
        check_is_float(tensors.explanation);
        CHECK(tensors.explanation.path == wide.explanation.path);
        using Out = typename decltype(tensors.out)::value_type;
        CHECK(same_bits(tensors.out, as<Out>(wide.out)));
        CHECK(same_bits(tensors.lse, wide.lse));
        const auto serial = tensors.out;
        tensors.attend({}, Threads{3});
        CHECK(same_bits(tensors.out, serial));
      });
    });
  }
}

TEST_CASE("RoPE rotates keys of another type", "[attention][elements]") {
  const Extents extents{1, 4, 2, 37, 300, 16, 8};
  const Rope<float> rope({.width = 16}, 300);
  for_each_target([&](const std::string&) {
    Tensors<float, half, bfloat16, half> tensors(extents);
    auto wide = tensors.widened();
    wide.attend({.rope = &rope});
    tensors.attend({.rope = &rope});
    CHECK(same_bits(tensors.out, as<half>(wide.out)));
  });
}

TEST_CASE("q, k and v of bfloat16 take the bf16 path with any type of out",
          "[attention][elements][bfloat16]") {
  const Extents extents{1, 4, 2, 37, 300, 16, 16};
  for_each_target_of<bfloat16>([&](const std::string&) {
    Tensors<bfloat16, bfloat16, bfloat16, float> tensors(extents);
    Tensors<bfloat16, bfloat16, bfloat16, bfloat16> plain(extents);
    tensors.attend();
    plain.attend();
    CHECK(tensors.explanation.path == plain.explanation.path);
    CHECK(std::string_view(tensors.explanation.operands) == plain.explanation.operands);
    CHECK(same_bits(as<bfloat16>(tensors.out), plain.out));
    CHECK(same_bits(tensors.lse, plain.lse));
    // The backward reads dout as bfloat16 in that path.
    tensors.differentiate(false);
    check_is_float(tensors.backward_explanation);
  });
}

TEST_CASE("explanations name the tensor of another type", "[attention][elements][explain][bfloat16]") {
  const Extents extents{1, 1, 1, 20, 300, 16, 16};
  for_each_target_of<bfloat16>([&](const std::string&) {
    Tensors<bfloat16, bfloat16, bfloat16, bfloat16> all(extents);
    all.attend();
    const bool has_products = std::string_view(all.explanation.operands) == "bfloat16";
    const auto check = [&](auto tensors, std::string_view reason, std::string_view backward_reason) {
      tensors.attend();
      tensors.differentiate(false);
      CHECK(std::string_view(tensors.explanation.reason) == (has_products ? reason : ""));
      CHECK(std::string_view(tensors.backward_explanation.reason) == (has_products ? backward_reason : ""));
    };
    const auto other = [](const char* tensor) {
      return std::string("bfloat16: ") + tensor + " stored in another type";
    };
    const std::string q = other("queries are"), k = other("keys are"), v = other("values are");
    check(Tensors<half, bfloat16, bfloat16, bfloat16>(extents), q, q);
    check(Tensors<bfloat16, half, bfloat16, bfloat16>(extents), k, k);
    check(Tensors<bfloat16, bfloat16, half, bfloat16>(extents), v, v);
    if (has_products) check(Tensors<bfloat16, bfloat16, bfloat16, half>(extents), "", other("dout is"));
  });
}

TEST_CASE("gradients of tensors of different types are bit-identical to float",
          "[backward][elements][slow]") {
  for (const Extents& extents : shapes) {
    for_each_target_of<bfloat16>([&](const std::string& target) {
      for_each_mixture(extents, [&](auto tensors) {
        INFO(target << ", queries " << extents.queries << ", keys " << extents.keys);
        tensors.attend();
        auto wide = tensors.widened();
        wide.differentiate(false);
        tensors.differentiate(false);
        check_is_float(tensors.backward_explanation);
        using Q = typename decltype(tensors.q)::value_type;
        using K = typename decltype(tensors.k)::value_type;
        using V = typename decltype(tensors.v)::value_type;
        CHECK(same_bits(tensors.dq, as<Q>(wide.dq)));
        CHECK(same_bits(tensors.dk, as<K>(wide.dk)));
        CHECK(same_bits(tensors.dv, as<V>(wide.dv)));
        CHECK(same_bits(tensors.ds, wide.ds));
        // Gradients are added before they are rounded.
        wide = tensors.widened();
        wide.differentiate(true);
        tensors.differentiate(true, Threads{3});
        CHECK(same_bits(tensors.dq, as<Q>(wide.dq)));
        CHECK(same_bits(tensors.dk, as<K>(wide.dk)));
        CHECK(same_bits(tensors.dv, as<V>(wide.dv)));
      });
    });
  }
}

/// Attention over a cache of keys K and values V has the bits of a cache of float with the same numbers.
template <class K, class V, class Q, class Out>
void check_cache(const Extents& e) {
  const KvCacheOptions options{e.batch, e.kv_heads, e.d, e.dv, e.keys + 3};
  const std::vector<float> k = reference::normals<float>(size_of(e.k()), 2),
                           v = reference::normals<float>(size_of(e.v()), 3);
  KvCache<K, V> cache(options);
  cache.append({k.data(), e.k()}, {v.data(), e.v()});
  // What the cache holds, in float.
  std::vector<float> wide_k(k.size()), wide_v(v.size());
  const auto widen = [](const auto* row, const float* scale, index_t n, float* out) {
    using X = std::remove_cvref_t<decltype(*row)>;
    if constexpr (std::is_same_v<X, float>) {
      std::copy_n(row, n, out);
    } else {
      StorageTraits<X>::load(row, n, out);
      for (index_t i = 0; scale != nullptr && i < n; ++i) out[i] *= *scale;
    }
  };
  reference::for_each_index({e.batch, e.kv_heads, e.keys}, [&](index_t b, index_t h, index_t key) {
    const auto row = cache.run(b, h, key);
    const index_t at = (b * e.kv_heads + h) * e.keys + key;
    widen(row.k, row.k_scales, e.d, wide_k.data() + at * e.d);
    widen(row.v, row.v_scales, e.dv, wide_v.data() + at * e.dv);
  });
  KvCache<float> wide(options);
  wide.append({wide_k.data(), e.k()}, {wide_v.data(), e.v()});
  const std::vector<Q> q = as<Q>(reference::normals<float>(size_of(e.q()), 1));
  const std::vector<float> wide_q = as<float>(q);
  std::vector<Out> out(size_of(e.out()));
  std::vector<float> wide_out(out.size());
  for_each_target_of<bfloat16>([&](const std::string& target) {
    INFO(target << ", queries " << e.queries << ", keys " << e.keys);
    attention({.q = {q.data(), e.q()}, .keys = cache, .out = {out.data(), e.out()}}, SSMax<float>{0.4f},
              Causal{});
    attention({.q = {wide_q.data(), e.q()}, .keys = wide, .out = {wide_out.data(), e.out()}},
              SSMax<float>{0.4f}, Causal{});
    CHECK(same_bits(out, as<Out>(wide_out)));
  });
}

TEST_CASE("a cache stores keys and values in different types", "[decode][elements]") {
  for (const Extents& extents : {Extents{2, 4, 2, 1, 1100, 24, 17}, Extents{1, 4, 2, 5, 300, 16, 16},
                                 Extents{1, 4, 2, 37, 300, 16, 8}, Extents{1, 1, 1, 1, 1, 1, 1}}) {
    check_cache<half, bfloat16, float, float>(extents);
    check_cache<float, half, float, bfloat16>(extents);
    check_cache<bfloat16, float, bfloat16, float>(extents);
    check_cache<OwnInt8, half, half, half>(extents);
    check_cache<half, OwnInt8, float, float>(extents);
  }
}

TEST_CASE("an output must not overlap the values of a cache with another type", "[decode][elements]") {
  KvCache<half, float> cache({.width = 4, .capacity = 4});
  const std::vector<float> rows(16, 1.f);
  cache.append({rows.data(), {1, 1, 4, 4}}, {rows.data(), {1, 1, 4, 4}});
  const std::vector<float> q(4, 1.f);
  float* const inside = const_cast<float*>(cache.memory().second.data()) + 4;
  CHECK_THROWS_WITH(
      attention({.q = {q.data(), {1, 1, 1, 4}}, .keys = cache, .out = {inside, {1, 1, 1, 4}}}, Causal{}),
      Catch::Contains("out (16 bytes) overlaps v"));
}

TEST_CASE("a plan takes tensors of different types", "[plan][elements]") {
  const Extents e{1, 4, 2, 37, 300, 16, 8};
  Tensors<float, half, bfloat16, half> tensors(e);
  tensors.attend();
  const auto expected = tensors.out;
  std::fill(tensors.out.begin(), tensors.out.end(), half{});
  const Plan plan(
      {.q = {tensors.q.data(), e.q()}, .k = {tensors.k.data(), e.k()}, .v = {tensors.v.data(), e.v()}}, 1,
      Causal{});
  Workspace workspace;
  const std::span<std::byte> memory(workspace.reserve(plan.bytes()), plan.bytes());
  plan.bind({.q = {tensors.q.data(), e.q()},
             .k = {tensors.k.data(), e.k()},
             .v = {tensors.v.data(), e.v()},
             .out = {tensors.out.data(), e.out()}},
            tensors.scaling())
      .run(memory);
  CHECK(same_bits(tensors.out, expected));
}

}  // namespace elements_test
