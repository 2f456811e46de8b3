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
  std::string first_wrong;
  for (index_t head = 0; head < shape.heads; ++head) {
    Query before{shape.batch - 1, head, 0, shape};
    for (index_t i = 0; i < shape.queries; ++i) {
      const Query query{shape.batch - 1, head, i, shape};
      const auto require = [&](bool holds, const char* member, index_t key) {
        if (holds || !first_wrong.empty()) return;
        first_wrong = std::string(member) + " of head " + std::to_string(head) + ", query " +
                      std::to_string(i) + ", key " + std::to_string(key);
      };
      const KeyRange keys = mask.keys(query), others = mask.keys(before);
      index_t n = 0;
      bool same_as_before = true;
      for (index_t key = 0; key < shape.keys; ++key) {
        const bool sees = key >= keys.begin && key < keys.end && mask.sees(query, key);
        n += sees ? 1 : 0;
        const KeyRange run = mask.run(query, key);
        index_t next = key;
        while (next < keys.end && (next < keys.begin || !mask.sees(query, next))) ++next;
        require(next >= keys.end ? run.size() <= 0 : run.begin == next && run.end > next, "run", key);
        for (index_t at = run.begin; at < run.end; ++at) require(mask.sees(query, at), "run", at);
        same_as_before &= sees == (key >= others.begin && key < others.end && mask.sees(before, key));
      }
      if constexpr (requires { mask.count(query); }) require(mask.count(query) == n, "count", n);
      require(ssmax::detail::visible_count(mask, query, ssmax::detail::visible_keys(mask, query)) == n,
              "visible_count", n);
      require(!ssmax::detail::same_runs(mask, before, query) || same_as_before, "same_runs", n);
      before = query;
    }
  }
  INFO(name << " of " << shape.queries << " queries and " << shape.keys << " keys");
  CHECK(first_wrong == "");
}

}  // namespace mask_members
