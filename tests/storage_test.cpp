// A storage type of the user's, in rows, as keys and values, and with a factor for each row. Header-only: the library's
// own drivers of rows know its own types.

#include "call.hpp"
#include "own_int8.hpp"
#include "reference.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace storage_test {

/// Multiples of 1/16 in 16 bits.
struct Fixed {
  std::int16_t sixteenths;
};
/// Two integers of 4 bits in a byte, which a factor of the row multiplies.
struct Nibbles {
  std::uint8_t both;
};
/// Halves. The first channel of a row of n has the value n, which no other channel has.
struct Watched {
  std::int16_t halves;
};
struct Loads {
  int whole = 0, others = 0;
} loads;

}  // namespace storage_test

template <>
struct ssmax::StorageTraits<storage_test::Fixed> {
  using Compute = float;
  static void load(const storage_test::Fixed* in, index_t n, float* out) {
    for (index_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i].sixteenths) / 16;
  }
  static void store(const float* in, index_t n, storage_test::Fixed* out) {
    for (index_t i = 0; i < n; ++i) out[i].sixteenths = static_cast<std::int16_t>(std::lrint(in[i] * 16));
  }
};

template <>
struct ssmax::StorageTraits<storage_test::Watched> {
  using Compute = float;
  static void load(const storage_test::Watched* in, index_t n, float* out) {
    ++(in[0].halves == 2 * n ? storage_test::loads.whole : storage_test::loads.others);
    for (index_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i].halves) / 2;
  }
  static void store(const float* in, index_t n, storage_test::Watched* out) {
    for (index_t i = 0; i < n; ++i) out[i].halves = static_cast<std::int16_t>(std::lrint(in[i] * 2));
  }
};

template <>
struct ssmax::StorageTraits<storage_test::Nibbles> {
  using Compute = float;
  static constexpr index_t group = 2;
  static void load(const storage_test::Nibbles* in, index_t n, float* out) {
    for (index_t i = 0; i < n; ++i) out[i] = static_cast<float>((in[i / 2].both >> (4 * (i % 2))) & 15) - 8;
  }
  static void store(const float* in, index_t n, storage_test::Nibbles* out) {
    const auto bits = [](float x) { return static_cast<unsigned>(std::lrint(x) + 8); };
    for (index_t i = 0; i < n / 2; ++i)
      out[i].both = static_cast<std::uint8_t>(bits(in[2 * i]) | bits(in[2 * i + 1]) << 4);
  }
  static float scale(const float* in, index_t n) {
    float largest = 1e-30f;
    for (index_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(in[i]));
    return largest / 7;
  }
};

namespace storage_test {

using namespace ssmax;
using Int8 = OwnInt8;

static_assert(ssmax::detail::Storage<Fixed> && !ssmax::detail::Storage<int>);
static_assert(ssmax::detail::KeyStorage<Int8> && !ssmax::detail::Storage<Int8>);

std::vector<Fixed> rounded(const std::vector<float>& values) {
  std::vector<Fixed> result(values.size());
  ssmax::StorageTraits<Fixed>::store(values.data(), static_cast<index_t>(values.size()), result.data());
  return result;
}
std::vector<float> widened(const std::vector<Fixed>& values) {
  std::vector<float> result(values.size());
  ssmax::StorageTraits<Fixed>::load(values.data(), static_cast<index_t>(values.size()), result.data());
  return result;
}

template <class A, class B>
int differences(const std::vector<A>& a, const std::vector<B>& b) {
  int count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if constexpr (std::same_as<A, Fixed>) {
      count += a[i].sixteenths != b[i].sixteenths;
    } else {
      count += !(a[i] == b[i]);
    }
  }
  return count;
}

TEST_CASE("rows of a user's storage type are the float rows, rounded by it", "[storage]") {
  for_each_target([](const std::string& target) {
    for (const index_t n : {1, 7, 300, 5000}) {
      CAPTURE(target, n);
      const index_t rows = 3;
      const auto logits = rounded(reference::normals<float>(static_cast<std::size_t>(rows * n), 1, 3));
      const auto wide = widened(logits);
      std::vector<Fixed> out(logits.size());
      std::vector<float> expected(logits.size()), lse(rows), expected_lse(rows);
      const SSMax<float> scaling{0.3f};
      const View<const Fixed, 2> in(logits.data(), {rows, n});
      const View<const float, 2> wide_in(wide.data(), {rows, n});
      ssmax::log_softmax(in, View<Fixed, 2>(out.data(), {rows, n}), scaling);
      ssmax::log_softmax(wide_in, View<float, 2>(expected.data(), {rows, n}), scaling);
      CHECK(differences(out, rounded(expected)) == 0);
      ssmax::softmax(in, View<Fixed, 2>(out.data(), {rows, n}), scaling);
      ssmax::softmax(wide_in, View<float, 2>(expected.data(), {rows, n}), scaling);
      CHECK(differences(out, rounded(expected)) == 0);
      ssmax::logsumexp(in, View<float, 1>(lse.data(), {rows}), scaling);
      ssmax::logsumexp(wide_in, View<float, 1>(expected_lse.data(), {rows}), scaling);
      CHECK(differences(lse, expected_lse) == 0);
    }
  });
}

constexpr index_t heads = 4, kv_heads = 2, keys = 1100, width = 10, value_width = 7;

/// [1, heads, rows, channels].
template <class T>
View<T, 4> view(std::vector<std::remove_const_t<T>>& values, index_t h, index_t channels) {
  return {values.data(), {1, h, static_cast<index_t>(values.size()) / (h * channels), channels}};
}

TEST_CASE("attention over a user's storage type is that over the widened numbers, rounded by it",
          "[storage]") {
  for_each_target([](const std::string& target) {
    for (const index_t queries : {2, 50}) {
      CAPTURE(target, queries);
      const auto numbers = [](index_t h, index_t rows, index_t channels, unsigned seed) {
        return rounded(reference::normals<float>(static_cast<std::size_t>(h * rows * channels), seed));
      };
      auto q = numbers(heads, queries, width, 1), k = numbers(kv_heads, keys, width, 2),
           v = numbers(kv_heads, keys, value_width, 3);
      auto wide_q = widened(q), wide_k = widened(k), wide_v = widened(v);
      std::vector<Fixed> out(static_cast<std::size_t>(heads * queries * value_width));
      std::vector<float> expected(out.size());
      const SSMax<float> scaling{0.3f};
      ssmax::attention({.q = view<const Fixed>(q, heads, width),
                        .k = view<const Fixed>(k, kv_heads, width),
                        .v = view<const Fixed>(v, kv_heads, value_width),
                        .out = view<Fixed>(out, heads, value_width)},
                       scaling, Causal{});
      ssmax::attention({.q = view<const float>(wide_q, heads, width),
                        .k = view<const float>(wide_k, kv_heads, width),
                        .v = view<const float>(wide_v, kv_heads, value_width),
                        .out = view<float>(expected, heads, value_width)},
                       scaling, Causal{});
      CHECK(differences(out, rounded(expected)) == 0);
    }
  });
}

/// Returns rows that were stored as X with a factor.
template <class X = Int8>
std::vector<float> quantised(std::vector<float> values, index_t n) {
  std::vector<X> stored(static_cast<std::size_t>(n));
  for (std::size_t at = 0; at < values.size(); at += static_cast<std::size_t>(n)) {
    float* row = values.data() + at;
    const float scale = ssmax::StorageTraits<X>::scale(row, n);
    for (index_t i = 0; i < n; ++i) row[i] /= scale;
    ssmax::StorageTraits<X>::store(row, n, stored.data());
    ssmax::StorageTraits<X>::load(stored.data(), n, row);
    for (index_t i = 0; i < n; ++i) row[i] *= scale;
  }
  return values;
}

/// Decode from a cache of K and V, as a ring or not.
template <class K, class V = K>
std::vector<float> decoded(std::vector<float> k, std::vector<float> v, index_t queries, bool ring) {
  KvCache<K, V> cache({.kv_heads = kv_heads,
                       .width = width,
                       .value_width = value_width,
                       .capacity = ring ? 200 : keys,
                       .ring = ring});
  cache.append(view<const float>(k, kv_heads, width), view<const float>(v, kv_heads, value_width));
  auto q = reference::normals<float>(static_cast<std::size_t>(heads * queries * width), 4);
  std::vector<float> out(static_cast<std::size_t>(heads * queries * value_width));
  ssmax::attention(
      {.q = view<const float>(q, heads, width), .keys = cache, .out = view<float>(out, heads, value_width)},
      SSMax<float>{0.3f}, ssmax::SlidingWindow{150});
  return out;
}

TEST_CASE("a cache of integers with a factor for each row", "[storage][decode]") {
  const auto numbers = [](index_t channels, unsigned seed) {
    auto values = reference::normals<float>(static_cast<std::size_t>(kv_heads * keys * channels), seed);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] *= static_cast<float>(1 + i / 700 % 5);
    return values;
  };
  const auto k = numbers(width, 2), v = numbers(value_width, 3);
  for_each_target([&](const std::string& target) {
    for (const bool ring : {false, true}) {
      for (const index_t queries : {1, 3, 40}) {
        CAPTURE(target, ring, queries);
        const auto expected = decoded<float>(quantised(k, width), quantised(v, value_width), queries, ring);
        const auto out = decoded<Int8>(k, v, queries, ring);
        double largest = 0;
        for (std::size_t i = 0; i < out.size(); ++i) {
          largest =
              std::max(largest, std::abs(static_cast<double>(out[i]) - static_cast<double>(expected[i])));
        }
        // Few queries read a ring of float where it lies, so that sums are cut where it wraps.
        CHECK(largest <= (ring && queries < 9 ? 1e-5 : 0));
      }
    }
  });
}

TEST_CASE("a cache of keys in groups of two channels with a factor for each row", "[storage][decode]") {
  static_assert(!ssmax::detail::Storage<Nibbles> && ssmax::detail::KeyStorage<Nibbles>);
  const auto k = reference::normals<float>(static_cast<std::size_t>(kv_heads * keys * width), 2);
  const auto v = reference::normals<float>(static_cast<std::size_t>(kv_heads * keys * value_width), 3);
  CHECK((KvCache<Nibbles, float>({.width = width, .capacity = 1}).run(0, 0, 0).k_stride == width / 2));
  for_each_target([&](const std::string& target) {
    for (const index_t queries : {1, 40}) {
      CAPTURE(target, queries);
      CHECK(differences(decoded<Nibbles, float>(k, v, queries, false),
                        decoded<float>(quantised<Nibbles>(k, width), v, queries, false)) == 0);
    }
  });
}

TEST_CASE("load receives the whole row of a query, key or value, from its first channel",
          "[storage][decode]") {
  const auto rows = [](index_t h, index_t count, index_t channels) {
    std::vector<Watched> values(static_cast<std::size_t>(h * count * channels));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto channel = static_cast<index_t>(i) % channels;
      values[i].halves =
          static_cast<std::int16_t>(channel == 0 ? 2 * channels : static_cast<index_t>(i) % 5 - 2);
    }
    return values;
  };
  for_each_target([&](const std::string& target) {
    // Wide enough for every pass of a kernel, and of its tail; many queries and few, keys in several blocks.
    for (const auto& [d, dv] : {std::array<index_t, 2>{10, 7}, {70, 130}, {300, 64}}) {
      for (const index_t queries : {1, 2, 50}) {
        CAPTURE(target, d, dv, queries);
        loads = {};
        auto q = rows(heads, queries, d), k = rows(kv_heads, keys, d), v = rows(kv_heads, keys, dv);
        auto dout = rows(heads, queries, dv);
        std::vector<Watched> out(dout.size()), dq(q.size()), dk(k.size()), dv_of_v(v.size());
        std::vector<float> lse(static_cast<std::size_t>(heads * queries));
        const View<float, 3> lse_view(lse.data(), {1, heads, queries});
        const ssmax::Rope<float> rope({.width = 8}, keys);
        const ssmax::AttentionOptions<Watched> options{.scale = 0.01, .rope = &rope};
        ssmax::attention(
            with(over_views(view<const Watched>(q, heads, d), view<const Watched>(k, kv_heads, d),
                            view<const Watched>(v, kv_heads, dv), view<Watched>(out, heads, dv), lse_view),
                 options),
            SSMax<float>{0.3f}, Causal{});
        CHECK(loads.whole > 0);
        CHECK(loads.others == 0);
        loads = {};
        ssmax::attention_backward(backward_with({.q = view<const Watched>(q, heads, d),
                                                 .k = view<const Watched>(k, kv_heads, d),
                                                 .v = view<const Watched>(v, kv_heads, dv),
                                                 .out = view<const Watched>(dout, heads, dv),
                                                 .lse = lse_view},
                                                options),
                                  {.dout = view<const Watched>(dout, heads, dv),
                                   .dq = view<Watched>(dq, heads, d),
                                   .dk = view<Watched>(dk, kv_heads, d),
                                   .dv = view<Watched>(dv_of_v, kv_heads, dv)},
                                  SSMax<float>{0.3f}, Causal{});
        CHECK(loads.whole > 0);
        CHECK(loads.others == 0);
        loads = {};
        KvCache<Watched> cache({.kv_heads = kv_heads, .width = d, .value_width = dv, .capacity = keys});
        cache.append(view<const Watched>(k, kv_heads, d), view<const Watched>(v, kv_heads, dv));
        ssmax::attention({.q = view<const Watched>(q, heads, d),
                          .keys = cache,
                          .out = view<Watched>(out, heads, dv),
                          .scale = 0.01},
                         SSMax<float>{0.3f}, Causal{});
        CHECK(loads.whole > 0);
        CHECK(loads.others == 0);
      }
    }
  });
}

}  // namespace storage_test
