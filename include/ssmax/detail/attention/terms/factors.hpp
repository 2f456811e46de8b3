// Reads the factors of a key run, whose stride a source chooses (KeyRun).
#pragma once

#include <algorithm>

#include "../../../config.hpp"

SSMAX_BEGIN_SHARED

/// The factors of the keys, or of the values, of a run. A number is element · factor of the row · factor of the
/// channel.
struct StoredFactors {
  const float* rows = nullptr;      // null: each is 1
  index_t rows_stride = 1;          // floats from one factor to the next, or 0
  const float* channels = nullptr;  // the same for all rows of the run. null: each is 1
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Calls f(first key, factors, count) with contiguous factors of rows: in place if the stride is 1, else with copies of
/// up to 256 factors.
template <class F>
void for_contiguous_factors(const StoredFactors& factors, index_t keys, const F& f) {
  const float* rows = factors.rows;
  const index_t stride = rows == nullptr ? 0 : factors.rows_stride;
  if (stride == 1) return f(index_t{0}, rows, keys);
  constexpr index_t most = 256;
  float copies[most];
  if (stride == 0) std::fill_n(copies, std::min(most, keys), rows == nullptr ? 1 : *rows);
  for (index_t key = 0; key < keys; key += most) {
    const index_t count = std::min(most, keys - key);
    for (index_t i = 0; stride != 0 && i < count; ++i) copies[i] = rows[(key + i) * stride];
    f(key, static_cast<const float*>(copies), count);
  }
}

SSMAX_END
