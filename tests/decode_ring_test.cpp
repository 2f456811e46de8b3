// decode on rings: a window, with or without first keys, gives the results of a cache that holds all keys. Masks that
// show forgotten keys are refused.

#include "decode_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "wrapped_source.hpp"

namespace decode_problem::decode_ring_test {

/// A window, the first keys beside it, and the capacity of the ring.
struct Kept {
  index_t first, window, capacity;

  bool shows(const Query& query, index_t key) const {
    return key <= query.position() && (key < first || key > query.position() - window);
  }
};

/// Positions arrive some at a time. After each append, a ring and a cache that holds all keys decode the last
/// positions. Returns how many elements had other bits. The mask must show what `kept` shows.
template <class X, class M>
index_t check_ring(const Shape& shape, const Kept& kept, const M& mask, Rule& rule, bool bits) {
  const ssmax::RopeOptions turn{.width = shape.d};
  const Rope<float> rope(turn, shape.longest());
  const AttentionOptions<float> options{.rope = &rope};
  const Data<float> all(shape);
  KvCache<X> ring(options_of(shape, kept.capacity, true, kept.first)), plain(options_of(shape));
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
    const Output<float> from_ring = run(all, ring, SSMax<float>{0.4F}, mask, Identity{}, options);
    const Output<float> from_plain = run(all, plain, SSMax<float>{0.4F}, mask, Identity{}, options);
    CHECK((from_ring.explanation.path == ssmax::Path::decode) == !bits);
    for (std::size_t i = 0; i < from_ring.out.size(); ++i) different += from_ring.out[i] != from_plain.out[i];
    if (bits) CHECK(from_ring == from_plain);
    if (step % 8 != 0 && position < shape.longest()) continue;
    // The reference sees what the ring has kept, rotated already: it rotates the queries itself.
    Data<float> stored(Shape{shape.heads, shape.kv_heads, shape.queries, shape.d, shape.dv, lengths});
    for (index_t b = 0; b < shape.batch(); ++b) {
      reference::for_each_index({shape.kv_heads, plain.length(b)}, [&](index_t h, index_t key) {
        const auto held = plain.run(b, h, key);
        for (index_t c = 0; c < shape.d; ++c) stored.k_row(b, h, key)[c] = static_cast<float>(held.k[c]);
        for (index_t c = 0; c < shape.dv; ++c) stored.v_row(b, h, key)[c] = static_cast<float>(held.v[c]);
      });
    }
    stored.q = all.q;
    for (index_t row = 0; row < shape.rows(); ++row) {
      const index_t b = row / (shape.heads * shape.queries);
      float* const q = stored.q.data() + row * shape.d;
      const index_t at = plain.length(b) - shape.queries + row % shape.queries;
      ssmax::rope(ssmax::View<const float, 2>(q, {1, shape.d}), ssmax::View<float, 2>(q, {1, shape.d}), rope,
                  at);
    }
    const Plan plan{.visible = [&](const Query& query, index_t key) { return kept.shows(query, key); },
                    .multiplier = [](index_t, index_t,
                                     index_t n) { return Real(0.4F) * std::log(static_cast<Real>(n)); }};
    const Expected<float> expected(stored, plan);
    const std::string name = name_of(shape) + " at " + std::to_string(position);
    rule.take(from_ring, expected, name + ", ring");
    rule.take(from_plain, expected, name + ", plain");
  }
  return different;
}

template <class X>
index_t check_window(const Shape& shape, index_t window, index_t capacity, Rule& rule, bool bits) {
  return check_ring<X>(shape, {0, window, capacity}, SlidingWindow{window - 1}, rule, bits);
}

template <class X>
index_t check_first_keys(const Shape& shape, const Kept& kept, Rule& rule, bool bits) {
  return check_ring<X>(shape, kept, SlidingWindow{kept.window - 1, 0, kept.first}, rule, bits);
}

TEST_CASE("a window on a ring gives the results of a cache that holds all keys", "[decode][slow]") {
  for_each_target_of<bfloat16>([](const std::string& target) {
    Rule rule;
    check_window<float>({6, 2, 1, 16, 9, {300, 141}}, 50, 50, rule, false);
    check_window<float>({4, 2, 3, 8, 16, {290, 200}}, 130, 135, rule, false);
    check_window<half>({4, 2, 3, 8, 16, {290, 200}}, 130, 135, rule, false);
    check_window<bfloat16>({2, 2, 1, 16, 8, {140}}, 33, 40, rule, false);
    check_first_keys<float>({6, 2, 1, 16, 9, {300, 141}}, {4, 50, 54}, rule, false);
    check_first_keys<float>({2, 2, 5, 8, 16, {290, 200}}, {1, 130, 135}, rule, false);
    check_first_keys<half>({2, 2, 5, 8, 16, {290, 200}}, {7, 130, 145}, rule, false);
    check_first_keys<bfloat16>({2, 2, 1, 16, 8, {140}}, {70, 1, 71}, rule, false);
    rule.check(target);
  });
}

TEST_CASE("with more than 16 queries of a kv head a ring gives the same bits, too", "[decode]") {
  for_each_target([](const std::string& target) {
    Rule rule;
    index_t different = check_window<float>({1, 1, 17, 8, 9, {300, 141}}, 50, 69, rule, true);
    different += check_window<float>({2, 1, 20, 8, 16, {500, 300}}, 60, 200, rule, true);
    different += check_window<half>({8, 2, 5, 16, 16, {290, 200}}, 130, 150, rule, true);
    different += check_first_keys<float>({1, 1, 17, 8, 9, {300, 141}}, {4, 50, 70}, rule, true);
    different += check_first_keys<float>({2, 1, 20, 8, 16, {500, 300}}, {65, 60, 200}, rule, true);
    different += check_first_keys<half>({8, 2, 5, 16, 16, {290, 200}}, {3, 130, 150}, rule, true);
    CHECK(different == 0);
    rule.check(target);
  });
}

/// Lengths below, at and far above the capacity. The longest one's window lies in two chunks of 1024 keys. Queries have
/// the cache's type.
TEMPLATE_TEST_CASE("first keys and a window on a ring, for all lengths and types", "[decode][bfloat16]",
                   float, half, bfloat16) {
  using T = TestType;
  for (const index_t queries : {1, 5, 20}) {
    const Shape shape{2, 2, queries, 16, 9, {20, 67, 91, 92, 2060}};
    const Kept kept{5, 67, 72 + queries - 1};
    const SlidingWindow mask{kept.window - 1, 0, kept.first};
    const Data<T> data(shape);
    const Expected<T> expected(
        data, {.visible = [&](const Query& query, index_t key) { return kept.shows(query, key); }});
    const KvCache<T> ring = filled<T>(data, nullptr, kept.capacity, true, kept.first),
                     plain = filled<T>(data);
    check(data, ring, expected, Softmax{}, mask);
    if (queries > 16) {
      for_each_target([&](const std::string&) {
        CHECK(run(data, ring, Softmax{}, mask) == run(data, plain, Softmax{}, mask));
      });
    }
    // The same keys by a predicate alone: attention reads the places of forgotten keys.
    const auto shows =
        Causal{} & ssmax::Where([&](const Query& q, index_t key) { return kept.shows(q, key); });
    check(data, ring, expected, Softmax{}, shows);
  }
}

TEST_CASE("a mask that shows keys which a ring has forgotten is refused", "[decode]") {
  const Data<float> data({2, 1, 3, 8, 4, {9, 20}});
  const KvCache<float> ring = filled<float>(data, nullptr, 12, true);  // the second one keeps 8 … 19
  Output<float> result(data.shape);
  const Output<float> untouched = result;
  const auto call = [&](const auto& mask) { attention(over(arguments_of(data, result), ring), mask); };
  check_refused({"ssmax::attention: mask shows key 0", "stores keys [0, 8)"}, [&] { call(Causal{}); });
  check_refused({"mask shows key 0", "stores keys [0, 8)"}, [&] { call(ssmax::Full{}); });
  // The first of three queries is at 17.
  check_refused({"mask shows key 7", "stores keys [0, 8)"}, [&] { call(SlidingWindow{10}); });
  const std::vector<index_t> lengths{9, 20};
  check_refused({"mask shows key 0"}, [&] { call(KeyLengths{lengths}); });
  CHECK(result == untouched);
  CHECK_NOTHROW(call(SlidingWindow{9}));
  CHECK_NOTHROW(call(SlidingWindow{9} & KeyLengths{lengths}));
  // Visible keys count, not the range that a mask returns.
  const auto where =
      Causal{} & ssmax::Where([](const Query& q, index_t key) { return key > q.position() - 10; });
  CHECK_NOTHROW(call(where));
  CHECK_NOTHROW(call(SlidingWindow{9, 0, 0}));
  check_refused({"mask shows key 7", "stores keys [0, 8)"}, [&] { call(SlidingWindow{10, 0, 0}); });
  check_refused({"mask shows key 0", "stores keys [0, 8)"}, [&] { call(SlidingWindow{9, 0, 3}); });
  // A ring that has not forgotten a key is like any other cache.
  const KvCache<float> fresh = filled<float>(data, nullptr, 20, true);
  CHECK(run(data, fresh) == run(data, filled<float>(data)));
}

TEST_CASE("a mask that shows keys between the first ones and the last ones of a ring is refused",
          "[decode]") {
  const Data<float> data({2, 1, 3, 8, 4, {9, 20}});
  const KvCache<float> ring = filled<float>(data, nullptr, 12, true, 4);  // the second one forgets 4 … 11
  Output<float> result(data.shape);
  const Output<float> untouched = result;
  const auto call = [&](const auto& mask) { attention(over(arguments_of(data, result), ring), mask); };
  const auto where = [](index_t first, index_t window) {
    return Causal{} & ssmax::Where([=](const Query& query, index_t key) {
             return key < first || key > query.position() - window;
           });
  };
  // The first of three queries is at 17.
  check_refused({"ssmax::attention: mask shows key 11", "stores keys [4, 12)"}, [&] {
    call(SlidingWindow{6, 0, 4});
  });
  check_refused({"mask shows key 4", "stores keys [4, 12)"}, [&] { call(SlidingWindow{5, 0, 5}); });
  check_refused({"mask shows key 11", "stores keys [4, 12)"}, [&] { call(where(4, 7)); });
  check_refused({"mask shows key 4", "stores keys [4, 12)"}, [&] { call(where(5, 6)); });
  check_refused({"mask shows key 4", "stores keys [4, 12)"}, [&] { call(Causal{}); });
  check_refused({"mask shows key 11", "stores keys [4, 12)"}, [&] { call(SlidingWindow{6}); });
  CHECK(result == untouched);
  CHECK_NOTHROW(call(SlidingWindow{5, 0, 4}));
  CHECK_NOTHROW(call(where(4, 6)));
  CHECK_NOTHROW(call(SlidingWindow{5, 0, 4} & Causal{}));
  CHECK_NOTHROW(call(SlidingWindow{5}));
}

/// A source that has forgotten keys at the begin and others between those it stores.
struct TwoGaps : WrappedSource<KvCache<float>> {
  ssmax::KeyRange stored(index_t b) const { return {3, length(b)}; }
  ssmax::KeyRange forgotten(index_t) const { return {5, 9}; }
};

TEST_CASE("a source names the keys that it has forgotten", "[decode][key_source]") {
  const Data<float> data({1, 1, 1, 8, 4, {20}});
  const KvCache<float> cache = filled<float>(data);
  Output<float> result(data.shape);
  const auto call = [&](auto&& shows) {
    attention({.q = data.q_view(), .keys = TwoGaps{{cache}}, .out = {result.out.data(), {1, 1, 1, 4}}},
              Causal{} & ssmax::Where([=](const Query&, index_t key) { return shows(key); }));
  };
  check_refused({"mask shows key 2", "stores keys [0, 3)"},
                [&] { call([](index_t key) { return key == 2; }); });
  check_refused({"mask shows key 8", "stores keys [5, 9)"},
                [&] { call([](index_t key) { return key >= 8; }); });
  CHECK_NOTHROW(call([](index_t key) { return key == 3 || key == 4 || key >= 9; }));
}

}  // namespace decode_problem::decode_ring_test
