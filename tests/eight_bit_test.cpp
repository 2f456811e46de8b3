// Int8, Fp8E4M3 and Fp8E5M2: every code against the definition of the format, and decode from caches of these types
// against the naive loop over the rows that the cache holds.

#include <bit>

#include "decode_problem.hpp"
#include "test.hpp"

namespace decode_problem::eight_bit_test {

constexpr float nan = std::numeric_limits<float>::quiet_NaN(),
                infinity = std::numeric_limits<float>::infinity();

static_assert(ssmax::detail::KeyStorage<Int8> && !ssmax::detail::Storage<Int8>);
static_assert(ssmax::detail::KeyStorage<Fp8E4M3> && !ssmax::detail::Storage<Fp8E4M3>);
static_assert(ssmax::detail::KeyStorage<Fp8E5M2> && !ssmax::detail::Storage<Fp8E5M2>);

// ---- Codes ------------------------------------------------------------------------------------------------

template <class X>
X code(unsigned bits) {
  return std::bit_cast<X>(static_cast<std::uint8_t>(bits));
}

/// The value of a code by the definition of its format.
double value_of(Int8 x) { return x.value; }
double value_of_float(unsigned bits, int mantissa_bits, int bias) {
  const int exponent = static_cast<int>(bits & 0x7Fu) >> mantissa_bits, ones = 1 << mantissa_bits;
  const int mantissa = static_cast<int>(bits) & (ones - 1);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp(ones + mantissa, exponent - bias - mantissa_bits);
  return (bits & 0x80u) != 0 ? -magnitude : magnitude;
}
double value_of(Fp8E4M3 x) {
  return (x.bits & 0x7Fu) == 0x7Fu ? std::numeric_limits<double>::quiet_NaN() : value_of_float(x.bits, 3, 7);
}
double value_of(Fp8E5M2 x) {
  if ((x.bits & 0x7Fu) < 0x7Cu) return value_of_float(x.bits, 2, 15);
  if ((x.bits & 3u) != 0) return std::numeric_limits<double>::quiet_NaN();
  return (x.bits & 0x80u) != 0 ? -std::numeric_limits<double>::infinity()
                               : std::numeric_limits<double>::infinity();
}

bool is_same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

/// The finite values of the format, in ascending order, without the second zero. Exception: without Int8's -128, which
/// no conversion returns.
template <class X>
std::vector<double> finite_values() {
  std::vector<double> values;
  for (unsigned bits = 0; bits < 256; ++bits) {
    const double value = value_of(code<X>(bits));
    if (std::abs(value) <= static_cast<double>(X::largest)) values.push_back(value);
  }
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

TEMPLATE_TEST_CASE("every code of 8 bits widens to its value, on every target", "[eight_bit]", Int8, Fp8E4M3,
                   Fp8E5M2) {
  using X = TestType;
  std::vector<X> codes;
  for (unsigned bits = 0; bits < 256; ++bits) codes.push_back(code<X>(bits));
  for (const X x : codes) CHECK(is_same(static_cast<float>(x), value_of(x)));
  for_each_target([&](const std::string& target) {
    for (const std::size_t first : {0u, 1u, 13u}) {  // vectors and their tails
      CAPTURE(target, first);
      const auto n = static_cast<index_t>(codes.size() - first);
      std::vector<float> wide(codes.size() - first);
      ssmax::StorageTraits<X>::load(codes.data() + first, n, wide.data());
      int wrong = 0;
      for (std::size_t i = 0; i < wide.size(); ++i) wrong += !is_same(wide[i], value_of(codes[first + i]));
      CHECK(wrong == 0);
    }
  });
}

TEMPLATE_TEST_CASE("conversions to 8 bits round to nearest even and saturate", "[eight_bit]", Int8, Fp8E4M3,
                   Fp8E5M2) {
  using X = TestType;
  const auto rounded = [](float x) { return value_of(X(x)); };
  const std::vector<double> values = finite_values<X>();
  const auto is_even = [](double value) {
    return (std::bit_cast<std::uint8_t>(X(static_cast<float>(value))) & 1) == 0;
  };
  int wrong = 0;
  for (std::size_t i = 0; i + 1 < values.size(); ++i) {
    const double low = values[i], high = values[i + 1];
    const auto middle = static_cast<float>((low + high) / 2);  // exact
    wrong += rounded(static_cast<float>(low)) != low;
    wrong += rounded(std::nextafter(middle, -infinity)) != low;
    wrong += rounded(std::nextafter(middle, infinity)) != high;
    wrong += rounded(middle) != (is_even(low) ? low : high);
  }
  CHECK(wrong == 0);
  for (const float x : {X::largest, X::largest * 1.01f, X::largest * 1.2f, 1e30f}) {
    CHECK(rounded(x) == static_cast<double>(X::largest));
    CHECK(rounded(-x) == -static_cast<double>(X::largest));
  }
  CHECK(rounded(1e-40f) == 0);
  CHECK(std::isnan(rounded(nan)) == !std::is_same_v<X, Int8>);
  CHECK(std::isfinite(rounded(infinity)) == std::is_same_v<X, Int8>);
}

TEMPLATE_TEST_CASE("the factor of a row", "[eight_bit]", Int8, Fp8E4M3, Fp8E5M2) {
  using Traits = ssmax::StorageTraits<TestType>;
  const auto factor = [](std::vector<float> row) {
    return Traits::scale(row.data(), static_cast<index_t>(row.size()));
  };
  CHECK(factor({1, -3, 2}) == 3 / TestType::largest);
  CHECK(factor({0, -0.0f}) == 1);
  CHECK(factor({}) == 1);
  CHECK(factor({1e-42f, 0}) == std::numeric_limits<float>::min());
  for (const float x : {nan, infinity, -infinity}) {
    CHECK(std::isnan(factor({1, x, 2})));
    CHECK(std::isnan(factor({x})));
  }
}

// ---- Decode -----------------------------------------------------------------------------------------------

/// Every row as a cache of X holds it.
template <class X>
void round_rows(std::vector<float>& rows, index_t n) {
  std::vector<X> stored(static_cast<std::size_t>(n));
  for (std::size_t at = 0; at < rows.size(); at += stored.size()) {
    float* row = rows.data() + at;
    const float factor = ssmax::StorageTraits<X>::scale(row, n);
    for (index_t i = 0; i < n; ++i) row[i] /= factor;
    ssmax::StorageTraits<X>::store(row, n, stored.data());
    for (std::size_t i = 0; i < stored.size(); ++i) row[i] = static_cast<float>(stored[i]) * factor;
  }
}
template <class X>
Data<float> rounded(Data<float> data) {
  round_rows<X>(data.k, data.shape.d);
  round_rows<X>(data.v, data.shape.dv);
  return data;
}

const std::vector<Shape> shapes{
    // heads, kv_heads, queries, d, dv, lengths
    {1, 1, 1, 1, 1, {1}},          {2, 1, 1, 7, 1, {2, 17}},       {3, 3, 2, 16, 7, {129, 2, 40}},
    {12, 4, 1, 64, 64, {300}},     {16, 2, 1, 64, 80, {1030, 70}}, {4, 2, 4, 80, 64, {257}},
    {2, 2, 5, 128, 16, {140, 5}},  {6, 2, 4, 16, 128, {1100}},     {2, 1, 2, 128, 128, {2050}},
    {2, 2, 20, 80, 80, {20, 300}},  // more than 16 queries of a kv head: prefill
};

TEMPLATE_TEST_CASE("decode from an 8-bit cache is as good as a naive loop on what it holds",
                   "[eight_bit][decode]", Int8, Fp8E4M3, Fp8E5M2) {
  using X = TestType;
  std::vector<Data<float>> all;
  std::vector<Expected<float>> expected;
  for (const Shape& shape : shapes) {
    all.push_back(uneven(shape));
    expected.emplace_back(rounded<X>(all.back()), Plan{});
  }
  for_each_target([&](const std::string& target) {
    Rule rule;
    for (std::size_t i = 0; i < all.size(); ++i)
      rule.take(run(all[i], filled<X>(all[i])), expected[i], name_of(all[i].shape));
    rule.check(target);
  });
}

/// Rows that are converted give the bits of a float cache of the same rows. Rows read in place do not, because the
/// factor multiplies the product.
TEMPLATE_TEST_CASE("decode reads rows of 8 bits in place", "[eight_bit][decode]", Int8, Fp8E4M3, Fp8E5M2) {
  using X = TestType;
  const auto& products = ssmax::detail::stored_type<float, X, true>;
  CHECK(products.logits != nullptr);
  CHECK(products.accumulate != nullptr);
  for_each_target([&](const std::string& target) {
    for (const index_t queries : {1, 4, 5, 20}) {
      CAPTURE(target, queries);
      const Data<float> data = uneven({12, 4, queries, 64, 64, {40, 25}}), held = rounded<X>(data);
      const auto out = run(data, filled<X>(data)), converted = run(held, filled<float>(held));
      const bool is_decode = 3 * queries <= 16;
      CHECK((out.explanation.path == ssmax::Path::decode) == is_decode);
      CHECK(same_bits(out.out, converted.out) == !is_decode);
      CHECK(same_bits(out.lse, converted.lse) == !is_decode);
    }
  });
}

TEST_CASE("keys and values of different storage types, one of 8 bits", "[eight_bit][decode]") {
  const Data<float> data = uneven({6, 3, 2, 64, 80, {300, 1100}});
  const auto check_types = [&]<class K, class V>(K, V) {
    Data<float> held = data;
    const auto hold = [&]<class X>(X, std::vector<float>& rows, index_t n) {
      if constexpr (ssmax::detail::ScaledStorage<X>) {
        round_rows<X>(rows, n);
      } else {
        for (float& x : rows) x = static_cast<float>(X(x));
      }
    };
    hold(K{}, held.k, held.shape.d);
    hold(V{}, held.v, held.shape.dv);
    const Expected<float> expected(held, Plan{});
    KvCache<K, V> cache(options_of(data.shape));
    cache.append(data.k_view(0, 1100), data.v_view(0, 1100), nullptr, data.shape.lengths);
    check(data, cache, expected);
  };
  check_types(Int8{}, bfloat16{});
  check_types(half{}, Fp8E4M3{});
  check_types(Fp8E5M2{}, Int8{});
}

TEMPLATE_TEST_CASE("multipliers of either sign, a window and a ring over 8 bits", "[eight_bit][decode]", Int8,
                   Fp8E4M3, Fp8E5M2) {
  using X = TestType;
  const index_t window = 150;
  const std::vector<float> s{0.43f, -0.2f, 0, 1, -0.7f, 0.1f};
  const Plan plan{
      .visible = [](const Query& query,
                    index_t key) { return key <= query.position() && key > query.position() - window; },
      .multiplier =
          [&](index_t head, index_t, index_t n) {
            return Real(s[static_cast<std::size_t>(head)]) * std::log(static_cast<Real>(n));
          }};
  for (const index_t queries : {1, 3, 20}) {
    const Data<float> data = uneven({6, 2, queries, 64, 16, {700, 90}});
    const Expected<float> expected(rounded<X>(data), plan);
    for (const bool ring : {false, true}) {
      const auto cache = filled<X>(data, nullptr, ring ? 200 : 0, ring);
      check(data, cache, expected, SSMax<float>{s}, ssmax::SlidingWindow{window - 1});
    }
  }
}

TEMPLATE_TEST_CASE("NaN and infinities in rows of 8 bits reach the queries that see them, and only those",
                   "[eight_bit][decode]", Int8, Fp8E4M3, Fp8E5M2) {
  using X = TestType;
  const Shape shape{2, 1, 3, 20, 20, {300}};
  const index_t bad = 298;  // the first of three queries does not see it
  for_each_target([&](const std::string& target) {
    for (const float special : {nan, infinity, -infinity}) {
      for (const bool in_key : {true, false}) {
        CAPTURE(target, special, in_key);
        Data<float> data(shape);
        const auto clean = run(data, filled<X>(data));
        (in_key ? data.k_row(0, 0, bad) : data.v_row(0, 0, bad))[5] = special;
        const auto output = run(data, filled<X>(data));
        for (index_t row = 0; row < shape.rows(); ++row) {
          const bool sees = row % shape.queries > 0;
          for (index_t c = 0; c < shape.dv; ++c) {
            const auto i = static_cast<std::size_t>(row * shape.dv + c);
            CHECK(std::isnan(output.out[i]) == sees);
            if (!sees) CHECK(std::abs(output.out[i] - clean.out[i]) <= 1e-5f);
          }
        }
      }
    }
  });
}

/// Two keys of X, with factors of 1. Keys are values as well.
template <class X>
struct TwoKeys {
  using Element = X;
  static constexpr index_t width = 40;
  static constexpr float factors[] = {1, 1};
  const X* rows;

  ssmax::KeySourceShape shape() const { return {1, 1, width, width}; }
  index_t length(index_t) const { return 2; }
  ssmax::KeyRange stored(index_t) const { return {0, 2}; }
  ssmax::KeyRun<X> run(index_t, index_t, index_t key) const {
    const X* row = rows + key * width;
    return {row, width, row, width, 2 - key, factors + key, factors + key};
  }
};

TEMPLATE_TEST_CASE("NaN codes of another source of 8 bits stay NaN", "[eight_bit][decode]", Fp8E4M3,
                   Fp8E5M2) {
  using X = TestType;
  const index_t n = TwoKeys<X>::width;
  for_each_target([&](const std::string& target) {
    for (const index_t channel : {0, 39}) {
      CAPTURE(target, channel);
      std::vector<X> rows(2 * n, X(0.5f));
      rows[static_cast<std::size_t>(n + channel)] = code<X>(0xFF);
      const std::vector<float> q(n, 0.1f);
      std::vector<float> out(n);
      attention(
          {.q = {q.data(), {1, 1, 1, n}}, .keys = TwoKeys<X>{rows.data()}, .out = {out.data(), {1, 1, 1, n}}},
          Causal{});
      CHECK(std::ranges::all_of(out, [](float x) { return std::isnan(x); }));
    }
  });
}

TEST_CASE("the cost of storing rows in 8 bits, in units of the largest result", "[eight_bit][decode]") {
  const auto check_cost = [](auto type, Real bound) {
    using X = decltype(type);
    for (const Shape& shape : {Shape{8, 2, 1, 64, 64, {300, 17}}, Shape{4, 2, 2, 128, 80, {600}}}) {
      const Data<float> data(shape);
      const Loops<Real> exact = loops<Real>(data, {});
      for_each_target([&](const std::string&) {
        const Real error = largest_error(run(data, filled<X>(data)).out, exact.out);
        CHECK(static_cast<double>(error / largest(exact.out)) <= static_cast<double>(bound));
      });
    }
  };
  check_cost(Int8{}, 0.015L);
  check_cost(Fp8E4M3{}, 0.08L);
  check_cost(Fp8E5M2{}, 0.15L);
}

}  // namespace decode_problem::eight_bit_test
