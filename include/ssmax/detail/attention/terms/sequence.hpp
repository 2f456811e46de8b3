// Defines Sequence: where the rows and keys of one sequence of a call lie, and the path that it takes.
#pragma once

#include "../../../explain.hpp"
#include "../../../query.hpp"

SSMAX_BEGIN_SHARED

/// One sequence of a call: a batch entry, or one of several sequences in packed rows.
struct Sequence {
  index_t batch = -1;                // its batch entry in Query, in keys and in states
  index_t entry = 0, first_row = 0;  // its rows in q, out and lse: [entry, head, first_row + i]
  index_t row_shift = 0;             // the row of a query is its index + row_shift
  index_t queries = 0;               // rows per head
  QueryShape shape{};                // the extents that mask, scaling and score see
  KeyRange stored{};                 // the keys that the call computes
  bool has_start = true;             // whether Result::start, if given, has a state for it
  Path path = Path::none;
  const char* reason = "";  // why no faster path takes the sequence
};

SSMAX_END
