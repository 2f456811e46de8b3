// Adds a source of keys: a paged cache, as in vLLM. Each sequence owns pages of 16 keys in one pool, in any order.
// A server assigns a page when a sequence grows, and frees the pages when the sequence ends.
#include <algorithm>
#include <cmath>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using ssmax::index_t;

struct OwnPages {
  using Element = float;

  static constexpr index_t page = 16;
  index_t kv_heads, width;
  std::vector<float> k, v;                  // pool: [page][kv head][key of the page][channel]
  std::vector<std::vector<index_t>> pages;  // page table of each sequence, in key order
  std::vector<index_t> lengths;             // number of keys of each sequence

  // Returns the number of sequences, the number of kv heads, the width of keys and the width of values.
  ssmax::KeySourceShape shape() const { return {std::ssize(lengths), kv_heads, width, width}; }
  // Returns the number of keys that the sequence has had. The library computes n and positions from this number.
  index_t length(index_t sequence) const { return lengths[static_cast<std::size_t>(sequence)]; }
  // Returns the range of keys that can be read: here all keys.
  ssmax::KeyRange stored(index_t sequence) const { return {0, length(sequence)}; }
  // Returns the longest contiguous run of keys that starts at `key`: up to the end of the page or the sequence.
  ssmax::KeyRun<float> run(index_t sequence, index_t kv_head, index_t key) const {
    const index_t at = pages[static_cast<std::size_t>(sequence)][static_cast<std::size_t>(key / page)];
    const index_t offset = ((at * kv_heads + kv_head) * page + key % page) * width;
    return {.k = k.data() + offset,
            .k_stride = width,
            .v = v.data() + offset,
            .v_stride = width,
            .count = std::min(page - key % page, length(sequence) - key)};
  }
};
static_assert(ssmax::KeySource<OwnPages>);

namespace {

constexpr index_t kHeads = 4, kKvHeads = 2, kWidth = 32, kLengths[] = {100, 37};

}  // namespace

int main() {
  // Assign pages to two sequences in turn, from the end of the pool.
  OwnPages keys{.kv_heads = kKvHeads, .width = kWidth, .k = {}, .v = {}, .pages = {{}, {}}, .lengths = {}};
  index_t free = 10;
  for (const index_t length : kLengths) keys.lengths.push_back(length);
  for (index_t first = 0; first < 100; first += OwnPages::page) {
    for (std::size_t b = 0; b < 2; ++b) {
      if (first < kLengths[b]) keys.pages[b].push_back(--free);
    }
  }
  const auto pool = static_cast<std::size_t>(10 * kKvHeads * OwnPages::page * kWidth);
  examples::Random random(1);
  for (std::size_t i = 0; i < pool; ++i) {
    keys.k.push_back(random.standard());
    keys.v.push_back(random.standard());
  }
  std::vector<float> q(2 * kHeads * kWidth), out(q.size()), expected(q.size());
  for (float& value : q) value = random.standard();
  const ssmax::View<const float, 4> queries(q.data(), {2, kHeads, 1, kWidth});
  const ssmax::View<float, 4> results(out.data(), {2, kHeads, 1, kWidth});

  // Pass the source of keys in place of a KvCache.
  ssmax::attention({.q = queries, .keys = keys, .out = results}, ssmax::SSMax<float>{0.43f}, ssmax::Causal{});

  // Copy the same keys into a KvCache, and decode against the cache.
  ssmax::KvCache<float> cache({.batch = 2, .kv_heads = kKvHeads, .width = kWidth, .capacity = 100});
  std::vector<float> k(2 * kKvHeads * 100 * kWidth), v(k.size());
  for (index_t b = 0; b < 2; ++b) {
    for (index_t h = 0; h < kKvHeads; ++h) {
      for (index_t key = 0; key < keys.length(b); ++key) {
        const auto from = keys.run(b, h, key);
        const index_t to = ((b * kKvHeads + h) * 100 + key) * kWidth;
        std::copy_n(from.k, kWidth, k.data() + to);
        std::copy_n(from.v, kWidth, v.data() + to);
      }
    }
  }
  cache.append(ssmax::View<const float, 4>(k.data(), {2, kKvHeads, 100, kWidth}),
               ssmax::View<const float, 4>(v.data(), {2, kKvHeads, 100, kWidth}), nullptr, kLengths);
  ssmax::attention({.q = queries, .keys = cache, .out = {expected.data(), {2, kHeads, 1, kWidth}}},
                   ssmax::SSMax<float>{0.43f}, ssmax::Causal{});

  examples::Check check;
  float worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::abs(out[i] - expected[i]));
  check.holds("pages give what a cache gives", worst < 4e-6f);
  return check.exit_code();
}
