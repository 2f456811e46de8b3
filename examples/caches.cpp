// docs/kv_cache.md shows these calls: storage types of a cache, sequences of different lengths, and rejected tokens.
// The program compares them with calls without a cache.
#include <algorithm>
#include <cmath>
#include <span>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

// Keys stored as half, values as bfloat16: 4 bytes per channel of a position.
KvCache<half, bfloat16> small_cache(index_t batch, index_t kv_heads, index_t d, index_t capacity) {
  return KvCache<half, bfloat16>({.batch = batch, .kv_heads = kv_heads, .width = d, .capacity = capacity});
}

// Keys and values in 8 bits, with a float factor for each key and each value.
KvCache<Int8> eight_bit_cache(index_t batch, index_t kv_heads, index_t d, index_t capacity) {
  return KvCache<Int8>({.batch = batch, .kv_heads = kv_heads, .width = d, .capacity = capacity});
}

// A batch of prompts of different lengths, padded at the end: lengths[b] positions of sequence b are stored.
void append_prompts(KvCache<half, bfloat16>& cache, View<const float, 4> k, View<const float, 4> v,
                    std::span<const index_t> lengths, const Rope<float>& rope) {
  cache.append(k, v, &rope, lengths);
}

// One step of a server: the queries of all sequences are packed, as many per sequence as it has new tokens. Their keys
// are in the cache.
void mixed_step(const KvCache<half, bfloat16>& cache, View<const float, 2> q, View<float, 2> out,
                index_t heads, std::span<const index_t> cumulative, const Rope<float>& rope) {
  attention({.q = heads_view(q, heads),
             .keys = cache,
             .out = heads_view(out, heads),
             .rope = &rope,
             .lengths = SequenceLengths::packed_queries(cumulative)},
            SSMax<float>{0.43f}, Causal{});
}

// A draft of several tokens per sequence: all are appended and decoded in one call. Then truncate removes the
// rejected tokens.
void try_draft(KvCache<half, bfloat16>& cache, View<const float, 4> q, View<const float, 4> k,
               View<const float, 4> v, View<float, 4> out, const Rope<float>& rope, index_t accepted) {
  cache.append(k, v, &rope);
  attention({.q = q, .keys = cache, .out = out, .rope = &rope}, SSMax<float>{0.43f}, Causal{});
  const index_t rejected = k.extent(2) - accepted;
  for (index_t b = 0; b < cache.shape().batch; ++b) cache.truncate(b, cache.length(b) - rejected);
}

// Sequences of different lengths without a cache, packed into rows: sequence b has the rows
// [cumulative[b], cumulative[b + 1]).
void packed_prompts(View<const float, 2> qkv, View<float, 2> out, index_t heads, index_t kv_heads,
                    std::span<const index_t> cumulative) {
  const auto [q, k, v] = qkv_views(qkv, heads, kv_heads);
  attention(
      {.q = q, .k = k, .v = v, .out = heads_view(out, heads), .lengths = SequenceLengths::packed(cumulative)},
      SSMax<float>{0.43f}, Causal{});
}

namespace {

constexpr index_t kHeads = 4, kKvHeads = 2, kWidth = 8, kBatch = 2, kPrompt = 20, kDraft = 3, kTotal = 23;

std::vector<float> random_numbers(index_t count, examples::Random& random) {
  std::vector<float> numbers;
  for (index_t i = 0; i < count; ++i) numbers.push_back(random.standard());
  return numbers;
}

// Positions [first, first + count) of a contiguous [kBatch, heads, kTotal, kWidth].
View<const float, 4> positions(const std::vector<float>& x, index_t heads, index_t first, index_t count) {
  return {x.data() + first * kWidth,
          {kBatch, heads, count, kWidth},
          {heads * kTotal * kWidth, kTotal * kWidth, kWidth, 1}};
}

}  // namespace

int main() {
  examples::Check check;
  examples::Random random(1);
  const auto q = random_numbers(kBatch * kHeads * kTotal * kWidth, random),
             k = random_numbers(kBatch * kKvHeads * kTotal * kWidth, random),
             v = random_numbers(std::ssize(k), random);
  const Rope<float> rope({.width = kWidth}, kTotal);
  {
    auto cache = small_cache(kBatch, kKvHeads, kWidth, kTotal);
    const std::vector<index_t> lengths{kPrompt, 5};
    append_prompts(cache, positions(k, kKvHeads, 0, kPrompt), positions(v, kKvHeads, 0, kPrompt), lengths,
                   rope);
    check.holds("lengths", cache.length(0) == kPrompt && cache.length(1) == 5);
    std::vector<float> out(kBatch * kHeads * kDraft * kWidth);
    const View<float, 4> results(out.data(), {kBatch, kHeads, kDraft, kWidth});
    try_draft(cache, positions(q, kHeads, kPrompt, kDraft), positions(k, kKvHeads, kPrompt, kDraft),
              positions(v, kKvHeads, kPrompt, kDraft), results, rope, 1);
    // The same queries once more: the last 2 of sequence 0, the last one of sequence 1.
    {
      const std::vector<index_t> cumulative{0, 2, 3};
      std::vector<float> packed(3 * kHeads * kWidth), mixed(packed.size());
      for (index_t row = 0; row < 3; ++row) {
        const index_t b = row / 2, i = kDraft - 2 + row % 2 - (b == 1 ? -1 : 0);
        for (index_t h = 0; h < kHeads; ++h) {
          for (index_t c = 0; c < kWidth; ++c) {
            packed[static_cast<std::size_t>((row * kHeads + h) * kWidth + c)] =
                positions(q, kHeads, kPrompt, kDraft)(b, h, i, c);
          }
        }
      }
      auto full = small_cache(kBatch, kKvHeads, kWidth, kTotal);
      append_prompts(full, positions(k, kKvHeads, 0, kPrompt), positions(v, kKvHeads, 0, kPrompt), lengths,
                     rope);
      full.append(positions(k, kKvHeads, kPrompt, kDraft), positions(v, kKvHeads, kPrompt, kDraft), &rope);
      mixed_step(full, {packed.data(), {3, kHeads * kWidth}}, {mixed.data(), {3, kHeads * kWidth}}, kHeads,
                 cumulative, rope);
      double worst = 0;
      for (index_t row = 0; row < 3; ++row) {
        const index_t b = row / 2, i = kDraft - 2 + row % 2 - (b == 1 ? -1 : 0);
        for (index_t h = 0; h < kHeads; ++h) {
          for (index_t c = 0; c < kWidth; ++c) {
            const float x = mixed[static_cast<std::size_t>((row * kHeads + h) * kWidth + c)];
            worst = std::max(worst, std::abs(static_cast<double>(x - results(b, h, i, c))));
          }
        }
      }
      check.holds("a mixed step", worst < 1e-6);
    }
    check.holds("one token was accepted", cache.length(0) == kPrompt + 1 && cache.length(1) == 6);

    // The first sequence without a cache.
    std::vector<float> expected(q.size());
    attention({.q = positions(q, kHeads, 0, kTotal),
               .k = positions(k, kKvHeads, 0, kTotal),
               .v = positions(v, kKvHeads, 0, kTotal),
               .out = {expected.data(), {kBatch, kHeads, kTotal, kWidth}},
               .rope = &rope},
              SSMax<float>{0.43f}, Causal{});
    double worst = 0;
    for (index_t h = 0; h < kHeads; ++h) {
      for (index_t i = 0; i < kDraft; ++i) {
        for (index_t c = 0; c < kWidth; ++c) {
          const float same = positions(expected, kHeads, kPrompt, kDraft)(0, h, i, c);
          worst = std::max(worst, std::abs(static_cast<double>(results(0, h, i, c) - same)));
        }
      }
    }
    check.holds("a small cache", worst < 0.02);
  }
  {
    // Three sequences of 5, 0 and 12 tokens, and the last of them alone.
    const std::vector<index_t> cumulative{0, 5, 5, 17};
    constexpr index_t channels = (kHeads + 2 * kKvHeads) * kWidth;
    const auto qkv = random_numbers(17 * channels, random);
    std::vector<float> out(17 * kHeads * kWidth), alone(12 * kHeads * kWidth);
    packed_prompts({qkv.data(), {17, channels}}, {out.data(), {17, kHeads * kWidth}}, kHeads, kKvHeads,
                   cumulative);
    packed_prompts({qkv.data() + 5 * channels, {12, channels}}, {alone.data(), {12, kHeads * kWidth}}, kHeads,
                   kKvHeads, std::vector<index_t>{0, 12});
    check.holds("packed sequences",
                std::equal(alone.begin(), alone.end(), out.begin() + 5 * kHeads * kWidth));
  }
  {
    auto cache = eight_bit_cache(kBatch, kKvHeads, kWidth, kTotal);
    KvCache<float> same({.batch = kBatch, .kv_heads = kKvHeads, .width = kWidth, .capacity = kTotal});
    std::vector<float> out(kBatch * kHeads * kWidth), expected(out.size());
    const auto next_token = [&](auto& any_cache, std::vector<float>& result) {
      any_cache.append(positions(k, kKvHeads, 0, kTotal), positions(v, kKvHeads, 0, kTotal), &rope);
      attention({.q = positions(q, kHeads, kTotal - 1, 1),
                 .keys = any_cache,
                 .out = View<float, 4>(result.data(), {kBatch, kHeads, 1, kWidth}),
                 .rope = &rope},
                SSMax<float>{0.43f}, Causal{});
    };
    next_token(cache, out);
    next_token(same, expected);
    float worst = 0;
    for (std::size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::abs(out[i] - expected[i]));
    check.holds("8 bits are close to float", worst > 0 && worst < 0.02f);
  }
  return check.exit_code();
}
