// What a cache holds and a query does not see never enters a result. What it sees spreads no further.

#include "decode_problem.hpp"
#include "test.hpp"

namespace decode_problem::decode_hidden_test {

template <class X>
X poison(int i) {
  using Limits = std::numeric_limits<float>;
  return X(i % 3 == 0 ? Limits::quiet_NaN() : i % 3 == 1 ? Limits::infinity() : -Limits::infinity());
}

/// The same rows with poison where bad(b, kv_head, key) says so.
template <class T, class Bad>
Data<T> poisoned(const Data<T>& data, const Bad& bad) {
  Data<T> result = data;
  const Shape& s = data.shape;
  int next = 0;
  reference::for_each_index({s.batch(), s.kv_heads, s.longest()}, [&](index_t b, index_t h, index_t key) {
    if (!bad(b, h, key)) return;
    for (index_t c = 0; c < s.d; ++c) result.k_row(b, h, key)[c] = poison<T>(next++);
    for (index_t c = 0; c < s.dv; ++c) result.v_row(b, h, key)[c] = poison<T>(next++);
  });
  return result;
}

const std::vector<Shape> poisoned_shapes{{3, 1, 1, 16, 9, {300, 141, 1}},
                                         {4, 2, 3, 11, 20, {290, 3}},
                                         {6, 2, 7, 16, 9, {300, 141, 7}},
                                         {1, 1, 40, 5, 16, {1200, 40}}};

template <class X>
void check_poison() {
  for (const Shape& shape : poisoned_shapes) {
    INFO(name_of(shape));
    const Data<float> data(shape);
    const index_t all = shape.longest();
    SECTION("beyond a sequence's length " + name_of(shape)) {
      const auto everything = [](index_t, index_t, index_t) { return true; };
      const Data<float> bad = poisoned(data, everything);
      KvCache<X> cache(options_of(shape));
      cache.append(bad.k_view(0, all), bad.v_view(0, all));
      for (index_t b = 0; b < shape.batch(); ++b) cache.truncate(b, 0);
      cache.append(data.k_view(0, all), data.v_view(0, all), nullptr, shape.lengths);
      CHECK(run(data, cache, LogN{}) == run(data, filled<X>(data), LogN{}));
    }
    SECTION("before a window " + name_of(shape)) {
      const auto outside = [&](index_t b, index_t, index_t key) {
        return key < shape.length(b) - shape.queries - 50;
      };
      const Data<float> bad = poisoned(data, outside);
      const SlidingWindow window{50};
      CHECK(run(data, filled<X>(bad), LogN{}, window) == run(data, filled<X>(data), LogN{}, window));
      // In a ring that still holds some of them, and has had others.
      const index_t capacity = 50 + shape.queries + 150;
      CHECK(run(data, filled<X>(bad, nullptr, capacity, true), LogN{}, window) ==
            run(data, filled<X>(data, nullptr, capacity, true), LogN{}, window));
    }
    SECTION("between first keys and a window " + name_of(shape)) {
      const auto outside = [&](index_t b, index_t, index_t key) {
        return key >= 2 && key < shape.length(b) - shape.queries - 50;
      };
      const Data<float> bad = poisoned(data, outside);
      const SlidingWindow mask{49, 0, 2};
      const auto where = Causal{} & ssmax::Where([=](const Query& query, index_t key) {
                           return key < 2 || key > query.position() - 50;
                         });
      for (const index_t more : {0, 150}) {  // masked keys that the ring still stores
        const index_t capacity = 2 + 50 + shape.queries + more;
        const KvCache<X> clean_ring = filled<X>(data, nullptr, capacity, true, 2),
                         bad_ring = filled<X>(bad, nullptr, capacity, true, 2);
        CHECK(run(data, bad_ring, LogN{}, mask) == run(data, clean_ring, LogN{}, mask));
        CHECK(run(data, bad_ring, LogN{}, where) == run(data, clean_ring, LogN{}, where));
      }
    }
    SECTION("keys that a mask hides " + name_of(shape)) {
      const auto hidden = [&](index_t, index_t, index_t key) { return key % 7 == 3; };
      const Data<float> bad = poisoned(data, hidden);
      const auto mask =
          Causal{} & ssmax::Where([&](const Query&, index_t key) { return !hidden(0, 0, key); });
      CHECK(run(data, filled<X>(bad), LogN{}, mask) == run(data, filled<X>(data), LogN{}, mask));
      const ssmax::Softcap cap{20};
      CHECK(run(data, filled<X>(bad), LogN{}, mask, cap) == run(data, filled<X>(data), LogN{}, mask, cap));
    }
    SECTION("keys after those of KeyLengths " + name_of(shape)) {
      const std::vector<index_t> lengths{100, 2, 1};
      const std::vector<index_t> own(lengths.begin(), lengths.begin() + shape.batch());
      const auto after = [&](index_t b, index_t, index_t key) {
        return key >= own[static_cast<std::size_t>(b)];
      };
      const Data<float> bad = poisoned(data, after);
      CHECK(run(data, filled<X>(bad), LogN{}, KeyLengths{own}) ==
            run(data, filled<X>(data), LogN{}, KeyLengths{own}));
    }
    // Compares the rows that do not see the poison. All others must be NaN.
    const auto check_spread = [&](const auto& bad, const auto& sees) {
      const Output<float> clean = run(data, filled<X>(data), LogN{});
      const Output<float> spread = run(data, filled<X>(poisoned(data, bad)), LogN{});
      bool same = true, spreads = true;
      for (index_t row = 0; row < shape.rows(); ++row) {
        const bool seen =
            sees(row / shape.queries / shape.heads, row / shape.queries % shape.heads, row % shape.queries);
        const auto take = [&](float result, float expected) {
          if (!seen) same = same && result == expected;
          if (seen) spreads = spreads && std::isnan(result);
        };
        for (index_t c = 0; c < shape.dv; ++c) {
          const auto at = static_cast<std::size_t>(row * shape.dv + c);
          take(spread.out[at], clean.out[at]);
        }
        take(spread.lse[static_cast<std::size_t>(row)], clean.lse[static_cast<std::size_t>(row)]);
      }
      CHECK(same);
      CHECK(spreads);
    };
    SECTION("the last key, which only the last query sees " + name_of(shape)) {
      check_spread([&](index_t b, index_t, index_t key) { return key == shape.length(b) - 1; },
                   [&](index_t, index_t, index_t query) { return query == shape.queries - 1; });
    }
    SECTION("other sequences and other kv heads " + name_of(shape)) {
      const index_t head = shape.kv_heads - 1;
      check_spread([&](index_t b, index_t h, index_t key) { return b == 0 && h == head && key == 0; },
                   [&](index_t b, index_t h, index_t) {
                     return b == 0 && h / (shape.heads / shape.kv_heads) == head;
                   });
    }
  }
}

TEST_CASE("what a cache holds and a query does not see never enters its result", "[decode]") {
  const TargetScope scope;
  for (const ssmax::Target target : ssmax::available_targets()) {
    SECTION(std::string(ssmax::target_name(target))) {
      ssmax::set_active_target(target);
      SECTION("float") { check_poison<float>(); }
      SECTION("half") { check_poison<half>(); }
      SECTION("bfloat16") { check_poison<bfloat16>(); }
    }
  }
}

TEST_CASE("a NaN in a visible value stays in its channel", "[decode]") {
  for_each_target([](const std::string&) {
    for (const index_t queries : {1, 20}) {
      const Shape shape{2, 1, queries, 8, 21, {200}};
      Data<float> data(shape);
      const Output<float> clean = run(data, filled<float>(data));
      data.v_row(0, 0, 150)[17] = std::numeric_limits<float>::quiet_NaN();
      const Output<float> spread = run(data, filled<float>(data));
      bool right = true;
      for (std::size_t at = 0; at < clean.out.size(); ++at) {
        const bool changed = at % 21 == 17;
        right = right && (changed ? std::isnan(spread.out[at]) : spread.out[at] == clean.out[at]);
      }
      CHECK(right);
      CHECK(same_bits(spread.lse, clean.lse));
    }
  });
}

}  // namespace decode_problem::decode_hidden_test
