// Checks the boundaries of parts that are packed into one dimension.
#pragma once

#include "../../view.hpp"
#include "error.hpp"

SSMAX_BEGIN_DETAIL

/// Throws unless `boundaries` begins with 0, never decreases and ends with `extent`. `part` names what lies between two
/// boundaries. O(parts).
inline void check_boundaries(const char* owner, const char* name, Integers boundaries, const char* part,
                             const char* extent_name, index_t extent) {
  if (boundaries.empty()) fail_value(owner, name, "has extent", 0, "must be at least", 1);
  check_equal(owner, name, "begins with", boundaries.front(), "must begin with", 0);
  for (std::size_t i = 1; i < boundaries.size(); ++i) {
    if (boundaries[i] < boundaries[i - 1]) {
      fail_format("ssmax::%s: %s falls from %td to %td in %s %zu", owner, name, boundaries[i - 1],
                  boundaries[i], part, i - 1);
    }
  }
  check_equal(owner, name, "ends with", boundaries.back(), extent_name, extent);
}

SSMAX_END
