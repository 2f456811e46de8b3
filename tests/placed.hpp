// A tensor that lies anywhere.
#pragma once

#include <algorithm>
#include <array>
#include <ssmax/view.hpp>
#include <vector>

#include "attention_problem.hpp"

namespace attention_problem {

/// A tensor with dimensions in any order in memory, each with a gap behind it, and any of them running
/// backwards.
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
  template <class Visit>
  void for_each(const Visit& visit) {
    const View<T, 4> all = view();
    for (index_t b = 0; b < extents[0]; ++b) {
      for (index_t h = 0; h < extents[1]; ++h) {
        for (index_t i = 0; i < extents[2]; ++i) {
          for (index_t c = 0; c < extents[3]; ++c) visit(all(b, h, i, c));
        }
      }
    }
  }
  void fill(const std::vector<T>& values) {
    auto next = values.begin();
    for_each([&](T& element) { element = *next++; });
  }
  /// How many elements differ from `expected`, and how much of the rest is not `between` any more.
  int differences(const std::vector<T>& expected, T between) {
    auto next = expected.begin();
    int wrong = 0;
    for_each([&](T& element) {
      wrong += same_bits(element, *next++) ? 0 : 1;
      element = between;
    });
    for (const T element : storage) wrong += same_bits(element, between) ? 0 : 1;
    return wrong;
  }
};

}  // namespace attention_problem
