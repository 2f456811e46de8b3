// Compiled several times, each time with another SINGLE_HEADER_UNIT: <ssmax.hpp> is the library in one file
// or, from the folder of the headers, the one that includes them all.

#include "unit.hpp"

#include <cmath>
#include <ssmax.hpp>

#define JOIN_EXPANDED(a, b) a##b
#define JOIN(a, b) JOIN_EXPANDED(a, b)

std::vector<float> JOIN(numbers_, SINGLE_HEADER_UNIT)() {
  using namespace ssmax;
  constexpr index_t heads = 2, keys = 61, width = 24;
  constexpr std::array<index_t, 4> shape{1, heads, keys, width};
  std::vector<float> in;
  for (int i = 0; i < heads * keys * width; ++i) in.push_back(std::sin(static_cast<float>(i)));
  const View<const float, 4> q(in.data(), shape);

  std::vector<float> all;
  const auto keep = [&](const std::vector<float>& numbers) {
    all.insert(all.end(), numbers.begin(), numbers.end());
  };
  const SSMax<float> scaling{0.43F, 0.1F};
  keep(scaling(in));

  std::vector<float> out(in.size()), lse(heads * keys), dq(in.size()), dk(in.size()), dv(in.size());
  const View<float, 3> lse_view(lse.data(), {1, heads, keys});
  ThreadPool pool(2);
  attention({.q = q, .k = q, .v = q, .out = {out.data(), shape}, .lse = lse_view}, scaling, Causal{},
            Softcap{20}, pool);
  attention_backward(
      {.q = q, .k = q, .v = q, .out = {out.data(), shape}, .lse = lse_view},
      {.dout = q, .dq = {dq.data(), shape}, .dk = {dk.data(), shape}, .dv = {dv.data(), shape}}, scaling,
      Causal{}, Softcap{20}, pool);
  for (const auto& numbers : {out, lse, dq, dk, dv}) keep(numbers);
  return all;
}
