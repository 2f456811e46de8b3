// The contract of batch_invariant for servers: the bits of a request do not depend on its neighbours in a step, on the
// threads, on pages, on common pages, or on the places where its prompt is cut.

#include <memory>
#include <random>

#include "call.hpp"
#include "reference.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace batch_invariance_test {

using namespace ssmax;

constexpr index_t heads = 10, kv_heads = 2, d = 24;

/// The tokens of a request. The first `cached` tokens are in the cache when the request arrives.
template <class T>
struct Request {
  index_t cached, length;
  std::vector<T> q;         // [tokens, heads, d]
  std::vector<float> k, v;  // [tokens, kv_heads, d]
  std::vector<T> alone;     // results of the tokens after the cached ones
  std::vector<T> got;

  template <class U>
  static View<const U, 3> rows(const std::vector<U>& all, index_t of_heads, index_t first, index_t count) {
    return {all.data() + first * of_heads * d, {count, of_heads, d}};
  }
};

/// Requests of two families. Requests of the first family have the same cached tokens.
template <class T>
std::vector<Request<T>> draw_requests(std::mt19937& random) {
  std::vector<Request<T>> requests;
  const auto seed = [&random] { return static_cast<unsigned>(random()); };
  const std::vector<float> prompt_k = reference::normals<float>(1200 * kv_heads * d, seed()),
                           prompt_v = reference::normals<float>(1200 * kv_heads * d, seed());
  for (int i = 0; i < 5; ++i) {
    Request<T> r;
    r.cached = i < 3 ? 1100 : static_cast<index_t>(random() % 1200);
    r.length = r.cached + 1 + static_cast<index_t>(random() % 120);
    const auto of_kv = static_cast<std::size_t>(r.length * kv_heads * d);
    r.q = reference::normals<T>(static_cast<std::size_t>(r.length * heads * d), seed());
    r.k = reference::normals<float>(of_kv, seed());
    r.v = reference::normals<float>(of_kv, seed());
    if (i < 3) {
      std::copy_n(prompt_k.begin(), r.cached * kv_heads * d, r.k.begin());
      std::copy_n(prompt_v.begin(), r.cached * kv_heads * d, r.v.begin());
    }
    r.got.resize(static_cast<std::size_t>((r.length - r.cached) * heads * d));
    requests.push_back(std::move(r));
  }
  return requests;
}

template <class T>
View<const T, 4> packed(const std::vector<T>& rows, index_t of_heads) {
  const index_t tokens = static_cast<index_t>(rows.size()) / (of_heads * d);
  return {rows.data(), {1, of_heads, tokens, d}, {0, d, of_heads * d, 1}};
}
template <class T>
View<T, 4> packed(std::vector<T>& rows, index_t of_heads) {
  const index_t tokens = static_cast<index_t>(rows.size()) / (of_heads * d);
  return {rows.data(), {1, of_heads, tokens, d}, {0, d, of_heads * d, 1}};
}

template <class T, class X, class M>
struct Server {
  const M& mask;
  const Rope<float>& rope;
  const SSMax<float> scaling{0.3f};

  AttentionOptions<T> options() const {
    AttentionOptions<T> result;
    result.rope = &rope;
    result.batch_invariant = true;
    return result;
  }

  /// Computes a request alone: one call of one thread over a contiguous cache.
  void compute_alone(Request<T>& r) const {
    KvCache<X> cache({.kv_heads = kv_heads, .width = d, .capacity = r.length});
    const auto keys = [](const std::vector<float>& all) { return packed(all, kv_heads); };
    cache.append(keys(r.k), keys(r.v), &rope);
    const std::vector<T> q(r.q.begin() + r.cached * heads * d, r.q.end());
    r.alone.resize(q.size());
    attention<ssmax::ComputeType<T>>(
        with({.q = packed(q, heads), .keys = cache, .out = packed(r.alone, heads)}, options()), scaling,
        mask);
  }

  /// Computes all requests in steps. Each step has some tokens of some requests.
  void serve(std::vector<Request<T>>& requests, std::mt19937& random) const {
    const index_t page = std::vector<index_t>{1, 16, 50, 64}[random() % 4];
    PagedKvCache<X> cache({.kv_heads = kv_heads, .width = d, .page = page, .pages = 5 * 1400 / page + 10});
    const auto append = [&](index_t id, const Request<T>& r, index_t first, index_t count) {
      cache.append(Request<T>::rows(r.k, kv_heads, first, count),
                   Request<T>::rows(r.v, kv_heads, first, count),
                   std::vector<index_t>(static_cast<std::size_t>(count), id), &rope);
    };
    const index_t root = cache.add();
    append(root, requests[0], 0, requests[0].cached);
    std::vector<index_t> ids, done;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      ids.push_back(i < 3 ? cache.fork(root) : cache.add());
      if (i >= 3) append(ids.back(), requests[i], 0, requests[i].cached);
      done.push_back(requests[i].cached);
    }
    std::vector<std::size_t> order{0, 1, 2, 3, 4};
    for (bool has_more = true; has_more;) {
      has_more = false;
      std::shuffle(order.begin(), order.end(), random);
      std::vector<index_t> batch, cumulative{0};
      std::vector<T> q;
      std::vector<std::size_t> computed;
      for (const std::size_t i : order) {
        const Request<T>& r = requests[i];
        const index_t drawn = std::vector<index_t>{0, 1, 1, 1, 2, 5, 17, 40}[random() % 8];
        const index_t count = std::min(drawn, r.length - done[i]);
        has_more = has_more || done[i] + count < r.length;
        if (count == 0) continue;
        append(ids[i], r, done[i], count);
        batch.push_back(ids[i]);
        cumulative.push_back(cumulative.back() + count);
        q.insert(q.end(), r.q.begin() + done[i] * heads * d, r.q.begin() + (done[i] + count) * heads * d);
        computed.push_back(i);
      }
      std::vector<T> out(q.size());
      AttentionOptions<T> packed_options = options();
      packed_options.lengths = SequenceLengths::packed_queries(cumulative);
      attention<ssmax::ComputeType<T>>(
          with({.q = packed(std::as_const(q), heads), .keys = cache.source(batch), .out = packed(out, heads)},
               packed_options),
          scaling, mask, test_executors::Threads{static_cast<index_t>(1 + random() % 4)});
      for (std::size_t j = 0; j < computed.size(); ++j) {
        Request<T>& r = requests[computed[j]];
        const index_t count = cumulative[j + 1] - cumulative[j];
        std::copy_n(out.begin() + cumulative[j] * heads * d, count * heads * d,
                    r.got.begin() + (done[computed[j]] - r.cached) * heads * d);
        done[computed[j]] += count;
      }
    }
  }
};

template <class T, class X, class M>
void check(const M& mask) {
  const Rope<float> rope({.width = 16}, 1400);
  for_each_target_of<T>([&](const std::string& target) {
    for (const unsigned seed : {1u, 2u}) {
      INFO(target << ", seed " << seed);
      std::mt19937 random(seed);
      std::vector<Request<T>> requests = draw_requests<T>(random);
      const Server<T, X, M> server{mask, rope};
      for (Request<T>& r : requests) server.compute_alone(r);
      server.serve(requests, random);
      for (const Request<T>& r : requests) CHECK(same_bits(r.got, r.alone));
    }
  });
}

TEST_CASE("batch_invariant: a request has the same bits alone and in any steps of a server",
          "[attention][source][batch_invariance][bfloat16][slow]") {
  SECTION("float") { check<float, float>(Causal{}); }
  SECTION("bfloat16") { check<bfloat16, bfloat16>(Causal{}); }
  SECTION("bfloat16, a window") { check<bfloat16, bfloat16>(SlidingWindow{700}); }
  SECTION("half, first keys and a window") { check<half, half>(SlidingWindow{299, 0, 4}); }
  SECTION("bfloat16 queries over 8 bits") { check<bfloat16, Int8>(Causal{}); }
  SECTION("float queries over 8 bits") { check<float, Fp8E5M2>(Causal{}); }
}

}  // namespace batch_invariance_test
