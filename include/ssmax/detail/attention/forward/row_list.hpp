// Defines RowList, the addresses of keys and values in short runs, such as pages. Kernels read all of them at once.
#pragma once

#include <algorithm>

#include "../../kernels/decode.hpp"
#include "../operands/prefetch.hpp"
#include "../terms/problem.hpp"

SSMAX_BEGIN_DETAIL

/// The listed rows of the tasks of one thread. Rows are numbered as the keys of their chunk. If the heads of a source
/// have known distances, rows of kv head 0 are listed, and serve all kv heads.
///
/// In a list of more than listed_ahead keys, the last keys prefetch the first values, and `list` prefetches the first
/// keys. In a shorter list, `list` prefetches all rows. A lane that computes one kv head after the other prefetches
/// them in the kernels of the task before. Measured: docs/measured.md.
template <class Compute>
class RowList {
 public:
  /// `k_rows` and `v_rows` have key_chunk + listed_ahead addresses. Under a mask with runs, the list does not prefetch
  /// the rows of the next sequence.
  RowList(const Problem<Compute>& problem, bool has_runs, const std::byte** k_rows, const std::byte** v_rows)
      : problem_(problem), has_runs_(has_runs), k_rows_(k_rows), v_rows_(v_rows) {}

  /// Selects the kv head of a task. Returns whether the rows of its keys are listed: the kernels take listed rows, and
  /// runs are short.
  bool select(index_t batch, index_t kv_head, KeyRange keys) {
    batch_ = batch;
    kv_head_ = kv_head;
    const AnyKeys<Compute>& source = problem_.keys;
    return source.k_type().listed_logits != nullptr && source.v_type().accumulate_listed != nullptr &&
           (holds(keys) || has_short_runs(source, batch, kv_head, keys, short_run));
  }

  /// Lists the rows of keys and values from number `first` on.
  void list(KeyRange keys, index_t first) {
    const AnyKeys<Compute>& source = problem_.keys;
    const std::byte **k = k_rows_ + first, **v = v_rows_ + first;
    const index_t count = keys.size(), k_bytes = source.k_row() * source.k_size(),
                  v_bytes = source.v_row() * source.v_size();
    const HeadDistance& distance = source.head_distance();
    if (!holds(keys) || last_.first != first)
      source.find_rows(batch_, distance.is_known ? 0 : kv_head_, keys, k, v);
    const index_t task = batch_ * problem_.kv_heads() + kv_head_;
    const bool follows = task == last_.task + 1, is_prefetched = follows && last_.prefetches_next;
    last_ = {task,
             batch_,
             first,
             keys,
             distance.is_known ? kv_head_ * distance.k : 0,
             distance.is_known ? kv_head_ * distance.v : 0};
    if (count > listed_ahead) {
      std::fill_n(v + count, listed_ahead, v[count - 1]);
      for (index_t i = 0; i < listed_ahead; ++i) k[count + i] = v[i] + (last_.v_bytes - last_.k_bytes);
      return prefetch_rows(k, listed_ahead, last_.k_bytes, k_bytes);
    }
    if (!is_prefetched) {
      prefetch_rows(k, count, last_.k_bytes, k_bytes);
      prefetch_rows(v, count, last_.v_bytes, v_bytes);
    }
    if (!follows || count * (k_bytes + v_bytes) > max_next_bytes) return;
    // The next task computes the next kv head or, after the last one, the next sequence.
    if (kv_head_ + 1 < problem_.kv_heads()) {
      last_.prefetches_next = distance.is_known;
    } else if (batch_ + 1 < problem_.sequences() && !has_runs_) {
      KeyRange next = source.stored(batch_ + 1);
      next.end = std::min(next.end, next.begin + count);
      if (next.size() <= 0) return;
      source.find_rows(batch_ + 1, 0, next, k + count, v + count);
      std::fill_n(k + count + next.size(), count - next.size(), k[count]);
      std::fill_n(v + count + next.size(), count - next.size(), v[count]);
      last_.prefetches_next = last_.is_last_head = true;
    }
  }

  /// Return `count` listed keys or values from number `first` on, with the rows that they prefetch.
  ListedRows<void> keys(index_t first, index_t count) const {
    return rows({k_rows_ + first, last_.k_bytes, count, problem_.width()}, problem_.keys.head_distance().k);
  }
  ListedRows<void> values(index_t first, index_t count) const {
    return rows({v_rows_ + first, last_.v_bytes, count, problem_.value_width()},
                problem_.keys.head_distance().v);
  }

  /// Return the same of a kv head of a task of several, whose distances are known. They prefetch the same keys of the
  /// next kv head. The last kv head of the task prefetches the next keys of the first one.
  ListedRows<void> keys_of(index_t kv_head, bool is_last, index_t first, index_t count) const {
    return rows_of_head({k_rows_ + first, 0, count, problem_.width()}, kv_head, is_last,
                        problem_.keys.head_distance().k);
  }
  ListedRows<void> values_of(index_t kv_head, bool is_last, index_t first, index_t count) const {
    return rows_of_head({v_rows_ + first, 0, count, problem_.value_width()}, kv_head, is_last,
                        problem_.keys.head_distance().v);
  }

 private:
  /// Returns whether the rows of a range are listed for all kv heads.
  bool holds(KeyRange keys) const {
    return last_.batch == batch_ && last_.keys.begin == keys.begin && last_.keys.end == keys.end &&
           problem_.keys.head_distance().is_known;
  }

  /// Adds the rows that `rows` prefetch.
  ListedRows<void> rows(ListedRows<void> rows, index_t distance) const {
    if (rows.count > listed_ahead) {
      rows.ahead = rows.rows + listed_ahead;
      rows.ahead_bytes = rows.bytes;
    } else if (last_.prefetches_next) {
      rows.ahead = last_.is_last_head ? rows.rows + last_.keys.size() : rows.rows;
      rows.ahead_bytes = last_.is_last_head ? 0 : rows.bytes + distance;
    }
    return rows;
  }

  ListedRows<void> rows_of_head(ListedRows<void> rows, index_t kv_head, bool is_last,
                                index_t distance) const {
    rows.bytes = kv_head * distance;
    if (is_last && last_.keys.size() <= listed_ahead) return rows;  // no rows are listed after the last key
    rows.ahead = is_last ? rows.rows + rows.count : rows.rows;
    rows.ahead_bytes = (is_last ? kv_head_ : kv_head + 1) * distance;
    return rows;
  }

  /// The last rows that were listed.
  struct Last {
    index_t task = -2, batch = -1, first = 0;  // task: counts the kv heads of all sequences
    KeyRange keys{};
    index_t k_bytes = 0, v_bytes = 0;  // from the listed rows to those of the task
    bool prefetches_next = false;      // the rows of the next task
    bool is_last_head = false;         // these rows are listed after those of the task
  };

  const Problem<Compute>& problem_;
  const bool has_runs_;
  const std::byte **k_rows_, **v_rows_;
  index_t batch_ = 0, kv_head_ = 0;
  Last last_;
};

SSMAX_END
