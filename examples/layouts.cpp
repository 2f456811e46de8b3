// docs/layouts.md shows these views: the strides of each layout, storage types, and a cache of your own. The program
// stores one call's tensors in each layout and compares the results.
#include <algorithm>
#include <cmath>
#include <span>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

// x [batch, heads, n, d], contiguous: the constructor computes the strides {heads·n·d, n·d, d, 1}.
View<float, 4> heads_outside(float* x, index_t batch, index_t heads, index_t n, index_t d) {
  return {x, {batch, heads, n, d}};
}

// x [batch, n, heads, d], as PyTorch has it before the transpose.
View<float, 4> tokens_outside(float* x, index_t batch, index_t heads, index_t n, index_t d) {
  return {x, {batch, heads, n, d}, {n * heads * d, d, heads * d, 1}};
}

// x [tokens, heads·d]: one sequence, the heads of a token side by side.
View<float, 4> one_sequence(float* x, index_t heads, index_t tokens, index_t d) {
  return {x, {1, heads, tokens, d}, {tokens * heads * d, d, heads * d, 1}};
}

struct Qkv {
  View<float, 4> q, k, v;
};

// qkv [tokens, (heads + 2·kv_heads)·d]: a row has the heads of q, then the heads of k, then the heads of v.
Qkv packed(float* qkv, index_t heads, index_t kv_heads, index_t tokens, index_t d) {
  const index_t row = (heads + 2 * kv_heads) * d;
  return {{qkv, {1, heads, tokens, d}, {tokens * row, d, row, 1}},
          {qkv + heads * d, {1, kv_heads, tokens, d}, {tokens * row, d, row, 1}},
          {qkv + (heads + kv_heads) * d, {1, kv_heads, tokens, d}, {tokens * row, d, row, 1}}};
}

// Queries and the result are float. Keys and values are stored as half.
void half_keys(View<const float, 4> q, View<const half, 4> k, View<const half, 4> v, View<float, 4> out) {
  attention({.q = q, .k = k, .v = v, .out = out}, SSMax<float>{0.43f}, Causal{});
}

// `keys` holds rotated keys, each rotated once when it was stored. Rotates the query, and passes no rope.
void next_token_rotated(View<const float, 4> q, View<float, 4> rotated_q, View<const float, 4> keys,
                        View<const float, 4> values, View<float, 4> out, const Rope<float>& tables) {
  rope(q, rotated_q, tables, keys.extent(2) - 1);  // the position of the new token
  attention({.q = rotated_q, .k = keys, .v = values, .out = out}, SSMax<float>{0.43f}, Causal{});
}

// `keys` holds keys without rotation. The call rotates the query and every key.
void next_token_unrotated(View<const float, 4> q, View<const float, 4> keys, View<const float, 4> values,
                          View<float, 4> out, const Rope<float>& tables) {
  attention({.q = q, .k = keys, .v = values, .out = out, .rope = &tables}, SSMax<float>{0.43f}, Causal{});
}

namespace {

constexpr index_t kHeads = 4, kKvHeads = 2, kTokens = 30, kWidth = 8;

// Copies every element of `from`.
template <class From, class To>
void copy(const View<From, 4>& from, const View<To, 4>& to) {
  for (index_t h = 0; h < from.extent(1); ++h) {
    for (index_t i = 0; i < from.extent(2); ++i) {
      for (index_t c = 0; c < from.extent(3); ++c) to(0, h, i, c) = To(from(0, h, i, c));
    }
  }
}

double difference(const View<float, 4>& a, const View<float, 4>& b) {
  double largest = 0;
  for (index_t h = 0; h < a.extent(1); ++h) {
    for (index_t i = 0; i < a.extent(2); ++i) {
      for (index_t c = 0; c < a.extent(3); ++c) {
        largest = std::max(largest, std::abs(static_cast<double>(a(0, h, i, c) - b(0, h, i, c))));
      }
    }
  }
  return largest;
}

void attend(const View<float, 4>& q, const View<float, 4>& k, const View<float, 4>& v,
            const View<float, 4>& out) {
  attention({.q = q, .k = k, .v = v, .out = out}, SSMax<float>{0.43f}, Causal{});
}

struct Memory {
  std::vector<float> q = std::vector<float>(kHeads * kTokens * kWidth),
                     k = std::vector<float>(kKvHeads * kTokens * kWidth), v = k, out = q;
};

}  // namespace

int main() {
  examples::Check check;
  examples::Random random(1);
  Memory memory;
  for (auto* numbers : {&memory.q, &memory.k, &memory.v}) {
    for (float& x : *numbers) x = random.standard();
  }
  const auto q = heads_outside(memory.q.data(), 1, kHeads, kTokens, kWidth),
             k = heads_outside(memory.k.data(), 1, kKvHeads, kTokens, kWidth),
             v = heads_outside(memory.v.data(), 1, kKvHeads, kTokens, kWidth),
             expected = heads_outside(memory.out.data(), 1, kHeads, kTokens, kWidth);
  attend(q, k, v, expected);

  Memory other;
  const auto out = tokens_outside(other.out.data(), 1, kHeads, kTokens, kWidth);
  {
    const auto q2 = tokens_outside(other.q.data(), 1, kHeads, kTokens, kWidth),
               k2 = one_sequence(other.k.data(), kKvHeads, kTokens, kWidth),
               v2 = one_sequence(other.v.data(), kKvHeads, kTokens, kWidth);
    copy(q, q2), copy(k, k2), copy(v, v2);
    attend(q2, k2, v2, out);
    check.holds("rows of tokens", difference(out, expected) == 0);
  }
  {
    std::vector<float> qkv(kTokens * (kHeads + 2 * kKvHeads) * kWidth);
    const Qkv x = packed(qkv.data(), kHeads, kKvHeads, kTokens, kWidth);
    copy(q, x.q), copy(k, x.k), copy(v, x.v);
    attend(x.q, x.k, x.v, out);
    check.holds("packed rows", difference(out, expected) == 0);
  }
  {
    std::vector<half> k2(memory.k.size()), v2(k2.size());
    const View<half, 4> half_k(k2.data(), {1, kKvHeads, kTokens, kWidth}),
        half_v(v2.data(), {1, kKvHeads, kTokens, kWidth});
    copy(k, half_k), copy(v, half_v);
    half_keys(q, half_k, half_v, out);
    check.holds("keys of half", difference(out, expected) < 5e-3);
  }
  {
    const Rope<float> tables({.width = kWidth}, kTokens);
    std::vector<float> rotated(memory.k.size()), rotated_q(kHeads * kWidth), a(kHeads * kWidth), b(a);
    const View<float, 4> rotated_k(rotated.data(), {1, kKvHeads, kTokens, kWidth});
    rope(k, rotated_k, tables, 0);
    const View<const float, 4> last(&q(0, 0, kTokens - 1, 0), {1, kHeads, 1, kWidth},
                                    {q.stride(0), q.stride(1), q.stride(2), 1});
    const View<float, 4> to_a(a.data(), {1, kHeads, 1, kWidth}), to_b(b.data(), {1, kHeads, 1, kWidth});
    next_token_rotated(last, {rotated_q.data(), {1, kHeads, 1, kWidth}}, rotated_k, v, to_a, tables);
    next_token_unrotated(last, k, v, to_b, tables);
    check.holds("keys rotated before or in the call", difference(to_a, to_b) < 1e-5);
  }
  return check.exit_code();
}
