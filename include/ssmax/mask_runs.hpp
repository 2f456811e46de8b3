/// @defgroup mask_runs Masks with runs of visible keys (mask_runs.hpp)
/// @ingroup mask
/// Masks that provide their runs of visible keys. Attention skips the key blocks between the runs.
///
///     attention(arguments, SSMax<float>{s}, Causal{} & BlockSparse(blocks, bitmap));
///
/// query.hpp describes the optional members `run` and `count` of such a mask.

/// @defgroup tree_mask Trees of candidates (mask_runs.hpp)
/// @ingroup mask
/// The mask of speculative decoding with a tree: one call verifies many candidates for the next tokens.
///
///     const Tree tree(parents);                                 // {-1, 0, 0, 1}: 1 and 2 follow 0, 3 follows 1
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
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/checks/matrix.hpp"
#include "detail/checks/views.hpp"
#include "detail/memory/bits.hpp"
#include "mask.hpp"
#include "query.hpp"
#include "view.hpp"

/// @addtogroup mask_runs
/// @{
SSMAX_BEGIN_DATA

/// The shapes of the blocks and bitmaps of a BlockSparse mask.
struct SparseBlocks {
  index_t query_block = 64,  ///< Query positions per block, at least 1.
      key_block = 64;        ///< Keys per block, at least 1; multiples of 64 are fastest.
  index_t query_blocks = 0,  ///< Rows of a bitmap; must cover the last position.
      key_blocks = 0;        ///< Bits of a row; must cover the last key.
  index_t bitmaps = 1;  ///< 1 for all heads, or one per kv head or head; must divide the number of heads.

  /// Returns the number of words of a row.
  SSMAX_INLINE constexpr index_t row_words() const { return key_blocks / 64 + (key_blocks % 64 > 0 ? 1 : 0); }
  /// Returns the number of words of all bitmaps: bitmaps · query_blocks · row_words().
  SSMAX_INLINE constexpr index_t words() const { return bitmaps * query_blocks * row_words(); }
};

/// A mask by blocks. A query at position p attends to the key blocks whose bits are set in row p / query_block of its
/// head's bitmap.
///
/// The bitmap is [bitmaps][query_blocks][row_words] words. Key block j is bit j % 64 of word j / 64 of a row. Head h
/// reads bitmap h / (heads / bitmaps). All batch entries share the bitmaps. Positions are those of Query::position().
/// The mask does not mask keys after the query: for that, join it with Causal by &.
class BlockSparse {
 public:
  /// Stores the shapes and the span, which must outlive the mask.
  SSMAX_INLINE constexpr BlockSparse(const SparseBlocks& blocks, KeptSpan<const std::uint64_t> bitmap)
      : blocks_(blocks),
        bitmap_(bitmap),
        query_shift_(shift_of(blocks.query_block)),
        key_shift_(shift_of(blocks.key_block)) {}

  /// Returns [0, keys).
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
  /// Returns true if the bit of the key's block is set.
  SSMAX_INLINE constexpr bool sees(const Query& query, index_t key) const {
    const index_t block = key_block_of(key);
    return detail::has_bit(row(query), block);
  }
  /// Returns the next run of blocks whose bits are set.
  SSMAX_INLINE constexpr KeyRange run(const Query& query, index_t from) const {
    const std::uint64_t* words = row(query);
    const index_t blocks = blocks_of(query.shape.keys, blocks_.key_block);  // products cannot overflow below
    const index_t begin = next(words, key_block_of(from), 0);
    if (begin >= blocks) return {from, from};
    const index_t end = std::min(next(words, begin, ~std::uint64_t{0}), blocks);
    return {std::max(from, begin * blocks_.key_block), std::min(end * blocks_.key_block, query.shape.keys)};
  }
  /// Returns n. O(words of a row).
  SSMAX_INLINE constexpr index_t count(const Query& query) const {
    const std::uint64_t* words = row(query);
    const index_t whole = query.shape.keys / blocks_.key_block;  // number of whole blocks
    index_t n = 0;
    for (index_t i = 0; i < whole / 64; ++i) n += std::popcount(words[i]);
    if (whole % 64 != 0) n += std::popcount(words[whole / 64] << (64 - whole % 64));
    n *= blocks_.key_block;
    const index_t rest = query.shape.keys % blocks_.key_block;
    return rest > 0 && detail::has_bit(words, whole) ? n + rest : n;
  }
  /// Returns true if both queries read the same row of the same bitmap.
  SSMAX_INLINE constexpr bool same_runs(const Query& query, const Query& other) const {
    if (query.head != other.head && blocks_.bitmaps > 1) return row(query) == row(other);
    return query_block_of(query) == query_block_of(other);
  }
  /// Throws std::invalid_argument unless block sizes are at least 1, bitmaps divide the heads, blocks cover all
  /// positions and keys, and the span has words() words.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_at_least("BlockSparse", "query_block", blocks_.query_block, 1);
    detail::check_at_least("BlockSparse", "key_block", blocks_.key_block, 1);
    detail::check_at_least("BlockSparse", "bitmaps", blocks_.bitmaps, 1);
    detail::check_at_least("BlockSparse", "key_blocks", blocks_.key_blocks,
                           blocks_of(shape.keys, blocks_.key_block));
    const bool has_rows = shape.queries > 0 && shape.keys > 0;
    detail::check_at_least("BlockSparse", "query_blocks", blocks_.query_blocks,
                           has_rows ? blocks_of(shape.keys, blocks_.query_block) : 0);
    if (shape.heads % blocks_.bitmaps != 0) {
      detail::fail_value("BlockSparse", "bitmaps", "are", blocks_.bitmaps, "must divide the heads,",
                         shape.heads);
    }
    // The product of words() may overflow, so this check divides.
    const auto size = static_cast<index_t>(bitmap_.size());
    const index_t words = blocks_.row_words(), rows = blocks_.query_blocks;
    const bool fits = words == 0 || rows == 0 ? size == 0
                                              : size % words == 0 && size / words % rows == 0 &&
                                                    size / words / rows == blocks_.bitmaps;
    if (!fits) {
      detail::fail_format(
          "ssmax::BlockSparse: bitmap has extent %td, must be bitmaps * query_blocks * words of a row: %td * "
          "%td * %td",
          size, blocks_.bitmaps, rows, words);
    }
  }

 private:
  SSMAX_INLINE static constexpr index_t blocks_of(index_t extent, index_t block) {
    return extent / block + (extent % block > 0 ? 1 : 0);
  }
  /// Returns log2 of a power of two, -1 for other numbers. Shifts are faster than divisions.
  SSMAX_INLINE static constexpr int shift_of(index_t block) {
    const auto bits = static_cast<std::uint64_t>(block);
    return std::has_single_bit(bits) ? std::countr_zero(bits) : -1;
  }
  SSMAX_INLINE constexpr index_t key_block_of(index_t key) const {
    return key_shift_ >= 0 ? key >> key_shift_ : key / blocks_.key_block;
  }
  /// Returns the block of a query. A query before the first key is in the first block.
  SSMAX_INLINE constexpr index_t query_block_of(const Query& query) const {
    const index_t position = std::max<index_t>(0, query.position());
    return query_shift_ >= 0 ? position >> query_shift_ : position / blocks_.query_block;
  }
  /// Returns the row of the bitmap that a query reads.
  SSMAX_INLINE constexpr const std::uint64_t* row(const Query& query) const {
    const index_t bitmap = blocks_.bitmaps == 1 ? 0 : query.head / (query.shape.heads / blocks_.bitmaps);
    return bitmap_.data() + (bitmap * blocks_.query_blocks + query_block_of(query)) * blocks_.row_words();
  }
  /// Returns the first block at or after `block` whose bit, xored with `flip`, is set, or else key_blocks.
  SSMAX_INLINE constexpr index_t next(const std::uint64_t* words, index_t block, std::uint64_t flip) const {
    return detail::next_bit(words, block, blocks_.key_blocks, flip);
  }

  SparseBlocks blocks_;
  std::span<const std::uint64_t> bitmap_;
  int query_shift_, key_shift_;  // for block sizes that are powers of two; else -1
};

SSMAX_END

SSMAX_BEGIN_CODE

/// A mask with the visible keys of a matrix, stored as runs. The constructor reads the matrix [batch, heads, queries,
/// keys] once. You may change the matrix afterwards. MatrixMask reads the matrix for each logit instead.
///
/// Memory: 16 bytes per run and per row. A dimension of stride 0 is stored once.
class MatrixRuns {
 public:
  /// Reads a matrix of bool, or an additive mask of float, double, half or bfloat16. Throws std::invalid_argument for a
  /// view that view.hpp rules out, but accepts any last stride.
  template <class T>
  explicit MatrixRuns(const View<T, 4>& matrix, HeadsOfMatrix heads = HeadsOfMatrix::each) : heads_(heads) {
    detail::check_strided_view("MatrixRuns", "the matrix", matrix);
    for (int i = 0; i < 4; ++i) extents_[i] = matrix.extent(i);
    for (int i = 0; i < 3; ++i)
      rows_[i] = matrix.stride(i) == 0 ? std::min<index_t>(1, extents_[i]) : extents_[i];
    begins_.push_back(0);
    for (index_t b = 0; b < rows_[0]; ++b) {
      for (index_t h = 0; h < rows_[1]; ++h) {
        for (index_t q = 0; q < rows_[2]; ++q) read_row(matrix, b, h, q);
      }
    }
  }

  /// Returns the range from the first to the last visible key.
  KeyRange keys(const Query& query) const {
    const Runs runs = runs_of(query);
    if (runs.empty()) return {};
    return {runs.front().keys.begin, runs.back().keys.end};
  }
  /// Returns true if the key is visible. O(log runs).
  bool sees(const Query& query, index_t key) const {
    const KeyRange next = run(query, key);
    return next.size() > 0 && next.begin == key;
  }
  /// Returns the next run. O(log runs).
  KeyRange run(const Query& query, index_t from) const {
    const Runs runs = runs_of(query);
    const auto next = std::ranges::upper_bound(runs, from, {}, [](const Run& run) { return run.keys.end; });
    if (next == runs.end()) return {from, from};
    return {std::max(from, next->keys.begin), next->keys.end};
  }
  /// Returns n.
  index_t count(const Query& query) const {
    const Runs runs = runs_of(query);
    return runs.empty() ? 0 : runs.back().count;
  }
  /// Returns true if both queries have the same row of the matrix. Rows count as equal only through strides of 0.
  bool same_runs(const Query& query, const Query& other) const { return row_of(query) == row_of(other); }
  /// Throws std::invalid_argument unless the matrix has the extents of the queries and keys.
  void check(const QueryShape& shape) const {
    const index_t extents[] = {shape.batch, shape.heads, shape.queries, shape.keys};
    const char* names[] = {"batch entries are", "heads are", "queries are", "keys are"};
    for (int i = 0; i < 4; ++i) {
      if (extents_[i] == extents[i] || (i == 1 && detail::fits_heads(extents_[i], extents[i], heads_)))
        continue;
      const char* hint = i == 1 && heads_ == HeadsOfMatrix::modulo ? " (must be a multiple)"
                         : extents_[i] == 1                        ? " (stride 0 broadcasts)"
                                                                   : "";
      detail::fail_format("ssmax::MatrixRuns: the matrix has extent %td, %s %td%s", extents_[i], names[i],
                          extents[i], hint);
    }
  }

 private:
  struct Run {
    KeyRange keys;
    index_t count;  // of visible keys up to the end of the run
  };
  using Runs = std::span<const Run>;

  template <class T>
  void read_row(const View<T, 4>& matrix, index_t b, index_t h, index_t q) {
    index_t count = 0;
    for (index_t key = 0; key < extents_[3];) {
      KeyRange run{key, key};
      while (run.end < extents_[3] && detail::shows(matrix(b, h, q, run.end))) ++run.end;
      if (run.size() > 0) runs_.push_back({run, count += run.size()});
      key = run.end + 1;
    }
    begins_.push_back(runs_.size());
  }

  /// Returns the index of a query's row among the stored rows.
  std::size_t row_of(const Query& query) const {
    const auto at = [this](int i, index_t index) { return rows_[i] == 1 ? 0 : index; };
    const index_t head = detail::matrix_of_head(query.head, extents_[1]);
    return static_cast<std::size_t>((at(0, query.batch) * rows_[1] + at(1, head)) * rows_[2] +
                                    at(2, query.index));
  }
  Runs runs_of(const Query& query) const {
    const std::size_t row = row_of(query);
    return Runs(runs_).subspan(begins_[row], begins_[row + 1] - begins_[row]);
  }

  HeadsOfMatrix heads_;
  index_t extents_[4], rows_[3];     // of the matrix; rows_: 1 for a stride of 0
  std::vector<std::size_t> begins_;  // [rows + 1]: the first run of each row
  std::vector<Run> runs_;
};

SSMAX_END
/// @}

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
