// Computes some rows of attention in double, and the errors of a result against them.
#pragma once

#include <cmath>
#include <limits>
#include <ssmax/half.hpp>
#include <vector>

#include "attention.hpp"
#include "reference.hpp"

namespace ssmax_bench {

// The formula softmax(multiplier(n) R q (R k)^T / sqrt(width)) v. R is the rotary embedding, or the identity.
struct AttentionFormula {
  double (*multiplier)(index_t n);
  bool rope;
  bool rounds_rotation = false;  // rotated q and k are rounded to bfloat16
};

namespace detail {

inline double read(const void* data, ElementType type, index_t i) {
  if (type == ElementType::f32) return static_cast<double>(static_cast<const float*>(data)[i]);
  if (type == ElementType::f16) return static_cast<double>(static_cast<const ssmax::half*>(data)[i]);
  return static_cast<double>(static_cast<const ssmax::bfloat16*>(data)[i]);
}

// A table of cos and sin of position times 10000^(-2 i / width), for the half-split pairing.
class Rotation {
 public:
  Rotation(index_t positions, index_t width) : half_(width / 2) {
    for (index_t position = 0; position < positions; ++position) {
      for (index_t i = 0; i < half_; ++i) {
        const double frequency =
            std::pow(10'000.0, -2.0 * static_cast<double>(i) / static_cast<double>(width));
        cosine_.push_back(std::cos(static_cast<double>(position) * frequency));
        sine_.push_back(std::sin(static_cast<double>(position) * frequency));
      }
    }
  }

  void rotate(std::vector<double>& row, index_t position) const {
    for (index_t i = 0; i < half_; ++i) {
      const auto at = static_cast<std::size_t>(position * half_ + i);
      double& first = row[static_cast<std::size_t>(i)];
      double& second = row[static_cast<std::size_t>(i + half_)];
      const double turned = first * cosine_[at] - second * sine_[at];
      second = second * cosine_[at] + first * sine_[at];
      first = turned;
    }
  }

 private:
  index_t half_;
  std::vector<double> cosine_;
  std::vector<double> sine_;
};

// Returns the largest error of one query's result, relative to sum(p |v|), the size of its terms.
inline double attention_row_error(const AttentionArguments& a, const AttentionFormula& formula,
                                  const Rotation& rotation, index_t head, index_t query) {
  const index_t width = a.shape.width;
  const index_t n = a.shape.n;
  const index_t position = query + n - a.shape.queries;
  const index_t first = a.visibility.first(position);
  const index_t end = a.visibility.end(position, n);
  const index_t kv = head / a.shape.group() * n * width;
  const index_t q_row = (head * a.shape.queries + query) * width;
  const auto size = static_cast<std::size_t>(width);
  const auto load = [&](std::vector<double>& row, const void* data, index_t at, index_t row_position) {
    for (index_t i = 0; i < width; ++i) row[static_cast<std::size_t>(i)] = read(data, a.type, at + i);
    if (formula.rope) rotation.rotate(row, row_position);
    if (formula.rounds_rotation) {
      for (double& x : row) x = static_cast<double>(ssmax::bfloat16(static_cast<float>(x)));
    }
  };

  std::vector<double> q(size);
  std::vector<double> k(size);
  load(q, a.q, q_row, position);
  std::vector<double> logits;
  double max = -std::numeric_limits<double>::infinity();
  const double multiplier = formula.multiplier(end - first) / std::sqrt(static_cast<double>(width));
  for (index_t key = first; key < end; ++key) {
    load(k, a.k, kv + key * width, key);
    double dot = 0;
    for (std::size_t i = 0; i < size; ++i) dot += q[i] * k[i];
    logits.push_back(multiplier * dot);
    max = std::max(max, logits.back());
  }

  std::vector<double> sums(size);
  std::vector<double> sizes(size);
  double total = 0;
  for (index_t key = first; key < end; ++key) {
    const double weight = std::exp(logits[static_cast<std::size_t>(key - first)] - max);
    total += weight;
    for (std::size_t i = 0; i < size; ++i) {
      const double v = read(a.v, a.type, kv + key * width + static_cast<index_t>(i));
      sums[i] += weight * v;
      sizes[i] += weight * std::abs(v);
    }
  }
  double error = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const double out = read(a.out, a.type, q_row + static_cast<index_t>(i));
    error = worse(error, std::abs(out * total - sums[i]) / sizes[i]);
  }
  return error;
}

}  // namespace detail

// Compares some queries of each head: the first, the last, and others at different places in each head.
inline Accuracy compare_attention(const AttentionArguments& a, const AttentionFormula& formula) {
  const detail::Rotation rotation(formula.rope ? a.shape.n : 0, a.shape.width);
  constexpr index_t count = 6;
  double error = 0;
  for (index_t head = 0; head < a.shape.batch * a.shape.heads; ++head) {
    for (index_t i = 0; i <= count; ++i) {
      const index_t between = (a.shape.queries - 1) * i / count + (i > 0 && i < count ? 37 * head : 0);
      const index_t query = std::min(between, a.shape.queries - 1);
      error = worse(error, detail::attention_row_error(a, formula, rotation, head, query));
      if (a.shape.queries == 1) break;
    }
  }
  // A kernel of a 16-bit type may round its weights, and must round its result.
  if (a.type == ElementType::bf16) return {error, error <= 0x1p-7};
  if (a.type == ElementType::f16) return {error, error <= 0x1p-10};
  // One key too many or too few of 32768 gives an error of 3e-5. Rounding gives 1e-6.
  return {error, error <= 1e-5};
}

}  // namespace ssmax_bench
