// Attention is bit-identical for any strides (also negative and 0), gaps full of NaN and columns of a packed matrix.
// Attention writes only the output, which may be q.

#include "attention_problem.hpp"
#include "placed.hpp"
#include "test.hpp"

namespace attention_problem::attention_layouts_test {

constexpr std::array<Shape, 7> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 3, 290, 6, 5},
    {2, 4, 2, 37, 290, 6, 5},
    {1, 2, 2, 20, 100, 16, 16},
    {2, 2, 1, 4, 300, 32, 32},
    {1, 2, 1, 70, 290, 16, 16},
    {1, 2, 1, 3, 1100, 7, 7},
    {1, 1, 1, 1, 1, 1, 1},
}};

template <class T>
void check_placed(const Shape& s, const std::array<std::size_t, 3>& order, index_t gap,
                  const std::array<bool, 3>& backwards) {
  const Problem<T> problem(s);
  const SSMax<Compute<T>> scaling{Compute<T>(0.4)};
  const T between = T(nan<float>), untouched = T(-1234.0F);
  Placed<T> q({s.batch, s.heads, s.queries, s.d}, order, 2 * gap, backwards, between),
      k({s.batch, s.kv_heads, s.keys, s.d}, order, gap, backwards, between),
      v({s.batch, s.kv_heads, s.keys, s.dv}, order, 3 * gap, backwards, between),
      out({s.batch, s.heads, s.queries, s.dv}, order, gap, backwards, untouched);
  q.fill(problem.q);
  k.fill(problem.k);
  v.fill(problem.v);
  const Output<T> expected = run(problem, scaling, Causal{});
  ssmax::attention<Compute<T>>({.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view()}, scaling,
                               Causal{});
  CHECK(out.differences(expected.out, untouched) == 0);
  // Rows of lse have gaps as well.
  Placed<Compute<T>> lse({1, s.batch, s.heads, s.queries}, {2, 1, 0}, gap, {}, Compute<T>(-1234));
  ssmax::attention<Compute<T>>(
      over_views(
          q.view(), k.view(), v.view(), out.view(),
          {lse.view().data_handle(), {s.batch, s.heads, s.queries}, {lse.strides[1], lse.strides[2], 1}}),
      scaling, Causal{});
  CHECK(out.differences(expected.out, untouched) == 0);
  CHECK(lse.differences(expected.lse, Compute<T>(-1234)) == 0);
  if (s.d != s.dv) return;
  static ssmax::ThreadPool three(3);
  attention<Compute<T>>({.q = q.view(), .k = k.view(), .v = v.view(), .out = q.view()}, scaling, Causal{},
                        three);
  CHECK(q.differences(expected.out, between) == 0);
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

TEST_CASE("columns of a packed qkv", "[attention][layouts]") {
  for_each_target([](const std::string& target) {
    for (const Shape& shape : shapes) {
      if (shape.queries != 37 && shape.queries != 3) continue;
      Shape s = shape;
      s.keys = s.queries = shape.queries == 3 ? 4 : 270;
      INFO(target << ' ' << name_of(s));
      const Problem<float> problem(s);
      PackedQkv<float> qkv(s, 0);
      qkv.fill(problem);
      const Output<float> expected = run(problem, SSMax<float>{}, Causal{});
      Output<float> output(s);
      ssmax::attention(
          {.q = qkv.q(), .k = qkv.k(), .v = qkv.v(), .out = output.out_view(), .lse = output.lse_view()},
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
      ssmax::attention({.q = {q.data(), {s.batch, s.heads, s.queries, s.d}, {0, 0, 0, 1}},
                        .k = {k.data(), {s.batch, s.kv_heads, s.keys, s.d}, {0, 0, s.d, 1}},
                        .v = {v.data(), {s.batch, s.kv_heads, s.keys, s.dv}, {0, 0, 0, 1}},
                        .out = output.out_view(),
                        .lse = output.lse_view()},
                       SSMax<float>{}, Causal{});
      CHECK(output == run(repeated, SSMax<float>{}, Causal{}));
    }
  });
}

TEST_CASE("a batch stride of 0 shares the keys", "[attention][layouts]") {
  const Problem<float> problem({3, 2, 1, 5, 40, 8, 4});
  Problem<float> copied = problem;
  for (index_t batch = 1; batch < 3; ++batch) {
    std::copy_n(problem.k.begin(), 40 * 8, copied.k.begin() + batch * 40 * 8);
    std::copy_n(problem.v.begin(), 40 * 4, copied.v.begin() + batch * 40 * 4);
  }
  Output<float> output(problem.shape);
  ssmax::attention({.q = problem.q_view(),
                    .k = {problem.k.data(), {3, 1, 40, 8}, {0, 0, 8, 1}},
                    .v = {problem.v.data(), {3, 1, 40, 4}, {0, 0, 4, 1}},
                    .out = output.out_view()});
  CHECK(same_bits(output.out, run(copied, Softmax{}, Full{}).out));
}

TEST_CASE("the output is bit-identical without an lse", "[attention][layouts]") {
  for_each_target([](const std::string& target) {
    for (const Shape& s : shapes) {
      INFO(target << ' ' << name_of(s));
      const Problem<float> problem(s);
      Output<float> output(s);
      ssmax::attention(
          {.q = problem.q_view(), .k = problem.k_view(), .v = problem.v_view(), .out = output.out_view()},
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
  for_each_target([&](const std::string&) {
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
