// Defines ForwardCall and BackwardCall, calls whose arguments are not checked yet. The user's unit fills them
// (build.hpp). The library checks and completes them (open.hpp).
#pragma once

#include "../terms/backward_problem.hpp"
#include "../terms/variant.hpp"

SSMAX_BEGIN_SHARED

/// The arguments of a call that a problem does not have. Checks read them.
struct CallFacts {
  bool has_mask = true;     // whether the caller named a mask
  bool is_example = false;  // whether a plan is made: outputs and sinks are not read
  bool rotate_source_keys = false, more_queries_than_keys = false, continues = false;
  index_t first_key = 0, all_keys = 0, first_query = 0, all_queries = 0;
};

/// A call of attention. `views` has the keys, unless `problem` refers to a source. out and lse, and the state, are in
/// `result` as they were given.
template <class Compute>
struct ForwardCall {
  Problem<Compute> problem{};
  ViewKeys<Compute> views{};
  Result<Compute> result{};
  CallFacts facts{};
  /// Opens a call over a source (driver.hpp), or null: the keys are in views.
  void (*open_source)(ForwardCall& call, const Variant<Compute>& variant) = nullptr;
};

/// A call of attention_backward.
template <class Compute>
struct BackwardCall {
  BackwardProblem<Compute> problem{};
  ViewKeys<Compute> views{};
  CallFacts facts{};
};

SSMAX_END
