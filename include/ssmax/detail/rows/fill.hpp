// Fills rows, or parts of rows, with one number.
#pragma once

#include <algorithm>

#include "../../query.hpp"
#include "../../storage.hpp"

SSMAX_BEGIN_DETAIL

template <class Y>
void fill_row(Y* out, index_t n, float value) {
  if constexpr (BuiltInStorage<Y>) {
    std::fill_n(out, n, static_cast<Y>(value));
  } else if (n > 0) {
    StorageTraits<Y>::store(&value, 1, out);
    std::fill_n(out + 1, n - 1, *out);
  }
}

/// Fills the masked keys of a row: all keys outside [keys.begin, keys.end).
template <class Y>
void fill_masked(Y* out, index_t columns, KeyRange keys, float value) {
  fill_row(out, keys.begin, value);
  fill_row(out + keys.end, columns - keys.end, value);
}

SSMAX_END
