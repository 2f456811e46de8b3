// Causal attention with SSMax: 8 query heads share 2 kv heads, RoPE turns queries and keys, two threads work.
#include <ssmax/ssmax.hpp>
#include <vector>

int main() {
  using namespace ssmax;
  constexpr index_t heads = 8, kv_heads = 2, n = 512, d = 64;
  std::vector<float> q(heads * n * d, 0.1f), k(kv_heads * n * d, 0.2f), v(k.size(), 1.0f), out(q.size());

  const std::vector<float> s(heads, 0.43f);  // learnable, one for each head
  const Rope<float> rope({.width = d, .theta = 10'000}, n);
  ThreadPool pool(2);
  // A view is a pointer and its extents, [batch, head, position, channel], with any strides.
  attention({.q = {q.data(), {1, heads, n, d}},
             .k = {k.data(), {1, kv_heads, n, d}},
             .v = {v.data(), {1, kv_heads, n, d}},
             .out = {out.data(), {1, heads, n, d}},
             .rope = &rope},
            SSMax<float>{s}, Causal{}, pool);

  return out.back() > 0.9999f && out.back() < 1.0001f ? 0 : 1;  // a weighted mean of ones
}
