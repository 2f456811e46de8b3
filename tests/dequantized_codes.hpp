// Every code of an 8-bit type, dequantized with factors.
#pragma once

#include <bit>

#include "attention_problem.hpp"
#include "test.hpp"

/// Checks that the kernel rounds code · factor of the row · factor of the channel once, for rows of n codes. channels
/// has 256 factors of channels, or none.
template <class X>
void check_dequantized_codes(float factor, ssmax::index_t n, const std::vector<float>& channels = {}) {
  using ssmax::bfloat16, ssmax::index_t;
  std::vector<X> codes(256);
  for (unsigned bits = 0; bits < 256; ++bits) codes[bits] = std::bit_cast<X>(static_cast<std::uint8_t>(bits));
  const auto& kernels = ssmax::detail::kernels<ssmax::shared::DequantizeKernels<X>>();
  CAPTURE(factor, n);
  int wrong = 0;
  for (index_t first = 0; first + n <= 256; first += n) {
    std::vector<bfloat16> out(static_cast<std::size_t>(n + 1), bfloat16(-1234.0f));
    kernels.dequantize({codes.data() + first, n, 1, n}, &factor,
                       channels.empty() ? nullptr : channels.data() + first, {out.data(), n});
    for (index_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(first + i);
      float product = static_cast<float>(codes[at]) * factor;
      if (!channels.empty()) product *= channels[at];
      const bfloat16 got = out[static_cast<std::size_t>(i)];
      wrong +=
          std::isnan(product) ? !std::isnan(static_cast<float>(got)) : got.bits != bfloat16(product).bits;
    }
    wrong += out.back().bits != bfloat16(-1234.0f).bits;
  }
  CHECK(wrong == 0);
}
