// Checks that the members of a mask with runs agree.
#pragma once

#include <ssmax/mask.hpp>
#include <string>

#include "catch.hpp"

namespace mask_members {

using namespace ssmax;

/// Checks the queries of the last batch entry.
template <class M>
void check_members(const QueryShape& shape, const M& mask, const std::string& name) {
  INFO(name);
  for (index_t head = 0; head < shape.heads; ++head) {
    Query before{0, head, 0, shape};
    for (index_t i = 0; i < shape.queries; ++i) {
      const Query query{shape.batch - 1, head, i, shape};
      const KeyRange keys = mask.keys(query);
      index_t n = 0;
      bool same_as_before = true;
      for (index_t key = 0; key < shape.keys; ++key) {
        const bool sees = key >= keys.begin && key < keys.end && mask.sees(query, key);
        n += sees ? 1 : 0;
        const KeyRange run = mask.run(query, key);
        index_t next = key;
        while (next < keys.end && (next < keys.begin || !mask.sees(query, next))) ++next;
        const bool agrees = next >= keys.end ? run.size() <= 0 : run.begin == next && run.end > next;
        for (index_t at = run.begin; at < run.end; ++at) REQUIRE(mask.sees(query, at));
        REQUIRE(agrees);
        before.batch = query.batch;
        const KeyRange others = mask.keys(before);
        same_as_before &= sees == (key >= others.begin && key < others.end && mask.sees(before, key));
      }
      if constexpr (requires { mask.count(query); }) REQUIRE(mask.count(query) == n);
      REQUIRE(ssmax::detail::visible_count(mask, query, ssmax::detail::visible_keys(mask, query)) == n);
      if (ssmax::detail::same_runs(mask, before, query)) REQUIRE(same_as_before);
      before = query;
    }
  }
}

}  // namespace mask_members
