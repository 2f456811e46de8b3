// Policies of a user's own that forward and backward are tested with.
#pragma once

#include <ssmax/query.hpp>
#include <ssmax/scaling.hpp>

namespace own_policies {

using ssmax::index_t;
using ssmax::KeyRange;
using ssmax::Query;

/// A scaling that looks at all that it is shown.
struct Everything {
  double operator()(const ssmax::Row& row) const {
    return 0.5 + 0.25 * static_cast<double>(row.head) + 0.001 * static_cast<double>(row.position) -
           0.002 * static_cast<double>(row.n);
  }
};

/// A mask with another range for every batch entry, head and query, given carelessly.
struct Careless {
  KeyRange keys(const Query& query) const {
    const index_t number = query.batch * 7 + query.head * 5 + query.index * 13;
    return {number % 40 - 10, number % 11 == 0 ? -20 : number * 3};
  }
};

}  // namespace own_policies
