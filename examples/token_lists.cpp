// Attends over the tokens that a selection chose: one list of token indices per kv head, in the pool of a server.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

namespace {

constexpr index_t kHeads = 8, kKvHeads = 2, kWidth = 64, kTokens = 500, kChosen = 100;

// Attention of one query over 100 of 500 tokens, another 100 for each kv head. The pool is [token][kv head][channel].
// n is the length of the sequence, so the multipliers of the heads are computed here.
void attend(const std::vector<float>& k, const std::vector<float>& v, const std::vector<std::int32_t>& chosen,
            const View<const float, 4>& q, const View<float, 4>& out) {
  const View<const float, 4> k_pool(k.data(), {kTokens, 1, kKvHeads, kWidth}),  // pages of one key
      v_pool(v.data(), {kTokens, 1, kKvHeads, kWidth});
  const View<const std::int32_t, 3> lists(chosen.data(), {1, kKvHeads, kChosen});
  const std::vector<std::int32_t> lengths{kChosen};
  const PagedKeys keys(k_pool, v_pool, PageTable(lists, lengths));

  const std::vector<float> c(kHeads, 0.43f * std::log(static_cast<float>(kTokens)));
  attention({.q = q, .keys = keys, .out = out}, PerQuery<float>{{c.data(), {1, kHeads, 1}}}, Full{});
}

}  // namespace

int main() {
  examples::Random random(1);
  std::vector<float> k(kTokens * kKvHeads * kWidth), v(k), q(kHeads * kWidth), out(q), expected(q);
  for (float& x : k) x = random.standard();
  for (float& x : v) x = random.standard();
  for (float& x : q) x = random.standard();
  std::vector<std::int32_t> chosen;
  for (index_t h = 0; h < kKvHeads; ++h) {
    for (index_t i = 0; i < kChosen; ++i)
      chosen.push_back(static_cast<std::int32_t>((i * 37 + h * 11) % kTokens));
  }
  attend(k, v, chosen, {q.data(), {1, kHeads, 1, kWidth}}, {out.data(), {1, kHeads, 1, kWidth}});

  // The same tokens in arrays of their own.
  std::vector<float> own_k, own_v;
  for (index_t h = 0; h < kKvHeads; ++h) {
    for (index_t i = 0; i < kChosen; ++i) {
      const index_t token = chosen[static_cast<std::size_t>(h * kChosen + i)];
      const auto row = static_cast<std::ptrdiff_t>((token * kKvHeads + h) * kWidth);
      own_k.insert(own_k.end(), k.begin() + row, k.begin() + row + kWidth);
      own_v.insert(own_v.end(), v.begin() + row, v.begin() + row + kWidth);
    }
  }
  attention({.q = {q.data(), {1, kHeads, 1, kWidth}},
             .k = {own_k.data(), {1, kKvHeads, kChosen, kWidth}},
             .v = {own_v.data(), {1, kKvHeads, kChosen, kWidth}},
             .out = {expected.data(), {1, kHeads, 1, kWidth}}},
            Constant{0.43f * std::log(static_cast<float>(kTokens))});
  float worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::abs(out[i] - expected[i]));
  examples::Check check;
  check.holds("lists and arrays agree", worst < 1e-5f);
  return check.exit_code();
}
