// Adds a storage type: keys and values in 8 bits, with one factor per row. eight_bit.hpp has such types of the library.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

struct Byte {
  std::int8_t value;
};

template <>
struct ssmax::StorageTraits<Byte> {
  using Compute = float;
  static void load(const Byte* in, index_t n, float* out) {
    for (index_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i].value);
  }
  static void store(const float* in, index_t n, Byte* out) {
    for (index_t i = 0; i < n; ++i) out[i].value = static_cast<std::int8_t>(std::lrint(in[i]));
  }
  // Returns the factor by which the row is divided before `store`. Leave `scale` out for a type without a factor.
  static float scale(const float* in, index_t n) {
    float largest = 1e-30f;
    for (index_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(in[i]));
    return largest / 127;
  }
};

namespace {

using ssmax::index_t;
constexpr index_t kHeads = 4, kKvHeads = 2, kLength = 500, kWidth = 64;

template <class X>
std::vector<float> decoded(const std::vector<float>& q, const std::vector<float>& k,
                           const std::vector<float>& v) {
  ssmax::KvCache<X> cache({.kv_heads = kKvHeads, .width = kWidth, .capacity = kLength});
  cache.append(ssmax::View<const float, 4>(k.data(), {1, kKvHeads, kLength, kWidth}),
               ssmax::View<const float, 4>(v.data(), {1, kKvHeads, kLength, kWidth}));
  std::vector<float> out(q.size());
  ssmax::attention(
      {.q = {q.data(), {1, kHeads, 1, kWidth}}, .keys = cache, .out = {out.data(), {1, kHeads, 1, kWidth}}},
      ssmax::SSMax<float>{0.1f}, ssmax::Causal{});
  return out;
}

}  // namespace

int main() {
  examples::Random random(1);
  std::vector<float> q(kHeads * kWidth), k(kKvHeads * kLength * kWidth), v(k.size());
  for (auto* values : {&q, &k, &v}) {
    for (float& value : *values) value = random.standard();
  }
  const std::vector<float> exact = decoded<float>(q, k, v), out = decoded<Byte>(q, k, v);
  float worst = 0, largest = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    worst = std::max(worst, std::abs(out[i] - exact[i]));
    largest = std::max(largest, std::abs(exact[i]));
  }
  std::printf("8 bits instead of 32: results up to %.3f differ by up to %.4f\n", static_cast<double>(largest),
              static_cast<double>(worst));
  examples::Check check;
  check.holds("8 bits are close to 32", worst < 0.01f * largest && worst > 0);
  return check.exit_code();
}
