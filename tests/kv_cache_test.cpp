// KvCache: what it stores where, rounded and rotated how; what a ring forgets; what it refuses, and that it has then
// changed nothing.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <span>
#include <ssmax/kv_cache.hpp>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "allocation_count.hpp"
#include "catch.hpp"
#include "reference.hpp"
#include "refusal.hpp"
#include "target_scope.hpp"

namespace kv_cache_test {

using reference::Real;
using ssmax::bfloat16;
using ssmax::half;
using ssmax::index_t;
using ssmax::KeyRange;
using ssmax::KvCache;
using ssmax::KvCacheOptions;
using ssmax::Pairing;
using ssmax::Rope;
using ssmax::RopeOptions;
using ssmax::View;

template <class X>
using Compute = ssmax::detail::Compute<X>;

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// ---- Data

/// [batch, heads, positions, channels], contiguous.
template <class U>
struct Rows {
  std::array<index_t, 4> extents;
  std::vector<U> values;

  Rows(index_t batch, index_t heads, index_t positions, index_t channels, unsigned seed)
      : extents{batch, heads, positions, channels},
        values(reference::normals<U>(static_cast<std::size_t>(batch * heads * positions * channels), seed)) {}

  View<const U, 4> view() const { return {values.data(), extents}; }
  View<U, 4> view() { return {values.data(), extents}; }
};

/// Key and value of a position of a sequence, as far as it is held.
template <class X>
X key(const KvCache<X>& cache, index_t b, index_t h, index_t position, index_t c) {
  const auto stored = cache.key_values();
  return stored.k(b, h, stored.row(position), c);
}
template <class X>
X value(const KvCache<X>& cache, index_t b, index_t h, index_t position, index_t c) {
  const auto stored = cache.key_values();
  return stored.v(b, h, stored.row(position), c);
}

/// Calls f(b, h, i, c) for every index of a shape.
template <class F>
void for_each_index(const std::array<index_t, 4>& extents, const F& f) {
  for (index_t b = 0; b < extents[0]; ++b) {
    for (index_t h = 0; h < extents[1]; ++h) {
      for (index_t i = 0; i < extents[2]; ++i) {
        for (index_t c = 0; c < extents[3]; ++c) f(b, h, i, c);
      }
    }
  }
}

/// Whether position start + i of each sequence holds row i of k and v, rounded to the cache's storage.
template <class X, class U>
bool holds(const KvCache<X>& cache, index_t start, View<const U, 4> k, View<const U, 4> v) {
  const index_t batch = k.extent(0), heads = k.extent(1), positions = k.extent(2);
  bool same = true;
  for_each_index({batch, heads, positions, k.extent(3)}, [&](index_t b, index_t h, index_t i, index_t c) {
    same = same && same_bits(key(cache, b, h, start + i, c), X(k(b, h, i, c)));
  });
  for_each_index({batch, heads, positions, v.extent(3)}, [&](index_t b, index_t h, index_t i, index_t c) {
    same = same && same_bits(value(cache, b, h, start + i, c), X(v(b, h, i, c)));
  });
  return same;
}

/// Everything that can be seen of a cache.
template <class X>
struct Contents {
  std::vector<index_t> lengths;
  std::vector<X> k, v;

  explicit Contents(const KvCache<X>& cache) {
    const auto stored = cache.key_values();
    lengths.assign(stored.lengths.begin(), stored.lengths.end());
    k.assign(stored.k.data_handle(), stored.k.data_handle() + stored.k.size());
    v.assign(stored.v.data_handle(), stored.v.data_handle() + stored.v.size());
  }
  bool operator==(const Contents& other) const {
    const auto same = [](const std::vector<X>& a, const std::vector<X>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(X)) == 0;
    };
    return lengths == other.lengths && same(k, other.k) && same(v, other.v);
  }
};

bool contains_all(const std::string& message, std::initializer_list<const char*> parts) {
  return std::ranges::all_of(parts,
                             [&](const char* part) { return message.find(part) != std::string::npos; });
}

// ---- Storage

constexpr index_t widths[] = {1, 2, 3, 7, 8, 15, 16, 17, 33, 59, 64, 111, 128};

template <class X, class U>
void check_append_stores() {
  for_each_target([](const std::string& target) {
    INFO(target);
    bool same = true;
    for (const index_t width : widths) {
      const index_t value_width = width % 5 + 1;
      KvCache<X> cache(
          {.batch = 2, .kv_heads = 3, .width = width, .value_width = value_width, .capacity = 9});
      index_t start = 0;
      for (const index_t added : {1, 0, 3, 5}) {
        const Rows<U> k(2, 3, added, width, static_cast<unsigned>(width + added));
        const Rows<U> v(2, 3, added, value_width, static_cast<unsigned>(width + added + 1));
        cache.append(k.view(), v.view());
        same = same && holds(cache, start, k.view(), v.view());
        start += added;
        same = same && cache.length(0) == start && cache.length(1) == start;
      }
    }
    CHECK(same);
  });
}

TEST_CASE("append stores what it is given, rounded as the scalar conversions round", "[kv_cache]") {
  SECTION("float") { check_append_stores<float, float>(); }
  SECTION("double") { check_append_stores<double, double>(); }
  SECTION("half") { check_append_stores<half, float>(); }
  SECTION("bfloat16") { check_append_stores<bfloat16, float>(); }
}

TEST_CASE("append takes rows that have the cache's type already as they are", "[kv_cache]") {
  SECTION("half") { check_append_stores<half, half>(); }
  SECTION("bfloat16") { check_append_stores<bfloat16, bfloat16>(); }
}

struct Rounded {
  float from, to;
};

template <class X>
void check_rounding(const std::vector<Rounded>& cases) {
  for_each_target([&](const std::string& target) {
    INFO(target);
    const auto count = static_cast<index_t>(cases.size());
    for (const index_t width : {count, index_t{1}}) {  // whole vectors and their remainders, and one by one
      const index_t rows = count / width;
      std::vector<float> from;
      for (const Rounded& c : cases) from.push_back(c.from);
      KvCache<X> cache({.width = width, .capacity = rows});
      const View<const float, 4> view(from.data(), {1, 1, rows, width});
      cache.append(view, view);
      for (index_t i = 0; i < count; ++i) {
        const float expected = cases[static_cast<std::size_t>(i)].to;
        const float k = key(cache, 0, 0, i / width, i % width), v = value(cache, 0, 0, i / width, i % width);
        CAPTURE(i, cases[static_cast<std::size_t>(i)].from, k, v, expected);
        CHECK(same_bits(k, expected));
        CHECK(same_bits(v, expected));
      }
    }
  });
}

constexpr float infinity = std::numeric_limits<float>::infinity();

TEST_CASE("16-bit caches round to nearest, ties to even", "[kv_cache]") {
  SECTION("half") {
    check_rounding<half>({{1, 1},
                          {-0.F, -0.F},
                          {1 + 0x1p-11F, 1},  // ties
                          {1 + 0x3p-11F, 1 + 0x1p-9F},
                          {-1 - 0x1p-11F, -1},
                          {-1 - 0x3p-11F, -1 - 0x1p-9F},
                          {1 + 0x1.002p-11F, 1 + 0x1p-10F},  // just above one, just below the next
                          {1 + 0x2.FFp-11F, 1 + 0x1p-10F},
                          {65519, 65504},  // the largest half, and what is too large
                          {65520, infinity},
                          {-1e30F, -infinity},
                          {0x1p-24F, 0x1p-24F},  // subnormal
                          {0x1p-25F, 0},
                          {0x1.8p-24F, 0x2p-24F},
                          {0x2.8p-24F, 0x2p-24F},
                          {0x1.FFEp-15F, 0x1p-14F},  // rounded up to the smallest normal half
                          {infinity, infinity},
                          {-infinity, -infinity},
                          {0.1F, 0x1.998p-4F}});
  }
  SECTION("bfloat16") {
    check_rounding<bfloat16>({{1, 1},
                              {-0.F, -0.F},
                              {1 + 0x1p-8F, 1},
                              {1 + 0x3p-8F, 1 + 0x1p-6F},
                              {-1 - 0x1p-8F, -1},
                              {-1 - 0x3p-8F, -1 - 0x1p-6F},
                              {1 + 0x1.002p-8F, 1 + 0x1p-7F},
                              {1 + 0x2.FFp-8F, 1 + 0x1p-7F},
                              {0x1.FEp127F, 0x1.FEp127F},
                              {0x1.FEFFp127F, 0x1.FEp127F},
                              {0x1.FFp127F, infinity},
                              {-0x1.FFp127F, -infinity},
                              {0x1p-133F, 0x1p-133F},
                              {0x1p-134F, 0},
                              {0x3p-134F, 0x4p-134F},
                              {infinity, infinity},
                              {-infinity, -infinity},
                              {0.1F, 0x1.9Ap-4F}});
  }
}

template <class X>
bool is_nan(X x) {
  return std::isnan(static_cast<Compute<X>>(x));
}

TEST_CASE("a NaN stays one in every storage, and stays where it is", "[kv_cache]") {
  const auto check = [](auto storage) {
    using X = decltype(storage);
    for_each_target([](const std::string& target) {
      INFO(target);
      Rows<Compute<X>> k(1, 1, 3, 19, 1), v(1, 1, 3, 19, 2);
      k.view()(0, 0, 1, 4) = std::numeric_limits<Compute<X>>::quiet_NaN();
      v.view()(0, 0, 2, 18) = std::numeric_limits<Compute<X>>::quiet_NaN();
      KvCache<X> cache({.width = 19, .capacity = 3});
      cache.append(k.view(), v.view());
      bool right = true;
      for_each_index(k.extents, [&](index_t b, index_t h, index_t i, index_t c) {
        right = right && is_nan(key(cache, b, h, i, c)) == (i == 1 && c == 4) &&
                is_nan(value(cache, b, h, i, c)) == (i == 2 && c == 18);
      });
      CHECK(right);
    });
  };
  check(float{});
  check(double{});
  check(half{});
  check(bfloat16{});
}

// ---- Layouts

template <class X, class U>
void check_layouts() {
  const index_t batch = 2, heads = 3, positions = 4, width = 5, value_width = 7;
  const Rows<U> k(batch, heads, positions, width, 1), v(batch, heads, positions, value_width, 2);
  const KvCacheOptions options{
      .batch = batch, .kv_heads = heads, .width = width, .value_width = value_width, .capacity = positions};
  KvCache<X> expected(options);
  expected.append(k.view(), v.view());

  // [batch, position, head, channel], keys and values side by side, with a gap behind them.
  const index_t head_pitch = width + value_width + 2, pitch = heads * head_pitch;
  std::vector<U> packed(static_cast<std::size_t>(batch * positions * pitch),
                        U(std::numeric_limits<Compute<U>>::quiet_NaN()));
  const View<U, 4> packed_k(packed.data(), {batch, heads, positions, width},
                            {positions * pitch, head_pitch, pitch, 1});
  const View<U, 4> packed_v(packed.data() + width, {batch, heads, positions, value_width},
                            {positions * pitch, head_pitch, pitch, 1});
  for_each_index(k.extents, [&](auto... at) { packed_k(at...) = k.view()(at...); });
  for_each_index(v.extents, [&](auto... at) { packed_v(at...) = v.view()(at...); });
  KvCache<X> cache(options);
  cache.append(View<const U, 4>(packed_k), View<const U, 4>(packed_v));
  CHECK(Contents(cache) == Contents(expected));

  // Backwards in memory, and one head's rows for all.
  KvCache<X> other(options);
  const View<const U, 4> backwards(&k.view()(0, 0, positions - 1, 0), {batch, heads, positions, width},
                                   {heads * positions * width, 0, -width, 1});
  other.append(backwards, v.view());
  CHECK(holds(other, 0, backwards, v.view()));
  CHECK(same_bits(key(other, 1, 2, 0, 0), X(k.view()(1, 0, positions - 1, 0))));
}

TEST_CASE("append takes any strides", "[kv_cache]") {
  check_layouts<float, float>();
  check_layouts<double, double>();
  check_layouts<half, float>();
  check_layouts<half, half>();
  check_layouts<bfloat16, float>();
  check_layouts<bfloat16, bfloat16>();
}

// ---- Sequences of their own lengths

TEST_CASE("counts say how many positions of each sequence are real", "[kv_cache]") {
  const Rows<float> k(3, 2, 4, 5, 1), v(3, 2, 4, 5, 2);
  KvCache<float> cache({.batch = 3, .kv_heads = 2, .width = 5, .capacity = 6});
  const auto holds_at = [&](index_t b, index_t position, index_t i) {
    bool same = true;
    for (index_t h = 0; h < 2; ++h) {
      for (index_t c = 0; c < 5; ++c) {
        same = same && key(cache, b, h, position, c) == k.view()(b, h, i, c) &&
               value(cache, b, h, position, c) == v.view()(b, h, i, c);
      }
    }
    return same;
  };
  cache.append(k.view(), v.view(), nullptr, std::vector<index_t>{2, 0, 4});
  CHECK(cache.length(0) == 2);
  CHECK(cache.length(1) == 0);
  CHECK(cache.length(2) == 4);
  cache.append(k.view(), v.view(), nullptr, std::vector<index_t>{4, 3, 0});
  CHECK(cache.length(0) == 6);
  CHECK(cache.length(1) == 3);
  CHECK(cache.length(2) == 4);
  for (index_t i = 0; i < 2; ++i) CHECK(holds_at(0, i, i));
  for (index_t i = 0; i < 4; ++i) CHECK(holds_at(0, 2 + i, i));
  for (index_t i = 0; i < 3; ++i) CHECK(holds_at(1, i, i));
  for (index_t i = 0; i < 4; ++i) CHECK(holds_at(2, i, i));
}

/// What a cache should hold: every row that a sequence has had, [position][head][channel].
struct Model {
  std::vector<std::vector<float>> k, v;
};

/// Whether each sequence has its model's length and, where they are held, its rows.
bool is_as(const KvCache<float>& cache, const Model& model) {
  const KvCacheOptions& options = cache.options();
  bool same = true;
  for (index_t b = 0; b < options.batch; ++b) {
    const auto& k = model.k[static_cast<std::size_t>(b)];
    const auto& v = model.v[static_cast<std::size_t>(b)];
    const index_t size = options.kv_heads * options.width, length = static_cast<index_t>(k.size()) / size;
    const KeyRange stored = cache.stored(b);
    const index_t first = options.ring ? std::max<index_t>(0, length - options.capacity) : 0;
    same = same && cache.length(b) == length && stored.begin == first && stored.end == length;
    if (!same) return false;
    for_each_index(
        {1, options.kv_heads, length - first, options.width}, [&](index_t, index_t h, index_t i, index_t c) {
          const auto at = static_cast<std::size_t>(((first + i) * options.kv_heads + h) * options.width + c);
          same = same && key(cache, b, h, first + i, c) == k[at] && value(cache, b, h, first + i, c) == v[at];
        });
  }
  return same;
}

/// Random calls on a cache and on its model. A call that would not fit must be refused.
void check_against_model(bool ring, unsigned seed) {
  const KvCacheOptions options{.batch = 3, .kv_heads = 2, .width = 3, .capacity = 11, .ring = ring};
  KvCache<float> cache(options);
  Model model{std::vector<std::vector<float>>(3), std::vector<std::vector<float>>(3)};
  std::mt19937 generator(seed);
  const auto below = [&](index_t bound) { return static_cast<index_t>(generator()) % bound; };
  const index_t size = options.kv_heads * options.width;
  int appended = 0, refused = 0;
  for (int step = 0; step < 200; ++step) {
    const index_t added = ring ? below(30) : below(6);
    const Rows<float> k(3, 2, added, 3, static_cast<unsigned>(step)), v(3, 2, added, 3, seed + 1);
    std::vector<index_t> counts;
    if (below(2) == 0) counts = {below(added + 1), below(added + 1), below(added + 1)};
    const auto real = [&](index_t b) { return counts.empty() ? added : counts[static_cast<std::size_t>(b)]; };
    bool fits = true;
    for (index_t b = 0; b < 3; ++b) fits = fits && (ring || cache.length(b) + real(b) <= options.capacity);
    if (fits) {
      cache.append(k.view(), v.view(), nullptr, counts);
      ++appended;
      for (index_t b = 0; b < 3; ++b) {
        for_each_index({real(b), 2, 3, 1}, [&](index_t i, index_t h, index_t c, index_t) {
          model.k[static_cast<std::size_t>(b)].push_back(k.view()(b, h, i, c));
          model.v[static_cast<std::size_t>(b)].push_back(v.view()(b, h, i, c));
        });
      }
    } else {
      REQUIRE_THROWS_AS(cache.append(k.view(), v.view(), nullptr, counts), std::invalid_argument);
      ++refused;
    }
    const index_t b = below(3), length = below(cache.length(b) + 1);
    const bool forgotten = cache.stored(b).begin > 0;
    if (below(ring ? 8 : 2) == 0 && !forgotten) {
      cache.truncate(b, length);
      model.k[static_cast<std::size_t>(b)].resize(static_cast<std::size_t>(length * size));
      model.v[static_cast<std::size_t>(b)].resize(static_cast<std::size_t>(length * size));
    }
    if (below(20) == 0) {
      cache.clear();
      for (std::size_t i = 0; i < 3; ++i) {
        model.k[i].clear();
        model.v[i].clear();
      }
    }
    CAPTURE(ring, seed, step);
    REQUIRE(is_as(cache, model));
  }
  CHECK(appended > 50);
  CHECK((refused > 10) == !ring);
}

TEST_CASE("any calls leave what a list of rows would hold", "[kv_cache]") {
  for (const unsigned seed : {1U, 2U, 3U}) {
    check_against_model(false, seed);
    check_against_model(true, seed);
  }
}

TEST_CASE("a copy is a cache of its own", "[kv_cache]") {
  const Rows<float> k(1, 1, 2, 3, 1), v(1, 1, 2, 3, 2);
  KvCache<float> cache({.width = 3, .capacity = 4});
  cache.append(k.view(), v.view());
  const Contents before(cache);
  KvCache<float> copy = cache;
  CHECK(Contents(copy) == before);
  copy.append(v.view(), k.view());
  CHECK(Contents(cache) == before);
  CHECK(copy.length(0) == 4);
  CHECK(holds(copy, 2, v.view(), k.view()));
}

TEST_CASE("a cache without sequences, and appending nothing", "[kv_cache]") {
  KvCache<float> none({.batch = 0, .width = 3, .capacity = 4});
  none.append({nullptr, {0, 1, 2, 3}}, {nullptr, {0, 1, 2, 3}});
  none.clear();
  KvCache<float> cache({.batch = 2, .width = 3, .capacity = 4});
  cache.append({nullptr, {2, 1, 0, 3}}, {nullptr, {2, 1, 0, 3}}, nullptr, std::vector<index_t>{0, 0});
  CHECK(cache.length(0) == 0);
  CHECK(cache.stored(1).size() == 0);
}

TEST_CASE("append allocates nothing", "[kv_cache]") {
  const Rows<float> k(2, 2, 5, 9, 1), v(2, 2, 5, 9, 2);
  const Rope<float> rope({.width = 8}, 40);
  const std::vector<index_t> counts{5, 3};
  const long start = allocation_count();
  KvCache<half> cache({.batch = 2, .kv_heads = 2, .width = 9, .capacity = 7, .ring = true});
  const long before = allocation_count();
  for (int i = 0; i < 5; ++i) cache.append(k.view(), v.view(), &rope, counts);
  cache.clear();
  const long during = allocation_count() - before;
  CHECK(during == 0);
  CHECK(before > start);  // or they were not counted
}

// ---- RoPE

/// Three appends that leave the sequences at lengths of their own.
const std::vector<std::vector<index_t>> uneven_counts{{3, 0, 1}, {2, 4, 0}, {1, 1, 4}};

/// The largest distance of a stored key from the exact rotation, relative to the length of the turned pair's row.
template <class X>
Real rope_error(const RopeOptions& options, index_t width, Real* unrotated) {
  const KvCacheOptions cache_options{.batch = 3, .kv_heads = 2, .width = width, .capacity = 12};
  const Rope<Compute<X>> rope(options, 40);
  const auto frequencies = reference::rope_frequencies(options.width, static_cast<Real>(options.theta));
  const auto pairs =
      options.pairing == Pairing::half_split ? reference::Pairs::half_split : reference::Pairs::interleaved;
  KvCache<X> cache(cache_options);
  Real worst = 0;
  *unrotated = 0;
  for (std::size_t step = 0; step < uneven_counts.size(); ++step) {
    const std::vector<index_t>& counts = uneven_counts[step];
    const Rows<Compute<X>> k(3, 2, 4, width, static_cast<unsigned>(step)), v(3, 2, 4, width, 9);
    const std::array<index_t, 3> before{cache.length(0), cache.length(1), cache.length(2)};
    cache.append(k.view(), v.view(), &rope, counts);
    for (index_t b = 0; b < 3; ++b) {
      const auto entry = static_cast<std::size_t>(b);
      for_each_index({1, 2, counts[entry], 1}, [&](index_t, index_t h, index_t i, index_t) {
        const index_t position = before[entry] + i;
        const auto exact = reference::rope(
            std::span<const Compute<X>>(&k.view()(b, h, i, 0), static_cast<std::size_t>(width)),
            static_cast<Real>(position), frequencies, pairs);
        for (index_t c = 0; c < width; ++c) {
          const Real error =
              std::abs(reference::widen(key(cache, b, h, position, c)) - exact[static_cast<std::size_t>(c)]);
          worst = reference::worse(worst, error);
          if (position == 0 || c >= options.width) {  // an angle of 0, and channels that are not rotated
            *unrotated = reference::worse(
                *unrotated, reference::widen(key(cache, b, h, position, c)) ==
                                    reference::widen(reference::narrow<X>(Real(k.view()(b, h, i, c))))
                                ? 0
                                : 1);
          }
          if (!same_bits(value(cache, b, h, position, c), X(v.view()(b, h, i, c)))) worst = 1000;
        }
      });
    }
  }
  return worst;
}

template <class X>
void check_rope(Real bound) {
  for_each_target([&](const std::string& target) {
    for (const Pairing pairing : {Pairing::half_split, Pairing::interleaved}) {
      for (const index_t width : {2, 6, 16, 34, 64}) {
        for (const index_t channels : {width, width + 3}) {
          CAPTURE(target, static_cast<int>(pairing), width, channels);
          Real unrotated = 0;
          CHECK(rope_error<X>({.width = width, .pairing = pairing}, channels, &unrotated) <= bound);
          CHECK(unrotated == 0);
        }
      }
    }
  });
}

// Elements are below 6, their pairs below 8. Two products, a sum and the table's entries are five roundings at most of
// numbers below 8 in the arithmetic's precision; storing is one more in the storage's.
TEST_CASE("append rotates keys to their positions in each sequence, and no values", "[kv_cache]") {
  const Real once_float = 0x1p-24L * 8, once_double = 0x1p-53L * 8;
  SECTION("float") { check_rope<float>(5 * once_float); }
  SECTION("double") { check_rope<double>(5 * once_double); }
  SECTION("half") { check_rope<half>(5 * once_float + 0x1p-11L * 8); }
  SECTION("bfloat16") { check_rope<bfloat16>(5 * once_float + 0x1p-8L * 8); }
}

/// Rotated keys are those of ssmax::rope in the arithmetic's type, rounded once.
template <class X, class U>
void check_rotated_once() {
  for_each_target([](const std::string& target) {
    INFO(target);
    const Rope<Compute<X>> rope({.width = 16}, 300);
    const Rows<U> k(1, 2, 7, 19, 3), v(1, 2, 7, 19, 4);
    std::vector<Compute<X>> rotated(k.values.begin(), k.values.end());
    const View<Compute<X>, 4> view(rotated.data(), k.extents);
    KvCache<X> cache({.kv_heads = 2, .width = 19, .capacity = 20, .ring = true});
    bool same = true;
    for (index_t start = 0; start < 280; start += 7) {  // beyond the ring's capacity: positions go on
      cache.append(k.view(), v.view(), &rope);
      std::copy(k.values.begin(), k.values.end(), rotated.begin());
      ssmax::rope(view, view, rope, start);
      for_each_index(k.extents, [&](index_t b, index_t h, index_t i, index_t c) {
        same = same && same_bits(key(cache, b, h, start + i, c), X(view(b, h, i, c)));
      });
    }
    CHECK(same);
  });
}

TEST_CASE("rotated keys are rounded once, in a ring at positions that go on", "[kv_cache]") {
  check_rotated_once<float, float>();
  check_rotated_once<double, double>();
  check_rotated_once<half, float>();
  check_rotated_once<half, half>();
  check_rotated_once<bfloat16, float>();
  check_rotated_once<bfloat16, bfloat16>();
}

// ---- Rings

TEST_CASE("a ring keeps the last positions", "[kv_cache]") {
  KvCache<float> cache({.width = 1, .capacity = 5, .ring = true});
  const auto append = [&](index_t first, index_t count) {
    std::vector<float> rows;
    for (index_t i = 0; i < count; ++i) rows.push_back(static_cast<float>(first + i));
    const View<const float, 4> view(rows.data(), {1, 1, count, 1});
    cache.append(view, view);
  };
  const auto check = [&](index_t begin, index_t end) {
    CAPTURE(begin, end);
    CHECK(cache.length(0) == end);
    CHECK(cache.stored(0).begin == begin);
    CHECK(cache.stored(0).end == end);
    for (index_t i = begin; i < end; ++i) {
      CHECK(key(cache, 0, 0, i, 0) == static_cast<float>(i));
      CHECK(value(cache, 0, 0, i, 0) == static_cast<float>(i));
    }
  };
  check(0, 0);
  append(0, 4);
  check(0, 4);
  append(4, 1);
  check(0, 5);
  append(5, 1);
  check(1, 6);
  append(6, 3);
  check(4, 9);
  append(9, 5);  // all of it at once
  check(9, 14);
  append(14, 23);  // more than it holds
  check(32, 37);
  append(37, 0);
  check(32, 37);
  cache.clear();
  check(0, 0);
  append(0, 11);
  check(6, 11);
}

TEST_CASE("sequences of a ring wrap each at their own time", "[kv_cache]") {
  KvCache<float> cache({.batch = 2, .width = 2, .capacity = 4, .ring = true});
  const Rows<float> k(2, 1, 7, 2, 1), v(2, 1, 7, 2, 2);
  cache.append(k.view(), v.view(), nullptr, std::vector<index_t>{7, 3});
  CHECK(cache.stored(0).begin == 3);
  CHECK(cache.stored(0).end == 7);
  CHECK(cache.stored(1).begin == 0);
  CHECK(cache.stored(1).end == 3);
  for (index_t i = 3; i < 7; ++i) CHECK(key(cache, 0, 0, i, 1) == k.view()(0, 0, i, 1));
  for (index_t i = 0; i < 3; ++i) CHECK(value(cache, 1, 0, i, 1) == v.view()(1, 0, i, 1));
}

// ---- Truncation

TEST_CASE("truncate forgets the last positions of one sequence", "[kv_cache]") {
  const Rows<float> k(2, 1, 4, 3, 1), v(2, 1, 4, 3, 2);
  for (const bool ring : {false, true}) {
    KvCache<float> cache({.batch = 2, .width = 3, .capacity = 4, .ring = ring});
    cache.append(k.view(), v.view());
    cache.truncate(1, 4);  // nothing
    CHECK(cache.length(1) == 4);
    cache.truncate(1, 1);
    CHECK(cache.length(0) == 4);
    CHECK(cache.length(1) == 1);
    CHECK(cache.stored(1).end == 1);
    cache.append(v.view(), k.view(), nullptr, std::vector<index_t>{0, 3});
    CHECK(key(cache, 1, 0, 0, 0) == k.view()(1, 0, 0, 0));
    CHECK(key(cache, 1, 0, 1, 0) == v.view()(1, 0, 0, 0));
    CHECK(value(cache, 1, 0, 3, 2) == k.view()(1, 0, 2, 2));
    cache.truncate(0, 0);
    CHECK(cache.length(0) == 0);
    CHECK(cache.stored(0).size() == 0);
  }
}

TEST_CASE("truncate refuses what is not there", "[kv_cache]") {
  const Rows<float> k(2, 1, 4, 3, 1), v(2, 1, 4, 3, 2);
  KvCache<float> cache({.batch = 2, .width = 3, .capacity = 5});
  cache.append(k.view(), v.view());
  const Contents before(cache);
  const auto check = [&](index_t b, index_t length, std::initializer_list<const char*> parts) {
    const std::string message = refusal([&] { cache.truncate(b, length); });
    INFO(message);
    CHECK(contains_all(message, parts));
    CHECK(Contents(cache) == before);
  };
  check(2, 0, {"KvCache::truncate: b is 2", "sequences are 2"});
  check(-1, 0, {"b is -1"});
  check(0, 5, {"length is 5", "4"});
  check(0, -1, {"length is -1"});
}

TEST_CASE("a ring that has forgotten keys cannot be truncated", "[kv_cache]") {
  KvCache<float> cache({.batch = 2, .width = 3, .capacity = 3, .ring = true});
  const Rows<float> k(2, 1, 5, 3, 1), v(2, 1, 5, 3, 2);
  cache.append(k.view(), v.view(), nullptr, std::vector<index_t>{5, 3});
  const Contents before(cache);
  for (const index_t length : {4, 2, 0}) {
    const std::string message = refusal([&] { cache.truncate(0, length); });
    INFO(message);
    CHECK(contains_all(message, {"KvCache::truncate", "length is", "forgotten", "2"}));
  }
  CHECK(Contents(cache) == before);
  CHECK_NOTHROW(cache.truncate(0, 5));
  CHECK_NOTHROW(cache.truncate(1, 1));
  CHECK(cache.length(1) == 1);
}

// ---- Refusals

TEST_CASE("a cache refuses options that make no sense", "[kv_cache]") {
  const auto check = [](const KvCacheOptions& options, std::initializer_list<const char*> parts) {
    const std::string message = refusal([&] { KvCache<half> cache(options); });
    INFO(message);
    CHECK(contains_all(message, parts));
  };
  check({.batch = -1, .width = 2, .capacity = 2}, {"KvCache: batch is -1"});
  check({.kv_heads = 0, .width = 2, .capacity = 2}, {"kv_heads is 0"});
  check({.width = 0, .capacity = 2}, {"width is 0"});
  check({.width = -3, .capacity = 2}, {"width is -3"});
  check({.width = 2, .value_width = -1, .capacity = 2}, {"value_width is -1"});
  check({.width = 2, .capacity = 0}, {"capacity is 0"});
  check({.width = index_t{1} << 62, .capacity = 2}, {"too many bytes"});
  check({.width = 2, .value_width = index_t{1} << 62, .capacity = 2}, {"too many bytes"});
  check({.width = 2, .capacity = -5}, {"capacity is -5"});
  check({.batch = index_t{1} << 30, .kv_heads = 1 << 20, .width = 128, .capacity = index_t{1} << 30},
        {"capacity is 1073741824", "too many"});
  check({.batch = 1, .kv_heads = 1, .width = 1, .capacity = std::numeric_limits<index_t>::max()},
        {"capacity is 9223372036854775807"});
  KvCache<half> cache({.width = 3, .capacity = 2});
  CHECK(cache.options().value_width == 3);
  CHECK(cache.options().batch == 1);
  CHECK_FALSE(cache.options().ring);
}

/// A cache with something in it, and an append that fits.
struct Append {
  std::vector<float> data = reference::normals<float>(1000, 7);
  KvCache<float> cache{
      KvCacheOptions{.batch = 2, .kv_heads = 3, .width = 4, .value_width = 5, .capacity = 6}};
  View<const float, 4> k{data.data(), {2, 3, 2, 4}}, v{data.data() + 100, {2, 3, 2, 5}};
  const Rope<float>* rope = nullptr;
  std::vector<index_t> counts;

  Append() { cache.append(k, v, nullptr, std::vector<index_t>{2, 1}); }

  void run() { cache.append(k, v, rope, counts); }
  void refused(std::initializer_list<const char*> parts) {
    const Contents before(cache);
    const std::string message = refusal([&] { run(); });
    INFO(message);
    CHECK(contains_all(message, {"ssmax::KvCache::append: "}));
    CHECK(contains_all(message, parts));
    CHECK(Contents(cache) == before);
  }
};

TEST_CASE("append refuses views that do not fit, and changes nothing", "[kv_cache]") {
  Append call;
  float* const at = call.data.data();
  SECTION("batch of k") {
    call.k = {at, {1, 3, 2, 4}};
    call.refused({"k has batch 1", "2"});
  }
  SECTION("batch of v") {
    call.v = {at, {3, 3, 2, 5}};
    call.refused({"v has batch 3", "2"});
  }
  SECTION("heads of k") {
    call.k = {at, {2, 2, 2, 4}};
    call.refused({"k has heads 2", "3"});
  }
  SECTION("heads of v") {
    call.v = {at, {2, 6, 2, 5}};
    call.refused({"v has heads 6", "3"});
  }
  SECTION("width of k") {
    call.k = {at, {2, 3, 2, 5}};
    call.refused({"k has channels 5", "4"});
  }
  SECTION("width of v") {
    call.v = {at, {2, 3, 2, 4}};
    call.refused({"v has channels 4", "5"});
  }
  SECTION("positions of k and v") {
    call.v = {at, {2, 3, 1, 5}};
    call.refused({"v has extent 1 in dimension 2", "k has 2"});
  }
  SECTION("a negative extent") {
    call.k = {at, {2, 3, -2, 4}};
    call.refused({"k", "-2"});
  }
  SECTION("null k") {
    call.k = {nullptr, {2, 3, 2, 4}};
    call.refused({"k is null", "48"});
  }
  SECTION("null v") {
    call.v = {nullptr, {2, 3, 2, 5}};
    call.refused({"v is null", "60"});
  }
  SECTION("strides of channels") {
    call.k = {at, {2, 3, 2, 4}, {48, 16, 8, 2}};
    call.refused({"k has last stride 2", "1"});
  }
  SECTION("strides of channels of v") {
    call.v = {at, {2, 3, 2, 5}, {0, 0, 0, 0}};
    call.refused({"v has last stride 0", "1"});
  }
}

TEST_CASE("append refuses counts out of range, and changes nothing", "[kv_cache]") {
  Append call;
  SECTION("too many") {
    call.counts = {2, 3};
    call.refused({"counts has 3", "new positions are 2"});
  }
  SECTION("negative") {
    call.counts = {-1, 0};
    call.refused({"counts has -1"});
  }
  SECTION("one too few") {
    call.counts = {1};
    call.refused({"counts has extent 1", "sequences are 2"});
  }
  SECTION("one too many") {
    call.counts = {1, 1, 1};
    call.refused({"counts has extent 3", "sequences are 2"});
  }
}

TEST_CASE("append refuses what a full cache cannot take, and changes nothing", "[kv_cache]") {
  Append call;  // lengths 2 and 1 of 6
  SECTION("all sequences") {
    call.k = {call.data.data(), {2, 3, 6, 4}};
    call.v = {call.data.data() + 200, {2, 3, 6, 5}};
    call.refused({"k would bring a sequence to length 8", "the capacity is 6"});
  }
  SECTION("the first sequence alone") {
    call.k = {call.data.data(), {2, 3, 5, 4}};
    call.v = {call.data.data() + 200, {2, 3, 5, 5}};
    call.refused({"length 7", "the capacity is 6"});
    call.counts = {4, 5};
    CHECK_NOTHROW(call.run());
    CHECK(call.cache.length(0) == 6);
    CHECK(call.cache.length(1) == 6);
    call.counts = {0, 1};
    call.refused({"length 7"});
    call.counts = {0, 0};
    CHECK_NOTHROW(call.run());
  }
  SECTION("the last sequence alone") {
    call.k = {call.data.data(), {2, 3, 6, 4}};
    call.v = {call.data.data() + 200, {2, 3, 6, 5}};
    call.counts = {4, 6};
    call.refused({"length 7", "the capacity is 6"});
  }
}

TEST_CASE("append refuses positions that the rope does not have, and changes nothing", "[kv_cache]") {
  Append call;  // lengths 2 and 1
  const Rope<float> brief({.width = 4}, 3), enough({.width = 4}, 4), wide({.width = 6}, 20),
      late({.width = 2, .first_position = 2}, 9);
  SECTION("too few") {
    call.rope = &brief;
    call.refused({"k has position 3", "last is 2"});
    call.rope = &enough;
    CHECK_NOTHROW(call.run());
  }
  SECTION("too many channels") {
    call.rope = &wide;
    call.refused({"k has channels 4", "width is 6"});
  }
  SECTION("too late") {
    call.rope = &late;
    call.refused({"k has position 1", "first is 2"});
    call.counts = {2, 0};
    CHECK_NOTHROW(call.run());
  }
}

}  // namespace kv_cache_test
