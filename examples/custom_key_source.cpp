// A source of keys of your own: a paged cache. Sequences own pages of 16 keys, which lie anywhere in one pool;
// a server gives them out as sequences grow, and takes them back.
#include <algorithm>
#include <cmath>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using ssmax::index_t;

struct PagedKeys {
  using Element = float;

  static constexpr index_t page = 16;
  index_t kv_heads, width;
  std::vector<float> k, v;                  // the pool: [page][kv head][key of the page][channel]
  std::vector<std::vector<index_t>> pages;  // of each sequence, in the order of its keys
  std::vector<index_t> lengths;             // of each sequence

  // The extents of the whole: batch entries, kv heads, width of keys and of values.
  ssmax::KeySourceShape shape() const { return {std::ssize(lengths), kv_heads, width, width}; }
  // Keys that a sequence has had: n and positions come from it.
  index_t length(index_t sequence) const { return lengths[static_cast<std::size_t>(sequence)]; }
  // Those of them that can still be read: here all.
  ssmax::KeyRange stored(index_t sequence) const { return {0, length(sequence)}; }
  // One key, and how many lie behind it: the rest of its page, as far as the sequence goes.
  ssmax::KeyStretch<float> stretch(index_t sequence, index_t kv_head, index_t key) const {
    const index_t at = pages[static_cast<std::size_t>(sequence)][static_cast<std::size_t>(key / page)];
    const index_t offset = ((at * kv_heads + kv_head) * page + key % page) * width;
    return {.k = k.data() + offset,
            .k_stride = width,
            .v = v.data() + offset,
            .v_stride = width,
            .count = std::min(page - key % page, length(sequence) - key)};
  }
};
static_assert(ssmax::KeySource<PagedKeys>);

namespace {

constexpr index_t kHeads = 4, kKvHeads = 2, kWidth = 32, kLengths[] = {100, 37};

}  // namespace

int main() {
  // Two sequences take pages in turn, from the pool's end.
  PagedKeys keys{.kv_heads = kKvHeads, .width = kWidth, .k = {}, .v = {}, .pages = {{}, {}}, .lengths = {}};
  index_t free = 10;
  for (const index_t length : kLengths) keys.lengths.push_back(length);
  for (index_t first = 0; first < 100; first += PagedKeys::page) {
    for (std::size_t b = 0; b < 2; ++b) {
      if (first < kLengths[b]) keys.pages[b].push_back(--free);
    }
  }
  const auto pool = static_cast<std::size_t>(10 * kKvHeads * PagedKeys::page * kWidth);
  examples::Random random(1);
  for (std::size_t i = 0; i < pool; ++i) {
    keys.k.push_back(random.standard());
    keys.v.push_back(random.standard());
  }
  std::vector<float> q(2 * kHeads * kWidth), out(q.size()), expected(q.size());
  for (float& value : q) value = random.standard();
  const ssmax::View<const float, 4> queries(q.data(), {2, kHeads, 1, kWidth});
  const ssmax::View<float, 4> results(out.data(), {2, kHeads, 1, kWidth});

  // It goes where a KvCache goes.
  ssmax::decode<float>({.q = queries, .out = results}, keys, ssmax::SSMax<float>{0.43f});

  // The same keys, one behind the other in a KvCache.
  ssmax::KvCache<float> cache({.batch = 2, .kv_heads = kKvHeads, .width = kWidth, .capacity = 100});
  std::vector<float> k(2 * kKvHeads * 100 * kWidth), v(k.size());
  for (index_t b = 0; b < 2; ++b) {
    for (index_t h = 0; h < kKvHeads; ++h) {
      for (index_t key = 0; key < keys.length(b); ++key) {
        const auto from = keys.stretch(b, h, key);
        const index_t to = ((b * kKvHeads + h) * 100 + key) * kWidth;
        std::copy_n(from.k, kWidth, k.data() + to);
        std::copy_n(from.v, kWidth, v.data() + to);
      }
    }
  }
  cache.append(ssmax::View<const float, 4>(k.data(), {2, kKvHeads, 100, kWidth}),
               ssmax::View<const float, 4>(v.data(), {2, kKvHeads, 100, kWidth}), nullptr, kLengths);
  ssmax::decode<float>({.q = queries, .out = {expected.data(), {2, kHeads, 1, kWidth}}}, cache,
                       ssmax::SSMax<float>{0.43f});

  examples::Check check;
  float worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::abs(out[i] - expected[i]));
  check.holds("pages give what a cache gives", worst < 4e-6f);
  return check.exit_code();
}
