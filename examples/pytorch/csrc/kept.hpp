// Tables that are kept from call to call.
#pragma once

#include <algorithm>
#include <bit>
#include <list>
#include <memory>
#include <mutex>

#include "tensors.hpp"

namespace ssmax_torch {

/// The last `most` tables that were asked for, by what they were made of. A table of fewer positions than are asked
/// for is made anew, with room for a sequence that grows. Any thread may ask.
template <class Key, class Table>
class Kept {
 public:
  explicit Kept(std::size_t most) : most_(most) {}

  /// make(positions) makes the table.
  template <class Make>
  std::shared_ptr<const Table> get(const Key& key, index_t positions, const Make& make) {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(tables_, key, &Entry::key);
    if (found != tables_.end()) {
      tables_.splice(tables_.begin(), tables_, found);
      if (found->positions >= positions) return found->table;
    }
    const auto least = static_cast<std::size_t>(std::max<index_t>(positions, 256));
    const index_t rounded =
        least > (std::size_t{1} << 40) ? positions : static_cast<index_t>(std::bit_ceil(least));
    auto table = std::make_shared<const Table>(make(rounded));
    if (found != tables_.end()) tables_.pop_front();
    tables_.push_front({key, rounded, table});
    if (tables_.size() > most_) tables_.pop_back();
    return table;
  }

 private:
  struct Entry {
    Key key;
    index_t positions;
    std::shared_ptr<const Table> table;
  };

  const std::size_t most_;
  std::mutex mutex_;
  std::list<Entry> tables_;  // the one asked for last first
};

}  // namespace ssmax_torch
