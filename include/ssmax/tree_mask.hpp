/// @defgroup tree_mask Trees of candidates (tree_mask.hpp)
/// @ingroup mask
/// The mask of speculative decoding with a tree: one call verifies many candidates for the next tokens.
///
///     const Tree tree(parents);                                 // parents {-1, 0, 0, 1}: 1 and 2 follow 0, 3 follows 1
///     cache.append(k, v, &rope, {}, tree.offsets());            // the candidates' keys, rotated to their positions
///     attention({.q = q, .keys = cache, .out = out, .rope = &rope}, scaling, tree);
///     cache.keep(0, committed, accepted);                       // removes the keys of rejected candidates
///
/// A tree has T candidates. The queries of the call are the candidates, and the last T keys are the keys of the
/// candidates, both in the order of the tree. The keys before them are committed.
///
/// | of candidate i, at depth d (1 if the parent is -1) | |
/// |---|---|
/// | parents[i] | another candidate, below i. Or -1: the candidate follows the last committed key |
/// | visible keys | the committed keys, the candidate's ancestors, the candidate |
/// | n | committed keys + d |
/// | position of query and key | committed keys + d - 1 |
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "detail/checks/views.hpp"
#include "detail/memory/bits.hpp"
#include "kept_span.hpp"
#include "query.hpp"
#include "view.hpp"

/// @addtogroup tree_mask
/// @{
SSMAX_BEGIN_CODE

/// A mask for a tree of candidates. The constructor reads the parents once.
///
/// With a `window`, only the keys at the last `window` positions of a candidate's branch are visible. In
/// `tree & other`, the other mask places candidate i at key `committed + i`. So SlidingWindow does not count
/// positions of the branch there.
///
/// With the option `lengths`, a sequence with fewer queries has the first candidates of its tree. The longest sequence
/// has all T. Memory: T · (T / 8 + 8) bytes per tree.
class Tree {
 public:
  /// The offsets of KvCache::append rotate keys to the positions of the tree.
  static constexpr bool rotated_to_positions = true;

  /// Makes one tree for all batch entries. Throws std::invalid_argument unless -1 <= parents[i] < i and window >= 1.
  explicit Tree(Integers parents, index_t window = unbounded)
      : Tree(1, std::ssize(parents), window,
             [&](index_t, index_t i) { return parents[static_cast<std::size_t>(i)]; }) {}
  /// Makes one tree per batch entry from parents [batch, T]. Throws as the other constructor.
  template <std::integral Index>
  explicit Tree(const View<const Index, 2>& parents, index_t window = unbounded)
      : Tree((detail::check_view("Tree", "parents", parents), parents.extent(0)), parents.extent(1), window,
             [&](index_t tree, index_t i) { return static_cast<index_t>(parents(tree, i)); }) {}

  /// Returns the offset of each candidate [trees, T]: its depth - 1. Its position is committed keys + offset.
  [[nodiscard]] std::span<const index_t> offsets() const { return offsets_; }

  /// Returns the range from the first visible committed key to the candidate's own key.
  KeyRange keys(const Query& query) const { return {first(query), committed(query) + query.index + 1}; }
  /// Returns true for a committed key within the window, an ancestor or the candidate's own key.
  bool sees(const Query& query, index_t key) const {
    const index_t candidate = key - committed(query);
    return candidate < 0 ? key >= first(query) : detail::has_bit(branch(query), candidate);
  }
  /// Returns the committed keys from `from` on or, after them, the next candidates of the branch.
  KeyRange run(const Query& query, index_t from) const {
    const index_t keys = committed(query), end = query.index + 1;
    from = std::max(from, first(query));
    if (from < keys) return {from, keys};
    const index_t begin = detail::next_bit(branch(query), from - keys, end, 0);
    return {keys + begin, keys + detail::next_bit(branch(query), begin, end, ~std::uint64_t{0})};
  }
  /// Returns n.
  index_t count(const Query& query) const { return std::min(query_position(query) + 1, window_); }
  /// Returns true if both queries are the same candidate.
  bool same_runs(const Query& query, const Query& other) const { return query.index == other.index; }
  /// Returns the position of the candidate.
  index_t query_position(const Query& query) const { return committed(query) + offset(query, query.index); }
  /// Returns the position of the key: of a candidate's key, the position of the candidate.
  index_t key_position(const Query& query, index_t key) const {
    const index_t candidate = key - committed(query);
    return candidate < 0 ? key : committed(query) + offset(query, candidate);
  }
  /// Throws std::invalid_argument unless the call has T queries, at least T keys, and as many batch entries as trees.
  /// Exception: one tree serves any number of batch entries.
  void check(const QueryShape& shape) const {
    if (trees_ != 1 && trees_ != shape.batch)
      detail::fail_value("Tree", "parents", "has trees", trees_, "batch entries are", shape.batch);
    detail::check_equal("Tree", "parents", "has candidates", candidates_, "queries are", shape.queries);
    if (candidates_ > shape.keys)
      detail::fail_value("Tree", "parents", "has candidates", candidates_, "keys are", shape.keys);
  }

 private:
  static constexpr index_t unbounded = std::numeric_limits<index_t>::max();

  template <class Parents>
  Tree(index_t trees, index_t candidates, index_t window, const Parents& parents)
      : trees_(trees), candidates_(candidates), window_(window) {
    if (window < 1) detail::fail_value("Tree", "window", "is", window, "must be at least", 1);
    const auto rows = static_cast<std::size_t>(trees_ * candidates_);
    offsets_.reserve(rows);
    branches_.resize(rows * static_cast<std::size_t>(words()));
    for (index_t tree = 0; tree < trees_; ++tree) {
      for (index_t i = 0; i < candidates_; ++i) add(parents, tree, i);
    }
  }

  template <class Parents>
  void add(const Parents& parents, index_t tree, index_t candidate) {
    const auto parent = [&](index_t i) { return parents(tree, i); };
    if (parent(candidate) < -1 || parent(candidate) >= candidate) {
      detail::fail_format("ssmax::Tree: parents of tree %td has %td for candidate %td, must be -1 to %td",
                          tree, parent(candidate), candidate, candidate - 1);
    }
    std::uint64_t* const words_of_branch = branches_.data() + row(tree, candidate) * words();
    index_t depth = 0;
    for (index_t i = candidate; i >= 0; i = parent(i), ++depth) {
      if (depth < window_) words_of_branch[i / 64] |= std::uint64_t{1} << (i % 64);
    }
    offsets_.push_back(depth - 1);
  }

  static index_t committed(const Query& query) { return query.shape.keys - query.shape.queries; }
  /// Returns the first visible committed key, or else the number of committed keys.
  index_t first(const Query& query) const {
    const index_t position = query_position(query);
    return window_ > position ? 0 : std::min(position + 1 - window_, committed(query));
  }
  index_t words() const { return (candidates_ + 63) / 64; }
  index_t row(index_t tree, index_t candidate) const {
    return (trees_ == 1 ? 0 : tree) * candidates_ + candidate;
  }
  index_t offset(const Query& query, index_t candidate) const {
    return offsets_[static_cast<std::size_t>(row(query.batch, candidate))];
  }
  /// Returns the bitmap of the visible candidates.
  const std::uint64_t* branch(const Query& query) const {
    return branches_.data() + row(query.batch, query.index) * words();
  }

  index_t trees_, candidates_, window_;
  std::vector<index_t> offsets_;         // [trees][candidates]
  std::vector<std::uint64_t> branches_;  // [trees][candidates][words]
};

SSMAX_END

/// @}
