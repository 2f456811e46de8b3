// What attention and its backward should compute: the definition of a call as plain functions, and the loops
// that anyone would write. Exact in long double, naive in float and double, for which reference_attention.cpp
// compiles them once; and in any other type that computes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <functional>
#include <limits>
#include <tuple>
#include <vector>

#include "reference.hpp"

namespace reference {

using ssmax::Query;

/// q, k and v [batch, head, position, channel] as R has them, turned to their positions.
template <class R>
struct Inputs {
  std::vector<R> q, k, v;
  std::array<index_t, 4> of_q, of_k, of_v;

  ssmax::View<const R, 4> q_view() const { return {q.data(), of_q}; }
  ssmax::View<const R, 4> k_view() const { return {k.data(), of_k}; }
  ssmax::View<const R, 4> v_view() const { return {v.data(), of_v}; }
};

/// Sums of terms, and those of the sizes of what their roundings are in proportion to.
template <class R>
struct Sums {
  std::vector<R> values, sizes;

  void add(std::size_t at, R term, R size) {
    if (at >= values.size()) {
      values.resize(at + 1);
      sizes.resize(at + 1);
    }
    values[at] += term;
    sizes[at] += size;
  }
};

template <class R>
struct Gradients {
  std::vector<R> dq, dk, dv;                          // [batch, head, position, channel]
  R largest_lse = 0;                                  // of either sign
  Sums<R> dc{};                                       // of the multiplier, [batch, head, query], and
  std::vector<index_t> n{};                           // the number of keys
  Sums<R> dsinks{};                                   // [head]
  Sums<R> dslopes{}, dbias{};                         // of the score, where its formula has them
  std::vector<R> dq_sizes{}, dk_sizes{}, dv_sizes{};  // sums of their terms' sizes, in long double only
};

template <class R>
struct Attended {
  std::vector<R> out;  // [batch, head, query, channel]
  std::vector<R> lse;  // [batch, head, query]
};

/// A score as a formula, in R.
template <class R>
struct FormulaIn {
  std::function<R(R z, const Query&, index_t key)> value, derivative;
  /// Adds what a key gives to the gradients of the score's parameters, of dz and of terms of that size.
  std::function<void(R z, R dz, R size, const Query&, index_t key, Gradients<R>&)> collect;

  FormulaIn() = default;
  template <class F>
  explicit FormulaIn(const F& f) : value(f) {
    if constexpr (requires { f.derivative(R(), Query(), index_t()); }) {
      derivative = [f](R z, const Query& query, index_t key) { return f.derivative(z, query, key); };
      collect = [f](R z, R dz, R size, const Query& query, index_t key, Gradients<R>& into) {
        f.collect(z, dz, size, query, key, into);
      };
    }
  }
};

/// A score as a formula: formula(z, query, key) -> z' for every R and, for the backward, its members derivative
/// and collect. By default there is none: logits are as q and k give them.
class Formula {
 public:
  Formula() = default;
  template <class F>
  requires(!std::same_as<F, Formula>) Formula(const F& f)
      : given(true), in_(FormulaIn<float>(f), FormulaIn<double>(f), FormulaIn<Real>(f)) {}

  bool given = false;

  template <class R>
  R operator()(R z, const Query& query, index_t key) const {
    return std::get<FormulaIn<R>>(in_).value(z, query, key);
  }
  template <class R>
  R derivative(R z, const Query& query, index_t key) const {
    return std::get<FormulaIn<R>>(in_).derivative(z, query, key);
  }
  template <class R>
  void collect(R z, R dz, R size, const Query& query, index_t key, Gradients<R>& into) const {
    std::get<FormulaIn<R>>(in_).collect(z, dz, size, query, key, into);
  }

 private:
  std::tuple<FormulaIn<float>, FormulaIn<double>, FormulaIn<Real>> in_;
};

/// The visible keys of every query. The constructor asks sees(query, key) once per query and key.
class Visibility {
 public:
  template <class Sees>
  Visibility(const ssmax::QueryShape& shape, const Sees& sees) {
    for (Query query{0, 0, 0, shape}; query.batch < shape.batch; ++query.batch) {
      for (query.head = 0; query.head < shape.heads; ++query.head) {
        for (query.index = 0; query.index < shape.queries; ++query.index) {
          for (index_t key = 0; key < shape.keys; ++key) visible_.push_back(sees(query, key));
        }
      }
    }
  }
  bool operator()(const Query& query, index_t key) const {
    const ssmax::QueryShape& shape = query.shape;
    const index_t row = (query.batch * shape.heads + query.head) * shape.queries + query.index;
    return visible_[static_cast<std::size_t>(row * shape.keys + key)];
  }

 private:
  std::vector<bool> visible_;  // [batch, head, query, key]
};

/// What makes one attention differ from another, as plain functions.
struct Definition {
  Real scale;
  Visibility visible;
  Formula score;
  std::function<Real(const Query&, index_t n)> multiplier;  // n: the number of visible keys
  std::function<Real(index_t head)> sink;                   // its logit; -infinity: none
  bool scaled_sinks = false;                                // the multiplier is the sinks', too
};

/// What the sink of a head adds to the logits of a query, which are multiplied by c if it sees any key.
template <class R, class D, class C>
R sink_term(const D& definition, index_t head, const C& c, bool sees_any) {
  const R sink = static_cast<R>(definition.sink(head)), none = -std::numeric_limits<R>::infinity();
  if (!definition.scaled_sinks || sink == none) return sink;
  return sees_any ? static_cast<R>(c) * sink : none;
}

/// Returns a weight, or its gradient, after dropout: multiplied by 0 or 1 / (1 - p), where a definition has dropout.
template <class R, class D>
R after_dropout(const D& definition, R weight, const Query& query, index_t key) {
  if constexpr (requires { definition.dropout_factor(query, key); }) {
    if (const Real factor = definition.dropout_factor(query, key); factor != 1)
      return weight * static_cast<R>(factor);
  }
  return weight;
}

/// Attention by the loops that anyone would write, in R: the exact result in long double, the naive one in
/// any other type. A logit that is -inf after its score is a hidden key, which counts in n.
template <class R, class D>
Attended<R> attend(const Inputs<R>& inputs, const D& definition) {
  using std::exp, std::log;  // of R, where that is a type of the caller's
  const R lowest = -std::numeric_limits<R>::infinity();
  const ssmax::View<const R, 4> q = inputs.q_view(), k = inputs.k_view(), v = inputs.v_view();
  const index_t group = q.extent(1) / std::max<index_t>(k.extent(1), 1);
  const ssmax::QueryShape shape{q.extent(0), q.extent(1), q.extent(2), k.extent(2)};
  Attended<R> result;
  Query query{0, 0, 0, shape};
  const auto row = [&] {
    std::vector<index_t> keys;
    for (index_t key = 0; key < shape.keys; ++key) {
      if (definition.visible(query, key)) keys.push_back(key);
    }
    const auto n = static_cast<index_t>(keys.size());
    const auto c = n == 0 ? 0 : definition.multiplier(query, n);
    const R sink = sink_term<R>(definition, query.head, c, n > 0);
    std::vector<R> weights;
    R top = sink, sum = 0;
    const index_t kv_head = query.head / group, d = q.extent(3), q_step = q.stride(3), k_step = k.stride(3);
    for (const index_t key : keys) {
      R dot = 0;
      if (d > 0) {
        const R* of_query = &q(query.batch, query.head, query.index, 0);
        const R* of_key = &k(query.batch, kv_head, key, 0);
        for (index_t i = 0; i < d; ++i) dot += of_query[i * q_step] * of_key[i * k_step];
      }
      if (!definition.score.given) {
        weights.push_back(static_cast<R>(c * definition.scale) * dot);
      } else {
        const R z = definition.score(static_cast<R>(definition.scale) * dot, query, key);
        weights.push_back(z == lowest ? lowest : static_cast<R>(c) * z);
      }
      top = std::max(top, weights.back());
    }
    for (R& weight : weights) {
      weight = weight == lowest ? R{0} : exp(weight - top);
      sum += weight;
    }
    if (sink != lowest) sum += exp(sink - top);
    const std::size_t first = result.out.size();
    result.out.resize(first + static_cast<std::size_t>(v.extent(3)));
    for (std::size_t i = 0; i < keys.size() && sum != 0; ++i) {
      const R weight = after_dropout(definition, weights[i] / sum, query, keys[i]);
      R* out = result.out.data() + first;
      for (index_t channel = 0; channel < v.extent(3); ++channel) {
        *out++ += weight * v(query.batch, kv_head, keys[i], channel);
      }
    }
    result.lse.push_back(sum == 0 ? lowest : top + log(sum));
  };
  for (query.batch = 0; query.batch < shape.batch; ++query.batch) {
    for (query.head = 0; query.head < shape.heads; ++query.head) {
      for (query.index = 0; query.index < shape.queries; ++query.index) row();
    }
  }
  return result;
}

/// By the loops that anyone would write, in R: exact in long double, naive in any other type. `definition` is
/// that of attend; `forward` is what came out of it.
template <class R, class D>
Gradients<R> differentiate(const Inputs<R>& inputs, const std::vector<R>& dout, const std::vector<R>& dlse,
                           const Attended<R>& forward, const D& definition) {
  using std::abs, std::exp, std::isfinite;  // of R, where that is a type of the caller's
  const R lowest = -std::numeric_limits<R>::infinity();
  const auto at = [](index_t i) { return static_cast<std::size_t>(i); };
  const auto [batches, heads, queries, d] = inputs.of_q;
  const index_t kv_heads = inputs.of_k[1], keys = inputs.of_k[2], dv = inputs.of_v[3];
  const index_t group = heads / std::max<index_t>(kv_heads, 1);
  const R scale = static_cast<R>(definition.scale);
  Gradients<R> result{std::vector<R>(inputs.q.size()), std::vector<R>(inputs.k.size()),
                      std::vector<R>(inputs.v.size())};
  constexpr bool has_sizes = std::same_as<R, Real>;
  if constexpr (has_sizes) {
    result.dq_sizes = result.dq;
    result.dk_sizes = result.dk;
    result.dv_sizes = result.dv;
  }
  for (index_t row = 0; row < batches * heads * queries; ++row) {
    const Query query{
        row / queries / heads, row / queries % heads, row % queries, {batches, heads, queries, keys}};
    std::vector<index_t> seen;
    for (index_t key = 0; key < keys; ++key) {
      if (definition.visible(query, key)) seen.push_back(key);
    }
    const auto n = static_cast<index_t>(seen.size());
    const auto c = n == 0 ? 0 : definition.multiplier(query, n);
    const R lse = forward.lse[at(row)], sink = sink_term<R>(definition, query.head, c, n > 0);
    R inner = dlse.empty() ? R{0} : -dlse[at(row)];
    for (index_t i = 0; i < dv && n > 0; ++i) inner += dout[at(row * dv + i)] * forward.out[at(row * dv + i)];
    result.dc.add(at(row), 0, 0);
    if (sink != lowest) {
      const R dsink = -exp(sink - lse) * inner, size = exp(sink - lse) * abs(inner) * (1 + abs(lse));
      const R by = definition.scaled_sinks ? static_cast<R>(c) : R{1};
      result.dsinks.add(at(query.head), by * dsink, abs(by) * size);
      if (definition.scaled_sinks) {
        const R logit = static_cast<R>(definition.sink(query.head));
        result.dc.add(at(row), logit * dsink, abs(logit) * size);
      }
    }
    result.n.push_back(n);
    if (isfinite(lse)) result.largest_lse = std::max(result.largest_lse, abs(lse));
    if (n == 0) continue;
    const R* q = inputs.q.data() + row * d;
    for (const index_t key : seen) {
      const index_t of_key = (query.batch * kv_heads + query.head / group) * keys + key;
      const R* k = inputs.k.data() + of_key * d;
      R dot = 0, dp = 0;
      for (index_t i = 0; i < d; ++i) dot += q[i] * k[i];
      for (index_t i = 0; i < dv; ++i) dp += dout[at(row * dv + i)] * inputs.v[at(of_key * dv + i)];
      dp = after_dropout(definition, dp, query, key);
      const R z = scale * dot, by = static_cast<R>(c);
      const R score = definition.score.given ? definition.score(z, query, key) : z;
      if (score == lowest) continue;
      const R logit = definition.score.given ? by * score : static_cast<R>(c * definition.scale) * dot;
      const R p = exp(logit - lse), u = p * (dp - inner);
      // A rounding of the lse, and those of both terms of the difference.
      const R size = abs(u) * (1 + abs(lse)) + p * (abs(dp) + abs(inner));
      result.dc.add(at(row), u * score, size * abs(score));
      R dz = by * u;
      if (definition.score.given) {
        definition.score.collect(z, dz, abs(by) * size, query, key, result);
        dz *= definition.score.derivative(z, query, key);
      }
      dz *= scale;
      for (index_t i = 0; i < d; ++i) {
        result.dq[at(row * d + i)] += dz * k[i];
        result.dk[at(of_key * d + i)] += dz * q[i];
      }
      const R kept = after_dropout(definition, p, query, key);
      for (index_t i = 0; i < dv; ++i) result.dv[at(of_key * dv + i)] += kept * dout[at(row * dv + i)];
      if constexpr (has_sizes) {
        for (index_t i = 0; i < d; ++i) {
          result.dq_sizes[at(row * d + i)] += abs(dz * k[i]);
          result.dk_sizes[at(of_key * d + i)] += abs(dz * q[i]);
        }
        for (index_t i = 0; i < dv; ++i)
          result.dv_sizes[at(of_key * dv + i)] += abs(p * dout[at(row * dv + i)]);
      }
    }
  }
  return result;
}

extern template Attended<float> attend(const Inputs<float>&, const Definition&);
extern template Attended<double> attend(const Inputs<double>&, const Definition&);
extern template Attended<Real> attend(const Inputs<Real>&, const Definition&);
extern template Gradients<float> differentiate(const Inputs<float>&, const std::vector<float>&,
                                               const std::vector<float>&, const Attended<float>&,
                                               const Definition&);
extern template Gradients<double> differentiate(const Inputs<double>&, const std::vector<double>&,
                                                const std::vector<double>&, const Attended<double>&,
                                                const Definition&);
extern template Gradients<Real> differentiate(const Inputs<Real>&, const std::vector<Real>&,
                                              const std::vector<Real>&, const Attended<Real>&,
                                              const Definition&);

}  // namespace reference
