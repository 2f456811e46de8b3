// Describes attention of a server's batch over pages: sequences, sizes and tensors. Declares its benchmarks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention.hpp"

namespace ssmax_bench {

// Sequences of one size. The queries are the last ones of the sequence.
struct SequenceGroup {
  index_t count, queries, keys;
};

struct PagedShape {
  index_t heads, kv_heads, width;
  std::vector<SequenceGroup> groups;

  // Calls f(queries, keys) for each sequence.
  template <class F>
  void for_each_sequence(const F& f) const {
    for (const SequenceGroup& group : groups)
      for (index_t i = 0; i < group.count; ++i) f(group.queries, group.keys);
  }
  index_t sequences() const {
    return sum([](index_t, index_t) { return index_t{1}; });
  }
  index_t tokens() const {
    return sum([](index_t queries, index_t) { return queries; });
  }
  index_t keys() const {
    return sum([](index_t, index_t keys) { return keys; });
  }
  index_t most_keys() const {
    index_t most = 0;
    for (const SequenceGroup& group : groups) most = std::max(most, group.keys);
    return most;
  }
  // Returns the number of visible logits of all heads.
  double logits() const {
    const index_t visible = sum([](index_t queries, index_t keys) {
      return queries * (keys - queries) + queries * (queries + 1) / 2;
    });
    return static_cast<double>(heads) * static_cast<double>(visible);
  }
  std::string name() const {
    std::string queries;
    for (const SequenceGroup& group : groups) {
      queries += queries.empty() ? "_q" : "-";
      if (groups.size() > 1) queries += std::to_string(group.count) + "x";
      queries += std::to_string(group.queries);
    }
    return std::string("s") + std::to_string(sequences()) + queries + "_h" + std::to_string(heads) + "_kv" +
           std::to_string(kv_heads) + "_d" + std::to_string(width) + "_n" + std::to_string(most_keys());
  }

 private:
  template <class F>
  index_t sum(const F& f) const {
    index_t total = 0;
    for_each_sequence([&](index_t queries, index_t keys) { total += f(queries, keys); });
    return total;
  }
};

// Arguments of out = softmax(q k^T / sqrt(width)) v per sequence, causal. The tokens of the sequences follow each other. An
// implementation copies k and v into pages of its own: key i of sequence b is key i % page_size of page table[b][i / page_size].
struct PagedArguments {
  static constexpr index_t page_size = 128;

  PagedShape shape;
  ElementType type;  // of q, k, v and out
  bool fp8;          // whether pages have FP8 E4M3 with a factor of 1
  int threads;
  const void* q;                        // [token, head, channel]
  const void *k, *v;                    // [key of all sequences, kv head, channel]
  void* out;                            // [token, head, channel]
  index_t pages, table_width;           // pages of all sequences; entries of a row of the table
  const std::int32_t *table, *lengths;  // [sequence][table_width]; number of keys per sequence
  const std::int32_t* cumulative;       // [sequences + 1]: first tokens
};

void register_paged();

}  // namespace ssmax_bench
