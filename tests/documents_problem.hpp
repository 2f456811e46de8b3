// Packed documents, and what a mask of them shows.
#pragma once

#include "attention_problem.hpp"

namespace attention_problem {

/// The borders of documents, and a plain implementation of the visibility and positions that follow.
struct Packed {
  std::vector<index_t> queries, keys;
  bool causal;

  Documents mask() const { return {queries, keys, causal}; }
  static std::size_t document_of(const std::vector<index_t>& cumulative, index_t index) {
    std::size_t i = 0;
    while (index >= cumulative[i + 1]) ++i;
    return i;
  }
  /// Returns the position in the document, with bottom-right alignment.
  index_t position(const Query& query) const {
    const std::size_t i = document_of(queries, query.index);
    return query.index - queries[i + 1] + keys[i + 1] - keys[i];
  }
  index_t position(index_t key) const { return key - keys[document_of(keys, key)]; }
  bool sees(const Query& query, index_t key) const {
    return document_of(queries, query.index) == document_of(keys, key) &&
           (!causal || position(key) <= position(query));
  }
  Positions positions() const {
    return {[this](const Query& query) { return position(query); },
            [this](const Query&, index_t key) { return position(key); }};
  }
};

}  // namespace attention_problem
