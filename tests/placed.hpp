// Tensors that lie anywhere, or are columns of a packed matrix.
#pragma once

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem {

template <class T, class F>
void for_each(const View<T, 4>& view, const F& f) {
  reference::for_each_index(view.extents(), [&](auto... at) { f(view(at...)); });
}
template <class T>
void fill(const View<T, 4>& view, const std::vector<T>& values) {
  auto next = values.begin();
  for_each(view, [&](T& element) { element = *next++; });
}
/// Returns the number of elements that differ from `expected`.
template <class T>
int differences(const View<T, 4>& view, const std::vector<T>& expected) {
  auto next = expected.begin();
  int wrong = 0;
  for_each(view, [&](const T& element) { wrong += same_bits(element, *next++) ? 0 : 1; });
  return wrong;
}

/// Columns of [batch, position, q heads · d + k heads · d + v heads · dv].
template <class T>
struct PackedQkv {
  Shape s;
  std::vector<T> storage;

  PackedQkv(const Shape& shape, T value)
      : s(shape), storage(static_cast<std::size_t>(s.batch * s.queries * pitch()), value) {}
  index_t pitch() const { return (s.heads + s.kv_heads) * s.d + s.kv_heads * s.dv; }
  View<T, 4> columns(index_t first, index_t heads, index_t width) {
    return {
        storage.data() + first, {s.batch, heads, s.queries, width}, {s.queries * pitch(), width, pitch(), 1}};
  }
  View<T, 4> q() { return columns(0, s.heads, s.d); }
  View<T, 4> k() { return columns(s.heads * s.d, s.kv_heads, s.d); }
  View<T, 4> v() { return columns((s.heads + s.kv_heads) * s.d, s.kv_heads, s.dv); }
  void fill(const Problem<T>& problem) {
    attention_problem::fill(q(), problem.q);
    attention_problem::fill(k(), problem.k);
    attention_problem::fill(v(), problem.v);
  }
};

/// A tensor with dimensions in any order in memory, each with a gap behind it, and any of them running backwards.
template <class T>
struct Placed {
  std::vector<T> storage;
  index_t first = 0;
  std::array<index_t, 4> extents, strides{};

  /// order: dimensions 0, 1 and 2, the innermost first; channels come before them.
  Placed(const std::array<index_t, 4>& e, const std::array<std::size_t, 3>& order, index_t gap,
         const std::array<bool, 3>& backwards, T between)
      : extents(e) {
    index_t stride = extents[3] + gap;
    strides[3] = 1;
    for (const std::size_t dimension : order) {
      strides[dimension] = stride;
      stride = stride * extents[dimension] + gap;
    }
    first = 1;
    for (std::size_t i = 0; i < 3; ++i) {
      if (!backwards[i]) continue;
      first += (extents[i] - 1) * strides[i];
      strides[i] = -strides[i];
    }
    storage.assign(static_cast<std::size_t>(stride + 2), between);
  }
  View<T, 4> view() { return {storage.data() + first, extents, strides}; }
  void fill(const std::vector<T>& values) { attention_problem::fill(view(), values); }
  /// How many elements differ from `expected`, and how much of the rest is not `between` any more.
  int differences(const std::vector<T>& expected, T between) {
    int wrong = attention_problem::differences(view(), expected);
    attention_problem::for_each(view(), [&](T& element) { element = between; });
    for (const T element : storage) wrong += same_bits(element, between) ? 0 : 1;
    return wrong;
  }
};

}  // namespace attention_problem
