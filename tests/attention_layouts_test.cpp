// Attention is bit-identical for any strides (also negative and 0), gaps full of NaN and columns of a packed matrix.
// Attention writes only the output.

#include <algorithm>
#include <array>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "attention_problem.hpp"
#include "catch.hpp"
#include "placed.hpp"

namespace attention_problem::attention_layouts_test {

constexpr std::array<Shape, 7> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 3, 290, 6, 5},
    {2, 4, 2, 37, 290, 6, 5},
    {1, 2, 2, 20, 300, 16, 32},
    {2, 2, 1, 4, 300, 16, 32},
    {1, 2, 1, 70, 290, 16, 32},
    {1, 2, 1, 3, 1100, 7, 3},
    {1, 1, 1, 1, 1, 1, 1},
}};

template <class T>
void check_placed(const Shape& s, const std::array<std::size_t, 3>& order, index_t gap,
                  const std::array<bool, 3>& backwards) {
  const Problem<T> problem(s);
  const SSMax<Compute<T>> scaling{Compute<T>(0.4)};
  const T between = T(nan<float>), untouched = T(-1234.0F);
  Placed<T> q({s.batch, s.heads, s.queries, s.d}, order, gap, backwards, between),
      k({s.batch, s.kv_heads, s.keys, s.d}, order, gap, backwards, between),
      v({s.batch, s.kv_heads, s.keys, s.dv}, order, gap, backwards, between),
      out({s.batch, s.heads, s.queries, s.dv}, order, gap, backwards, untouched);
  q.fill(problem.q);
  k.fill(problem.k);
  v.fill(problem.v);
  const Output<T> expected = run(problem, scaling, Causal{});
  ssmax::attention<T>({.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view()}, scaling, Causal{});
  std::size_t at = 0;
  int wrong = 0;
  out.for_each([&](T& element) {
    wrong += same_bits(element, expected.out[at++]) ? 0 : 1;
    element = untouched;
  });
  CHECK(wrong == 0);
  CHECK(std::ranges::all_of(out.storage, [&](const T& x) { return same_bits(x, untouched); }));
}

TEST_CASE("attention is bit-identical for any dimension order, gaps and negative strides",
          "[attention][layouts][bfloat16][slow]") {
  for_each_target_of<ssmax::bfloat16>([](const std::string& target) {
    for (const Shape& shape : shapes) {
      for (const auto& order : {std::array<std::size_t, 3>{2, 1, 0}, {1, 2, 0}, {0, 2, 1}, {1, 0, 2}}) {
        for (const index_t gap : {0, 1, 5}) {
          for (const auto& backwards : {std::array<bool, 3>{}, {false, false, true}, {true, true, true}}) {
            INFO(target << ' ' << name_of(shape) << " innermost " << order[0] << " gap " << gap
                        << " backwards " << backwards[0] << backwards[2]);
            check_placed<float>(shape, order, gap, backwards);
          }
        }
        check_placed<double>(shape, order, 3, {});
        check_placed<ssmax::half>(shape, order, 3, {});
        check_placed<ssmax::bfloat16>(shape, order, 0, {});
      }
    }
  });
}

/// q, k and v, [position, (q heads, kv heads, kv heads) · channels], of one projection; out may be q's
/// columns of another.
TEST_CASE("columns of a packed qkv", "[attention][layouts]") {
  for_each_target([](const std::string& target) {
    for (const Shape& shape : shapes) {
      if (shape.queries != 37 && shape.queries != 3) continue;
      Shape s = shape;
      s.keys = s.queries = shape.queries == 3 ? 4 : 270;
      INFO(target << ' ' << name_of(s));
      const index_t q_columns = s.heads * s.d, k_columns = s.kv_heads * s.d;
      const index_t pitch = q_columns + k_columns + s.kv_heads * s.dv;
      std::vector<float> packed(static_cast<std::size_t>(s.batch * s.queries * pitch));
      const auto columns = [&](index_t first, index_t heads, index_t channels) {
        return View<float, 4>(packed.data() + first, {s.batch, heads, s.queries, channels},
                              {s.queries * pitch, channels, pitch, 1});
      };
      const View<float, 4> q = columns(0, s.heads, s.d), k = columns(q_columns, s.kv_heads, s.d),
                           v = columns(q_columns + k_columns, s.kv_heads, s.dv);
      const Problem<float> problem(s);
      const auto fill = [&](const View<float, 4>& to, const std::vector<float>& from) {
        auto next = from.begin();
        for (index_t b = 0; b < to.extent(0); ++b) {
          for (index_t h = 0; h < to.extent(1); ++h) {
            for (index_t i = 0; i < to.extent(2); ++i) {
              for (index_t c = 0; c < to.extent(3); ++c) to(b, h, i, c) = *next++;
            }
          }
        }
      };
      fill(q, problem.q);
      fill(k, problem.k);
      fill(v, problem.v);
      const Output<float> expected = run(problem, SSMax<float>{}, Causal{});
      Output<float> output(s);
      ssmax::attention<float>({.q = q,
                               .k = k,
                               .v = v,
                               .out = {output.out.data(), {s.batch, s.heads, s.queries, s.dv}},
                               .lse = {output.lse.data(), {s.batch, s.heads, s.queries}}},
                              SSMax<float>{}, Causal{});
      CHECK(output == expected);
    }
  });
}

TEST_CASE("strides of 0 repeat queries, heads and keys", "[attention][layouts]") {
  for_each_target([](const std::string& target) {
    for (const Shape& s : shapes) {
      INFO(target << ' ' << name_of(s));
      Problem<float> repeated(s);
      const std::vector<float> q(repeated.q.begin(), repeated.q.begin() + s.d),
          k(repeated.k.begin(), repeated.k.begin() + s.keys * s.d),
          v(repeated.v.begin(), repeated.v.begin() + s.dv);
      for (std::size_t i = 0; i < repeated.q.size(); ++i) repeated.q[i] = q[i % q.size()];
      for (std::size_t i = 0; i < repeated.k.size(); ++i) repeated.k[i] = k[i % k.size()];
      for (std::size_t i = 0; i < repeated.v.size(); ++i) repeated.v[i] = v[i % v.size()];
      Output<float> output(s);
      ssmax::attention<float>({.q = {q.data(), {s.batch, s.heads, s.queries, s.d}, {0, 0, 0, 1}},
                               .k = {k.data(), {s.batch, s.kv_heads, s.keys, s.d}, {0, 0, s.d, 1}},
                               .v = {v.data(), {s.batch, s.kv_heads, s.keys, s.dv}, {0, 0, 0, 1}},
                               .out = {output.out.data(), {s.batch, s.heads, s.queries, s.dv}},
                               .lse = {output.lse.data(), {s.batch, s.heads, s.queries}}},
                              SSMax<float>{}, Causal{});
      CHECK(output == run(repeated, SSMax<float>{}, Causal{}));
    }
  });
}

TEST_CASE("the output is bit-identical without an lse", "[attention][layouts]") {
  for_each_target([](const std::string& target) {
    for (const Shape& s : shapes) {
      INFO(target << ' ' << name_of(s));
      const Problem<float> problem(s);
      Output<float> output(s);
      ssmax::attention<float>({.q = problem.q_view(),
                               .k = problem.k_view(),
                               .v = problem.v_view(),
                               .out = {output.out.data(), {s.batch, s.heads, s.queries, s.dv}}},
                              SSMax<float>{}, Causal{});
      CHECK(same_bits(output.out, run(problem, SSMax<float>{}, Causal{}).out));
      CHECK(std::ranges::all_of(output.lse, [](float x) { return x == -77; }));
    }
  });
}

TEST_CASE("a row is bit-identical whatever the other rows", "[attention][layouts]") {
  // One head of many, one batch entry of many, alone.
  const Shape s{3, 4, 2, 37, 290, 6, 5}, alone{1, 2, 1, 37, 290, 6, 5};
  const Problem<float> problem(s);
  for_each_target([&](const std::string& target) {
    INFO(target);
    const Output<float> all = run(problem, SSMax<float>{}, Causal{});
    for (index_t kv_head = 0; kv_head < 6; ++kv_head) {
      Problem<float> part(alone);
      const auto take = [&](std::vector<float>& to, const std::vector<float>& from) {
        const auto size = static_cast<index_t>(to.size());
        std::copy_n(from.begin() + kv_head * size, size, to.begin());
      };
      take(part.q, problem.q);
      take(part.k, problem.k);
      take(part.v, problem.v);
      Output<float> expected(alone);
      take(expected.out, all.out);
      take(expected.lse, all.lse);
      CHECK(run(part, SSMax<float>{}, Causal{}) == expected);
    }
  });
}

}  // namespace attention_problem::attention_layouts_test
