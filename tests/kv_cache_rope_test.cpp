// KvCache rotates keys as it appends them, each sequence at its own positions, and rounds them once.

#include "kv_cache_rows.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace kv_cache_rows::kv_cache_rope_test {

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

// Elements are below 6, their pairs below 8. Two products, a sum and the table's entries are five roundings
// at most of numbers below 8 in the arithmetic's precision; storing is one more in the storage's.
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
  for_each_target([](const std::string&) {
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

}  // namespace kv_cache_rows::kv_cache_rope_test
