// Gradients are bit-identical for any strides, with gaps full of NaN and as columns of a packed matrix. Backward
// writes only the gradients, and their old contents do not affect the result.

#include "attention_backward_problem.hpp"
#include "placed.hpp"
#include "test.hpp"

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
  ssmax::attention_backward<Compute<T>>(
      backward_over_views(q.view(), k.view(), v.view(), out.view(), {lse.data(), of_rows, row_strides}),
      gradients_into(dout.view(), {dlse.data(), of_rows, row_strides}, dq.view(), dk.view(), dv.view()),
      scaling, Causal{});
  const Result<T> expected = backward(problem, output, scaling, Causal{});
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

template <class T>
void check_packed(const Shape& s) {
  const Problem<T> problem(s);
  const SSMax<Compute<T>> scaling{Compute<T>(0.4)};
  const Output<T> output = run(problem, scaling, Causal{});
  PackedQkv<T> qkv(s, T(0.0F)), gradients(s, T(nan<float>));
  qkv.fill(problem);
  ssmax::attention_backward<Compute<T>>(
      {.q = qkv.q(), .k = qkv.k(), .v = qkv.v(), .out = output.out_view(), .lse = output.lse_view()},
      gradients_into(problem.dout_view(), problem.dlse_view(), gradients.q(), gradients.k(), gradients.v()),
      scaling, Causal{});
  const Result<T> expected = backward(problem, output, scaling, Causal{});
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
  const Result<float> expected = backward(problem, output, SSMax<float>{}, Causal{});
  PackedQkv<float> gradients(s, nan<float>);
  const auto one_head = [&](const View<float, 4>& view, index_t stride) {
    return View<float, 4>(view.data_handle(), {2, 1, 20, 8}, {view.stride(0), stride, view.stride(2), 1});
  };
  ssmax::attention_backward(
      backward_arguments_of(problem, output),
      gradients_into(problem.dout_view(), problem.dlse_view(), gradients.q(),
                     one_head(gradients.k(), 20 * gradients.pitch()), one_head(gradients.v(), -1)),
      SSMax<float>{}, Causal{});
  CHECK(differences(gradients.q(), expected.dq) == 0);
  CHECK(differences(gradients.k(), expected.dk) == 0);
  CHECK(differences(gradients.v(), expected.dv) == 0);
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
  const Result<float> expected = backward(copied, output, SSMax<float>{}, Causal{});
  Result<float> result(problem);
  BackwardArguments<float> arguments = backward_arguments_of(problem, output);
  arguments.k = {problem.k.data(), {3, 1, 40, 8}, {0, 0, 8, 1}};
  arguments.v = {problem.v.data(), {3, 1, 40, 4}, {0, 0, 4, 1}};
  ssmax::attention_backward(arguments, gradients_to(problem, result), SSMax<float>{}, Causal{});
  CHECK(result == expected);
}

}  // namespace attention_problem::backward_problem::attention_backward_layouts_test
