// Computes gradients of attention in double, for some rows, and the errors of results against them.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "reference_attention.hpp"

namespace ssmax_bench {
namespace detail {

// Computes errors relative to the size of the terms of a result.
class BackwardReference {
 public:
  BackwardReference(const AttentionBackwardArguments& a, const AttentionFormula& formula)
      : a_(a), formula_(formula), rotation_(formula.rope ? a.shape.n : 0, a.shape.width) {}

  // Returns the larger error of dq and lse of one query.
  double query_error(index_t head, index_t query) const {
    const auto [first, end] = visible(query);
    const std::vector<double> q = rotated(a_.q, head * a_.shape.queries + query, query);
    const std::vector<double> dout = plain(a_.dout, head * a_.shape.queries + query);
    std::vector<double> logits;
    double max = -std::numeric_limits<double>::infinity();
    for (index_t key = first; key < end; ++key) {
      logits.push_back(multiplier(query) * dot(q, rotated(a_.k, key_row(head, key), key)));
      max = std::max(max, logits.back());
    }
    double total = 0;
    for (const double logit : logits) total += std::exp(logit - max);
    const double lse = max + std::log(total);

    std::vector<double> weights;
    std::vector<Sum> dweights;
    Sum mean;
    for (index_t key = first; key < end; ++key) {
      weights.push_back(std::exp(logits[static_cast<std::size_t>(key - first)] - lse));
      dweights.push_back(product(dout, plain(a_.v, key_row(head, key))));
      mean.value += weights.back() * dweights.back().value;
      mean.size += weights.back() * dweights.back().size;
    }
    std::vector<Sum> dq(q.size());
    for (index_t key = first; key < end; ++key) {
      const auto at = static_cast<std::size_t>(key - first);
      add(dq, multiplier(query) * weights[at], dweights[at], mean, rotated(a_.k, key_row(head, key), key));
    }
    const double given = static_cast<double>(a_.lse[head * a_.shape.queries + query]);
    return worse(std::abs(given - lse) / std::max(1.0, std::abs(lse)),
                 error(dq, rotated(a_.dq, head * a_.shape.queries + query, query)));
  }

  // Returns the error of dk and dv of one key. Weights and means come from lse and out of the forward, which query_error
  // and compare_attention check.
  double key_error(index_t kv_head, index_t key) const {
    const index_t row = kv_head * a_.shape.n + key;
    const std::vector<double> k = rotated(a_.k, row, key);
    const std::vector<double> v = plain(a_.v, row);
    std::vector<Sum> dk(k.size());
    std::vector<Sum> dv(k.size());
    for (index_t member = 0; member < a_.shape.group(); ++member) {
      for (index_t query = 0; query < a_.shape.queries; ++query) {
        const auto [first, end] = visible(query);
        if (key < first || key >= end) continue;
        const index_t query_row = (kv_head * a_.shape.group() + member) * a_.shape.queries + query;
        const std::vector<double> q = rotated(a_.q, query_row, query);
        const std::vector<double> dout = plain(a_.dout, query_row);
        const double weight =
            std::exp(multiplier(query) * dot(q, k) - static_cast<double>(a_.lse[query_row]));
        const Sum mean = product(dout, plain(a_.out, query_row));
        add(dk, multiplier(query) * weight, product(dout, v), mean, q);
        for (std::size_t i = 0; i < dv.size(); ++i) {
          dv[i].value += weight * dout[i];
          dv[i].size += weight * std::abs(dout[i]);
        }
      }
    }
    return worse(error(dk, rotated(a_.dk, row, key)), error(dv, plain(a_.dv, row)));
  }

  // Returns the error of ds and db of one head. The logits are linear in q, so that a row's gradient of its multiplier c is
  // <q, dq> / c. The reference for ds and db are sums over the given dq, which query_error checks.
  double scaling_error(index_t head) const {
    Sum ds;
    Sum db;
    for (index_t query = 0; query < a_.shape.queries; ++query) {
      const auto [first, end] = visible(query);
      if (end - first < 2) continue;  // a single key has the weight 1 for any logit
      const index_t row = head * a_.shape.queries + query;
      const Sum terms = product(plain(a_.q, row), plain(a_.dq, row));
      const double c = formula_.multiplier(end - first);
      const double size = std::log(static_cast<double>(end - first));
      ds.value += size * terms.value / c;
      ds.size += size * terms.size / std::abs(c);
      db.value += terms.value / c;
      db.size += terms.size / std::abs(c);
    }
    double off = 0;
    if (a_.ds != nullptr) off = worse(off, std::abs(static_cast<double>(a_.ds[head]) - ds.value) / ds.size);
    if (a_.db != nullptr) off = worse(off, std::abs(static_cast<double>(a_.db[head]) - db.value) / db.size);
    return off;
  }

 private:
  struct Sum {
    double value = 0;
    double size = 0;
  };
  struct Keys {
    index_t first, end;
  };

  Keys visible(index_t query) const {
    return {a_.visibility.first(query), a_.visibility.end(query, a_.shape.n)};
  }

  double multiplier(index_t query) const {
    const auto [first, end] = visible(query);
    return formula_.multiplier(end - first) / std::sqrt(static_cast<double>(a_.shape.width));
  }

  index_t key_row(index_t head, index_t key) const { return head / a_.shape.group() * a_.shape.n + key; }

  std::vector<double> plain(const void* data, index_t row) const {
    std::vector<double> values;
    for (index_t i = 0; i < a_.shape.width; ++i)
      values.push_back(read(data, a_.type, row * a_.shape.width + i));
    return values;
  }

  // Returns a row as the logits use it. The same holds for gradients: the rotation is linear and keeps lengths.
  std::vector<double> rotated(const void* data, index_t row, index_t position) const {
    std::vector<double> values = plain(data, row);
    if (formula_.rope) rotation_.rotate(values, position);
    return values;
  }

  static double dot(const std::vector<double>& a, const std::vector<double>& b) {
    return product(a, b).value;
  }

  // Returns the dot product. `size` is its absolute value plus the root of the sum of squares of its terms.
  static Sum product(const std::vector<double>& a, const std::vector<double>& b) {
    Sum sum;
    double squares = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      sum.value += a[i] * b[i];
      squares += std::pow(a[i] * b[i], 2);
    }
    sum.size = std::abs(sum.value) + std::sqrt(squares);
    return sum;
  }

  // gradient += factor (dweight - mean) row
  static void add(std::vector<Sum>& gradient, double factor, const Sum& dweight, const Sum& mean,
                  const std::vector<double>& row) {
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      gradient[i].value += factor * (dweight.value - mean.value) * row[i];
      gradient[i].size += std::abs(factor * row[i]) * (dweight.size + mean.size);
    }
  }

  // Returns the error of a whole row. Single channels are not compared: a channel may be close to 0 in a sum of few terms,
  // and the rotation mixes channels.
  static double error(const std::vector<Sum>& exact, const std::vector<double>& result) {
    double off = 0;
    double size = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      off += std::pow(result[i] - exact[i].value, 2);
      size += std::pow(exact[i].size, 2);
    }
    // `size` may be 0: SSMax without b multiplies the logits of a row with one visible key by 0.
    return off == 0 ? 0 : std::sqrt(off / size);
  }

  AttentionBackwardArguments a_;
  AttentionFormula formula_;
  Rotation rotation_;
};

}  // namespace detail

// Compares some queries and keys of each head: the first, the last, and others at different places in each head.
inline Accuracy compare_attention_backward(const AttentionBackwardArguments& a,
                                           const AttentionFormula& formula) {
  const detail::BackwardReference reference(a, formula);
  constexpr index_t count = 6;
  double error = compare_attention(a, formula).error;
  const auto place = [](index_t head, index_t i, index_t extent) {
    const index_t between = (extent - 1) * i / count + (i > 0 && i < count ? 37 * head : 0);
    return std::min(between, extent - 1);
  };
  for (index_t head = 0; head < a.shape.batch * a.shape.heads; ++head) {
    for (index_t i = 0; i <= count; ++i) {
      error = worse(error, reference.query_error(head, place(head, i, a.shape.queries)));
      if (head < a.shape.batch * a.shape.kv_heads) {
        error = worse(error, reference.key_error(head, place(head, i, a.shape.n)));
      }
    }
    error = worse(error, reference.scaling_error(head));
  }
  // A kernel of a 16-bit type may round weights and gradients of logits. The results of the forward are rounded.
  return {error, error <= (a.type == ElementType::f32 ? 1e-5 : 0x1p-6)};
}

}  // namespace ssmax_bench
