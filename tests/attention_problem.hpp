// A problem for attention, its expected results, and error bounds. Brings the helpers that tests of attention need.
#pragma once

#include <concepts>
#include <functional>
#include <ssmax/detail/dispatch/bf16.hpp>

#include "call.hpp"
#include "reference_attention.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace attention_problem {

using namespace ssmax;
using reference::Formula;
using reference::Gradients;
using reference::Inputs;
using reference::Real;
using reference::rounding;
using reference::Sums;
using reference::widen;
using reference::worse;

/// The type in which elements of T are computed.
template <class T>
using Compute = std::conditional_t<std::same_as<T, double>, double, float>;

template <std::floating_point T>
constexpr T nan = std::numeric_limits<T>::quiet_NaN();
template <std::floating_point T>
constexpr T infinity = std::numeric_limits<T>::infinity();

// ---- Problem and result -----------------------------------------------------------------------------------

struct Shape {
  index_t batch, heads, kv_heads, queries, keys, d, dv;
};

inline std::string name_of(const Shape& s) {
  std::string name;
  for (const index_t extent : {s.batch, s.heads, s.kv_heads, s.queries, s.keys, s.d, s.dv}) {
    name += std::to_string(extent) + ' ';
  }
  return name;
}

/// One shape for each driver. All shapes have four heads.
constexpr std::array<Shape, 5> every_driver{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 300, 8, 5},     // few queries
    {2, 4, 4, 40, 70, 9, 24},    // a short sequence
    {2, 4, 2, 61, 300, 8, 8},    // many queries
    {1, 4, 1, 70, 33, 8, 9},     // some queries without visible keys
    {1, 4, 2, 300, 600, 16, 4},  // more than one query block of the backward
}};

/// Returns the first `shape.heads` of the values.
template <class T>
std::span<const T> for_heads_of(const Shape& shape, const std::vector<T>& values) {
  return std::span(values).first(static_cast<std::size_t>(shape.heads));
}

/// q, k and v in [batch, head, position, channel] order.
template <class T>
struct Problem {
  Shape shape;
  std::vector<T> q, k, v;

  explicit Problem(const Shape& s, double deviation = 1) : shape(s) {
    const auto seed = static_cast<unsigned>(s.queries * 1000 + s.keys + s.d);
    q = reference::normals<T>(static_cast<std::size_t>(s.batch * s.heads * s.queries * s.d), seed, deviation);
    k = reference::normals<T>(static_cast<std::size_t>(s.batch * s.kv_heads * s.keys * s.d), seed + 1,
                              deviation);
    v = reference::normals<T>(static_cast<std::size_t>(s.batch * s.kv_heads * s.keys * s.dv), seed + 2);
  }
  /// Converts the numbers of another problem.
  template <class U>
  explicit Problem(const Problem<U>& other)
      : shape(other.shape),
        q(other.q.begin(), other.q.end()),
        k(other.k.begin(), other.k.end()),
        v(other.v.begin(), other.v.end()) {}
  View<const T, 4> q_view() const { return {q.data(), {shape.batch, shape.heads, shape.queries, shape.d}}; }
  View<const T, 4> k_view() const { return {k.data(), {shape.batch, shape.kv_heads, shape.keys, shape.d}}; }
  View<const T, 4> v_view() const { return {v.data(), {shape.batch, shape.kv_heads, shape.keys, shape.dv}}; }
  QueryShape query_shape() const { return {shape.batch, shape.heads, shape.queries, shape.keys}; }
  index_t rows() const { return shape.batch * shape.heads * shape.queries; }
};

template <class T>
struct Output {
  Shape shape;
  std::vector<T> out;
  std::vector<Compute<T>> lse;
  Explanation explanation{};  // explanation of the call, not compared

  explicit Output(const Shape& s)
      : shape(s),
        out(static_cast<std::size_t>(s.batch * s.heads * s.queries * s.dv), T(-77)),
        lse(static_cast<std::size_t>(s.batch * s.heads * s.queries), -77) {}
  bool operator==(const Output& other) const {
    return same_bits(out, other.out) && same_bits(lse, other.lse);
  }
  View<T, 4> out_view() { return {out.data(), {shape.batch, shape.heads, shape.queries, shape.dv}}; }
  View<const T, 4> out_view() const { return const_cast<Output*>(this)->out_view(); }
  View<Compute<T>, 3> lse_view() { return {lse.data(), {shape.batch, shape.heads, shape.queries}}; }
  View<const Compute<T>, 3> lse_view() const { return const_cast<Output*>(this)->lse_view(); }
};

/// The tensors of a call that writes `output`.
template <class T>
AttentionArguments<Compute<T>> arguments_of(const Problem<T>& problem, Output<T>& output) {
  return over_views(problem.q_view(), problem.k_view(), problem.v_view(), output.out_view(),
                    output.lse_view());
}

template <class T, class S, class M, class C, class E = ssmax::Serial>
requires ssmax::Score<C> Output<T> run(const Problem<T>& problem, const S& scaling, const M& mask,
                                       const C& score, const AttentionOptions<T>& options = {},
                                       E&& executor = E{}) {
  Output<T> result(problem.shape);
  AttentionOptions<T> explained = options;
  explained.explanation = &result.explanation;
  ssmax::attention<Compute<T>>(with(arguments_of(problem, result), explained), scaling, mask, score,
                               executor);
  return result;
}

template <class T, class S, class M, class E = ssmax::Serial>
Output<T> run(const Problem<T>& problem, const S& scaling, const M& mask,
              const AttentionOptions<T>& options = {}, E&& executor = E{}) {
  return run(problem, scaling, mask, ssmax::Identity{}, options, executor);
}

// ---- Expected results -------------------------------------------------------------------------------------

/// Positions of queries and keys. The default is the position without a mask.
struct Positions {
  std::function<index_t(const Query&)> of_query = [](const Query& query) { return query.position(); };
  std::function<index_t(const Query&, index_t)> of_key = [](const Query&, index_t key) { return key; };
};

/// Rotates every row of [batch, head, row, channel] by position(batch, head, row): exactly, as the library documents
/// the rotation, or in R with angles computed in double.
template <class R, class Position>
void turn(std::vector<R>& values, const std::array<index_t, 4>& extents, const ssmax::RopeOptions& options,
          const Position& position) {
  using Angle = std::conditional_t<std::same_as<R, Real>, Real, double>;
  const bool neighbours = options.pairing == ssmax::Pairing::interleaved;
  const index_t half = options.width / 2;
  R* row = values.data();
  for (index_t batch = 0; batch < extents[0]; ++batch) {
    for (index_t head = 0; head < extents[1]; ++head) {
      for (index_t at = 0; at < extents[2]; ++at, row += extents[3]) {
        for (index_t i = 0; i < half; ++i) {
          const Angle exponent = Angle(-2) * static_cast<Angle>(i) / static_cast<Angle>(options.width);
          const Angle angle = static_cast<Angle>(position(batch, head, at)) *
                              std::pow(static_cast<Angle>(options.theta), exponent);
          const R cosine = static_cast<R>(std::cos(angle)), sine = static_cast<R>(std::sin(angle));
          R& a = row[neighbours ? 2 * i : i];
          R& b = row[neighbours ? 2 * i + 1 : i + half];
          const R before = a;
          a = before * cosine - b * sine;
          b = b * cosine + before * sine;
        }
      }
    }
  }
}

template <class R, class T>
std::vector<R> widened(const std::vector<T>& values) {
  std::vector<R> result;
  for (const T value : values) result.push_back(static_cast<R>(value));
  return result;
}

/// Rotates q and k by their positions. With sign -1, rotates them back.
template <class R, class T>
void turn_both(std::vector<R>& q, std::vector<R>& k, const Problem<T>& problem,
               const AttentionOptions<T>& options, const Positions& positions, index_t sign) {
  if (options.rope == nullptr) return;
  const QueryShape shape = problem.query_shape();
  const Shape& s = problem.shape;
  turn(q, {s.batch, s.heads, s.queries, s.d}, options.rope->options(),
       [&](index_t batch, index_t head, index_t i) {
         return sign * (options.key_position + positions.of_query({batch, head, i, shape}));
       });
  const index_t group = s.heads / s.kv_heads;
  turn(k, {s.batch, s.kv_heads, s.keys, s.d}, options.rope->options(),
       [&](index_t batch, index_t head, index_t key) {
         return sign * (options.key_position + positions.of_key({batch, head * group, 0, shape}, key));
       });
}

template <class R, class T>
Inputs<R> inputs_of(const Problem<T>& problem, const AttentionOptions<T>& options,
                    const Positions& positions) {
  const Shape& s = problem.shape;
  Inputs<R> inputs{widened<R>(problem.q),
                   widened<R>(problem.k),
                   widened<R>(problem.v),
                   {s.batch, s.heads, s.queries, s.d},
                   {s.batch, s.kv_heads, s.keys, s.d},
                   {s.batch, s.kv_heads, s.keys, s.dv}};
  turn_both(inputs.q, inputs.k, problem, options, positions, 1);
  return inputs;
}

/// The visible keys of a query, from visible(query) -> KeyRange or visible(query, key) -> bool.
class Visible {
 public:
  template <class F>
  Visible(const F& f) {
    if constexpr (std::invocable<F, const Query&>) {
      sees_ = [f](const Query& query, index_t key) {
        const KeyRange range = f(query);
        return key >= range.begin && key < range.end;
      };
    } else {
      sees_ = f;
    }
  }
  bool operator()(const Query& query, index_t key) const { return sees_(query, key); }

 private:
  std::function<bool(const Query&, index_t)> sees_;
};

/// The multiplier: (head, position of the query, n) -> c.
using Multiplier = std::function<Real(index_t, index_t, index_t)>;

/// Returns the call as input of the reference loops.
template <class T>
reference::Definition define(const Problem<T>& problem, const Visible& visible, const Multiplier& multiplier,
                             const AttentionOptions<T>& options, const Formula& score,
                             const Positions& positions) {
  const auto c = [multiplier, positions](const Query& query, index_t n) {
    return multiplier(query.head, std::max<index_t>(0, positions.of_query(query)), n);
  };
  const auto sink = [sinks = options.sinks](index_t head) {
    return sinks.empty() ? -reference::infinity : static_cast<Real>(sinks[static_cast<std::size_t>(head)]);
  };
  const Real scale =
      options.scale ? static_cast<Real>(*options.scale) : 1 / std::sqrt(static_cast<Real>(problem.shape.d));
  return {scale, {problem.query_shape(), visible}, score, c, sink};
}

template <class T>
struct Expected {
  reference::Attended<Real> exact;
  reference::Attended<Compute<T>> naive;  // naive loops
  // On the bf16 path: Σ p·|v|, which scales the additional error.
  bool may_be_in_16_bits = false;
  std::vector<Real> magnitudes{};
};

/// Returns true if the active target has the bf16 path.
inline bool has_bfloat16_products() {
  return ssmax::detail::bf16_capabilities(ssmax::active_target()).has_products;
}

/// Returns the path of a bfloat16 call with `rows` rows per kv head on a target with the bf16 path. Assumes more than
/// 128 keys or a cache.
inline ssmax::Path bfloat16_path(index_t rows) {
  if (rows < 5) return ssmax::Path::decode;
  const auto target = ssmax::detail::bf16_capabilities(ssmax::active_target());
  return rows <= target.decode_rows_max ? ssmax::Path::decode_bf16 : ssmax::Path::prefill_bf16;
}

/// Runs the test on every target with the bf16 path. A test case of nothing else has the tag [products].
template <class Test>
void for_each_target_of_products(Test test) {
  for_each_target_of<ssmax::bfloat16>([&](const std::string& target) {
    if (has_bfloat16_products()) test(target);
  });
}

/// Relative error bounds of rounding the weights to bfloat16: 2^-8 for each weight and for their sum. The exponential
/// adds 1.1e-4.
constexpr Real rounded_weights = 2 * (0x1p-8L + 1.1e-4L), rounded_sum = 0x1p-8L + 2e-4L;

template <class T>
Expected<T> expect(const Problem<T>& problem, const Visible& visible, const Multiplier& multiplier,
                   const AttentionOptions<T>& options = {}, const Formula& score = {},
                   const Positions& positions = {}) {
  const reference::Definition definition = define(problem, visible, multiplier, options, score, positions);
  Expected<T> expected{reference::attend(inputs_of<Real>(problem, options, positions), definition),
                       reference::attend(inputs_of<Compute<T>>(problem, options, positions), definition)};
  const Shape& s = problem.shape;
  if (std::same_as<T, ssmax::bfloat16> && !options.float_products && s.queries * s.heads >= 4 * s.kv_heads) {
    Inputs<Real> absolute = inputs_of<Real>(problem, options, positions);
    for (Real& value : absolute.v) value = std::abs(value);
    expected.magnitudes = reference::attend(absolute, definition).out;
    expected.may_be_in_16_bits = true;
  }
  return expected;
}

inline constexpr auto all_keys = [](const Query& query) { return KeyRange{0, query.shape.keys}; };
inline constexpr auto keys_before = [](const Query& query) {
  return KeyRange{0, std::max<index_t>(0, query.shape.keys - (query.shape.queries - 1 - query.index))};
};
inline constexpr auto before = [](const Query& query, index_t key) { return key <= query.position(); };
/// About three of seven keys, in no order.
inline constexpr auto scattered = [](const Query& query, index_t key) {
  return (query.index * 7919 + key * 104729) % 7 < 3;
};
inline constexpr auto one = [](index_t, index_t, index_t) { return Real(1); };

// ---- Error bounds -----------------------------------------------------------------------------------------

/// Returns the error bound of storing a number near `value` as T. The bound is 0 for types that compute in T.
template <class T>
Real storing(Real value) {
  if (std::same_as<T, Compute<T>> || !std::isfinite(value) || value == 0) return 0;
  const int bits = std::same_as<T, ssmax::half> ? 11 : 8;
  const Real half_ulp = std::ldexp(Real(1), std::ilogb(value) - bits);
  return std::same_as<T, ssmax::half> ? std::max(half_ulp, Real(0x1p-25)) : half_ulp;
}

template <class T>
Real error_of(const T& computed, Real exact) {
  const Real value = reference::widen(computed);
  return value == exact ? 0 : std::abs(value - exact) - storing<T>(exact);
}

template <class T>
Real largest_error(const std::vector<T>& computed, const std::vector<Real>& exact) {
  Real worst = computed.size() == exact.size() ? 0 : reference::infinity;
  for (std::size_t i = 0; i < std::min(computed.size(), exact.size()); ++i) {
    worst = reference::worse(worst, error_of(computed[i], exact[i]));
  }
  return worst;
}

/// Largest errors of a row, and the size of its values.
struct RowErrors {
  Real ours = 0, theirs = 0, size = 0;
};

/// Returns the errors of rows of `width` elements, beyond what each element is `allowed`. Theirs, the errors of the
/// naive loop, are its largest error of all rows, but at most four times its largest relative error times the row's
/// size: single rows of the naive loop may be lucky, and logits of one row larger than those of another. The size is the
/// row's largest finite value or, because terms may cancel, the largest of its `terms`, but at most the largest value of
/// all rows.
template <class T, class A>
std::vector<RowErrors> row_errors(const std::vector<T>& computed, const std::vector<A>& naive,
                                  const std::vector<Real>& exact, index_t width,
                                  const std::vector<Real>& allowed, const std::vector<Real>& terms = {}) {
  REQUIRE(computed.size() == exact.size());
  if (exact.empty()) return {};
  std::vector<RowErrors> rows(exact.size() / static_cast<std::size_t>(width));
  Real largest_value = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    RowErrors& row = rows[i / static_cast<std::size_t>(width)];
    row.ours = worse(row.ours, error_of(computed[i], exact[i]) - (allowed.empty() ? 0 : allowed[i]));
    row.theirs = worse(row.theirs, error_of(naive[i], exact[i]));
    if (!std::isfinite(exact[i])) continue;
    row.size = std::max(row.size, terms.empty() ? std::abs(exact[i]) : terms[i]);
    largest_value = std::max(largest_value, std::abs(exact[i]));
  }
  Real largest = 0, relative = 0;
  for (const RowErrors& row : rows) {
    largest = std::max(largest, row.theirs);
    relative = std::max(relative, row.theirs / row.size);
  }
  for (RowErrors& row : rows) {
    row.size = std::min(row.size, largest_value);
    row.theirs = std::min(largest, 4 * relative * row.size);
  }
  return rows;
}

/// The error bound of a row: twice the naive loop's error plus a few roundings of the row's largest value and of 1. The
/// rule keeps the excess over the bound, so that many shapes need one assertion.
template <class A>
struct Rule {
  Real roundings = 4;
  Real excess = -reference::infinity;
  std::string where{};

  template <class T>
  void take(const std::vector<T>& computed, const std::vector<A>& naive, const std::vector<Real>& exact,
            index_t width, const std::string& name, const std::vector<Real>& allowed = {},
            const std::vector<Real>& terms = {}) {
    for (const RowErrors& row : row_errors(computed, naive, exact, width, allowed, terms)) {
      const Real over = row.ours - (2 * row.theirs + roundings * rounding<A> * (row.size + 1));
      if (std::isnan(excess) || over <= excess) continue;
      excess = over;
      where = name + ": " + std::to_string(static_cast<double>(row.ours / rounding<A>)) + ", naive " +
              std::to_string(static_cast<double>(row.theirs / rounding<A>));
    }
  }
};

template <class T>
struct Rules {
  Rule<Compute<T>> out, lse;

  void take(const Output<T>& output, const Expected<T>& expected, const std::string& name) {
    std::vector<Real> of_out, of_lse;
    if (expected.may_be_in_16_bits && has_bfloat16_products()) {
      for (const Real magnitude : expected.magnitudes) of_out.push_back(rounded_weights * magnitude);
      of_lse.assign(output.lse.size(), rounded_sum);
    }
    const index_t width =
        static_cast<index_t>(output.out.size() / std::max<std::size_t>(1, output.lse.size()));
    out.take(output.out, expected.naive.out, expected.exact.out, width, name + " out", of_out);
    lse.take(output.lse, expected.naive.lse, expected.exact.lse, static_cast<index_t>(output.lse.size()),
             name + " lse", of_lse);
  }
  void check(const std::string& target) const {
    INFO(target << ", in half ulps of one: " << out.where << "; " << lse.where);
    CHECK(out.excess <= 0);
    CHECK(lse.excess <= 0);
  }
};

/// The bound for average errors. With large logits or long products, the rounding of one logit decides between two keys
/// that nearly tie. The affected row is arbitrary, so average errors are compared. The bound is twice the naive loop's
/// average error plus two roundings of the value and of 1.
template <class A>
struct Average {
  Real ours = 0, naive = 0, roundings = 0;

  void take(const std::vector<A>& computed, const std::vector<A>& naively, const std::vector<Real>& exact) {
    const auto error = [](A value, Real of) {
      const Real distance = Real(value) == of ? 0 : std::abs(Real(value) - of);
      return std::isnan(distance) ? reference::infinity : distance;
    };
    for (std::size_t i = 0; i < exact.size(); ++i) {
      ours += error(computed[i], exact[i]);
      naive += error(naively[i], exact[i]);
      if (std::isfinite(exact[i])) roundings += rounding<A> * (std::abs(exact[i]) + 1);
    }
  }
  bool holds() const { return ours <= 2 * naive + 2 * roundings; }
};

template <class T>
struct Averages {
  Average<T> out, lse;

  void take(const Output<T>& output, const Expected<T>& expected) {
    out.take(output.out, expected.naive.out, expected.exact.out);
    lse.take(output.lse, expected.naive.lse, expected.exact.lse);
  }
  void check() const {
    const auto ratio = [](const Average<T>& average) {
      return static_cast<double>(average.ours / average.naive);
    };
    INFO("average errors are " << ratio(out) << " and, of lse, " << ratio(lse) << " of the naive loop's");
    CHECK(out.holds());
    CHECK(lse.holds());
  }
};

// ---- SSMax against the reference --------------------------------------------------------------------------

/// Scalings of up to four heads, one negative and one zero. Their multipliers differ between n and n + 1.
template <class T>
struct FourHeads {
  std::vector<T> s{T(0.9), T(-0.4), T(1.2), T(0)}, b{T(0.1), T(0), T(-0.2), T(0)};

  /// Creates the scalings of the first `count` heads.
  explicit FourHeads(index_t count = 4) {
    s.resize(static_cast<std::size_t>(count));
    b.resize(static_cast<std::size_t>(count));
  }
  ssmax::SSMax<T> scaling() const { return ssmax::SSMax<T>{s, b}; }
  auto multiplier() const {
    return [this](index_t head, index_t, index_t n) {
      const auto h = static_cast<std::size_t>(head);
      return Real(s[h]) * std::log(static_cast<Real>(n)) + Real(b[h]);
    };
  }
};

/// Checks attention under a mask against the mask's definition on every target.
template <class T, class M>
void check_mask(const Shape& shape, const M& mask, const Visible& visible,
                const AttentionOptions<T>& options = {}, const Positions& positions = {}) {
  const FourHeads<Compute<T>> heads(shape.heads);
  const Problem<T> problem(shape);
  const Expected<T> expected = expect(problem, visible, heads.multiplier(), options, {}, positions);
  for_each_target_of<T>([&](const std::string& target) {
    Rules<T> rules;
    rules.take(run(problem, heads.scaling(), mask, options), expected, name_of(shape));
    rules.check(target);
  });
}

/// Checks attention with a score against the score's formula on every target.
template <class T, class M, class C>
void check_score(const Problem<T>& problem, const M& mask, const Visible& visible, const C& score,
                 const Formula& formula, const AttentionOptions<T>& options = {},
                 const Positions& positions = {}) {
  const FourHeads<Compute<T>> heads(problem.shape.heads);
  const Expected<T> expected = expect(problem, visible, heads.multiplier(), options, formula, positions);
  for_each_target_of<T>([&](const std::string& target) {
    Rules<T> rules;
    rules.take(run(problem, heads.scaling(), mask, score, options), expected, name_of(problem.shape));
    rules.check(target);
  });
}

}  // namespace attention_problem
