// Sequences of different lengths in one call: packed as [tokens, heads, channel], padded as [sequence, head, row,
// channel]. `alone` views the rows of one sequence.
#pragma once

#include <set>

#include "attention_problem.hpp"
#include "test.hpp"

namespace sequence_lengths_problem {

using namespace ssmax;
using attention_problem::Compute;

struct Sizes {
  index_t heads, kv_heads, d, dv;
};

/// The lengths of the sequences in the two forms that the library takes.
class Sequences {
 public:
  std::vector<index_t> queries, keys;
  bool is_packed;

  Sequences(std::vector<index_t> q, std::vector<index_t> k, bool packed)
      : queries(std::move(q)), keys(std::move(k)), is_packed(packed) {
    const auto add_up = [](const std::vector<index_t>& lengths) {
      std::vector<index_t> sums{0};
      for (const index_t length : lengths) sums.push_back(sums.back() + length);
      return sums;
    };
    first_queries_ = add_up(queries);
    first_keys_ = add_up(keys);
  }

  index_t count() const { return static_cast<index_t>(queries.size()); }
  index_t most_queries() const { return *std::ranges::max_element(queries); }
  index_t most_keys() const { return *std::ranges::max_element(keys); }
  SequenceLengths lengths() const {
    return is_packed ? SequenceLengths::packed(first_queries_, first_keys_)
                     : SequenceLengths::padded(queries, keys);
  }
  /// [1, heads, all rows, width] in the order [row, head] unless width is 1, or [sequences, heads, most rows + 3,
  /// width].
  std::array<index_t, 4> extents(bool of_queries, index_t heads, index_t width) const {
    const std::vector<index_t>& first = of_queries ? first_queries_ : first_keys_;
    if (is_packed) return {1, heads, first.back(), width};
    return {count(), heads, (of_queries ? most_queries() : most_keys()) + 3, width};
  }
  template <class T>
  View<T, 4> view(T* data, bool of_queries, index_t heads, index_t width) const {
    const std::array<index_t, 4> e = extents(of_queries, heads, width);
    if (is_packed && width > 1) return {data, e, {0, width, heads * width, 1}};
    return {data, e};
  }
  /// The rows of one sequence, as one batch entry.
  template <class T>
  View<T, 4> alone(const View<T, 4>& all, bool of_queries, index_t b) const {
    const auto i = static_cast<std::size_t>(b);
    const index_t count_rows = of_queries ? queries[i] : keys[i];
    const index_t offset =
        is_packed ? (of_queries ? first_queries_ : first_keys_)[i] * all.stride(2) : b * all.stride(0);
    return {all.data_handle() + offset,
            {1, all.extent(1), count_rows, all.extent(3)},
            {0, all.stride(1), all.stride(2), 1}};
  }
  static std::size_t size(const std::array<index_t, 4>& e) {
    return static_cast<std::size_t>(e[0] * e[1] * e[2] * e[3]);
  }

 private:
  std::vector<index_t> first_queries_, first_keys_;
};

/// Tensors of a call. Rows of the padding hold NaN.
template <class T>
struct Tensor {
  const Sequences* sequences;
  bool of_queries;
  index_t heads, width;
  std::vector<T> data;

  Tensor(const Sequences& s, bool queries, index_t h, index_t w)
      : sequences(&s),
        of_queries(queries),
        heads(h),
        width(w),
        data(s.size(s.extents(queries, h, w)), T(-77)) {}

  View<T, 4> view() { return sequences->view(data.data(), of_queries, heads, width); }
  View<const T, 4> view() const { return sequences->view(data.data(), of_queries, heads, width); }
  View<T, 4> alone(index_t b) { return sequences->alone(view(), of_queries, b); }
  View<const T, 4> alone(index_t b) const { return sequences->alone(view(), of_queries, b); }
  /// One number per row.
  View<T, 3> numbers() { return without_channels(view()); }
  View<T, 3> numbers_alone(index_t b) { return without_channels(alone(b)); }
  View<const T, 3> numbers() const { return without_channels(view()); }
  View<const T, 3> numbers_alone(index_t b) const { return without_channels(alone(b)); }

  static Tensor random(const Sequences& s, bool queries, index_t heads, index_t width, unsigned seed) {
    Tensor result(s, queries, heads, width);
    std::fill(result.data.begin(), result.data.end(), T(attention_problem::nan<float>));
    for (index_t b = 0; b < s.count(); ++b) {
      const View<T, 4> rows = result.alone(b);
      const std::vector<T> numbers =
          reference::normals<T>(static_cast<std::size_t>(rows.size()), seed + static_cast<unsigned>(b));
      auto next = numbers.begin();
      reference::for_each_index(rows.extents(), [&](auto... at) { rows(at...) = *next++; });
    }
    return result;
  }
  bool operator==(const Tensor& other) const { return same_bits(data, other.data); }

 private:
  template <class U>
  static View<U, 3> without_channels(const View<U, 4>& v) {
    return {
        v.data_handle(), {v.extent(0), v.extent(1), v.extent(2)}, {v.stride(0), v.stride(1), v.stride(2)}};
  }
};

/// Calls attend(b, options) for each sequence b alone. Returns the paths of these calls.
template <class T, class Attend>
std::set<Path> paths_alone(const Sequences& sequences, AttentionOptions<T> options, const Attend& attend) {
  std::set<Path> paths;
  for (index_t b = 0; b < sequences.count(); ++b) {
    Explanation explanation;
    options.explanation = &explanation;
    attend(b, options);
    if (explanation.path != Path::none) paths.insert(explanation.path);
  }
  return paths;
}

}  // namespace sequence_lengths_problem
