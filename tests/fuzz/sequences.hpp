// A case of sequences with their own lengths over a source of keys. Every way to write the call has the same bits.
#pragma once

#include <ssmax/rope.hpp>
#include <string>
#include <vector>

#include "attention.hpp"

namespace fuzz {

/// Sequence b begins with the first common[b] keys of sequence leaders[b].
struct Families {
  std::vector<index_t> leaders, common;
};

struct SequencesCase {
  int types;
  index_t heads, kv_heads, d, dv;
  std::vector<index_t> lengths, queries;  // of each sequence
  Families families, others;              // others: of a second source with the same lengths
  bool has_others;
  index_t page;
  bool packed, gives_lengths;
  index_t rows;                   // of q, in a batch entry
  std::vector<index_t> refilled;  // the numbers of queries that replace those of a plan, or empty
  DrawnMask mask;
  enum class Kind { range, runs, tree } kind;
  bool is_causal;               // no query sees a key after its own
  std::vector<index_t> prefix;  // of each sequence: how many of its queries a first call computes, or empty
  std::vector<index_t> parents;
  ssmax::RopeOptions rope;
  std::vector<double> frequencies;       // the rope's own, or empty
  std::vector<index_t> axes, positions;  // of a rope: [pair] and [sequence, axis, token], or empty
  bool has_rope, rotates_source_keys, rounded_rotation, float_products, batch_invariant;
  index_t key_position;
  std::vector<float> sinks;
  ssmax::Dropout dropout;
  std::vector<std::uint64_t> seeds;  // of the dropout, one per sequence
  bool scaled_sinks, wants_lse;
  AnyExecutor executor;
  std::uint64_t seed;  // of the numbers

  index_t sequences() const { return std::ssize(lengths); }
  index_t length(index_t b) const { return lengths[static_cast<std::size_t>(b)]; }
  index_t rope_positions() const { return key_position + longest() + 4; }
  index_t longest() const { return *std::ranges::max_element(lengths); }
  /// The first row of a sequence, counted over all batch entries.
  index_t first_row(index_t b) const {
    const auto end = queries.begin() + b;
    return packed ? std::accumulate(queries.begin(), end, index_t{0}) : b * rows;
  }
  /// What SequenceLengths refers to.
  std::vector<index_t> numbers(const std::vector<index_t>& of_queries) const {
    if (!packed) return of_queries;
    std::vector<index_t> cumulative{0};
    for (const index_t n : of_queries) cumulative.push_back(cumulative.back() + n);
    return cumulative;
  }
  std::string words() const;
};

/// T: of q; O: of out.
template <class T, class K, class V = K, class O = T>
void run_sequences(const SequencesCase& c);

/// Runs the backward of a case with `refilled` lengths, without options.
void check_backward_plan(const SequencesCase& c);

}  // namespace fuzz
