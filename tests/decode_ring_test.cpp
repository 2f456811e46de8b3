// decode on rings: a window has the numbers of one on a cache that holds all, and keys that a ring has
// forgotten are refused.

#include <algorithm>
#include <cmath>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "catch.hpp"
#include "decode_problem.hpp"
#include "refusal.hpp"
#include "target_scope.hpp"

namespace decode_problem::decode_ring_test {

/// Positions arrive some at a time; after each append the last of them are decoded from a ring and from a
/// cache that holds all. Returns how many elements had other bits.
template <class X>
index_t check_ring(const Shape& shape, index_t window, index_t capacity, Rule& rule, bool bits) {
  const ssmax::RopeOptions turn{.width = shape.d};
  const Rope<float> rope(turn, shape.longest());
  const AttentionOptions<float> options{.rope = &rope};
  const Data<float> all(shape);
  KvCache<X> ring(options_of(shape, capacity, true)), plain(options_of(shape));
  index_t different = 0;
  for (index_t position = 0, step = 0; position < shape.longest(); ++step) {
    const index_t end = std::min(shape.longest(), position + shape.queries + step % 4);
    std::vector<index_t> counts, lengths;
    for (const index_t length : shape.lengths) {
      lengths.push_back(std::min(length, end));
      counts.push_back(lengths.back() - std::min(length, position));
    }
    for (KvCache<X>* cache : {&ring, &plain}) {
      cache->append(all.k_view(position, end), all.v_view(position, end), &rope, counts);
    }
    position = end;
    if (std::ranges::any_of(lengths, [&](index_t length) { return length < shape.queries; })) continue;
    const Output<float> from_ring =
        run(all, ring, SSMax<float>{0.4F}, SlidingWindow{window - 1}, Identity{}, options);
    const Output<float> from_plain =
        run(all, plain, SSMax<float>{0.4F}, SlidingWindow{window - 1}, Identity{}, options);
    for (std::size_t i = 0; i < from_ring.out.size(); ++i) different += from_ring.out[i] != from_plain.out[i];
    if (bits) CHECK(from_ring == from_plain);
    if (step % 8 != 0 && position < shape.longest()) continue;
    // The reference sees what the ring has kept, rotated already: it rotates the queries itself.
    Data<float> stored(Shape{shape.heads, shape.kv_heads, shape.queries, shape.d, shape.dv, lengths});
    for (index_t b = 0; b < shape.batch(); ++b) {
      for (index_t h = 0; h < shape.kv_heads; ++h) {
        for (index_t key = 0; key < plain.length(b); ++key) {
          const auto held = plain.stretch(b, h, key);
          for (index_t c = 0; c < shape.d; ++c) stored.k_row(b, h, key)[c] = static_cast<float>(held.k[c]);
          for (index_t c = 0; c < shape.dv; ++c) stored.v_row(b, h, key)[c] = static_cast<float>(held.v[c]);
        }
      }
    }
    stored.q = all.q;
    for (index_t row = 0; row < shape.rows(); ++row) {
      const index_t b = row / (shape.heads * shape.queries);
      float* const q = stored.q.data() + row * shape.d;
      const index_t at = plain.length(b) - shape.queries + row % shape.queries;
      ssmax::rope(ssmax::View<const float, 2>(q, {1, shape.d}), ssmax::View<float, 2>(q, {1, shape.d}), rope,
                  at);
    }
    const Plan plan{
        .visible = [&](const Query& query,
                       index_t key) { return key <= query.position() && key > query.position() - window; },
        .multiplier = [](index_t, index_t,
                         index_t n) { return Real(0.4F) * std::log(static_cast<Real>(n)); }};
    const Expected<float> expected(stored, plan);
    const std::string name = name_of(shape) + " at " + std::to_string(position);
    rule.take(from_ring, expected, name + ", ring");
    rule.take(from_plain, expected, name + ", plain");
  }
  return different;
}

TEST_CASE("a window on a ring gives the numbers of one on a cache that holds all", "[decode][slow]") {
  for_each_target_of<bfloat16>([](const std::string& target) {
    Rule rule;
    check_ring<float>({6, 2, 1, 16, 9, {300, 141}}, 50, 50, rule, false);
    check_ring<float>({4, 2, 3, 8, 16, {290, 200}}, 130, 135, rule, false);
    check_ring<half>({4, 2, 3, 8, 16, {290, 200}}, 130, 135, rule, false);
    check_ring<bfloat16>({2, 2, 1, 16, 8, {140}}, 33, 40, rule, false);
    rule.check(target);
  });
}

TEST_CASE("with more than 16 queries of a kv head a ring gives the same bits, too", "[decode]") {
  for_each_target([](const std::string& target) {
    Rule rule;
    index_t different = check_ring<float>({1, 1, 17, 8, 9, {300, 141}}, 50, 69, rule, true);
    different += check_ring<float>({2, 1, 20, 8, 16, {500, 300}}, 60, 200, rule, true);
    different += check_ring<half>({8, 2, 5, 16, 16, {290, 200}}, 130, 150, rule, true);
    CHECK(different == 0);
    rule.check(target);
  });
}

TEST_CASE("a mask that shows keys which a ring has forgotten is refused", "[decode]") {
  const Data<float> data({2, 1, 3, 8, 4, {9, 20}});
  const KvCache<float> ring = filled<float>(data, nullptr, 12, true);  // the second one keeps 8 … 19
  Output<float> result(data.shape);
  const Output<float> untouched = result;
  const auto call = [&](const auto& mask) {
    decode<float>(
        {.q = data.q_view(), .out = {result.out.data(), {2, 2, 3, 4}}, .lse = {result.lse.data(), {2, 2, 3}}},
        ring, Softmax{}, mask);
  };
  check_refused([&] { call(Causal{}); }, {"ssmax::decode: mask shows key 0", "stored is 8"});
  check_refused([&] { call(ssmax::Full{}); }, {"mask shows key 0", "stored is 8"});
  // The first of three queries is at 17.
  check_refused([&] { call(SlidingWindow{10}); }, {"mask shows key 7", "stored is 8"});
  const std::vector<index_t> lengths{9, 20};
  check_refused([&] { call(KeyLengths{lengths}); }, {"mask shows key 0"});
  CHECK(result == untouched);
  CHECK_NOTHROW(call(SlidingWindow{9}));
  CHECK_NOTHROW(call(SlidingWindow{9} & KeyLengths{lengths}));
  // A ring that has forgotten nothing yet is as any cache.
  const KvCache<float> fresh = filled<float>(data, nullptr, 20, true);
  CHECK(run(data, fresh) == run(data, filled<float>(data)));
}

}  // namespace decode_problem::decode_ring_test
