// Attention against the long double reference and a naive loop in the same precision, on every target: shapes
// around the borders of its blocks, masks, scalings, layouts, RoPE; what hidden keys may not do; what it
// refuses.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <span>
#include <ssmax/ssmax.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_problem.hpp"
#include "catch.hpp"
#include "reference.hpp"
#include "target_scope.hpp"

namespace attention_test {

using attention_problem::all_keys;
using attention_problem::expect;
using attention_problem::Expected;
using attention_problem::keys_before;
using attention_problem::name_of;
using attention_problem::nan;
using attention_problem::one;
using attention_problem::Output;
using attention_problem::Problem;
using attention_problem::Real;
using attention_problem::Rules;
using attention_problem::run;
using attention_problem::Shape;
using ssmax::AttentionOptions;
using ssmax::Causal;
using ssmax::Constant;
using ssmax::Full;
using ssmax::index_t;
using ssmax::KeyRange;
using ssmax::Lengths;
using ssmax::Query;
using ssmax::Rope;
using ssmax::Softmax;
using ssmax::SSMax;
using ssmax::View;

/// A tensor [batch, head, position, channel] somewhere in memory; what lies between its elements is
/// `between`.
template <class T>
struct Tensor {
  using Extents = std::array<index_t, 4>;

  Extents extents{}, strides{};
  index_t offset = 0;
  std::vector<T> storage;

  Tensor(const Extents& e, const Extents& s, index_t before, T between)
      : extents(e), strides(s), offset(before) {
    index_t last = 0;
    for (std::size_t i = 0; i < 4; ++i) last += std::max<index_t>(extents[i] - 1, 0) * strides[i];
    storage.assign(static_cast<std::size_t>(offset + last + 9), between);
  }
  explicit Tensor(const Extents& e) : Tensor(e, View<T, 4>(nullptr, e).empty() ? e : packed(e), 0, T{0}) {}

  static Extents packed(const Extents& e) { return {e[1] * e[2] * e[3], e[2] * e[3], e[3], 1}; }
  View<T, 4> view() { return {storage.data() + offset, extents, strides}; }

  template <class Visit>
  void for_each(Visit visit) {
    const View<T, 4> all = view();
    for (index_t b = 0; b < extents[0]; ++b) {
      for (index_t h = 0; h < extents[1]; ++h) {
        for (index_t p = 0; p < extents[2]; ++p) {
          for (index_t c = 0; c < extents[3]; ++c) visit(all(b, h, p, c));
        }
      }
    }
  }
  void fill(const std::vector<T>& values) {
    auto next = values.begin();
    for_each([&](T& element) { element = *next++; });
  }
  std::vector<T> values() {
    std::vector<T> result;
    for_each([&](T& element) { result.push_back(element); });
    return result;
  }
  bool only_elements_differ_from(T value) {
    Tensor copy = *this;
    copy.for_each([&](T& element) { element = value; });
    return std::ranges::all_of(copy.storage, [&](T element) { return element == value; });
  }
};

// ---- Shapes
// ------------------------------------------------------------------------------------------------------

constexpr std::array<Shape, 13> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 1, 1, 1, 1},
    {1, 4, 1, 1, 600, 64, 65},
    {1, 2, 1, 31, 255, 3, 8},
    {1, 4, 2, 32, 256, 8, 3},
    {1, 2, 2, 33, 257, 65, 1},
    {1, 1, 1, 70, 600, 8, 65},
    {1, 1, 1, 32, 257, 64, 64},
    {2, 4, 1, 33, 31, 1, 64},
    {2, 4, 2, 70, 33, 8, 65},  // queries that see nothing under the causal mask, a block of them and more
    {2, 2, 1, 5, 0, 3, 8},     // no key at all
    {1, 2, 1, 70, 1, 65, 3},
    {3, 1, 1, 2, 513, 3, 1},
    {1, 2, 1, 257, 257, 3, 3},
}};

template <class T, class M, class Visible>
void check_shapes(const M& mask, Visible visible) {
  std::vector<Problem<T>> problems;
  std::vector<Expected<T>> expected;
  for (const Shape& shape : shapes) {
    problems.emplace_back(shape);
    expected.push_back(expect(problems.back(), visible, one));
  }
  for_each_target([&](const std::string& target) {
    Rules<T> rules;
    for (std::size_t i = 0; i < problems.size(); ++i) {
      rules.take(run(problems[i], Softmax{}, mask), expected[i], name_of(problems[i].shape));
    }
    rules.check(target);
  });
}

TEST_CASE("attention is as good as a naive loop, full: float", "[attention]") {
  check_shapes<float>(Full{}, all_keys);
}
TEST_CASE("attention is as good as a naive loop, full: double", "[attention]") {
  check_shapes<double>(Full{}, all_keys);
}
TEST_CASE("attention is as good as a naive loop, causal: float", "[attention]") {
  check_shapes<float>(Causal{}, keys_before);
}
TEST_CASE("attention is as good as a naive loop, causal: double", "[attention]") {
  check_shapes<double>(Causal{}, keys_before);
}

TEST_CASE("queries that see nothing give zero and an lse of -inf", "[attention]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    const Problem<float> causal({2, 2, 1, 70, 30, 8, 5});
    const Output<float> output = run(causal, Softmax{}, Causal{});
    bool zero = true, minus_infinity = true, others = true;
    for (std::size_t row = 0; row < output.lse.size(); ++row) {
      const bool sees = row % 70 >= 40;
      if (!sees)
        minus_infinity = minus_infinity && output.lse[row] == -std::numeric_limits<float>::infinity();
      if (sees) others = others && std::isfinite(output.lse[row]);
      for (std::size_t i = 0; i < 5; ++i) {
        const float value = output.out[row * 5 + i];
        if (!sees) zero = zero && value == 0;
        if (sees) others = others && value != 0 && std::isfinite(value);
      }
    }
    CHECK(zero);
    CHECK(minus_infinity);
    CHECK(others);
    const Output<float> none = run(Problem<float>({1, 2, 1, 3, 0, 8, 5}), SSMax<float>{2.F}, Full{});
    CHECK(none.out == std::vector<float>(30, 0.F));
    CHECK(none.lse == std::vector<float>(6, -std::numeric_limits<float>::infinity()));
  });
}

TEST_CASE("nothing to do is done without complaint", "[attention]") {
  CHECK(run(Problem<float>({0, 2, 1, 3, 4, 8, 5}), Softmax{}, Full{}).out.empty());
  CHECK(run(Problem<float>({1, 2, 1, 0, 4, 8, 5}), Softmax{}, Causal{}).out.empty());
  CHECK(run(Problem<float>({1, 0, 0, 3, 4, 8, 5}), Softmax{}, Causal{}).out.empty());
}

TEST_CASE("values of no width still give the lse, queries of no width see all keys alike", "[attention]") {
  const Output<float> no_values = run(Problem<float>({1, 2, 1, 3, 300, 8, 0}), Softmax{}, Causal{});
  const Output<float> values = run(Problem<float>({1, 2, 1, 3, 300, 8, 2}), Softmax{}, Causal{});
  CHECK(no_values.lse == values.lse);
  const Output<float> no_channels = run(Problem<float>({1, 1, 1, 2, 300, 0, 2}), Softmax{}, Full{});
  CHECK(std::abs(no_channels.lse[1] - std::log(300.F)) <= 1e-6F);
}

TEST_CASE("a few queries on many keys", "[attention]") {
  const Problem<float> problem({1, 1, 1, 3, 20'000, 16, 8});
  const Expected<float> expected = expect(problem, keys_before, one);
  for_each_target([&](const std::string& target) {
    Rules<float> rules;
    rules.take(run(problem, Softmax{}, Causal{}), expected, "20000 keys");
    rules.check(target);
  });
}

// ---- Scalings and options
// ----------------------------------------------------------------------------------------

constexpr Shape middle{1, 4, 2, 33, 270, 8, 6};

template <class T, class S, class Multiplier>
void check_scaling(const S& scaling, Multiplier multiplier, double deviation = 1,
                   const AttentionOptions<T>& options = {}) {
  const Problem<T> problem(middle, deviation);
  const Expected<T> full = expect(problem, all_keys, multiplier, options);
  const Expected<T> causal = expect(problem, keys_before, multiplier, options);
  for_each_target([&](const std::string& target) {
    Rules<T> rules;
    rules.take(run(problem, scaling, Full{}, options), full, "full");
    rules.take(run(problem, scaling, Causal{}, options), causal, "causal");
    rules.check(target);
  });
}

/// A scaling of a user's own, which looks at all that it is shown.
struct Everything {
  double operator()(const ssmax::Row& row) const {
    return 0.5 + 0.25 * static_cast<double>(row.head) + 0.001 * static_cast<double>(row.position) -
           0.002 * static_cast<double>(row.n);
  }
};

template <class T>
void check_scalings() {
  const auto at = [](const std::vector<T>& values, index_t i) {
    return Real(values[static_cast<std::size_t>(i)]);
  };
  const auto ln = [](index_t n) { return std::log(static_cast<Real>(n)); };
  const std::vector<T> s{T(0.43), T(1), T(-0.2), T(0)}, b{T(0.1), T(0), T(-0.5), T(0.7)};
  SECTION("SSMax, per head, with b; the third head's multiplier is negative") {
    check_scaling<T>(SSMax<T>{s, b},
                     [&](index_t h, index_t, index_t n) { return at(s, h) * ln(n) + at(b, h); });
  }
  SECTION("SSMax, one s") {
    check_scaling<T>(SSMax<T>{T(0.43)}, [&](index_t, index_t, index_t n) { return Real(T(0.43)) * ln(n); });
  }
  SECTION("SSMax, negative") {
    check_scaling<T>(SSMax<T>{T(-1)}, [&](index_t, index_t, index_t n) { return -ln(n); });
  }
  SECTION("zero") {
    check_scaling<T>(Constant{0}, [](index_t, index_t, index_t) { return Real(0); });
  }
  SECTION("SizeTable") {
    const std::vector<T> p = reference::normals<T>(300, 8);
    check_scaling<T>(ssmax::SizeTable<T>{p, T(0.5), T(1)},
                     [&](index_t, index_t, index_t n) { return Real(0.5) * at(p, n - 1) + 1; });
  }
  SECTION("large logits, multiplied by a thousand") {
    check_scaling<T>(
        Constant{1e3}, [](index_t, index_t, index_t) { return Real(1000); }, 4);
  }
  SECTION("logits of a million and more") {
    check_scaling<T>(
        Constant{1e3}, [](index_t, index_t, index_t) { return Real(1000); }, 40);
  }
  SECTION("head, position of the last visible key, and n") {
    check_scaling<T>(Everything{}, [](index_t head, index_t position, index_t n) {
      return static_cast<Real>(Everything{}({head, position, n}));
    });
  }
  SECTION("the scale, and a lambda as the scaling") {
    for (const double scale : {0.7, -0.3, 0.0}) {
      check_scaling<T>([](const ssmax::Row&) { return 1.5; },
                       [](index_t, index_t, index_t) { return Real(1.5); }, 1, {.scale = scale});
    }
  }
}

TEST_CASE("scalings multiply the logits of attention: float", "[attention]") { check_scalings<float>(); }
TEST_CASE("scalings multiply the logits of attention: double", "[attention]") { check_scalings<double>(); }

template <class T>
void check_rope(const Shape& shape, const ssmax::RopeOptions& rope_options, index_t key_position) {
  const Rope<T> rope(rope_options, shape.keys + 50);
  const AttentionOptions<T> options{.rope = &rope, .key_position = key_position};
  const Problem<T> problem(shape);
  const Expected<T> expected = expect(problem, keys_before, one, options);
  for_each_target([&](const std::string& target) {
    Rules<T> rules;
    rules.take(run(problem, Softmax{}, Causal{}, options), expected, name_of(shape));
    rules.check(target);
  });
}

template <class T>
void check_ropes() {
  check_rope<T>({2, 4, 2, 40, 300, 16, 8}, {.width = 16}, 0);
  check_rope<T>({1, 2, 1, 1, 257, 64, 8}, {.width = 32, .first_position = 1000}, 1050);
  check_rope<T>({1, 2, 1, 33, 300, 10, 3}, {.width = 10, .pairing = ssmax::Pairing::interleaved}, 50);
  check_rope<T>({1, 1, 1, 40, 33, 9, 3}, {.width = 6, .pairing = ssmax::Pairing::interleaved}, 7);
}

TEST_CASE("attention turns queries and keys to their positions", "[attention]") {
  SECTION("float") { check_ropes<float>(); }
  SECTION("double") { check_ropes<double>(); }
}

// ---- Layouts
// -----------------------------------------------------------------------------------------------------

/// The same problem with its tensors elsewhere in memory must give the same bits, and touch nothing beside.
template <class T>
void check_layout(const Problem<T>& problem, Tensor<T> q, Tensor<T> k, Tensor<T> v, Tensor<T> out) {
  const Shape& s = problem.shape;
  q.fill(problem.q);
  k.fill(problem.k);
  v.fill(problem.v);
  const T sentinel = out.storage.front();
  std::vector<T> lse(static_cast<std::size_t>(s.batch * s.queries * s.heads));
  const std::array<index_t, 3> lse_extents{s.batch, s.heads, s.queries};
  const View<T, 3> by_query(lse.data(), lse_extents, {s.queries * s.heads, 1, s.heads});
  const View<T, 3> transposed(lse.data(), lse_extents);
  const Output<T> expected = run(problem, SSMax<T>{T(0.4)}, Causal{});
  ssmax::attention<T>({.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = transposed},
                      SSMax<T>{T(0.4)}, Causal{});
  CHECK(same_bits(out.values(), expected.out));
  CHECK(out.only_elements_differ_from(sentinel));
  CHECK(same_bits(lse, expected.lse));

  // The last stride of lse must be 1 as well; without lse the result is the same.
  CHECK_THROWS_AS(
      ssmax::attention<T>({.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = by_query}),
      std::invalid_argument);
  out.for_each([](T& element) { element = T{0}; });
  ssmax::attention<T>({.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view()}, SSMax<T>{T(0.4)},
                      Causal{});
  CHECK(same_bits(out.values(), expected.out));
}

template <class T>
void check_layouts() {
  constexpr T gap = nan<T>, sentinel = T{-1234};
  const auto by_position = [](index_t batch, index_t heads, index_t positions, index_t channels, index_t pad,
                              T between) {
    const index_t pitch = heads * channels + pad;
    return Tensor<T>({batch, heads, positions, channels}, {positions * pitch, channels, pitch, 1}, 3,
                     between);
  };
  const Shape s{2, 4, 2, 37, 290, 6, 5};
  const Problem<T> problem(s);
  check_layout(problem, by_position(s.batch, s.heads, s.queries, s.d, 0, gap),
               by_position(s.batch, s.kv_heads, s.keys, s.d, 0, gap),
               by_position(s.batch, s.kv_heads, s.keys, s.dv, 0, gap),
               by_position(s.batch, s.heads, s.queries, s.dv, 0, sentinel));
  check_layout(problem, by_position(s.batch, s.heads, s.queries, s.d, 5, gap),
               by_position(s.batch, s.kv_heads, s.keys, s.d, 1, gap),
               by_position(s.batch, s.kv_heads, s.keys, s.dv, 7, gap),
               by_position(s.batch, s.heads, s.queries, s.dv, 2, sentinel));
}

TEST_CASE("[batch, position, head, channel] with gaps gives the same bits", "[attention]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    check_layouts<float>();
    check_layouts<double>();
  });
}

TEST_CASE("columns of a packed qkv give the same bits", "[attention]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    const Shape s{2, 4, 2, 270, 270, 6, 5};
    const Problem<float> problem(s);
    const index_t q_width = s.heads * s.d, k_width = s.kv_heads * s.d;
    const index_t pitch = q_width + k_width + s.kv_heads * s.dv;
    Tensor<float> q({s.batch, s.heads, s.queries, s.d}, {s.queries * pitch, s.d, pitch, 1}, 0, 0);
    q.storage.resize(static_cast<std::size_t>(s.batch * s.queries * pitch));
    Tensor<float> k = q, v = q;
    k.extents = {s.batch, s.kv_heads, s.keys, s.d};
    k.offset = q_width;
    k.fill(problem.k);
    v.extents = {s.batch, s.kv_heads, s.keys, s.dv};
    v.strides[1] = s.dv;
    v.offset = q_width + k_width;
    v.storage = k.storage;
    v.fill(problem.v);
    q.storage = v.storage;
    q.fill(problem.q);
    const float* const packed = q.storage.data();
    std::vector<float> out(static_cast<std::size_t>(problem.rows() * s.dv));
    ssmax::attention<float>({.q = q.view(),
                             .k = {packed + k.offset, k.extents, k.strides},
                             .v = {packed + v.offset, v.extents, v.strides},
                             .out = {out.data(), {s.batch, s.heads, s.queries, s.dv}}},
                            Softmax{}, Causal{});
    CHECK(same_bits(out, run(problem, Softmax{}, Causal{}).out));
  });
}

TEST_CASE("a batch whose stride is zero shares its keys", "[attention]") {
  const Problem<float> problem({3, 2, 1, 5, 40, 8, 4});
  Problem<float> copied = problem;
  for (index_t batch = 1; batch < 3; ++batch) {
    std::copy_n(problem.k.begin(), 40 * 8, copied.k.begin() + batch * 40 * 8);
    std::copy_n(problem.v.begin(), 40 * 4, copied.v.begin() + batch * 40 * 4);
  }
  std::vector<float> out(3 * 2 * 5 * 4);
  ssmax::attention<float>({.q = problem.q_view(),
                           .k = {problem.k.data(), {3, 1, 40, 8}, {0, 0, 8, 1}},
                           .v = {problem.v.data(), {3, 1, 40, 4}, {0, 0, 4, 1}},
                           .out = {out.data(), {3, 2, 5, 4}}});
  CHECK(same_bits(out, run(copied, Softmax{}, Full{}).out));
}

// ---- Masks
// -------------------------------------------------------------------------------------------------------

/// Ranges that begin and end anywhere, another for every batch, head and query, and some empty.
struct Anywhere {
  KeyRange keys(const Query& query) const {
    const index_t number = (query.batch * query.shape.heads + query.head) * query.shape.queries + query.index;
    if (number % 7 == 3) return {number % 5, number % 5};
    const index_t begin = number * 31 % query.shape.keys;
    return {begin, std::min(query.shape.keys, begin + 1 + number * 53 % 400)};
  }
};

template <class T>
void check_masks() {
  const Shape shape{2, 4, 2, 40, 600, 8, 5};
  const Problem<T> problem(shape);
  std::vector<index_t> lengths, given;
  for (index_t row = 0; row < problem.rows(); ++row) {
    lengths.push_back(row % 9 == 4 ? 0 : row * 37 % 600 + 1);
    given.push_back(lengths.back() == 0 ? -5 : lengths.back() == 600 ? 700 : lengths.back());
  }
  const auto first_keys = [&](const Query& query) {
    const index_t row = (query.batch * shape.heads + query.head) * shape.queries + query.index;
    return KeyRange{0, lengths[static_cast<std::size_t>(row)]};
  };
  const auto multiplier = [](index_t, index_t, index_t n) { return std::log(static_cast<Real>(n)); };
  const Expected<T> ragged = expect(problem, first_keys, multiplier);
  const auto anywhere = [](const Query& query) { return Anywhere{}.keys(query); };
  const Expected<T> own = expect(problem, anywhere, multiplier);
  for_each_target([&](const std::string& target) {
    Rules<T> rules;
    rules.take(run(problem, SSMax<T>{}, Lengths{lengths}), ragged, "lengths");
    rules.take(run(problem, SSMax<T>{}, Lengths{given}), ragged, "lengths outside of the keys");
    rules.take(run(problem, SSMax<T>{}, Anywhere{}), own, "own mask");
    rules.check(target);
  });
}

TEST_CASE("lengths and a mask of one's own hide keys, and n counts what is left", "[attention]") {
  SECTION("float") { check_masks<float>(); }
  SECTION("double") { check_masks<double>(); }
}

template <class T>
void check_poison() {
  const Shape s{1, 2, 1, 40, 300, 8, 5};
  const Problem<T> clean(s);
  for_each_target([&](const std::string& target) {
    INFO(target);
    for (const double multiplier : {1.5, -1.5, 0.0}) {
      const Constant scaling{multiplier};
      const Output<T> expected = run(clean, scaling, Causal{});
      int leaked = 0, lost = 0;
      // Key 260 + i is the last that query i sees. These lie in the block of the last visible key and after
      // it.
      for (const index_t key : {5, 255, 256, 261, 270, 291, 292, 298, 299}) {
        for (const T poison : {nan<T>, std::numeric_limits<T>::infinity()}) {
          Problem<T> in_k = clean, in_v = clean;
          for (index_t i = 0; i < s.d; ++i) in_k.k[static_cast<std::size_t>(key * s.d + i)] = poison;
          for (index_t i = 0; i < s.dv; i += 2) in_v.v[static_cast<std::size_t>(key * s.dv + i)] = poison;
          const Output<T> of_k = run(in_k, scaling, Causal{}), of_v = run(in_v, scaling, Causal{});
          for (std::size_t row = 0; row < expected.lse.size(); ++row) {
            const bool sees = static_cast<index_t>(row) % s.queries + 260 >= key;
            const auto same = [](T a, T b) { return std::memcmp(&a, &b, sizeof(T)) == 0; };
            if (!same(of_v.lse[row], expected.lse[row])) ++leaked;
            if (!sees && !same(of_k.lse[row], expected.lse[row])) ++leaked;
            if (sees && std::isnan(poison) && !std::isnan(of_k.lse[row])) ++lost;
            for (std::size_t i = 0; i < 5; ++i) {
              const std::size_t at = row * 5 + i;
              if (!sees && !same(of_k.out[at], expected.out[at])) ++leaked;
              if (!(sees && i % 2 == 0) && !same(of_v.out[at], expected.out[at])) ++leaked;
              if (sees && std::isnan(poison) && !std::isnan(of_k.out[at])) ++lost;
              if (sees && i % 2 == 0 && std::isfinite(of_v.out[at])) ++lost;
            }
          }
        }
      }
      CHECK(leaked == 0);
      CHECK(lost == 0);
    }
  });
}

TEST_CASE("NaN in hidden keys and values stays there, in visible ones it spreads", "[attention]") {
  SECTION("float") { check_poison<float>(); }
  SECTION("double") { check_poison<double>(); }
}

TEST_CASE("NaN in a query reaches no other query, and none at all without keys", "[attention]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    const Problem<float> clean({1, 1, 1, 40, 30, 8, 5});
    Problem<float> poisoned = clean;
    poisoned.q[3 * 8] = poisoned.q[25 * 8 + 7] = nan<float>;  // query 3 sees nothing, query 25 does
    const Output<float> expected = run(clean, Softmax{}, Causal{}),
                        output = run(poisoned, Softmax{}, Causal{});
    int wrong = 0;
    for (std::size_t i = 0; i < output.out.size(); ++i) {
      if (i / 5 == 25 ? !std::isnan(output.out[i]) : output.out[i] != expected.out[i]) ++wrong;
    }
    CHECK(wrong == 0);
    CHECK(std::isnan(output.lse[25]));
    CHECK(output.lse[3] == -std::numeric_limits<float>::infinity());
  });
}

TEST_CASE("padding that no query sees is never read into a result", "[attention]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    const Problem<float> clean({1, 2, 2, 33, 600, 8, 5});
    Problem<float> padded = clean;
    for (index_t head = 0; head < 2; ++head) {
      std::fill_n(padded.k.begin() + (head * 600 + 250) * 8, 350 * 8, nan<float>);
      std::fill_n(padded.v.begin() + (head * 600 + 250) * 5, 350 * 5, nan<float>);
    }
    const std::vector<index_t> lengths(2 * 33, 250);
    const Output<float> expected = run(clean, SSMax<float>{}, Lengths{lengths});
    const Output<float> output = run(padded, SSMax<float>{}, Lengths{lengths});
    CHECK(same_bits(output.out, expected.out));
    CHECK(same_bits(output.lse, expected.lse));
    CHECK(std::ranges::all_of(output.out, [](float value) { return std::isfinite(value); }));
  });
}

// ---- Errors
// ------------------------------------------------------------------------------------------------------

constexpr float untouched = -1234.5F;

/// A call that fits: 2 batches, 4 heads on 2, 5 queries on 7 keys, width 8 and 6. Tests spoil one thing.
struct Call {
  std::vector<float> inputs = std::vector<float>(4096, 1.F), outputs = std::vector<float>(4096, untouched);
  View<const float, 4> q{inputs.data(), {2, 4, 5, 8}}, k{inputs.data() + 512, {2, 2, 7, 8}},
      v{inputs.data() + 1024, {2, 2, 7, 6}};
  View<float, 4> out{outputs.data(), {2, 4, 5, 6}};
  View<float, 3> lse{outputs.data() + 512, {2, 4, 5}};

  template <class S = Softmax, class M = Full>
  void run(const S& scaling = {}, const M& mask = {}, const AttentionOptions<float>& options = {}) {
    ssmax::attention<float>({.q = q, .k = k, .v = v, .out = out, .lse = lse}, scaling, mask, options);
  }
  template <class S = Softmax, class M = Full>
  void refused(std::initializer_list<const char*> words, const S& scaling = {}, const M& mask = {},
               const AttentionOptions<float>& options = {}) {
    std::string message = "(nothing was thrown)";
    try {
      run(scaling, mask, options);
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    for (const char* word : words) {
      INFO('"' << message << "\" should mention " << word);
      CHECK(message.find(word) != std::string::npos);
    }
    CHECK(std::ranges::all_of(outputs, [](float value) { return value == untouched; }));
    CHECK(std::ranges::all_of(inputs, [](float value) { return value == 1; }));
  }
};

TEST_CASE("attention names what does not fit and writes nothing", "[attention]") {
  Call call;
  SECTION("heads") {
    call.k = {call.inputs.data(), {2, 3, 7, 8}};
    call.v = {call.inputs.data(), {2, 3, 7, 6}};
    call.refused({"q has heads 4", "multiple", "3"});
  }
  SECTION("more kv heads than heads") {
    call.k = {call.inputs.data(), {2, 8, 7, 8}};
    call.v = {call.inputs.data(), {2, 8, 7, 6}};
    call.refused({"q has heads 4", "8"});
  }
  SECTION("batch of k") {
    call.k = {call.inputs.data(), {1, 2, 7, 8}};
    call.refused({"k has extent 1 in dimension 0", "q has 2"});
  }
  SECTION("batch of v") {
    call.v = {call.inputs.data(), {1, 2, 7, 6}};
    call.refused({"v has extent 1 in dimension 0", "k has 2"});
  }
  SECTION("width of k") {
    call.k = {call.inputs.data(), {2, 2, 7, 4}};
    call.refused({"k has extent 4 in dimension 3", "q has 8"});
  }
  SECTION("heads of v") {
    call.v = {call.inputs.data(), {2, 4, 7, 6}};
    call.refused({"v has extent 4 in dimension 1", "k has 2"});
  }
  SECTION("keys of v") {
    call.v = {call.inputs.data(), {2, 2, 6, 6}};
    call.refused({"v has extent 6 in dimension 2", "k has 7"});
  }
  SECTION("each extent of out") {
    for (std::size_t i = 0; i < 4; ++i) {
      std::array<index_t, 4> extents{2, 4, 5, 6};
      ++extents[i];
      call.out = {call.outputs.data(), extents};
      call.refused({"out has extent", ("dimension " + std::to_string(i)).c_str(),
                    std::to_string(extents[i]).c_str(), std::to_string(extents[i] - 1).c_str()});
    }
  }
  SECTION("each extent of lse") {
    for (std::size_t i = 0; i < 3; ++i) {
      std::array<index_t, 3> extents{2, 4, 5};
      --extents[i];
      call.lse = {call.outputs.data() + 512, extents};
      call.refused({"lse has extent", ("dimension " + std::to_string(i)).c_str(),
                    std::to_string(extents[i]).c_str(), std::to_string(extents[i] + 1).c_str()});
    }
  }
  SECTION("a negative extent") {
    call.k = {call.inputs.data(), {2, 2, -7, 8}};
    call.refused({"k", "-7"});
  }
  SECTION("null q") {
    call.q = {nullptr, {2, 4, 5, 8}};
    call.refused({"q is null", "320"});
  }
  SECTION("null k") {
    call.k = {nullptr, {2, 2, 7, 8}};
    call.refused({"k is null"});
  }
  SECTION("null v") {
    call.v = {nullptr, {2, 2, 7, 6}};
    call.refused({"v is null"});
  }
  SECTION("null out") {
    call.out = {nullptr, {2, 4, 5, 6}};
    call.refused({"out is null"});
  }
  SECTION("strides of channels") {
    call.q = {call.inputs.data(), {2, 4, 5, 8}, {320, 80, 16, 2}};
    call.refused({"q", "stride 2", "1"});
  }
  SECTION("strides of channels of out") {
    call.out = {call.outputs.data(), {2, 4, 5, 6}, {240, 60, 12, 2}};
    call.refused({"out", "stride 2", "1"});
  }
  SECTION("rows of out on each other") {
    call.out = {call.outputs.data(), {2, 4, 5, 6}, {120, 30, 5, 1}};
    call.refused({"out", "stride 5", "6"});
  }
  SECTION("heads of lse on each other") {
    call.lse = {call.outputs.data() + 512, {2, 4, 5}, {20, 0, 1}};
    call.refused({"lse", "stride 0"});
  }
  SECTION("lse on out") {
    call.lse = {call.outputs.data() + 239, {2, 4, 5}};
    call.refused({"lse", "overlaps out", "4 bytes"});
  }
  SECTION("s") {
    const std::vector<float> s(3, 1.F);
    call.refused({"s has extent 3", "4"}, SSMax<float>{s});
  }
  SECTION("p") {
    const std::vector<float> p(6, 1.F);
    call.refused({"p has extent 6", "7"}, ssmax::SizeTable<float>{p});
  }
  SECTION("lengths") {
    const std::vector<index_t> lengths(41, 7);
    call.refused({"visible has extent 41", "40"}, Softmax{}, Lengths{lengths});
  }
}

TEST_CASE("attention refuses to write where it reads", "[attention]") {
  Call call;
  float* const shared = call.outputs.data();
  SECTION("q") {
    call.q = {shared + 239, {2, 4, 5, 8}};
    call.refused({"out", "overlaps q", "4 bytes"});
  }
  SECTION("k") {
    call.k = {shared + 200, {2, 2, 7, 8}};
    call.refused({"out", "overlaps k"});
  }
  SECTION("v in place") {
    call.v = {shared, {2, 2, 7, 6}};
    call.refused({"out", "overlaps v"});
  }
  SECTION("lse") {
    call.k = {shared + 512, {2, 2, 7, 8}};
    call.refused({"lse", "overlaps k"});
  }
  SECTION("neighbours are no overlap") {
    call.q = {shared + 240, {2, 4, 5, 8}, {4, 4, 8, 1}};  // ends before lse begins
    CHECK_NOTHROW(call.run());
    CHECK(std::ranges::count(call.outputs, untouched) == 4096 - 240 - 40);
  }
}

TEST_CASE("attention refuses a rope that does not reach its keys or queries", "[attention]") {
  Call call;
  const Rope<float> wide({.width = 10}, 20), brief({.width = 8}, 6),
      late({.width = 8, .first_position = 3}, 20);
  const Rope<float> enough({.width = 8}, 7);
  call.refused({"width is 10", "channels 8"}, Softmax{}, Causal{}, {.rope = &wide});
  call.refused({"position 6", "last is 5"}, Softmax{}, Causal{}, {.rope = &brief});
  call.refused({"position 0", "first is 3"}, Softmax{}, Causal{}, {.rope = &late});
  call.refused({"position 23", "last is 22"}, Softmax{}, Causal{}, {.rope = &late, .key_position = 17});
  call.refused({"position -1", "first is 0"}, Softmax{}, Causal{}, {.rope = &enough, .key_position = -1});
  // More queries than keys: the first ones would lie before position 0.
  call.k = {call.inputs.data() + 512, {2, 2, 4, 8}};
  call.v = {call.inputs.data() + 1024, {2, 2, 4, 6}};
  call.refused({"q has position -1", "first is 0"}, Softmax{}, Causal{}, {.rope = &enough});
  CHECK_NOTHROW(call.run(Softmax{}, Causal{}, {.rope = &enough, .key_position = 1}));
}

}  // namespace attention_test
