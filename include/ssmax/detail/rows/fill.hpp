// Rows, or parts of them, of one number.
#pragma once

#include <algorithm>

#include "../../query.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

template <class Y>
void fill_row(Y* out, index_t n, float value) {
  std::fill_n(out, n, static_cast<Y>(value));
}

/// Hidden keys of a row: everything outside [keys.begin, keys.end).
template <class Y>
void fill_hidden(Y* out, index_t columns, KeyRange keys, float value) {
  fill_row(out, keys.begin, value);
  fill_row(out + keys.end, columns - keys.end, value);
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
