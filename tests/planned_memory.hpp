// The shape and the memory of a planned call.
#pragma once

#include <ssmax/plan.hpp>

#include "attention_problem.hpp"
#include "guarded_memory.hpp"

namespace attention_problem {

inline ssmax::AttentionShape shape_of(const Shape& s) {
  return {.batch = s.batch,
          .heads = s.heads,
          .kv_heads = s.kv_heads,
          .queries = s.queries,
          .keys = s.keys,
          .width = s.d,
          .value_width = s.dv};
}

}  // namespace attention_problem
