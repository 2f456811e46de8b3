// A layer's attention with SSMax: a prompt at once, then token after token against the cache.
#include <algorithm>
#include <cmath>
#include <ssmax/ssmax.hpp>
#include <vector>

int main() {
  using namespace ssmax;
  constexpr index_t heads = 8, kv_heads = 2, d = 64, prompt = 200, total = 210;
  std::vector<float> q(heads * total * d), k(kv_heads * total * d), v(k), expected(q), out(q);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.37f * static_cast<float>(i));
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = v[i] = std::cos(0.61f * static_cast<float>(i));
  // Views are [batch, head, position, channel] with any strides; k and v may have fewer heads.
  const auto positions = [](std::vector<float>& x, index_t head_count, index_t first, index_t count) {
    return View<float, 4>(x.data() + first * d, {1, head_count, count, d},
                          {head_count * total * d, total * d, d, 1});
  };

  const std::vector<float> s(heads, 0.43f), b(heads, 0.1f);
  const SSMax<float> scaling{s, b};  // one s and b per head
  const Rope<float> rope({.width = d, .theta = 10'000}, total);
  ThreadPool pool(2);

  // Everything at once, as in training or for a prompt.
  attention({.q = positions(q, heads, 0, total),
             .k = positions(k, kv_heads, 0, total),
             .v = positions(v, kv_heads, 0, total),
             .out = positions(expected, heads, 0, total),
             .rope = &rope},
            scaling, Causal{}, pool);

  // Token by token. n and positions come from the cache.
  KvCache<bfloat16> cache({.kv_heads = kv_heads, .width = d, .capacity = total});
  cache.append(positions(k, kv_heads, 0, prompt), positions(v, kv_heads, 0, prompt), &rope);
  for (index_t token = prompt; token < total; ++token) {
    cache.append(positions(k, kv_heads, token, 1), positions(v, kv_heads, token, 1), &rope);
    attention({.q = positions(q, heads, token, 1),
               .keys = cache,
               .out = positions(out, heads, token, 1),
               .rope = &rope},
              scaling, Causal{}, pool);
  }

  float worst = 0;
  const View<float, 4> tokens = positions(out, heads, prompt, total - prompt),
                       same = positions(expected, heads, prompt, total - prompt);
  for (index_t head = 0; head < heads; ++head) {
    for (index_t i = 0; i < total - prompt; ++i) {
      for (index_t c = 0; c < d; ++c)
        worst = std::max(worst, std::abs(tokens(0, head, i, c) - same(0, head, i, c)));
    }
  }
  return worst < 0.02f ? 0 : 1;  // bfloat16 keeps 8 bits
}
