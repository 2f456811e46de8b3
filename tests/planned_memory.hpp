// The example and the memory of a planned call.
#pragma once

#include "attention_problem.hpp"
#include "guarded_memory.hpp"

namespace attention_problem {

/// The example of a plan: extents without data.
template <class T>
ssmax::AttentionArguments<Compute<T>> extents_of(const Problem<T>& problem,
                                                 const ssmax::AttentionOptions<T>& options = {}) {
  const auto without_data = [](const View<const T, 4>& view) {
    return View<const T, 4>(nullptr, view.extents());
  };
  return with({.q = without_data(problem.q_view()),
               .k = without_data(problem.k_view()),
               .v = without_data(problem.v_view())},
              options);
}

}  // namespace attention_problem
