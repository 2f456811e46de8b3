// Attends over the pages of a server: one pool for keys and values, a page table with int32 entries, a prompt chunk and
// a decoded token in one call. A second pool stores keys and values in 8 bits, with one factor per tensor. In a third pool
// each page of keys has a factor per channel. A fourth pool has groups of ggml's q8_0. A fifth pool has three storage
// types in one call. The last call is a plan for several layers over one page table.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

namespace {

constexpr index_t kHeads = 8, kKvHeads = 2, kWidth = 64, kPageSize = 16, kPages = 32;

// The memory of a server. Pages are [page][keys, values][key of the page][kv head][channel].
struct Server {
  std::vector<float> pool = std::vector<float>(kPages * 2 * kPageSize * kKvHeads * kWidth);
  std::vector<std::int32_t> table{7, 3,  30, 12, 9, 1,  -1, -1,   // sequence 0 has 90 keys in six pages
                                  2, 21, 5,  18, 0, 11, 28, 14};  // sequence 1 has 120 keys in eight pages
  std::vector<std::int32_t> lengths{90, 120};
};

// Attention of 40 new tokens of sequence 0 and one new token of sequence 1. q and out are [tokens, heads·width].
void attend(const Server& server, const View<const float, 2>& q, const View<float, 2>& out) {
  const index_t row = kKvHeads * kWidth, page = 2 * kPageSize * row;
  const View<const float, 4> k(server.pool.data(), {kPages, kPageSize, kKvHeads, kWidth},
                               {page, row, kWidth, 1}),
      v(server.pool.data() + page / 2, {kPages, kPageSize, kKvHeads, kWidth}, {page, row, kWidth, 1});
  const View<const std::int32_t, 2> table(server.table.data(), {2, 8});
  const PagedKeys keys(k, v, PageTable(table, server.lengths));

  const std::vector<index_t> cumulative{0, 40, 41};
  attention({.q = heads_view(q, kHeads),
             .keys = keys,
             .out = heads_view(out, kHeads),
             .batch_invariant = true,
             .lengths = SequenceLengths::packed_queries(cumulative)},
            SSMax<float>{0.43f}, Causal{});
}

// The pool of another server: keys and values in 8 bits. All keys have one factor, and all values have one.
struct EightBitServer {
  std::vector<Fp8E4M3> k, v;  // [page][key of the page][kv head][channel]
  float k_scale = 1, v_scale = 1;
};

// Attention of one new token of each sequence over such a pool.
void attend(const EightBitServer& server, const PageTable<std::int32_t>& table, const View<const float, 4>& q,
            const View<float, 4>& out) {
  const View<const Fp8E4M3, 4> k(server.k.data(), {kPages, kPageSize, kKvHeads, kWidth}),
      v(server.v.data(), {kPages, kPageSize, kKvHeads, kWidth});
  const PagedKeys keys(k, v, table, KeyScales::per_tensor(k, &server.k_scale, v, &server.v_scale));
  attention({.q = q, .keys = keys, .out = out}, SSMax<float>{0.43f}, Causal{});
}

// A third pool: the keys of a page share a factor per kv head and channel, and each value has a factor per kv head.
struct ChannelServer {
  std::vector<Int8> k, v;                   // [page][key of the page][kv head][channel]
  std::vector<float> k_factors, v_factors;  // [page][kv head][channel], [page][key of the page][kv head]
};

// Attention of one new token of each sequence over the third pool.
void attend(const ChannelServer& server, const PageTable<std::int32_t>& table, const View<const float, 4>& q,
            const View<float, 4>& out) {
  const View<const Int8, 4> k(server.k.data(), {kPages, kPageSize, kKvHeads, kWidth}),
      v(server.v.data(), {kPages, kPageSize, kKvHeads, kWidth});
  const View<const float, 3> of_channels(server.k_factors.data(), {kPages, kKvHeads, kWidth}),
      of_rows(server.v_factors.data(), {kPages, kPageSize, kKvHeads});
  const PagedKeys keys(k, v, table, {.v = of_rows}, {.k = of_channels});
  attention({.q = q, .keys = keys, .out = out}, SSMax<float>{0.43f}, Causal{});
}

// A fourth pool: groups of 32 channels with one half factor, the bytes of ggml's q8_0.
struct GroupServer {
  std::vector<Q8_0> k, v;  // [page][key of the page][kv head][group of 32 channels]
};

// Attention of one new token of each sequence over the fourth pool. Extents and strides count groups.
void attend(const GroupServer& server, const PageTable<std::int32_t>& table, const View<const float, 4>& q,
            const View<float, 4>& out) {
  constexpr index_t groups = kWidth / Q8_0::group;
  const View<const Q8_0, 4> k(server.k.data(), {kPages, kPageSize, kKvHeads, groups}),
      v(server.v.data(), {kPages, kPageSize, kKvHeads, groups});
  attention({.q = q, .keys = PagedKeys(k, v, table), .out = out}, SSMax<float>{0.43f}, Causal{});
}

// The tensors of a layer: its own pool, one query per sequence.
struct Layer {
  View<const float, 4> k, v;  // [pages, keys of a page, kv heads, width]
  View<const float, 4> q;     // [sequences, heads, 1, width]
  View<float, 4> out;
};

// One step of all layers. The layers have one page table, so one plan serves all of them.
void compute(std::span<const Layer> layers, const PageTable<std::int32_t>& table, Workspace& workspace) {
  const Layer& first = layers.front();
  const Plan plan({.q = first.q, .keys = PagedKeys(first.k, first.v, table)}, 1, Causal{});
  const std::span memory(workspace.reserve(plan.bytes()), plan.bytes());
  for (const Layer& layer : layers) {
    plan.run({.q = layer.q, .keys = PagedKeys(layer.k, layer.v, table), .out = layer.out}, memory,
             SSMax<float>{0.43f});
  }
}

// A batch of three storage types: queries in bfloat16, keys in 8 bits, values in 16 bits. Results are floats.
struct MixedServer {
  std::vector<Fp8E4M3> k;
  std::vector<half> v;
  float k_scale = 4.0f / Fp8E4M3::largest;
};

// Attention of 40 new tokens of sequence 0 and one new token of sequence 1.
void attend(const MixedServer& server, const PageTable<std::int32_t>& table, const View<const bfloat16, 2>& q,
            const View<float, 2>& out) {
  const View<const Fp8E4M3, 4> k(server.k.data(), {kPages, kPageSize, kKvHeads, kWidth});
  const View<const half, 4> v(server.v.data(), {kPages, kPageSize, kKvHeads, kWidth});
  const std::vector<std::int32_t> cumulative{0, 40, 41};
  attention({.q = heads_view(q, kHeads),
             .keys = PagedKeys(k, v, table, KeyScales::per_tensor(k, &server.k_scale, v, nullptr)),
             .out = heads_view(out, kHeads),
             .lengths = SequenceLengths::packed_queries(cumulative)},
            SSMax<float>{0.43f}, Causal{});
}

// Returns the largest difference from the float pool.
float difference_of_mixed(const Server& server, const std::vector<float>& q,
                          const std::vector<float>& expected) {
  const index_t page = kPageSize * kKvHeads * kWidth;
  MixedServer mixed;
  for (index_t i = 0; i < 2 * kPages * page; ++i) {
    const float x = server.pool[static_cast<std::size_t>(i)];
    if (i / page % 2 == 0) {
      mixed.k.push_back(Fp8E4M3(x / mixed.k_scale));
    } else {
      mixed.v.push_back(half(x));
    }
  }
  const std::vector<bfloat16> narrow(q.begin(), q.end());
  std::vector<float> out(q.size());
  const PageTable<std::int32_t> table(View<const std::int32_t, 2>(server.table.data(), {2, 8}),
                                      server.lengths);
  attend(mixed, table, {narrow.data(), {41, kHeads * kWidth}}, {out.data(), {41, kHeads * kWidth}});
  float worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::abs(out[i] - expected[i]));
  return worst;
}

// Returns the error of a call over a pool in 8 bits, relative to the float pool whose numbers are rounded to 8 bits.
template <class Pool>
float error_of(const Pool& rounded, const Server& widened, const std::vector<float>& q) {
  const index_t row = kKvHeads * kWidth, page = kPageSize * row;
  const View<const std::int32_t, 2> entries(widened.table.data(), {2, 8});
  const PageTable<std::int32_t> table(entries, widened.lengths);
  const View<const float, 4> k(widened.pool.data(), {kPages, kPageSize, kKvHeads, kWidth},
                               {2 * page, row, kWidth, 1}),
      v(widened.pool.data() + page, {kPages, kPageSize, kKvHeads, kWidth}, {2 * page, row, kWidth, 1});
  std::vector<float> out(2 * kHeads * kWidth), expected(out);
  const View<const float, 4> q_view(q.data(), {2, kHeads, 1, kWidth});
  attend(rounded, table, q_view, {out.data(), {2, kHeads, 1, kWidth}});
  attention({.q = q_view, .keys = PagedKeys(k, v, table), .out = {expected.data(), {2, kHeads, 1, kWidth}}},
            SSMax<float>{0.43f}, Causal{});
  float worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::abs(out[i] - expected[i]));
  return worst;
}

float error_of_eight_bits(const Server& server, const std::vector<float>& q) {
  const index_t page = kPageSize * kKvHeads * kWidth;
  EightBitServer rounded;
  Server widened = server;
  rounded.k_scale = rounded.v_scale = 4.0f / Fp8E4M3::largest;
  for (index_t p = 0; p < kPages; ++p) {
    for (index_t i = 0; i < 2 * page; ++i) {
      float& x = widened.pool[static_cast<std::size_t>(2 * p * page + i)];
      const Fp8E4M3 code(x / rounded.k_scale);
      (i < page ? rounded.k : rounded.v).push_back(code);
      x = static_cast<float>(code) * rounded.k_scale;
    }
  }
  return error_of(rounded, widened, q);
}

float error_of_groups(const Server& server, const std::vector<float>& q) {
  const index_t page = kPageSize * kKvHeads * kWidth;
  GroupServer rounded;
  Server widened = server;
  for (index_t p = 0; p < 2 * kPages; ++p) {
    std::vector<Q8_0>& groups = p % 2 == 0 ? rounded.k : rounded.v;
    for (index_t i = 0; i < page; i += Q8_0::group) {
      float* const x = widened.pool.data() + p * page + i;
      groups.emplace_back();
      StorageTraits<Q8_0>::store(x, Q8_0::group, &groups.back());
      StorageTraits<Q8_0>::load(&groups.back(), Q8_0::group, x);
    }
  }
  return error_of(rounded, widened, q);
}

// Returns true if a plan of two layers gives the results of two calls.
bool plan_equals_calls(const Server& server, const std::vector<float>& q) {
  const index_t row = kKvHeads * kWidth, page = kPageSize * row;
  const View<const float, 4> a(server.pool.data(), {kPages, kPageSize, kKvHeads, kWidth},
                               {2 * page, row, kWidth, 1}),
      b(server.pool.data() + page, {kPages, kPageSize, kKvHeads, kWidth}, {2 * page, row, kWidth, 1});
  const PageTable<std::int32_t> table(View<const std::int32_t, 2>(server.table.data(), {2, 8}),
                                      server.lengths);
  constexpr index_t numbers = 2 * kHeads * kWidth;
  std::vector<float> out(2 * numbers), expected(out);
  std::vector<Layer> layers;
  for (index_t i = 0; i < 2; ++i) {
    const View<const float, 4> of_layer(q.data() + i * numbers, {2, kHeads, 1, kWidth});
    layers.push_back({i == 0 ? a : b, i == 0 ? b : a, of_layer,
                      View<float, 4>(out.data() + i * numbers, {2, kHeads, 1, kWidth})});
    attention({.q = of_layer,
               .keys = PagedKeys(layers.back().k, layers.back().v, table),
               .out = {expected.data() + i * numbers, {2, kHeads, 1, kWidth}}},
              SSMax<float>{0.43f}, Causal{});
  }
  Workspace workspace;
  compute(layers, table, workspace);
  return out == expected;
}

float error_of_channels(const Server& server, const std::vector<float>& q) {
  constexpr index_t row = kKvHeads * kWidth, page = kPageSize * row;
  ChannelServer rounded;
  Server widened = server;
  const auto round = [](float& x, float factor, std::vector<Int8>& codes) {
    codes.push_back(Int8(x / factor));
    x = static_cast<float>(codes.back()) * factor;
  };
  for (index_t p = 0; p < kPages; ++p) {
    float* k = widened.pool.data() + 2 * p * page;
    for (index_t c = 0; c < row; ++c) {
      float most = 0;
      for (index_t key = 0; key < kPageSize; ++key) most = std::max(most, std::abs(k[key * row + c]));
      rounded.k_factors.push_back(most / Int8::largest);
    }
    for (index_t i = 0; i < page; ++i)
      round(k[i], rounded.k_factors[static_cast<std::size_t>(p * row + i % row)], rounded.k);
    for (float* v = k + page; v < k + 2 * page; v += kWidth) {
      rounded.v_factors.push_back(StorageTraits<Int8>::scale(v, kWidth));
      for (index_t c = 0; c < kWidth; ++c) round(v[c], rounded.v_factors.back(), rounded.v);
    }
  }
  return error_of(rounded, widened, q);
}

}  // namespace

int main() {
  Server server;
  examples::Random random(1);
  for (float& x : server.pool) x = random.standard();
  std::vector<float> q(41 * kHeads * kWidth), out(q.size());
  for (float& x : q) x = random.standard();
  attend(server, {q.data(), {41, kHeads * kWidth}}, {out.data(), {41, kHeads * kWidth}});

  // The same keys in a KvCache, and a call for each sequence.
  examples::Check check;
  for (index_t b = 0, first = 0; b < 2; ++b) {
    const index_t length = server.lengths[static_cast<std::size_t>(b)], queries = b == 0 ? 40 : 1;
    std::vector<float> k, v;
    for (index_t h = 0; h < kKvHeads; ++h) {
      for (index_t key = 0; key < length; ++key) {
        const index_t page = server.table[static_cast<std::size_t>(b * 8 + key / kPageSize)];
        const float* of_k =
            server.pool.data() + ((page * 2 * kPageSize + key % kPageSize) * kKvHeads + h) * kWidth;
        k.insert(k.end(), of_k, of_k + kWidth);
        const float* of_v = of_k + kPageSize * kKvHeads * kWidth;
        v.insert(v.end(), of_v, of_v + kWidth);
      }
    }
    KvCache<float> cache({.kv_heads = kKvHeads, .width = kWidth, .capacity = length});
    cache.append(View<const float, 4>(k.data(), {1, kKvHeads, length, kWidth}),
                 View<const float, 4>(v.data(), {1, kKvHeads, length, kWidth}));
    std::vector<float> expected(static_cast<std::size_t>(queries * kHeads * kWidth));
    const View<const float, 2> own_q(q.data() + first, {queries, kHeads * kWidth});
    const View<float, 2> own_out(expected.data(), {queries, kHeads * kWidth});
    attention({.q = heads_view(own_q, kHeads),
               .keys = cache,
               .out = heads_view(own_out, kHeads),
               .batch_invariant = true},
              SSMax<float>{0.43f}, Causal{});
    check.holds("pages are bit-identical to a cache",
                std::equal(expected.begin(), expected.end(), out.begin() + first));
    first += queries * kHeads * kWidth;
  }
  check.holds("8 bits with a factor per tensor agree with their numbers in float",
              error_of_eight_bits(server, q) < 1e-5f);
  check.holds("8 bits with a factor per channel agree with their numbers in float",
              error_of_channels(server, q) < 1e-5f);
  check.holds("groups of q8_0 agree with their numbers in float", error_of_groups(server, q) < 1e-5f);
  check.holds("a plan over pages is bit-identical to calls", plan_equals_calls(server, q));
  check.holds("a batch of three storage types is near the batch in float",
              difference_of_mixed(server, q, out) < 0.15f);
  return check.exit_code();
}
