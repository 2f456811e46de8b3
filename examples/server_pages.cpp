// Attends over the pages of a server: one pool for keys and values, a page table with int32 entries, a prompt chunk and
// a decoded token in one call.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

namespace {

constexpr index_t kHeads = 8, kKvHeads = 2, kWidth = 64, kPageSize = 16, kPages = 32;

// What the server owns. Pages are [page][keys, values][key of the page][kv head][channel].
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
  const PagedKeys keys(k, v, PageTable<std::int32_t>(table, server.lengths));

  const std::vector<index_t> cumulative{0, 40, 41};
  decode<float>({.q = heads_view(q, kHeads), .out = heads_view(out, kHeads)}, keys, SSMax<float>{0.43f},
                Causal{}, {.batch_invariant = true, .lengths = SequenceLengths::packed_queries(cumulative)});
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
    decode<float>({.q = heads_view(own_q, kHeads), .out = heads_view(own_out, kHeads)}, cache,
                  SSMax<float>{0.43f}, Causal{}, {.batch_invariant = true});
    check.holds("pages are bit-identical to a cache",
                std::equal(expected.begin(), expected.end(), out.begin() + first));
    first += queries * kHeads * kWidth;
  }
  return check.exit_code();
}
