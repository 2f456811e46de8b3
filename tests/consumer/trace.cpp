// One call of attention, its backward and decode each, which SSMAX_TRACE=1 prints to stderr.

#include <array>
#include <ssmax/ssmax.hpp>
#include <vector>

int main() {
  using namespace ssmax;
  constexpr std::array<index_t, 4> shape{1, 1, 200, 8};
  std::vector<float> numbers(200 * 8, 0.5F), out(numbers), dq(numbers), dk(numbers), dv(numbers), lse(200);
  const View<const float, 4> q(numbers.data(), shape);
  const View<float, 4> out_view(out.data(), shape);
  const View<float, 3> lse_view(lse.data(), {1, 1, 200});
  attention({.q = q, .k = q, .v = q, .out = out_view, .lse = lse_view});
  attention_backward(
      {.q = q, .k = q, .v = q, .out = out_view, .lse = lse_view},
      {.dout = q, .dq = {dq.data(), shape}, .dk = {dk.data(), shape}, .dv = {dv.data(), shape}});
  KvCache<float> cache({.kv_heads = 1, .width = 8, .capacity = 200});
  cache.append(q, q);
  attention({.q = {numbers.data(), {1, 1, 1, 8}}, .keys = cache, .out = {out.data(), {1, 1, 1, 8}}},
            Causal{});
}
