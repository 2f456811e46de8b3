// Functions over one row, by value, for rows of special values.
#pragma once

#include <array>
#include <cmath>
#include <limits>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "reference.hpp"

namespace special_values {

using namespace ssmax;
using reference::Real;
using reference::worse;

inline constexpr float inf = std::numeric_limits<float>::infinity();
inline constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// Lengths on both sides of every vector width, so that a value sits in full vectors and in tails.
inline constexpr std::array<index_t, 14> sizes{1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 100, 257, 1031};

template <class T>
bool is_nan(T value) {
  return std::isnan(reference::widen(value));
}

template <class T, class Scaling = Softmax>
std::vector<T> softmax(const std::vector<T>& logits, const Scaling& scaling = {}) {
  std::vector<T> y(logits.size(), reference::narrow<T>(-7));
  ssmax::softmax(View<const T, 1>(logits), View<T, 1>(y), scaling);
  return y;
}

template <class T, class Scaling = Softmax>
std::vector<T> log_softmax(const std::vector<T>& logits, const Scaling& scaling = {}) {
  std::vector<T> y(logits.size(), reference::narrow<T>(7));
  ssmax::log_softmax(View<const T, 1>(logits), View<T, 1>(y), scaling);
  return y;
}

template <class T, class Scaling = Softmax>
T logsumexp(const std::vector<T>& logits, const Scaling& scaling = {}) {
  std::vector<T> lse(1, reference::narrow<T>(-7));
  ssmax::logsumexp(View<const T, 2>(logits.data(), {1, static_cast<index_t>(logits.size())}), View<T, 1>(lse),
                   scaling);
  return lse[0];
}

}  // namespace special_values
