// half and bfloat16: the scalar conversions against the definition of the formats, the vector ones against the scalar.

#include <bit>

#include "target_scope.hpp"
#include "test.hpp"

namespace half_test {

using namespace ssmax;

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

half half_of(std::uint32_t bits) {
  half h;
  h.bits = static_cast<std::uint16_t>(bits);
  return h;
}

bfloat16 bfloat16_of(std::uint32_t bits) {
  bfloat16 b;
  b.bits = static_cast<std::uint16_t>(bits);
  return b;
}

/// The value of a finite half by its definition.
double half_value(std::uint32_t bits) {
  const int exponent = static_cast<int>((bits >> 10) & 0x1F);
  const double mantissa = bits & 0x3FF;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

/// Floats that matter to a conversion with `kept` mantissa bits: around every representable value and every tie.
std::vector<float> around_ties(int dropped_bits) {
  std::vector<float> values;
  for (std::uint64_t high = 0; high < (std::uint64_t{1} << 32);
       high += std::uint64_t{1} << (dropped_bits - 1)) {
    for (int offset : {-1, 0, 1}) {
      values.push_back(
          std::bit_cast<float>(static_cast<std::uint32_t>(high) + static_cast<std::uint32_t>(offset)));
    }
  }
  return values;
}

template <class Storage>
bool same(Storage a, Storage b) {
  return a.bits == b.bits || (std::isnan(static_cast<float>(a)) && std::isnan(static_cast<float>(b)));
}

TEST_CASE("every half widens to its value and comes back", "[half]") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<float>(half_of(bits));
    const bool special = (bits & 0x7C00) == 0x7C00;
    if (special) {
      wrong += (bits & 0x3FF) != 0 ? !std::isnan(value) : !std::isinf(value);
      wrong += std::signbit(value) != ((bits & 0x8000) != 0);
    } else {
      wrong += static_cast<double>(value) != half_value(bits);
    }
    wrong += !same(half(value), half_of(bits));
  }
  CHECK(wrong == 0);
}

TEST_CASE("every bfloat16 widens to its bits and comes back", "[half]") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<float>(bfloat16_of(bits));
    wrong += bits_of(value) != bits << 16;
    wrong += !same(bfloat16(value), bfloat16_of(bits));
  }
  CHECK(wrong == 0);
}

TEST_CASE("narrowing rounds to nearest, ties to even", "[half]") {
  CHECK(half(1.0f + 0x1p-11f).bits == 0x3C00);      // tie, even below
  CHECK(half(1.0f + 3 * 0x1p-11f).bits == 0x3C02);  // tie, even above
  CHECK(half(1.0f + 0x1.002p-11f).bits == 0x3C01);  // just above a tie
  CHECK(half(65504.0f).bits == 0x7BFF);
  CHECK(half(65519.99f).bits == 0x7BFF);
  CHECK(half(65520.0f).bits == 0x7C00);
  CHECK(half(0x1p-24f).bits == 1);
  CHECK(half(0x1p-25f).bits == 0);  // tie between 0 and the smallest: even
  CHECK(half(0x1.002p-25f).bits == 1);
  CHECK(half(-0.0f).bits == 0x8000);
  CHECK(bfloat16(1.0f + 0x1p-8f).bits == 0x3F80);
  CHECK(bfloat16(1.0f + 3 * 0x1p-8f).bits == 0x3F82);
  CHECK(bfloat16(std::numeric_limits<float>::max()).bits == 0x7F80);
  CHECK(
      std::isnan(static_cast<float>(bfloat16(std::bit_cast<float>(0x7F800001u)))));  // its payload is cut off
}

TEST_CASE("vector conversions are the scalar ones, bit for bit", "[half]") {
  const std::vector<float> half_values = around_ties(13), bfloat16_values = around_ties(16);
  for_each_target([&](const std::string& target) {
    CAPTURE(target);
    const auto& conversions = ssmax::detail::kernels<ssmax::detail::ConversionKernels>();
    const auto wrong_narrowings = [](const std::vector<float>& values, const auto& narrow, auto storage) {
      using Storage = decltype(storage);
      std::vector<Storage> narrowed(values.size());
      narrow(values.data(), static_cast<index_t>(values.size()), narrowed.data());
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < values.size(); ++i) wrong += !same(narrowed[i], Storage(values[i]));
      return wrong;
    };
    CHECK(wrong_narrowings(half_values, conversions.narrow_half, half{}) == 0);
    CHECK(wrong_narrowings(bfloat16_values, conversions.narrow_bfloat16, bfloat16{}) == 0);

    std::vector<half> halves;
    std::vector<bfloat16> bfloat16s;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      halves.push_back(half_of(bits));
      bfloat16s.push_back(bfloat16_of(bits));
    }
    std::vector<float> from_half(halves.size()), from_bfloat16(halves.size());
    // One element short, so that a remainder is converted as well.
    conversions.widen_half(halves.data(), 0xFFFF, from_half.data());
    conversions.widen_bfloat16(bfloat16s.data(), 0xFFFF, from_bfloat16.data());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < 0xFFFF; ++i) {
      const auto as_half = static_cast<float>(halves[i]);
      wrong +=
          !(bits_of(from_half[i]) == bits_of(as_half) || (std::isnan(from_half[i]) && std::isnan(as_half)));
      wrong += bits_of(from_bfloat16[i]) != bits_of(static_cast<float>(bfloat16s[i]));
    }
    CHECK(wrong == 0);
  });
}

}  // namespace half_test
