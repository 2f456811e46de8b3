// decode against the long double reference and the naive loop in the same precision, on every target: one and a few new
// queries, sequences of their own lengths, 16-bit caches; n and positions come from the cache; masks, scores and sinks;
// rings, chunks, speculation, threads: which bits must be the same; what rows that nobody sees may not do; what it
// refuses.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <ssmax/ssmax.hpp>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "allocation_count.hpp"
#include "catch.hpp"
#include "reference.hpp"
#include "target_scope.hpp"

namespace decode_test {

using reference::Real;
using reference::worse;
using ssmax::attention;
using ssmax::AttentionOptions;
using ssmax::bfloat16;
using ssmax::Causal;
using ssmax::decode;
using ssmax::half;
using ssmax::Identity;
using ssmax::index_t;
using ssmax::Key;
using ssmax::KeyLengths;
using ssmax::KvCache;
using ssmax::KvCacheOptions;
using ssmax::LogN;
using ssmax::Query;
using ssmax::Rope;
using ssmax::SlidingWindow;
using ssmax::Softmax;
using ssmax::SSMax;
using ssmax::ThreadPool;
using ssmax::View;
using ssmax::Workspace;

template <class X>
using Compute = ssmax::detail::Compute<X>;

/// Half an ulp of one.
template <class T>
constexpr Real rounding = std::numeric_limits<T>::epsilon() / Real(2);
template <>
constexpr Real rounding<half> = 0x1p-11L;
template <>
constexpr Real rounding<bfloat16> = 0x1p-8L;

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// ---- Data

struct Shape {
  index_t heads, kv_heads, queries, d, dv;
  std::vector<index_t> lengths;  // of the sequences, the new queries included

  index_t batch() const { return static_cast<index_t>(lengths.size()); }
  index_t longest() const { return lengths.empty() ? 0 : *std::ranges::max_element(lengths); }
  index_t length(index_t b) const { return lengths[static_cast<std::size_t>(b)]; }
  index_t rows() const { return batch() * heads * queries; }
};

std::string name_of(const Shape& s) {
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

/// The same with every key and value rounded to X.
template <class X, class T>
Data<T> rounded(Data<T> data) {
  for (T& x : data.k) x = static_cast<T>(X(x));
  for (T& x : data.v) x = static_cast<T>(X(x));
  return data;
}

KvCacheOptions options_of(const Shape& s, index_t capacity = 0, bool ring = false) {
  return {.batch = s.batch(),
          .kv_heads = s.kv_heads,
          .width = s.d,
          .value_width = s.dv,
          .capacity = capacity == 0 ? std::max<index_t>(s.longest(), 1) : capacity,
          .ring = ring};
}

/// A cache that holds the first lengths[b] positions of each sequence.
template <class X, class T>
KvCache<X> filled(const Data<T>& data, const Rope<Compute<T>>* rope = nullptr, index_t capacity = 0,
                  bool ring = false) {
  KvCache<X> cache(options_of(data.shape, capacity, ring));
  const index_t all = data.shape.longest();
  cache.append(data.k_view(0, all), data.v_view(0, all), rope, data.shape.lengths);
  return cache;
}

template <class T>
struct Output {
  std::vector<T> out;
  std::vector<Compute<T>> lse;

  explicit Output(const Shape& s)
      : out(static_cast<std::size_t>(s.rows() * s.dv), T(-77.F)),
        lse(static_cast<std::size_t>(s.rows()), Compute<T>(-77)) {}
  bool operator==(const Output& other) const {
    return same_bits(out, other.out) && same_bits(lse, other.lse);
  }
};

template <class T, class X, class S = Softmax, class M = Causal, class C = Identity, class E = ssmax::Serial>
Output<T> run(const Data<T>& data, const KvCache<X>& cache, const S& scaling = {}, const M& mask = {},
              const C& score = {}, const AttentionOptions<T>& options = {}, E&& executor = {}) {
  const Shape& s = data.shape;
  Output<T> result(s);
  decode<T>({.q = data.q_view(),
             .out = {result.out.data(), {s.batch(), s.heads, s.queries, s.dv}},
             .lse = {result.lse.data(), {s.batch(), s.heads, s.queries}}},
            cache, scaling, mask, score, options, executor);
  return result;
}

// ---- What should come out

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
        for (index_t i = 0; i < s.dv; ++i) {
          A value = 0, magnitude = 0;
          for (std::size_t j = 0; j < seen.size(); ++j) {
            const A p = weights[j] / sum, v = static_cast<A>(data.v_row(b, kv_head, seen[j])[i]);
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

  Expected(const Data<T>& data, const Plan& plan)
      : exact(loops<Real>(data, plan)), naive(loops<Compute<T>>(data, plan)) {}
};

template <class T>
Real largest_error(const std::vector<T>& computed, const std::vector<Real>& exact) {
  Real worst = computed.size() == exact.size() ? 0 : reference::infinity;
  for (std::size_t i = 0; i < std::min(computed.size(), exact.size()); ++i) {
    const Real value = reference::widen(computed[i]);
    worst = worse(worst, value == exact[i] ? 0 : std::abs(value - exact[i]));
  }
  return worst;
}

Real largest(const std::vector<Real>& values) {
  Real result = 0;
  for (const Real value : values) {
    if (std::isfinite(value)) result = std::max(result, std::abs(value));
  }
  return result;
}

/// At most twice the naive loop's largest error, two ulps of the largest value where that one was lucky (of lse: or of
/// one, as the sum's relative error is the absolute one of its logarithm), and, where T is narrower than its arithmetic,
/// the rounding of the result. Kept as the excess over that, so that many shapes make one assertion.
struct Rule {
  Real excess = -reference::infinity;
  std::string where;

  template <class T>
  void take(const Output<T>& output, const Expected<T>& expected, const std::string& name) {
    using A = Compute<T>;
    const Real stored = std::is_same_v<A, T> ? 0 : rounding<T>;
    const Real out = largest(expected.exact.out), lse = std::max(largest(expected.exact.lse), Real(1));
    take(output.out, expected.naive.out, expected.exact.out, (4 * rounding<A> + stored) * out, name + " out");
    take(output.lse, expected.naive.lse, expected.exact.lse, 4 * rounding<A> * lse, name + " lse");
  }
  void check(const std::string& target) const {
    INFO(target << ", " << where);
    CHECK(excess <= 0);
  }

 private:
  template <class U, class A>
  void take(const std::vector<U>& computed, const std::vector<A>& naive, const std::vector<Real>& exact,
            Real allowed, const std::string& name) {
    const Real ours = largest_error(computed, exact), theirs = largest_error(naive, exact);
    const Real over = ours - (2 * theirs + allowed);
    if (over <= excess) return;
    excess = over;
    where = name + ": " + std::to_string(static_cast<double>(ours / rounding<A>)) + ", naive " +
            std::to_string(static_cast<double>(theirs / rounding<A>));
  }
};

/// One call per target against the reference.
template <class T, class X, class S, class M, class C>
void check(const Data<T>& data, const KvCache<X>& cache, const Expected<T>& expected, const S& scaling,
           const M& mask, const C& score, const AttentionOptions<T>& options = {}) {
  for_each_target([&](const std::string& target) {
    Rule rule;
    rule.take(run(data, cache, scaling, mask, score, options), expected, name_of(data.shape));
    rule.check(target);
  });
}

// ---- Shapes

const std::vector<Shape> shapes{
    // heads, kv_heads, queries, d, dv, lengths
    {1, 1, 1, 1, 1, {1}},
    {2, 1, 1, 3, 5, {2, 17}},
    {3, 1, 2, 16, 16, {129, 2, 40}},
    {4, 1, 1, 59, 64, {257}},
    {7, 1, 1, 64, 59, {300, 1}},
    {8, 1, 2, 64, 64, {255, 256}},
    {16, 1, 1, 128, 128, {258, 131}},
    {8, 2, 3, 111, 3, {140, 3}},
    {16, 1, 1, 576, 512, {135}},
    {6, 3, 1, 576, 64, {97, 130}},
    {1, 1, 16, 8, 111, {16, 1030}},
    {6, 2, 5, 64, 1, {260, 5}},
    {1, 1, 1, 16, 128, {2500}},
    {2, 2, 4, 111, 111, {1024, 1025, 4}},
    // From here on more than 16 queries of a kv head: the other kernels.
    {1, 1, 17, 3, 16, {17, 1030}},
    {7, 1, 3, 64, 59, {129, 3, 300}},
    {8, 2, 5, 59, 64, {5, 257}},
    {16, 1, 2, 128, 576, {131}},
    {4, 4, 70, 16, 3, {70, 300}},
};

/// Queries and result in T, cache in X. The reference knows only what the cache holds.
template <class T, class X>
void check_shapes() {
  std::vector<Data<T>> all;
  std::vector<Expected<T>> expected;
  for (const Shape& shape : shapes) {
    all.emplace_back(shape);
    expected.emplace_back(rounded<X>(all.back()), Plan{});
  }
  for_each_target([&](const std::string& target) {
    Rule rule;
    for (std::size_t i = 0; i < all.size(); ++i) {
      rule.take(run(all[i], filled<X>(all[i])), expected[i], name_of(all[i].shape));
    }
    rule.check(target);
  });
}

TEST_CASE("decode is as good as a naive loop: float", "[decode][slow]") { check_shapes<float, float>(); }
TEST_CASE("decode is as good as a naive loop: double", "[decode][slow]") { check_shapes<double, double>(); }
TEST_CASE("decode from a 16-bit cache is as good as a naive loop in float on what it holds",
          "[decode][slow]") {
  SECTION("half") { check_shapes<float, half>(); }
  SECTION("bfloat16") { check_shapes<float, bfloat16>(); }
}
TEST_CASE("decode of 16-bit queries computes in float and rounds once", "[decode][slow]") {
  SECTION("half") { check_shapes<half, half>(); }
  SECTION("bfloat16") { check_shapes<bfloat16, bfloat16>(); }
}

/// The largest error of a row, in units of the row's largest value.
template <class T>
Real relative_error(const Output<T>& output, const Loops<Real>& exact, index_t dv) {
  const auto width = static_cast<std::size_t>(dv);
  Real worst = 0;
  for (std::size_t row = 0; row * width < exact.out.size(); ++row) {
    Real error = 0, size = 0;
    for (std::size_t i = row * width; i < (row + 1) * width; ++i) {
      error = worse(error, std::abs(reference::widen(output.out[i]) - exact.out[i]));
      size = std::max(size, std::abs(exact.out[i]));
    }
    worst = worse(worst, error / size);
  }
  return worst;
}

/// What storing K and V in 16 bits costs.
template <class X>
void check_cost_of_storage(Real bound) {
  std::vector<Data<float>> all;
  std::vector<Loops<Real>> expected;
  const ssmax::RopeOptions turn{.width = 64};
  const Rope<float> rope(turn, 600);
  for (const Shape& shape :
       {Shape{8, 1, 1, 64, 64, {1, 2, 3, 17, 129, 300}}, Shape{4, 2, 2, 128, 59, {2, 600}},
        Shape{16, 1, 1, 576, 512, {40}}, Shape{7, 1, 3, 64, 128, {3, 140}}}) {
    all.emplace_back(shape);
    expected.push_back(loops<Real>(all.back(), {.rope = &turn}));
  }
  for_each_target([&](const std::string& target) {
    Real worst = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Output<float> output = run(all[i], filled<X>(all[i], &rope), Softmax{}, Causal{}, Identity{},
                                       AttentionOptions<float>{.rope = &rope});
      worst = worse(worst, relative_error(output, expected[i], all[i].shape.dv));
    }
    INFO(target);
    CHECK(static_cast<double>(worst) <= static_cast<double>(bound));
  });
}

// bfloat16 has three bits less than half: what it stores alone may err by 2^-8 of its size.
TEST_CASE("a half cache costs a thousandth of a row's largest value, bfloat16 eight times that", "[decode]") {
  SECTION("half") { check_cost_of_storage<half>(1e-3L); }
  SECTION("bfloat16") { check_cost_of_storage<bfloat16>(8e-3L); }
}

TEST_CASE("decode is by default causal softmax", "[decode]") {
  const Data<float> data({4, 2, 3, 16, 8, {40, 300}});
  const KvCache<float> cache = filled<float>(data);
  Output<float> result(data.shape);
  decode<float>({.q = data.q_view(), .out = {result.out.data(), {2, 4, 3, 8}}}, cache);
  CHECK(same_bits(result.out, run(data, cache, Softmax{}, Causal{}).out));
  CHECK(std::ranges::all_of(result.lse, [](float x) { return x == -77; }));
}

TEST_CASE("nothing to decode is done without complaint", "[decode]") {
  const Data<float> no_sequences({2, 1, 3, 8, 4, {}}), no_queries({2, 1, 0, 8, 4, {5, 0}}),
      no_heads({0, 1, 1, 8, 4, {3}});
  CHECK(run(no_sequences, filled<float>(no_sequences)).out.empty());
  CHECK(run(no_queries, filled<float>(no_queries)).out.empty());
  CHECK(run(no_heads, filled<float>(no_heads)).out.empty());
}

// ---- n and positions come from the cache

/// Few queries, and more than 16 of a kv head.
const std::vector<Shape> few_and_many{{6, 2, 2, 16, 9, {300, 2, 37}}, {6, 2, 7, 16, 9, {300, 7, 37}}};

/// Distance of an output from what other policies would give.
template <class T>
Real distance(const Output<T>& output, const Data<T>& data, const Plan& plan) {
  return largest_error(output.out, loops<Real>(data, plan).out);
}

template <class T>
void check_scalings() {
  const std::vector<T> s{T(0.43), T(1), T(-0.2), T(0), T(0.7), T(1.3)};
  const std::vector<T> b{T(0.1), T(0), T(-0.5), T(0.7), T(1), T(-0.1)};
  const auto ln = [](index_t n) { return std::log(static_cast<Real>(n)); };
  const auto ssmax_of = [&](index_t head, Real size) {
    return Real(s[static_cast<std::size_t>(head)]) * size + Real(b[static_cast<std::size_t>(head)]);
  };
  for (const Shape& shape : few_and_many) {
    const Data<T> data(shape);
    const KvCache<T> cache = filled<T>(data, nullptr, 1000);
    const Plan log_n{.multiplier = [&](index_t, index_t, index_t n) { return ln(n); }};
    const Plan with_s{.multiplier = [&](index_t h, index_t, index_t n) { return ssmax_of(h, ln(n)); }};
    const auto of_row = [](const ssmax::Row& row) {
      return 0.5 + 0.25 * static_cast<double>(row.head) + 0.001 * static_cast<double>(row.position) -
             0.002 * static_cast<double>(row.n);
    };
    const Plan position{.multiplier = [&](index_t head, index_t p, index_t n) {
      return static_cast<Real>(of_row({head, p, n}));
    }};
    check(data, cache, Expected<T>(data, log_n), LogN{}, Causal{}, Identity{});
    check(data, cache, Expected<T>(data, with_s), SSMax<T>{s, b}, Causal{}, Identity{});
    check(data, cache, Expected<T>(data, position), of_row, Causal{}, Identity{});

    // Not the call's queries, not the cache's capacity, not the longest sequence.
    const Output<T> output = run(data, cache, SSMax<T>{s, b});
    for (const index_t wrong : {shape.queries, index_t{1000}, index_t{300}}) {
      const Plan plan{.multiplier = [&](index_t h, index_t, index_t) { return ssmax_of(h, ln(wrong)); }};
      CHECK(distance(output, data, plan) > 0.01L);
    }
    CHECK(distance(output, data, with_s) < 1e-5L);
  }
}

TEST_CASE("n and the position that a scaling sees are those of the sequence", "[decode]") {
  SECTION("float") { check_scalings<float>(); }
  SECTION("double") { check_scalings<double>(); }
}

template <class T>
void check_multipliers() {
  for (const Shape& shape : {Shape{3, 1, 2, 16, 9, {2300, 2}}, Shape{3, 1, 7, 16, 9, {2300, 7}}}) {
    for (const double deviation : {1.0, 4.0, 40.0}) {
      const Data<T> data(shape, deviation);
      const KvCache<T> cache = filled<T>(data);
      for (const double c : {1e3, -0.5, 0.0}) {
        const Plan plan{.multiplier = [&](index_t, index_t, index_t) { return static_cast<Real>(c); }};
        check(data, cache, Expected<T>(data, plan), ssmax::Constant{c}, Causal{}, Identity{});
      }
    }
  }
}

TEST_CASE("multipliers may be large, negative or zero, and so may logits", "[decode][slow]") {
  SECTION("float") { check_multipliers<float>(); }
  SECTION("double") { check_multipliers<double>(); }
}

template <class T>
void check_ropes() {
  const Shape long_ones{2, 1, 1, 32, 8, {1030, 1}};
  for (const ssmax::RopeOptions& turn :
       {ssmax::RopeOptions{.width = 16},
        ssmax::RopeOptions{.width = 10, .pairing = ssmax::Pairing::interleaved}}) {
    const Rope<T> rope(turn, 1030);
    for (const Shape& shape : {few_and_many[0], few_and_many[1], long_ones}) {
      const Data<T> data(shape);
      check(data, filled<T>(data, &rope), Expected<T>(data, {.rope = &turn}), Softmax{}, Causal{}, Identity{},
            {.rope = &rope});
    }
  }
}

TEST_CASE("queries are rotated to their positions in each sequence", "[decode]") {
  SECTION("float") { check_ropes<float>(); }
  SECTION("double") { check_ropes<double>(); }
}

// ---- Masks, scores, sinks

TEST_CASE("masks show keys of each sequence", "[decode]") {
  const std::vector<index_t> some{4, 1, 30}, more{310, 0, 36};
  const auto at = [](const std::vector<index_t>& values, const Query& query) {
    return values[static_cast<std::size_t>(query.batch)];
  };
  const auto log_n = [](index_t, index_t, index_t n) {
    return n == 0 ? Real(1) : std::log(static_cast<Real>(n));
  };
  const auto check_mask = [&](const auto& mask, const auto& visible) {
    for (const Shape& shape : few_and_many) {
      const Data<float> data(shape);
      check(data, filled<float>(data), Expected<float>(data, {.visible = visible, .multiplier = log_n}),
            LogN{}, mask, Identity{});
    }
  };
  SECTION("Full") {
    check_mask(ssmax::Full{}, [](const Query&, index_t) { return true; });
  }
  SECTION("SlidingWindow") {
    check_mask(SlidingWindow{50, 1}, [](const Query& query, index_t key) {
      return key >= query.position() - 50 && key <= query.position() + 1;
    });
    check_mask(SlidingWindow{0}, [](const Query& query, index_t key) { return key == query.position(); });
  }
  SECTION("PrefixLM") {
    check_mask(ssmax::PrefixLM{more}, [&](const Query& query, index_t key) {
      return key <= query.position() || key < at(more, query);
    });
  }
  SECTION("KeyLengths") {
    check_mask(KeyLengths{some}, [&](const Query& query, index_t key) { return key < at(some, query); });
    check_mask(KeyLengths{more} & Causal{}, [&](const Query& query, index_t key) {
      return key < at(more, query) && key <= query.position();
    });
  }
  SECTION("Where, with queries that see nothing") {
    const auto pick = [](const Query& query, index_t key) {
      return query.head != 4 && (key % 3 == 1 || key == query.position() || key > 290);
    };
    check_mask(Causal{} & ssmax::Where(pick),
               [&](const Query& query, index_t key) { return key <= query.position() && pick(query, key); });
  }
}

// Positions restart with every document, and what a rotation does depends on differences of positions alone.
TEST_CASE("a document's queries are rotated as its keys in the cache were", "[decode]") {
  const ssmax::RopeOptions turn{.width = 16};
  const Rope<float> rope(turn, 100);
  for (const index_t queries : {2, 7}) {
    const Data<float> data({6, 2, queries, 16, 9, {100, 100}});
    const std::vector<index_t> ends_of_queries{0, 0, queries}, ends_of_keys{0, 60, 100};
    const auto visible = [](const Query& query, index_t key) { return key >= 60 && key <= query.position(); };
    const ssmax::Documents documents(ends_of_queries, ends_of_keys, true);
    check(data, filled<float>(data), Expected<float>(data, {.visible = visible}), Softmax{}, documents,
          Identity{});
    check(data, filled<float>(data, &rope), Expected<float>(data, {.visible = visible, .rope = &turn}),
          Softmax{}, documents, Identity{}, {.rope = &rope});
  }
}

TEST_CASE("scores know positions of each sequence", "[decode]") {
  const std::vector<double> slopes = ssmax::Alibi::slopes(6);
  const auto alibi = [&](Real z, index_t head, index_t distance) {
    return z + Real(slopes[static_cast<std::size_t>(head)]) * static_cast<Real>(distance);
  };
  const auto cap = [](Real z, index_t, index_t) { return Real(2) * std::tanh(z / 2); };
  const auto log_n = [](index_t, index_t, index_t n) { return std::log(static_cast<Real>(n)); };
  for (const Shape& shape : few_and_many) {
    const Data<float> data(shape, 2);
    const KvCache<float> cache = filled<float>(data);
    check(data, cache, Expected<float>(data, {.multiplier = log_n, .score = alibi}), LogN{}, Causal{},
          ssmax::Alibi{slopes});
    check(data, cache, Expected<float>(data, {.multiplier = log_n, .score = cap}), LogN{}, Causal{},
          ssmax::Softcap{2});
    check(data, cache,
          Expected<float>(
              data, {.multiplier = log_n,
                     .score = [&](Real z, index_t h,
                                  index_t distance) { return alibi(cap(z, h, distance), h, distance); }}),
          LogN{}, Causal{}, ssmax::Softcap{2} | ssmax::Alibi{slopes});
  }
}

TEST_CASE("sinks and the scale", "[decode]") {
  const std::vector<float> of_many{0.5F, -3, 8, 0, -std::numeric_limits<float>::infinity(), 2};
  for (const Shape& shape : few_and_many) {
    const std::vector<float> sinks(of_many.begin(), of_many.begin() + shape.heads);
    const Data<float> data(shape);
    const auto nothing_for_some = [](const Query& query, index_t key) {
      return key <= query.position() && query.head != 2;
    };
    const Plan plan{.visible = nothing_for_some, .sinks = {sinks.begin(), sinks.end()}, .scale = 0.7L};
    for_each_target([&](const std::string& target) {
      Rule rule;
      rule.take(run(data, filled<float>(data), Softmax{}, Causal{} & ssmax::Where(nothing_for_some),
                    Identity{}, {.scale = 0.7, .sinks = sinks}),
                Expected<float>(data, plan), name_of(shape));
      rule.check(target);
    });
  }
}

TEST_CASE("masks and biases that are matrices, where all sequences are of one length", "[decode]") {
  const Shape shape{4, 2, 3, 8, 5, {70, 70}};
  const Data<float> data(shape);
  const KvCache<float> cache = filled<float>(data);
  const std::vector<float> bias = reference::normals<float>(2 * 4 * 3 * 70, 3);
  const View<const float, 4> values(bias.data(), {2, 4, 3, 70});
  std::vector<float> additive = bias;
  for (std::size_t i = 0; i < additive.size(); i += 3) additive[i] = -std::numeric_limits<float>::infinity();
  const View<const float, 4> holes(additive.data(), {2, 4, 3, 70});
  const auto visible = [&](const Query& query, index_t key) {
    return key <= query.position() && std::isfinite(holes(query.batch, query.head, query.index, key));
  };
  check(data, cache, Expected<float>(data, {.visible = visible}), Softmax{}, Causal{} & ssmax::Finite(holes),
        Identity{});
  // A bias that depends on head and distance alone, so that the reference can say it too.
  std::vector<float> by_distance(4 * 3 * 70);
  const View<float, 4> relative(by_distance.data(), {2, 4, 3, 70}, {0, 3 * 70, 70, 1});
  for (index_t head = 0; head < 4; ++head) {
    for (index_t query = 0; query < 3; ++query) {
      for (index_t key = 0; key < 70; ++key) {
        relative(0, head, query, key) = static_cast<float>((key - (67 + query) + head) % 5) / 4;
      }
    }
  }
  const auto score = [](Real z, index_t head, index_t distance) {
    return z + static_cast<Real>((distance + head) % 5) / 4;
  };
  check(data, cache, Expected<float>(data, {.score = score}), Softmax{}, Causal{},
        ssmax::Bias<float>(View<const float, 4>(relative)));
}

// ---- Rings

/// Positions arrive some at a time; after each append the last of them are decoded from a ring and from a cache that
/// holds all. Returns how many elements had other bits.
template <class X>
index_t check_ring(const Shape& shape, index_t window, index_t capacity, Rule& rule, bool bits) {
  const ssmax::RopeOptions turn{.width = shape.d};
  const Rope<float> rope(turn, shape.longest());
  const AttentionOptions<float> options{.rope = &rope};
  const Data<float> all(shape);
  KvCache<X> ring(options_of(shape, capacity, true)), plain(options_of(shape));
  index_t different = 0;
  for (index_t position = 0, step = 0; position < shape.longest(); ++step) {
    const index_t end = std::min(shape.longest(), position + shape.queries + step % 4);
    std::vector<index_t> counts, lengths;
    for (const index_t length : shape.lengths) {
      lengths.push_back(std::min(length, end));
      counts.push_back(lengths.back() - std::min(length, position));
    }
    for (KvCache<X>* cache : {&ring, &plain}) {
      cache->append(all.k_view(position, end), all.v_view(position, end), &rope, counts);
    }
    position = end;
    if (std::ranges::any_of(lengths, [&](index_t length) { return length < shape.queries; })) continue;
    const Output<float> from_ring =
        run(all, ring, SSMax<float>{0.4F}, SlidingWindow{window - 1}, Identity{}, options);
    const Output<float> from_plain =
        run(all, plain, SSMax<float>{0.4F}, SlidingWindow{window - 1}, Identity{}, options);
    for (std::size_t i = 0; i < from_ring.out.size(); ++i) different += from_ring.out[i] != from_plain.out[i];
    if (bits) CHECK(from_ring == from_plain);
    if (step % 8 != 0 && position < shape.longest()) continue;
    // The reference sees what the ring has kept, rotated already: it rotates the queries itself.
    Data<float> stored(Shape{shape.heads, shape.kv_heads, shape.queries, shape.d, shape.dv, lengths});
    const auto held = plain.key_values();
    for (index_t b = 0; b < shape.batch(); ++b) {
      for (index_t h = 0; h < shape.kv_heads; ++h) {
        for (index_t key = 0; key < plain.length(b); ++key) {
          for (index_t c = 0; c < shape.d; ++c)
            stored.k_row(b, h, key)[c] = static_cast<float>(held.k(b, h, key, c));
          for (index_t c = 0; c < shape.dv; ++c)
            stored.v_row(b, h, key)[c] = static_cast<float>(held.v(b, h, key, c));
        }
      }
    }
    stored.q = all.q;
    for (index_t row = 0; row < shape.rows(); ++row) {
      const index_t b = row / (shape.heads * shape.queries);
      float* const q = stored.q.data() + row * shape.d;
      const index_t at = plain.length(b) - shape.queries + row % shape.queries;
      ssmax::rope(ssmax::View<const float, 2>(q, {1, shape.d}), ssmax::View<float, 2>(q, {1, shape.d}), rope,
                  at);
    }
    const Plan plan{
        .visible = [&](const Query& query,
                       index_t key) { return key <= query.position() && key > query.position() - window; },
        .multiplier = [](index_t, index_t,
                         index_t n) { return Real(0.4F) * std::log(static_cast<Real>(n)); }};
    const Expected<float> expected(stored, plan);
    const std::string name = name_of(shape) + " at " + std::to_string(position);
    rule.take(from_ring, expected, name + ", ring");
    rule.take(from_plain, expected, name + ", plain");
  }
  return different;
}

TEST_CASE("a window on a ring gives the numbers of one on a cache that holds all", "[decode][slow]") {
  for_each_target([](const std::string& target) {
    Rule rule;
    check_ring<float>({6, 2, 1, 16, 9, {300, 141}}, 50, 50, rule, false);
    check_ring<float>({4, 2, 3, 8, 16, {290, 200}}, 130, 135, rule, false);
    check_ring<half>({4, 2, 3, 8, 16, {290, 200}}, 130, 135, rule, false);
    check_ring<bfloat16>({2, 2, 1, 16, 8, {140}}, 33, 40, rule, false);
    rule.check(target);
  });
}

TEST_CASE("with more than 16 queries of a kv head a ring gives the same bits, too", "[decode]") {
  for_each_target([](const std::string& target) {
    Rule rule;
    index_t different = check_ring<float>({1, 1, 17, 8, 9, {300, 141}}, 50, 69, rule, true);
    different += check_ring<float>({2, 1, 20, 8, 16, {500, 300}}, 60, 200, rule, true);
    different += check_ring<half>({8, 2, 5, 16, 16, {290, 200}}, 130, 150, rule, true);
    CHECK(different == 0);
    rule.check(target);
  });
}

/// Only that the call is refused with all of `parts` in the message, and that nothing was written.
template <class Call>
void check_refused(const Call& call, std::initializer_list<const char*> parts) {
  std::string message = "(nothing was thrown)";
  try {
    call();
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  INFO(message);
  for (const char* part : parts) {
    CAPTURE(part);
    CHECK(message.find(part) != std::string::npos);
  }
}

TEST_CASE("a mask that shows keys which a ring has forgotten is refused", "[decode]") {
  const Data<float> data({2, 1, 3, 8, 4, {9, 20}});
  const KvCache<float> ring = filled<float>(data, nullptr, 12, true);  // the second one keeps 8 … 19
  Output<float> result(data.shape);
  const Output<float> untouched = result;
  const auto call = [&](const auto& mask) {
    decode<float>(
        {.q = data.q_view(), .out = {result.out.data(), {2, 2, 3, 4}}, .lse = {result.lse.data(), {2, 2, 3}}},
        ring, Softmax{}, mask);
  };
  check_refused([&] { call(Causal{}); }, {"ssmax::decode: mask shows key 0", "first is 8"});
  check_refused([&] { call(ssmax::Full{}); }, {"mask shows key 0", "first is 8"});
  // The first of three queries is at 17.
  check_refused([&] { call(SlidingWindow{10}); }, {"mask shows key 7", "first is 8"});
  const std::vector<index_t> lengths{9, 20};
  check_refused([&] { call(KeyLengths{lengths}); }, {"mask shows key 0"});
  CHECK(result == untouched);
  CHECK_NOTHROW(call(SlidingWindow{9}));
  CHECK_NOTHROW(call(SlidingWindow{9} & KeyLengths{lengths}));
  // A ring that has forgotten nothing yet is as any cache.
  const KvCache<float> fresh = filled<float>(data, nullptr, 20, true);
  CHECK(run(data, fresh) == run(data, filled<float>(data)));
}

// ---- A sequence in pieces

/// A whole sequence of queries, keys and values: all positions are new.
Shape whole(index_t heads, index_t kv_heads, index_t d, index_t dv, index_t length, index_t batch = 1) {
  return {heads, kv_heads, length, d, dv, std::vector<index_t>(static_cast<std::size_t>(batch), length)};
}

template <class T, class S, class M>
Output<T> at_once(const Data<T>& data, const S& scaling, const M& mask, const AttentionOptions<T>& options) {
  const Shape& s = data.shape;
  Output<T> result(s);
  attention<T>({.q = data.q_view(),
                .k = data.k_view(0, s.longest()),
                .v = data.v_view(0, s.longest()),
                .out = {result.out.data(), {s.batch(), s.heads, s.queries, s.dv}},
                .lse = {result.lse.data(), {s.batch(), s.heads, s.queries}}},
               scaling, mask, options);
  return result;
}

/// append, decode, append, decode …, with as many positions a time as `steps` say, over and over.
template <class X, class T, class S, class M>
Output<T> in_pieces(const Data<T>& data, const std::vector<index_t>& steps, const S& scaling, const M& mask,
                    const AttentionOptions<T>& options, index_t ring_capacity = 0) {
  const Shape& s = data.shape;
  KvCache<X> cache(options_of(s, ring_capacity, ring_capacity != 0));
  Output<T> result(s);
  const index_t q_head = s.queries * s.d, out_head = s.queries * s.dv;
  for (index_t begin = 0, step = 0; begin < s.queries; ++step) {
    const index_t end = std::min(s.queries, begin + steps[static_cast<std::size_t>(step) % steps.size()]);
    const index_t count = end - begin;
    cache.append(data.k_view(begin, end), data.v_view(begin, end), options.rope);
    decode<T>({.q = {data.q.data() + begin * s.d,
                     {s.batch(), s.heads, count, s.d},
                     {s.heads * q_head, q_head, s.d, 1}},
               .out = {result.out.data() + begin * s.dv,
                       {s.batch(), s.heads, count, s.dv},
                       {s.heads * out_head, out_head, s.dv, 1}},
               .lse = {result.lse.data() + begin,
                       {s.batch(), s.heads, count},
                       {s.heads * s.queries, s.queries, 1}}},
              cache, scaling, mask, options);
    begin = end;
  }
  return result;
}

/// Steps that sum to the length, so that no step is shorter than these.
template <class T, class X = T>
void check_same_bits_in_pieces(const Shape& shape, const std::vector<index_t>& steps, bool rotated) {
  const Data<T> data(shape);
  const Rope<Compute<T>> rope({.width = shape.d / 2 * 2}, shape.longest());
  const AttentionOptions<T> options{.rope = rotated ? &rope : nullptr};
  const SSMax<Compute<T>> scaling{Compute<T>(0.4)};
  INFO(name_of(shape));
  CHECK(in_pieces<X>(data, steps, scaling, Causal{}, options) == at_once(data, scaling, Causal{}, options));
  const SlidingWindow window{60};
  const Output<T> expected = at_once(data, scaling, window, options);
  CHECK(in_pieces<X>(data, steps, scaling, window, options) == expected);
  const index_t largest_step = *std::ranges::max_element(steps);
  CHECK(in_pieces<X>(data, steps, scaling, window, options, 60 + largest_step) == expected);
}

TEST_CASE("a prefill in pieces of more than 16 queries of a kv head has the bits of one", "[decode]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    check_same_bits_in_pieces<float>(whole(1, 1, 8, 9, 300), {17, 40, 33, 70, 18, 23, 99}, true);
    check_same_bits_in_pieces<float>(whole(6, 2, 16, 16, 290, 2), {6, 40, 11, 128, 7, 98}, true);
    check_same_bits_in_pieces<float>(whole(4, 1, 5, 3, 130), {5}, true);
    check_same_bits_in_pieces<float>(whole(1, 1, 2, 1, 2300), {1000, 24, 300, 976}, true);
    check_same_bits_in_pieces<double>(whole(3, 1, 8, 9, 300), {17, 40, 33, 70, 18, 23, 99}, true);
    check_same_bits_in_pieces<half>(whole(2, 1, 8, 9, 300), {17, 40, 33, 70, 18, 23, 99}, false);
    check_same_bits_in_pieces<bfloat16>(whole(2, 1, 16, 8, 300), {17, 40, 33, 70, 18, 23, 99}, false);
  });
}

/// |difference| <= 4·(d + 1024 + n / 1024)·ε·Σ p |v|, as kv_cache.hpp says, and the rule of everything else.
template <class T>
void check_bounded_in_pieces(const Shape& shape, const std::vector<index_t>& steps) {
  const ssmax::RopeOptions turn{.width = shape.d};
  const Rope<T> rope(turn, shape.longest());
  const AttentionOptions<T> options{.rope = &rope};
  const Data<T> data(shape);
  const Expected<T> expected(data, {.rope = &turn});
  for_each_target([&](const std::string& target) {
    const Output<T> together = at_once(data, Softmax{}, Causal{}, options);
    const Output<T> pieces = in_pieces<T>(data, steps, Softmax{}, Causal{}, options);
    const Real factor =
        4 * (static_cast<Real>(shape.d) + 1024 + static_cast<Real>(shape.longest()) / 1024) * 2 * rounding<T>;
    Real over = -reference::infinity;
    for (std::size_t i = 0; i < pieces.out.size(); ++i) {
      over = worse(over, std::abs(Real(pieces.out[i]) - Real(together.out[i])) -
                             factor * expected.exact.value_sums[i]);
    }
    INFO(target);
    CHECK(over <= 0);
    Rule rule;
    rule.take(pieces, expected, name_of(shape));
    rule.check(target);
  });
}

TEST_CASE("a prefill, then one position after the other, is as good as one prefill", "[decode]") {
  check_bounded_in_pieces<float>(whole(3, 1, 16, 9, 150), {100, 1, 1, 1, 2, 3, 1});
  check_bounded_in_pieces<float>(whole(2, 2, 8, 16, 270, 2), {1, 16, 3, 200, 2});
  check_bounded_in_pieces<double>(whole(4, 2, 8, 5, 150), {100, 1, 1, 1, 2, 3, 1});
}

// ---- Speculation

TEST_CASE("what was speculated and taken back leaves no trace", "[decode]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    for (const index_t heads : {2, 20}) {
      const Shape shape{heads, 1, 4, 16, 8, {300, 300}};
      const Data<float> data(shape), wrong(Shape{heads, 1, 4, 16, 8, {301, 301}});
      const Rope<float> rope({.width = 16}, 301);
      const AttentionOptions<float> options{.rope = &rope};
      for (const bool ring : {false, true}) {
        const KvCache<half> expected_cache = filled<half>(data, &rope, 310, ring);
        const auto at = [&](const KvCache<half>& cache) {
          return run(data, cache, LogN{}, Causal{}, Identity{}, options);
        };
        const Output<float> expected = at(expected_cache);
        KvCache<half> cache(options_of(shape, 310, ring));
        cache.append(data.k_view(0, 296), data.v_view(0, 296), &rope);
        cache.append(data.k_view(296, 300), data.v_view(296, 300), &rope);
        CHECK(at(cache) == expected);
        for (index_t b = 0; b < 2; ++b) cache.truncate(b, 296);
        cache.append(data.k_view(296, 300), data.v_view(296, 300), &rope);
        CHECK(at(cache) == expected);
        // One sequence keeps one of four, the other none; then they catch up.
        for (index_t b = 0; b < 2; ++b) cache.truncate(b, 297 - b);
        cache.append(wrong.k_view(296, 301), wrong.v_view(296, 301), &rope, std::vector<index_t>{4, 5});
        CHECK_FALSE(at(cache) == expected);
        cache.truncate(0, 297);
        cache.truncate(1, 296);
        cache.append(data.k_view(296, 297), data.v_view(296, 297), &rope, std::vector<index_t>{0, 1});
        cache.append(data.k_view(297, 300), data.v_view(297, 300), &rope);
        CHECK(at(cache) == expected);
        cache.clear();
        cache.append(data.k_view(0, 300), data.v_view(0, 300), &rope);
        CHECK(at(cache) == expected);
      }
    }
  });
}

// ---- Threads, memory

TEST_CASE("any number of threads gives the same bits", "[decode][slow]") {
  std::vector<Data<float>> all;
  for (const Shape& shape : {Shape{8, 2, 1, 16, 9, {5000, 3, 1025, 2048}}, Shape{2, 1, 1, 8, 8, {3000}},
                             Shape{3, 1, 7, 16, 8, {2500, 7}}, Shape{4, 4, 40, 8, 5, {1100, 300, 40}},
                             Shape{1, 1, 400, 8, 8, {4000}}}) {
    all.emplace_back(shape);
  }
  ThreadPool two(2), three(3), seven(7);
  for_each_target([&](const std::string& target) {
    for (const Data<float>& data : all) {
      INFO(target << ", " << name_of(data.shape));
      const KvCache<half> cache = filled<half>(data);
      const Output<float> expected = run(data, cache, LogN{});
      for (ThreadPool* pool : {&two, &three, &seven}) {
        CHECK(run(data, cache, LogN{}, Causal{}, Identity{}, {}, *pool) == expected);
      }
      // A window leaves whole chunks of keys to nobody.
      const SlidingWindow window{700};
      const Output<float> narrow = run(data, cache, LogN{}, window);
      for (ThreadPool* pool : {&two, &three, &seven}) {
        CHECK(run(data, cache, LogN{}, window, Identity{}, {}, *pool) == narrow);
      }
    }
  });
}

TEST_CASE("a call allocates once, and with a workspace that was used before never", "[decode]") {
  ThreadPool pool(3);
  for (const Shape& shape : {Shape{8, 2, 1, 16, 9, {5000, 3}}, Shape{3, 1, 40, 16, 8, {2500, 70}}}) {
    const Data<float> data(shape), smaller(Shape{2, 1, 1, 8, 4, {1100}});
    const KvCache<bfloat16> cache = filled<bfloat16>(data), smaller_cache = filled<bfloat16>(smaller);
    Output<float> result(shape);
    const auto call = [&](Workspace* workspace, auto&& executor) {
      const long before = allocation_count();
      decode<float>(
          {.q = data.q_view(), .out = {result.out.data(), {2, shape.heads, shape.queries, shape.dv}}}, cache,
          LogN{}, Causal{}, {.workspace = workspace}, executor);
      return allocation_count() - before;
    };
    CHECK(call(nullptr, ssmax::Serial{}) == 1);
    CHECK(call(nullptr, pool) == 1);
    Workspace workspace;
    CHECK(call(&workspace, pool) == 1);
    const std::size_t size = workspace.size();
    CHECK(size > 0);
    CHECK(call(&workspace, pool) == 0);
    CHECK(call(&workspace, ssmax::Serial{}) == 0);
    Output<float> other(smaller.shape);
    const long before = allocation_count();
    decode<float>({.q = smaller.q_view(), .out = {other.out.data(), {1, 2, 1, 4}}}, smaller_cache, LogN{},
                  Causal{}, {.workspace = &workspace});
    const long during = allocation_count() - before;
    CHECK(during == 0);
    CHECK(workspace.size() == size);
    const std::vector<float> again = result.out;
    call(nullptr, ssmax::Serial{});
    CHECK(same_bits(again, result.out));
  }
}

// ---- What lies where nobody looks

template <class X>
X poison(int i) {
  using Limits = std::numeric_limits<float>;
  return X(i % 3 == 0 ? Limits::quiet_NaN() : i % 3 == 1 ? Limits::infinity() : -Limits::infinity());
}

/// The same rows with poison where bad(b, kv_head, key) says so.
template <class T, class Bad>
Data<T> poisoned(const Data<T>& data, const Bad& bad) {
  Data<T> result = data;
  const Shape& s = data.shape;
  int next = 0;
  for (index_t b = 0; b < s.batch(); ++b) {
    for (index_t h = 0; h < s.kv_heads; ++h) {
      for (index_t key = 0; key < s.longest(); ++key) {
        if (!bad(b, h, key)) continue;
        for (index_t c = 0; c < s.d; ++c) result.k_row(b, h, key)[c] = poison<T>(next++);
        for (index_t c = 0; c < s.dv; ++c) result.v_row(b, h, key)[c] = poison<T>(next++);
      }
    }
  }
  return result;
}

const std::vector<Shape> poisoned_shapes{{3, 1, 1, 16, 9, {300, 141, 1}},
                                         {4, 2, 3, 11, 20, {290, 3}},
                                         {6, 2, 7, 16, 9, {300, 141, 7}},
                                         {1, 1, 40, 5, 16, {1200, 40}}};

template <class X>
void check_poison() {
  for (const Shape& shape : poisoned_shapes) {
    INFO(name_of(shape));
    const Data<float> data(shape);
    const index_t all = shape.longest();
    SECTION("beyond a sequence's length " + name_of(shape)) {
      const auto everything = [](index_t, index_t, index_t) { return true; };
      const Data<float> bad = poisoned(data, everything);
      KvCache<X> cache(options_of(shape));
      cache.append(bad.k_view(0, all), bad.v_view(0, all));
      for (index_t b = 0; b < shape.batch(); ++b) cache.truncate(b, 0);
      cache.append(data.k_view(0, all), data.v_view(0, all), nullptr, shape.lengths);
      CHECK(run(data, cache, LogN{}) == run(data, filled<X>(data), LogN{}));
    }
    SECTION("before a window " + name_of(shape)) {
      const auto outside = [&](index_t b, index_t, index_t key) {
        return key < shape.length(b) - shape.queries - 50;
      };
      const Data<float> bad = poisoned(data, outside);
      const SlidingWindow window{50};
      CHECK(run(data, filled<X>(bad), LogN{}, window) == run(data, filled<X>(data), LogN{}, window));
      // In a ring that still holds some of them, and has had others.
      const index_t capacity = 50 + shape.queries + 150;
      CHECK(run(data, filled<X>(bad, nullptr, capacity, true), LogN{}, window) ==
            run(data, filled<X>(data, nullptr, capacity, true), LogN{}, window));
    }
    SECTION("keys that a mask hides " + name_of(shape)) {
      const auto hidden = [&](index_t, index_t, index_t key) { return key % 7 == 3; };
      const Data<float> bad = poisoned(data, hidden);
      const auto mask =
          Causal{} & ssmax::Where([&](const Query&, index_t key) { return !hidden(0, 0, key); });
      CHECK(run(data, filled<X>(bad), LogN{}, mask) == run(data, filled<X>(data), LogN{}, mask));
      const ssmax::Softcap cap{20};
      CHECK(run(data, filled<X>(bad), LogN{}, mask, cap) == run(data, filled<X>(data), LogN{}, mask, cap));
    }
    SECTION("keys after those of KeyLengths " + name_of(shape)) {
      const std::vector<index_t> lengths{100, 2, 1};
      const std::vector<index_t> own(lengths.begin(), lengths.begin() + shape.batch());
      const auto after = [&](index_t b, index_t, index_t key) {
        return key >= own[static_cast<std::size_t>(b)];
      };
      const Data<float> bad = poisoned(data, after);
      CHECK(run(data, filled<X>(bad), LogN{}, KeyLengths{own}) ==
            run(data, filled<X>(data), LogN{}, KeyLengths{own}));
    }
    SECTION("the last key, which only the last query sees " + name_of(shape)) {
      const auto last = [&](index_t b, index_t, index_t key) { return key == shape.length(b) - 1; };
      const Output<float> clean = run(data, filled<X>(data), LogN{});
      const Output<float> spread = run(data, filled<X>(poisoned(data, last)), LogN{});
      bool same = true, spreads = true;
      for (index_t row = 0; row < shape.rows(); ++row) {
        const bool sees = row % shape.queries == shape.queries - 1;
        for (index_t c = 0; c < shape.dv; ++c) {
          const auto at = static_cast<std::size_t>(row * shape.dv + c);
          if (!sees) same = same && spread.out[at] == clean.out[at];
          if (sees) spreads = spreads && std::isnan(spread.out[at]);
        }
        const auto at = static_cast<std::size_t>(row);
        if (!sees) same = same && spread.lse[at] == clean.lse[at];
        if (sees) spreads = spreads && std::isnan(spread.lse[at]);
      }
      CHECK(same);
      CHECK(spreads);
    }
    SECTION("other sequences and other kv heads " + name_of(shape)) {
      const index_t head = shape.kv_heads - 1;
      const auto one = [&](index_t b, index_t h, index_t key) { return b == 0 && h == head && key == 0; };
      const Output<float> clean = run(data, filled<X>(data), LogN{});
      const Output<float> spread = run(data, filled<X>(poisoned(data, one)), LogN{});
      bool same = true, spreads = true;
      for (std::size_t at = 0; at < clean.out.size(); ++at) {
        const auto row = static_cast<index_t>(at) / shape.dv / shape.queries;
        const bool sees =
            row / shape.heads == 0 && row % shape.heads / (shape.heads / shape.kv_heads) == head;
        if (!sees) same = same && spread.out[at] == clean.out[at];
        if (sees) spreads = spreads && std::isnan(spread.out[at]);
      }
      CHECK(same);
      CHECK(spreads);
    }
  }
}

TEST_CASE("what a cache holds and a query does not see never enters its result", "[decode]") {
  const TargetScope scope;
  for (const ssmax::Target target : ssmax::available_targets()) {
    SECTION(std::string(ssmax::target_name(target))) {
      ssmax::set_active_target(target);
      SECTION("float") { check_poison<float>(); }
      SECTION("half") { check_poison<half>(); }
      SECTION("bfloat16") { check_poison<bfloat16>(); }
    }
  }
}

TEST_CASE("a NaN in a visible value stays in its channel", "[decode]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    for (const index_t queries : {1, 20}) {
      const Shape shape{2, 1, queries, 8, 21, {200}};
      Data<float> data(shape);
      const Output<float> clean = run(data, filled<float>(data));
      data.v_row(0, 0, 150)[17] = std::numeric_limits<float>::quiet_NaN();
      const Output<float> spread = run(data, filled<float>(data));
      bool right = true;
      for (std::size_t at = 0; at < clean.out.size(); ++at) {
        const bool changed = at % 21 == 17;
        right = right && (changed ? std::isnan(spread.out[at]) : spread.out[at] == clean.out[at]);
      }
      CHECK(right);
      CHECK(same_bits(spread.lse, clean.lse));
    }
  });
}

// ---- Layouts

TEST_CASE("[batch, position, head, channel] gives the same bits and touches nothing beside", "[decode]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    for (const Shape& shape : few_and_many) {
      const Data<float> data(shape);
      const KvCache<float> cache = filled<float>(data);
      const Output<float> expected = run(data, cache, LogN{});
      const index_t batch = shape.batch(), heads = shape.heads, queries = shape.queries, d = shape.d,
                    dv = shape.dv;
      const index_t q_pitch = heads * d + 5, out_pitch = heads * dv + 3;
      std::vector<float> q(static_cast<std::size_t>(batch * queries * q_pitch),
                           std::numeric_limits<float>::quiet_NaN());
      const float sentinel = -1234;
      std::vector<float> out(static_cast<std::size_t>(batch * queries * out_pitch), sentinel);
      const View<float, 4> q_view(q.data(), {batch, heads, queries, d}, {queries * q_pitch, d, q_pitch, 1});
      const View<float, 4> out_view(out.data(), {batch, heads, queries, dv},
                                    {queries * out_pitch, dv, out_pitch, 1});
      for (index_t row = 0; row < shape.rows(); ++row) {
        const index_t b = row / (heads * queries), h = row / queries % heads, i = row % queries;
        std::copy_n(data.q.data() + row * d, d, &q_view(b, h, i, 0));
      }
      decode<float>({.q = q_view, .out = out_view}, cache, LogN{});
      std::vector<float> values;
      for (index_t row = 0; row < shape.rows(); ++row) {
        const index_t b = row / (heads * queries), h = row / queries % heads, i = row % queries;
        float* const at = &out_view(b, h, i, 0);
        values.insert(values.end(), at, at + dv);
        std::fill_n(at, dv, sentinel);
      }
      CHECK(same_bits(values, expected.out));
      CHECK(std::ranges::all_of(out, [&](float x) { return x == sentinel; }));
    }
  });
}

// ---- Refusals

/// A call that fits; refused() says what is wrong with a changed one, and that nothing was written.
struct Call {
  std::vector<float> inputs = reference::normals<float>(2000, 3);
  std::vector<float> outputs = std::vector<float>(600, -77.F);
  KvCache<float> cache{
      KvCacheOptions{.batch = 2, .kv_heads = 2, .width = 8, .value_width = 6, .capacity = 12}};
  View<const float, 4> q{inputs.data(), {2, 4, 3, 8}};
  View<float, 4> out{outputs.data(), {2, 4, 3, 6}};
  View<float, 3> lse{outputs.data() + 300, {2, 4, 3}};

  explicit Call(std::vector<index_t> lengths = {7, 4}) {
    cache.append({inputs.data() + 400, {2, 2, 10, 8}}, {inputs.data() + 800, {2, 2, 10, 6}}, nullptr,
                 lengths);
  }

  template <class S = Softmax, class M = Causal, class C = Identity>
  void run(const S& scaling = {}, const M& mask = {}, const C& score = {},
           const AttentionOptions<float>& options = {}) {
    decode<float>({.q = q, .out = out, .lse = lse}, cache, scaling, mask, score, options);
  }
  template <class S = Softmax, class M = Causal, class C = Identity>
  void refused(std::initializer_list<const char*> parts, const S& scaling = {}, const M& mask = {},
               const C& score = {}, const AttentionOptions<float>& options = {}) {
    check_refused([&] { run(scaling, mask, score, options); }, parts);
    CHECK(std::ranges::all_of(outputs, [](float x) { return x == -77.F; }));
  }
};

TEST_CASE("decode refuses queries whose positions the cache does not have", "[decode]") {
  Call({7, 2}).refused({"ssmax::decode: q has positions 3", "2"});
  Call({2, 7}).refused({"q has positions 3", "2"});
  Call({0, 7}).refused({"q has positions 3", "0"});
  Call({0, 0}).refused({"q has positions 3", "0"});
  Call({0, 0}).refused({"q has positions 3", "0"}, Softmax{}, ssmax::Full{});
  CHECK_NOTHROW(Call({3, 3}).run());
  Call cleared({7, 4});
  cleared.cache.clear();
  cleared.refused({"q has positions 3", "0"});
}

TEST_CASE("decode refuses shapes that do not fit, and writes nothing", "[decode]") {
  Call call;
  SECTION("it is a call that fits") {
    CHECK_NOTHROW(call.run());
    CHECK(std::ranges::count(call.outputs, -77.F) == 600 - 144 - 24);
  }
  SECTION("batch") {
    call.q = {call.inputs.data(), {1, 4, 3, 8}};
    call.refused({"decode: k has extent 2 in dimension 0", "q has 1"});
  }
  SECTION("heads") {
    call.q = {call.inputs.data(), {2, 3, 3, 8}};
    call.refused({"q has heads 3", "multiple", "2"});
  }
  SECTION("width") {
    call.q = {call.inputs.data(), {2, 4, 3, 7}};
    call.refused({"k has extent 8 in dimension 3", "q has 7"});
  }
  SECTION("value width") {
    call.out = {call.outputs.data(), {2, 4, 3, 8}};
    call.refused({"out has extent 8 in dimension 3", "v has 6"});
  }
  SECTION("queries of out") {
    call.out = {call.outputs.data(), {2, 4, 2, 6}};
    call.refused({"out has extent 2 in dimension 2", "q has 3"});
  }
  SECTION("heads of lse") {
    call.lse = {call.outputs.data() + 300, {2, 2, 3}};
    call.refused({"lse has extent 2 in dimension 1", "q has 4"});
  }
  SECTION("null q") {
    call.q = {nullptr, {2, 4, 3, 8}};
    call.refused({"q is null", "192"});
  }
  SECTION("null out") {
    call.out = {nullptr, {2, 4, 3, 6}};
    call.refused({"out is null", "144"});
  }
  SECTION("strides of channels") {
    call.q = {call.inputs.data(), {2, 4, 3, 8}, {192, 48, 16, 2}};
    call.refused({"q has last stride 2"});
  }
  SECTION("rows of out on each other") {
    call.out = {call.outputs.data(), {2, 4, 3, 6}, {72, 18, 5, 1}};
    call.refused({"out", "stride 5", "6"});
  }
  SECTION("lse on out") {
    call.lse = {call.outputs.data() + 143, {2, 4, 3}};
    call.refused({"lse", "overlaps out", "4 bytes"});
  }
  SECTION("out on q") {
    call.q = {call.outputs.data() + 100, {2, 4, 3, 8}};
    call.refused({"out", "overlaps q"});
  }
  SECTION("out in the cache") {
    const auto stored = call.cache.key_values();
    const std::vector<float> before(stored.v.data_handle(), stored.v.data_handle() + stored.v.size());
    call.out = {const_cast<float*>(stored.v.data_handle()), {2, 4, 3, 6}};
    call.refused({"out", "overlaps v"});
    CHECK(same_bits(before, {stored.v.data_handle(), stored.v.data_handle() + stored.v.size()}));
  }
}

TEST_CASE("decode refuses policies and options that do not fit, and writes nothing", "[decode]") {
  Call call;  // lengths 7 and 4, three queries
  SECTION("sinks") {
    const std::vector<float> sinks(3, 1.F);
    call.refused({"sinks has extent 3", "heads are 4"}, Softmax{}, Causal{}, Identity{}, {.sinks = sinks});
  }
  SECTION("key_position") {
    call.refused({"key_position is 2", "0"}, Softmax{}, Causal{}, Identity{}, {.key_position = 2});
  }
  SECTION("a rope that is too short for the longest sequence, wide, or late") {
    const Rope<float> brief({.width = 8}, 6), enough({.width = 8}, 7), wide({.width = 10}, 9),
        late({.width = 8, .first_position = 2}, 9);
    call.refused({"q has position 6", "last is 5"}, Softmax{}, Causal{}, Identity{}, {.rope = &brief});
    call.refused({"q has channels 8", "width is 10"}, Softmax{}, Causal{}, Identity{}, {.rope = &wide});
    call.refused({"q has position 1", "first is 2"}, Softmax{}, Causal{}, Identity{}, {.rope = &late});
    CHECK_NOTHROW(call.run(Softmax{}, Causal{}, Identity{}, {.rope = &enough}));
  }
  SECTION("s of too few heads") {
    const std::vector<float> s(3, 1.F);
    call.refused({"s has extent 3", "4"}, SSMax<float>{s});
  }
  SECTION("a table that is too short for the longest sequence") {
    const std::vector<float> p(6, 1.F);
    call.refused({"p has extent 6", "7"}, ssmax::SizeTable<float>{p});
  }
  SECTION("lengths of too many sequences") {
    const std::vector<index_t> lengths(3, 1);
    call.refused({"lengths has extent 3", "2"}, Softmax{}, KeyLengths{lengths});
  }
  SECTION("a window that ends before it begins") {
    call.refused({"SlidingWindow: left is -1"}, Softmax{}, SlidingWindow{-1});
  }
  SECTION("slopes of too few heads") {
    const std::vector<double> slopes(3, 1);
    call.refused({"slopes have extent 3", "4"}, Softmax{}, Causal{}, ssmax::Alibi{slopes});
  }
  SECTION("a matrix that does not fit the second sequence") {
    const std::vector<float> bias(2 * 4 * 3 * 7);
    call.refused({"bias has extent 7 in dimension 3", "4"}, Softmax{}, Causal{},
                 ssmax::Bias<float>(View<const float, 4>(bias.data(), {2, 4, 3, 7})));
  }
}

}  // namespace decode_test
