// A problem for decode: sequences with lengths of their own, and a cache that holds them; what should come
// out of it, and how far from that a result may be.
#pragma once

#include <functional>

#include "attention_problem.hpp"
#include "test.hpp"

namespace decode_problem {

using namespace ssmax;
using reference::Real;
using reference::worse;

template <class X>
using Compute = ssmax::ComputeType<X>;

/// Half an ulp of one.
template <class T>
constexpr Real rounding = std::numeric_limits<T>::epsilon() / Real(2);
template <>
inline constexpr Real rounding<half> = 0x1p-11L;
template <>
inline constexpr Real rounding<bfloat16> = 0x1p-8L;

// ---- Data -------------------------------------------------------------------------------------------------

struct Shape {
  index_t heads, kv_heads, queries, d, dv;
  std::vector<index_t> lengths;  // of the sequences, the new queries included

  index_t batch() const { return static_cast<index_t>(lengths.size()); }
  index_t longest() const { return lengths.empty() ? 0 : *std::ranges::max_element(lengths); }
  index_t length(index_t b) const { return lengths[static_cast<std::size_t>(b)]; }
  index_t rows() const { return batch() * heads * queries; }
};

inline std::string name_of(const Shape& s) {
  std::string name;
  for (const index_t extent : {s.heads, s.kv_heads, s.queries, s.d, s.dv})
    name += std::to_string(extent) + ' ';
  for (const index_t length : s.lengths) name += '/' + std::to_string(length);
  return name;
}

/// q [batch, heads, queries, d]; k and v [batch, kv_heads, longest, …], as many positions as any sequence has.
template <class T>
struct Data {
  Shape shape;
  std::vector<T> q, k, v;

  explicit Data(const Shape& s, double deviation = 1) : shape(s) {
    const auto seed = static_cast<unsigned>(s.d + 1000 * s.longest() + 77 * s.heads);
    const auto rows = static_cast<std::size_t>(s.batch() * s.kv_heads * s.longest());
    q = reference::normals<T>(static_cast<std::size_t>(s.rows() * s.d), seed, deviation);
    k = reference::normals<T>(rows * static_cast<std::size_t>(s.d), seed + 1, deviation);
    v = reference::normals<T>(rows * static_cast<std::size_t>(s.dv), seed + 2);
  }

  View<const T, 4> q_view() const { return {q.data(), {shape.batch(), shape.heads, shape.queries, shape.d}}; }
  /// Positions [begin, end).
  View<const T, 4> k_view(index_t begin, index_t end) const { return part(k, shape.d, begin, end); }
  View<const T, 4> v_view(index_t begin, index_t end) const { return part(v, shape.dv, begin, end); }

  const T* k_row(index_t b, index_t kv_head, index_t key) const {
    return k.data() + ((b * shape.kv_heads + kv_head) * shape.longest() + key) * shape.d;
  }
  const T* v_row(index_t b, index_t kv_head, index_t key) const {
    return v.data() + ((b * shape.kv_heads + kv_head) * shape.longest() + key) * shape.dv;
  }
  T* k_row(index_t b, index_t kv_head, index_t key) {
    return const_cast<T*>(std::as_const(*this).k_row(b, kv_head, key));
  }
  T* v_row(index_t b, index_t kv_head, index_t key) {
    return const_cast<T*>(std::as_const(*this).v_row(b, kv_head, key));
  }

 private:
  View<const T, 4> part(const std::vector<T>& all, index_t width, index_t begin, index_t end) const {
    const index_t head = shape.longest() * width;
    return {all.data() + begin * width,
            {shape.batch(), shape.kv_heads, end - begin, width},
            {shape.kv_heads * head, head, width, 1}};
  }
};

/// Keys and values whose rows have different sizes: a wrong factor changes every result.
inline Data<float> uneven(const Shape& shape) {
  Data<float> data(shape);
  const auto grow = [](std::vector<float>& rows, index_t n, int period) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto row = static_cast<int>(i) / static_cast<int>(n);
      rows[i] *= std::exp2(static_cast<float>(row % period) / 2 - 1);
    }
  };
  grow(data.k, shape.d, 3);
  grow(data.v, shape.dv, 7);
  return data;
}

inline KvCacheOptions options_of(const Shape& s, index_t capacity = 0, bool ring = false, index_t first = 0) {
  return {.batch = s.batch(),
          .kv_heads = s.kv_heads,
          .width = s.d,
          .value_width = s.dv,
          .capacity = capacity == 0 ? std::max<index_t>(s.longest(), 1) : capacity,
          .ring = ring,
          .first = first};
}

/// A cache that holds the first lengths[b] positions of each sequence.
template <class X, class T>
KvCache<X> filled(const Data<T>& data, const Rope<Compute<T>>* rope = nullptr, index_t capacity = 0,
                  bool ring = false, index_t first = 0) {
  KvCache<X> cache(options_of(data.shape, capacity, ring, first));
  const index_t all = data.shape.longest();
  cache.append(data.k_view(0, all), data.v_view(0, all), rope, data.shape.lengths);
  return cache;
}

template <class T>
struct Output {
  std::vector<T> out;
  std::vector<Compute<T>> lse;
  Explanation explanation{};  // of the call, not compared

  explicit Output(const Shape& s)
      : out(static_cast<std::size_t>(s.rows() * s.dv), T(-77.F)),
        lse(static_cast<std::size_t>(s.rows()), Compute<T>(-77)) {}
  bool operator==(const Output& other) const {
    return same_bits(out, other.out) && same_bits(lse, other.lse);
  }
};

/// The tensors of a call that writes `output`.
template <class T>
AttentionArguments<Compute<T>> arguments_of(const Data<T>& data, Output<T>& output) {
  const Shape& s = data.shape;
  return {.q = data.q_view(),
          .out = {output.out.data(), {s.batch(), s.heads, s.queries, s.dv}},
          .lse = {output.lse.data(), {s.batch(), s.heads, s.queries}}};
}

template <class T, class K, class S = Softmax, class M = Causal, class C = Identity, class E = ssmax::Serial>
Output<T> run(const Data<T>& data, const K& keys, const S& scaling = {}, const M& mask = {},
              const C& score = {}, const AttentionOptions<T>& options = {}, E&& executor = {}) {
  Output<T> result(data.shape);
  AttentionOptions<T> explained = options;
  explained.explanation = &result.explanation;
  attention<Compute<T>>(with(over(arguments_of(data, result), keys), explained), scaling, mask, score,
                        executor);
  return result;
}

// ---- What should come out ---------------------------------------------------------------------------------

/// The policies of a call, as plain functions of what they are defined by.
struct Plan {
  std::function<bool(const Query&, index_t)> visible = [](const Query& query, index_t key) {
    return key <= query.index + query.shape.keys - query.shape.queries;
  };
  /// Of the head, the query's position and n.
  std::function<Real(index_t, index_t, index_t)> multiplier = [](index_t, index_t, index_t) {
    return Real(1);
  };
  std::function<Real(Real, index_t, index_t)> score{};  // of z, head, key position - query position
  std::vector<Real> sinks{};
  Real scale = 0;  // 0: 1/√d
  const ssmax::RopeOptions* rope = nullptr;
};

/// One row turned to a position, in A; angles in double or, where A is Real, in Real.
template <class A, class T>
std::vector<A> turned(const T* row, index_t channels, index_t position, const ssmax::RopeOptions* rope) {
  std::vector<A> result(row, row + channels);
  if (rope == nullptr) return result;
  using Angle = std::conditional_t<std::is_same_v<A, Real>, Real, double>;
  for (index_t i = 0; i < rope->width / 2; ++i) {
    const bool neighbours = rope->pairing == ssmax::Pairing::interleaved;
    const auto first = static_cast<std::size_t>(neighbours ? 2 * i : i);
    const auto second = static_cast<std::size_t>(neighbours ? 2 * i + 1 : i + rope->width / 2);
    const Angle exponent = Angle(-2) * static_cast<Angle>(i) / static_cast<Angle>(rope->width);
    const Angle angle = static_cast<Angle>(position) * std::pow(static_cast<Angle>(rope->theta), exponent);
    const A cosine = static_cast<A>(std::cos(angle)), sine = static_cast<A>(std::sin(angle));
    const A a = result[first], b = result[second];
    result[first] = a * cosine - b * sine;
    result[second] = b * cosine + a * sine;
  }
  return result;
}

template <class A>
struct Loops {
  std::vector<A> out, lse;
  std::vector<A> value_sums;  // Σ p |v|, [row][channel]
};

/// The loops that anyone would write, in A.
template <class A, class T>
Loops<A> loops(const Data<T>& data, const Plan& plan) {
  const Shape& s = data.shape;
  const A scale = static_cast<A>(plan.scale != 0 ? plan.scale : 1 / std::sqrt(static_cast<Real>(s.d)));
  Loops<A> result;
  for (index_t b = 0; b < s.batch(); ++b) {
    const index_t keys = s.length(b);
    std::vector<std::vector<A>> k(static_cast<std::size_t>(s.kv_heads * keys));
    for (index_t i = 0; i < s.kv_heads * keys; ++i) {
      k[static_cast<std::size_t>(i)] = turned<A>(data.k_row(b, i / keys, i % keys), s.d, i % keys, plan.rope);
    }
    for (index_t head = 0; head < s.heads; ++head) {
      const index_t kv_head = head / (s.heads / s.kv_heads);
      for (index_t index = 0; index < s.queries; ++index) {
        const Query query{b, head, index, {s.batch(), s.heads, s.queries, keys}};
        const index_t position = keys - s.queries + index;
        const std::vector<A> q = turned<A>(data.q.data() + ((b * s.heads + head) * s.queries + index) * s.d,
                                           s.d, position, plan.rope);
        std::vector<index_t> seen;
        for (index_t key = 0; key < keys; ++key) {
          if (plan.visible(query, key)) seen.push_back(key);
        }
        const A c = static_cast<A>(plan.multiplier(head, position, static_cast<index_t>(seen.size())));
        std::vector<A> weights;
        A top = -std::numeric_limits<A>::infinity(), sum = 0;
        for (const index_t key : seen) {
          const std::vector<A>& row = k[static_cast<std::size_t>(kv_head * keys + key)];
          A z = 0;
          for (std::size_t i = 0; i < row.size(); ++i) z += q[i] * row[i];
          z *= scale;
          if (plan.score) z = static_cast<A>(plan.score(static_cast<Real>(z), head, key - position));
          weights.push_back(c * z);
          top = std::max(top, weights.back());
        }
        const A sink = plan.sinks.empty() ? -std::numeric_limits<A>::infinity()
                                          : static_cast<A>(plan.sinks[static_cast<std::size_t>(head)]);
        top = std::max(top, sink);
        for (A& weight : weights) {
          weight = std::exp(weight - top);
          sum += weight;
        }
        sum += sink == top ? A{1} : std::exp(sink - top);
        if (seen.empty() && plan.sinks.empty()) sum = 0;
        for (A& weight : weights) weight /= sum;
        for (index_t i = 0; i < s.dv; ++i) {
          A value = 0, magnitude = 0;
          for (std::size_t j = 0; j < seen.size(); ++j) {
            const A p = weights[j], v = static_cast<A>(data.v_row(b, kv_head, seen[j])[i]);
            value += p * v;
            magnitude += p * std::abs(v);
          }
          result.out.push_back(value);
          result.value_sums.push_back(magnitude);
        }
        result.lse.push_back(sum == 0 ? -std::numeric_limits<A>::infinity() : top + std::log(sum));
      }
    }
  }
  return result;
}

template <class T>
struct Expected {
  Loops<Real> exact;
  Loops<Compute<T>> naive;
  index_t width;  // of values

  Expected(const Data<T>& data, const Plan& plan)
      : exact(loops<Real>(data, plan)), naive(loops<Compute<T>>(data, plan)), width(data.shape.dv) {}
};

/// The rounding of a 16-bit result counts as an error.
template <class T>
Real largest_error(const std::vector<T>& computed, const std::vector<Real>& exact) {
  std::vector<Real> widened;
  for (const T value : computed) widened.push_back(reference::widen(value));
  return attention_problem::largest_error(widened, exact);
}

inline Real largest(const std::vector<Real>& values) {
  Real result = 0;
  for (const Real value : values) {
    if (std::isfinite(value)) result = std::max(result, std::abs(value));
  }
  return result;
}

/// The error bound of a row: twice the naive loop's error plus two ulps of the row's size. Exception: for lse, the size
/// is at least one, because the sum's relative error is the absolute error of its logarithm. The rule keeps the excess
/// over the bound, so that many shapes need one assertion.
struct Rule {
  Real excess = -reference::infinity;
  std::string where;

  template <class T>
  void take(const Output<T>& output, const Expected<T>& expected, const std::string& name) {
    std::vector<Real> of_out, of_lse;  // where products may be in 16 bits
    if (std::is_same_v<T, ssmax::bfloat16> && attention_problem::has_bfloat16_products()) {
      for (const Real sum : expected.exact.value_sums)
        of_out.push_back(attention_problem::rounded_weights * sum);
      of_lse.assign(output.lse.size(), attention_problem::rounded_sum);
    }
    take(output.out, expected.naive.out, expected.exact.out, expected.width, 0, name + " out", of_out,
         expected.exact.value_sums);
    take(output.lse, expected.naive.lse, expected.exact.lse, static_cast<index_t>(output.lse.size()), 1,
         name + " lse", of_lse, {});
  }
  void check(const std::string& target) const {
    INFO(target << ", " << where);
    CHECK(excess <= 0);
  }

 private:
  template <class U, class A>
  void take(const std::vector<U>& computed, const std::vector<A>& naive, const std::vector<Real>& exact,
            index_t width, Real least, const std::string& name, const std::vector<Real>& allowed,
            const std::vector<Real>& terms) {
    for (const auto& row : attention_problem::row_errors(computed, naive, exact, width, allowed, terms)) {
      const Real over = row.ours - (2 * row.theirs + 4 * rounding<A> * std::max(row.size, least));
      if (over <= excess) continue;
      excess = over;
      where = name + ": " + std::to_string(static_cast<double>(row.ours / rounding<A>)) + ", naive " +
              std::to_string(static_cast<double>(row.theirs / rounding<A>));
    }
  }
};

template <class T>
void check_output(const Output<T>& output, const Expected<T>& expected, const std::string& name) {
  Rule rule;
  rule.take(output, expected, name);
  rule.check(target_name(active_target()));
}

/// One call per target against the reference.
template <class T, class K, class S = Softmax, class M = Causal, class C = Identity>
void check(const Data<T>& data, const K& keys, const Expected<T>& expected, const S& scaling = {},
           const M& mask = {}, const C& score = {}, const AttentionOptions<T>& options = {}) {
  for_each_target_of<typename K::Element>([&](const std::string&) {
    check_output(run(data, keys, scaling, mask, score, options), expected, name_of(data.shape));
  });
}

/// Few queries, and more than 16 of a kv head.
inline const std::vector<Shape> few_and_many{{6, 2, 2, 16, 9, {300, 2, 37}}, {6, 2, 7, 16, 9, {300, 7, 37}}};

}  // namespace decode_problem
