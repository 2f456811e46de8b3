// Gradients are bit-identical for any strides, with gaps full of NaN and as columns of a packed matrix. Backward
// writes only the gradients, and their old contents do not affect the result.

#include <algorithm>
#include <array>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "attention_backward_problem.hpp"
#include "catch.hpp"
#include "placed.hpp"

namespace attention_problem::backward_problem::attention_backward_layouts_test {

constexpr std::array<Shape, 6> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 3, 290, 6, 5},
    {2, 4, 2, 37, 150, 6, 5},
    {1, 2, 2, 20, 130, 16, 32},
    {2, 2, 1, 4, 300, 16, 17},
    {1, 2, 1, 53, 41, 7, 3},
    {1, 1, 1, 1, 1, 1, 1},
}};

template <class T>
void check_placed(const Shape& s, const std::array<std::size_t, 3>& order, index_t gap,
                  const std::array<bool, 3>& backwards) {
  const Problem<T> problem(s);
  const SSMax<Compute<T>> scaling{Compute<T>(0.4)};
  const T between = T(nan<float>), untouched = T(-1234.0F);
  const Output<T> output = run(problem, scaling, Causal{});
  const std::array<index_t, 4> of_q{s.batch, s.heads, s.queries, s.d}, of_k{s.batch, s.kv_heads, s.keys, s.d},
      of_v{s.batch, s.kv_heads, s.keys, s.dv}, of_out{s.batch, s.heads, s.queries, s.dv};
  const std::array<index_t, 3> of_rows{s.batch, s.heads, s.queries};
  const auto place = [&](const std::array<index_t, 4>& extents, const std::vector<T>& values) {
    Placed<T> placed(extents, order, gap, backwards, between);
    placed.fill(values);
    return placed;
  };
  Placed<T> q = place(of_q, problem.q), k = place(of_k, problem.k), v = place(of_v, problem.v),
            out = place(of_out, output.out), dout = place(of_out, problem.dout),
            dq(of_q, order, gap, backwards, untouched), dk(of_k, order, gap, backwards, untouched),
            dv(of_v, order, gap, backwards, untouched);
  // Rows of lse and dlse have gaps as well.
  const index_t pitch = s.queries + gap;
  std::vector<Compute<T>> lse(static_cast<std::size_t>(s.batch * s.heads * pitch), nan<Compute<T>>),
      dlse = lse;
  for (index_t row = 0; row < problem.rows(); ++row) {
    const auto from = static_cast<std::size_t>(row),
               to = static_cast<std::size_t>(row / s.queries * pitch + row % s.queries);
    lse[to] = output.lse[from];
    dlse[to] = problem.dlse[from];
  }
  const std::array<index_t, 3> row_strides{s.heads * pitch, pitch, 1};
  ssmax::attention_backward<T>({.q = q.view(),
                                .k = k.view(),
                                .v = v.view(),
                                .out = out.view(),
                                .lse = {lse.data(), of_rows, row_strides}},
                               {.dout = dout.view(),
                                .dlse = {dlse.data(), of_rows, row_strides},
                                .dq = dq.view(),
                                .dk = dk.view(),
                                .dv = dv.view()},
                               scaling, Causal{});
  const Result<T> expected = backward(problem, output, scaling, Causal{}, ssmax::Identity{});
  CHECK(dq.differences(expected.dq, untouched) == 0);
  CHECK(dk.differences(expected.dk, untouched) == 0);
  CHECK(dv.differences(expected.dv, untouched) == 0);
}

TEST_CASE("gradients are bit-identical for any dimension order, gaps and negative strides",
          "[attention][backward][layouts][bfloat16][slow]") {
  for (const Shape& shape : shapes) {
    // [batch, head, position, channel], [batch, position, head, channel] and two more.
    for (const auto& order : {std::array<std::size_t, 3>{2, 1, 0}, {1, 2, 0}, {0, 2, 1}, {1, 0, 2}}) {
      for (const index_t gap : {0, 1, 5}) {
        for_each_target_of<ssmax::bfloat16>([&](const std::string& target) {
          for (const auto& backwards : {std::array<bool, 3>{}, {false, false, true}, {true, true, true}}) {
            INFO(target << ' ' << name_of(shape) << " innermost " << order[0] << " gap " << gap
                        << " backwards " << backwards[2] << backwards[0]);
            check_placed<float>(shape, order, gap, backwards);
          }
          check_placed<double>(shape, order, gap, {});
          check_placed<ssmax::half>(shape, order, gap, {});
          check_placed<ssmax::bfloat16>(shape, order, gap, {});
        });
      }
    }
  }
}

/// Columns of [batch, position, q heads · d + k heads · d + v heads · dv].
template <class T>
struct PackedQkv {
  Shape s;
  std::vector<T> storage;

  PackedQkv(const Shape& shape, T value)
      : s(shape), storage(static_cast<std::size_t>(s.batch * s.queries * pitch()), value) {}
  index_t pitch() const { return (s.heads + s.kv_heads) * s.d + s.kv_heads * s.dv; }
  View<T, 4> columns(index_t first, index_t heads, index_t width) {
    return {
        storage.data() + first, {s.batch, heads, s.queries, width}, {s.queries * pitch(), width, pitch(), 1}};
  }
  View<T, 4> q() { return columns(0, s.heads, s.d); }
  View<T, 4> k() { return columns(s.heads * s.d, s.kv_heads, s.d); }
  View<T, 4> v() { return columns((s.heads + s.kv_heads) * s.d, s.kv_heads, s.dv); }
};

template <class T, class F>
void for_each(const View<T, 4>& view, const F& f) {
  for (index_t b = 0; b < view.extent(0); ++b) {
    for (index_t h = 0; h < view.extent(1); ++h) {
      for (index_t i = 0; i < view.extent(2); ++i) {
        for (index_t c = 0; c < view.extent(3); ++c) f(view(b, h, i, c));
      }
    }
  }
}

template <class T>
void check_packed(const Shape& s) {
  const Problem<T> problem(s);
  const SSMax<Compute<T>> scaling{Compute<T>(0.4)};
  const Output<T> output = run(problem, scaling, Causal{});
  PackedQkv<T> qkv(s, T(0.0F)), gradients(s, T(nan<float>));
  const auto fill = [](const View<T, 4>& view, const std::vector<T>& values) {
    auto next = values.begin();
    for_each(view, [&](T& element) { element = *next++; });
  };
  fill(qkv.q(), problem.q);
  fill(qkv.k(), problem.k);
  fill(qkv.v(), problem.v);
  const std::array<index_t, 4> of_out{s.batch, s.heads, s.queries, s.dv};
  const std::array<index_t, 3> of_rows{s.batch, s.heads, s.queries};
  ssmax::attention_backward<T>({.q = qkv.q(),
                                .k = qkv.k(),
                                .v = qkv.v(),
                                .out = {output.out.data(), of_out},
                                .lse = {output.lse.data(), of_rows}},
                               {.dout = {problem.dout.data(), of_out},
                                .dlse = {problem.dlse.data(), of_rows},
                                .dq = gradients.q(),
                                .dk = gradients.k(),
                                .dv = gradients.v()},
                               scaling, Causal{});
  const Result<T> expected = backward(problem, output, scaling, Causal{}, ssmax::Identity{});
  const auto differences = [](const View<T, 4>& view, const std::vector<T>& values) {
    int wrong = 0;
    auto next = values.begin();
    for_each(view, [&](T& element) { wrong += same_bits(element, *next++) ? 0 : 1; });
    return wrong;
  };
  CHECK(differences(gradients.q(), expected.dq) == 0);
  CHECK(differences(gradients.k(), expected.dk) == 0);
  CHECK(differences(gradients.v(), expected.dv) == 0);
}

TEST_CASE("gradients of a packed qkv can be columns of a packed matrix", "[attention][backward][layouts]") {
  for_each_target([](const std::string& target) {
    for (const Shape& shape :
         {Shape{2, 4, 2, 53, 53, 6, 5}, {1, 1, 1, 130, 130, 8, 8}, {2, 2, 2, 3, 3, 1, 1}}) {
      INFO(target << ' ' << name_of(shape));
      check_packed<float>(shape);
      check_packed<double>(shape);
      check_packed<ssmax::half>(shape);
    }
  });
}

TEST_CASE("strides of dimensions of extent 1 are ignored in a packed matrix",
          "[attention][backward][layouts]") {
  const Shape s{2, 3, 1, 20, 20, 8, 8};
  const Problem<float> problem(s);
  const Output<float> output = run(problem, SSMax<float>{}, Causal{});
  const Result<float> expected = backward(problem, output, SSMax<float>{}, Causal{}, ssmax::Identity{});
  PackedQkv<float> gradients(s, nan<float>);
  const auto one_head = [&](const View<float, 4>& view, index_t stride) {
    return View<float, 4>(view.data_handle(), {2, 1, 20, 8}, {view.stride(0), stride, view.stride(2), 1});
  };
  const std::array<index_t, 4> of_out{2, 3, 20, 8};
  ssmax::attention_backward<float>({.q = problem.q_view(),
                                    .k = problem.k_view(),
                                    .v = problem.v_view(),
                                    .out = {output.out.data(), of_out},
                                    .lse = {output.lse.data(), {2, 3, 20}}},
                                   {.dout = {problem.dout.data(), of_out},
                                    .dlse = {problem.dlse.data(), {2, 3, 20}},
                                    .dq = gradients.q(),
                                    .dk = one_head(gradients.k(), 20 * gradients.pitch()),
                                    .dv = one_head(gradients.v(), -1)},
                                   SSMax<float>{}, Causal{});
  int wrong = 0;
  const auto compare = [&](const View<float, 4>& view, const std::vector<float>& values) {
    auto next = values.begin();
    for_each(view, [&](float& element) { wrong += same_bits(element, *next++) ? 0 : 1; });
  };
  compare(gradients.q(), expected.dq);
  compare(gradients.k(), expected.dk);
  compare(gradients.v(), expected.dv);
  CHECK(wrong == 0);
}

TEST_CASE("keys shared by a batch stride of 0 have separate gradients per batch entry",
          "[attention][backward][layouts]") {
  const Problem<float> problem({3, 2, 1, 5, 40, 8, 4});
  Problem<float> copied = problem;
  for (index_t batch = 1; batch < 3; ++batch) {
    std::copy_n(problem.k.begin(), 40 * 8, copied.k.begin() + batch * 40 * 8);
    std::copy_n(problem.v.begin(), 40 * 4, copied.v.begin() + batch * 40 * 4);
  }
  const Output<float> output = run(copied, SSMax<float>{}, Causal{});
  const Result<float> expected = backward(copied, output, SSMax<float>{}, Causal{}, ssmax::Identity{});
  Result<float> result(problem);
  ssmax::attention_backward<float>({.q = problem.q_view(),
                                    .k = {problem.k.data(), {3, 1, 40, 8}, {0, 0, 8, 1}},
                                    .v = {problem.v.data(), {3, 1, 40, 4}, {0, 0, 4, 1}},
                                    .out = {output.out.data(), {3, 2, 5, 4}},
                                    .lse = {output.lse.data(), {3, 2, 5}}},
                                   {.dout = {problem.dout.data(), {3, 2, 5, 4}},
                                    .dlse = {problem.dlse.data(), {3, 2, 5}},
                                    .dq = {result.dq.data(), {3, 2, 5, 8}},
                                    .dk = {result.dk.data(), {3, 1, 40, 8}},
                                    .dv = {result.dv.data(), {3, 1, 40, 4}}},
                                   SSMax<float>{}, Causal{});
  CHECK(result == expected);
}

}  // namespace attention_problem::backward_problem::attention_backward_layouts_test
