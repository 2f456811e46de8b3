// Checks SequenceLengths in O(sequences) time.
#pragma once

#include "../../sequence_lengths.hpp"
#include "views.hpp"

SSMAX_BEGIN_DETAIL

/// Throws unless `lengths` has one length per batch entry (`entries`), and every length is 0 to `rows`.
inline void check_padded_lengths(const char* function, const char* name, Integers lengths, const char* tensor,
                                 index_t entries, index_t rows) {
  const auto count = static_cast<index_t>(lengths.size());
  if (count != entries) {
    fail_format("ssmax::%s: lengths.%s have extent %td, %s has %td batch entries", function, name, count,
                tensor, entries);
  }
  for (index_t b = 0; b < count; ++b) {
    const index_t length = lengths[static_cast<std::size_t>(b)];
    if (length < 0 || length > rows) {
      fail_format("ssmax::%s: lengths.%s of sequence %td are %td, must be within 0 and the rows of %s, %td",
                  function, name, b, length, tensor, rows);
    }
  }
}

/// Throws unless `cumulative` begins with 0, never decreases and ends with the rows of a tensor of one batch
/// entry.
inline void check_packed_lengths(const char* function, const char* name, Integers cumulative,
                                 const char* tensor, index_t entries, index_t rows) {
  if (entries != 1) {
    fail_format("ssmax::%s: %s has %td batch entries, must have 1 where lengths are packed", function, tensor,
                entries);
  }
  if (cumulative.empty()) {
    fail_format("ssmax::%s: lengths.%s have extent 0, must have at least 1", function, name);
  }
  if (cumulative.front() != 0) {
    fail_format("ssmax::%s: lengths.%s begin with %td, must begin with 0", function, name,
                cumulative.front());
  }
  for (std::size_t b = 1; b < cumulative.size(); ++b) {
    if (cumulative[b] < cumulative[b - 1]) {
      fail_format("ssmax::%s: lengths.%s fall from %td to %td in sequence %zu", function, name,
                  cumulative[b - 1], cumulative[b], b - 1);
    }
  }
  if (cumulative.back() != rows) {
    fail_format("ssmax::%s: lengths.%s end with %td, %s has %td rows", function, name, cumulative.back(),
                tensor, rows);
  }
}

/// Throws unless the lengths, if given, fit q and k.
inline void check_lengths(const char* function, const SequenceLengths& lengths, const AnyView& q,
                          const AnyView& k) {
  if (!lengths.is_given()) return;
  const auto queries = static_cast<index_t>(lengths.queries().size()),
             keys = static_cast<index_t>(lengths.keys().size());
  check_equal(function, "lengths.queries", "have extent", queries, "lengths.keys have", keys);
  const auto check = lengths.is_packed() ? check_packed_lengths : check_padded_lengths;
  check(function, "queries", lengths.queries(), "q", q.extent(0), q.extent(2));
  check(function, "keys", lengths.keys(), "k", k.extent(0), k.extent(2));
}

/// Throws unless the lengths, if given, fit q and a key source with `sequences` sequences.
inline void check_source_lengths(const char* function, const SequenceLengths& lengths, const AnyView& q,
                                 index_t sequences) {
  if (!lengths.is_given()) return;
  if (!lengths.keys().empty()) {
    fail_format("ssmax::%s: lengths.keys have extent %zu, must be 0 over a source: use %s", function,
                lengths.keys().size(), lengths.is_packed() ? "packed_queries" : "padded_queries");
  }
  const auto check = lengths.is_packed() ? check_packed_lengths : check_padded_lengths;
  check(function, "queries", lengths.queries(), "q", q.extent(0), q.extent(2));
  check_equal(function, "lengths.queries", "have sequence count", lengths.count(), "the source has",
              sequences);
}

/// Throws if the caller gives lengths to a function, or to a kind of call, that does not take lengths.
inline void check_no_lengths(const char* function, const SequenceLengths& lengths, const char* call = "") {
  if (!lengths.is_given()) return;
  fail_format("ssmax::%s: lengths are given for %td sequences, the call%s%s takes 0", function,
              lengths.count(), *call != '\0' ? " " : "", call);
}

SSMAX_END
