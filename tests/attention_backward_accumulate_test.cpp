// With `accumulate`, dq, dk and dv are old value + gradient, rounded once. The expected gradient is what a call without
// `accumulate` writes. Exception: for half and bfloat16, the expected gradient comes from a call in float.

#include "attention_backward_problem.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace attention_problem::backward_problem::attention_backward_accumulate_test {

constexpr std::array<Shape, 8> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 37, 150, 6, 5},
    {1, 2, 2, 20, 256, 16, 32},
    {2, 2, 1, 4, 300, 16, 17},
    {1, 2, 1, 53, 41, 7, 3},
    {1, 1, 1, 1, 1, 1, 1},
    {1, 2, 2, 2, 2, 2, 2},
    {1, 2, 1, 0, 5, 4, 3},
    {1, 2, 1, 5, 0, 4, 3},
}};

constexpr Shape many_keys{1, 1, 1, 251, 2053, 4, 4};       // more keys than one partial sum of dq covers
constexpr Shape many_queries{1, 1, 1, 1931, 260, 16, 16};  // more queries than one partial sum of dk covers

/// A gradient whose rows lie [batch][position][head][width + 3], with numbers in the gaps as well.
template <class T>
struct Gradient {
  std::array<index_t, 4> extents;
  std::vector<T> data;

  Gradient(index_t batch, index_t heads, index_t rows, index_t width, unsigned seed)
      : extents{batch, heads, rows, width},
        data(reference::normals<T>(static_cast<std::size_t>(batch * heads * rows * (width + 3)), seed)) {}
  View<T, 4> view() {
    const index_t row = extents[3] + 3;
    return {data.data(), extents, {extents[2] * extents[1] * row, row, extents[1] * row, 1}};
  }
};

template <class R>
struct Result {
  Gradient<R> dq, dk, dv;
  std::vector<Compute<R>> ds, db;

  explicit Result(const Shape& s)
      : dq(s.batch, s.heads, s.queries, s.d, 11),
        dk(s.batch, s.kv_heads, s.keys, s.d, 12),
        dv(s.batch, s.kv_heads, s.keys, s.dv, 13),
        ds(static_cast<std::size_t>(s.heads), Compute<R>(0.5)),
        db(ds) {}
};

/// Runs the backward in R, on tensors of T.
template <class R, class T, class M, class E>
Result<R> differentiate(const Problem<T>& problem, const Output<T>& output, const M& mask,
                        const AttentionOptions<T>& options, bool accumulate, E&& executor) {
  using A = Compute<T>;
  const Shape& s = problem.shape;
  const auto as = [](const std::vector<T>& numbers) {
    std::vector<R> result;
    for (const T x : numbers) result.push_back(static_cast<R>(static_cast<A>(x)));
    return result;
  };
  const std::vector<R> q = as(problem.q), k = as(problem.k), v = as(problem.v), out = as(output.out),
                       dout = as(problem.dout);
  Result<R> result(s);
  Explanation explanation;
  const std::vector<A> factors(result.ds.size(), A(0.4)), offsets(result.ds.size(), A(0.1));
  const std::array<index_t, 4> of_out{s.batch, s.heads, s.queries, s.dv};
  const std::array<index_t, 3> of_rows{s.batch, s.heads, s.queries};
  ssmax::attention_backward<Compute<R>>({.q = {q.data(), {s.batch, s.heads, s.queries, s.d}},
                                         .k = {k.data(), {s.batch, s.kv_heads, s.keys, s.d}},
                                         .v = {v.data(), {s.batch, s.kv_heads, s.keys, s.dv}},
                                         .out = {out.data(), of_out},
                                         .lse = {output.lse.data(), of_rows},
                                         .rope = options.rope,
                                         .key_position = options.key_position,
                                         .float_products = options.float_products,
                                         .explanation = &explanation},
                                        {.dout = {dout.data(), of_out},
                                         .dlse = {problem.dlse.data(), of_rows},
                                         .dq = result.dq.view(),
                                         .dk = result.dk.view(),
                                         .dv = result.dv.view(),
                                         .accumulate = accumulate},
                                        SSMax<A>(factors, offsets).gradient(result.ds, result.db), mask,
                                        executor);
  const bool is_bf16 = std::same_as<R, ssmax::bfloat16> && has_bfloat16_products() && !options.float_products;
  if (s.queries > 0 && s.keys > 0)
    CHECK(explanation.path == (is_bf16 ? ssmax::Path::backward_bf16 : ssmax::Path::backward));
  return result;
}

/// Checks that `got` holds old value + gradient. `overwritten` holds the gradients, in the type of the sum.
template <class T>
bool holds_sum(Gradient<T> got, Gradient<T> old, Gradient<Compute<T>> overwritten) {
  using A = Compute<T>;
  const View<T, 4> sums = got.view(), before = old.view();
  const View<A, 4> gradient = overwritten.view();
  reference::for_each_index(sums.extents(), [&](auto... at) {
    before(at...) = static_cast<T>(static_cast<A>(before(at...)) + gradient(at...));
  });
  return same_bits(got.data, old.data);  // and the gaps are unchanged
}

template <class T, class M, class E>
void check_sum(const Problem<T>& problem, const Output<T>& output, const Result<Compute<T>>& gradient,
               const M& mask, const AttentionOptions<T>& options, E&& executor) {
  const Result<T> got = differentiate<T>(problem, output, mask, options, true, executor), old(problem.shape);
  CHECK(holds_sum(got.dq, old.dq, gradient.dq));
  CHECK(holds_sum(got.dk, old.dk, gradient.dk));
  CHECK(holds_sum(got.dv, old.dv, gradient.dv));
  CHECK(same_bits(got.ds, gradient.ds));
  CHECK(same_bits(got.db, gradient.db));
}

template <class T>
void check_shape(const Shape& shape) {
  static ThreadPool three(3);
  const Problem<T> problem(shape);
  const Rope<Compute<T>> rope({.width = std::max<index_t>(2, shape.d / 2 * 2)}, 4000);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << ' ' << name_of(shape));
    const auto check = [&](const auto& mask, AttentionOptions<T> options) {
      options.float_products = true;
      const Output<T> output =
          run(problem, SSMax<Compute<T>>(Compute<T>(0.4), Compute<T>(0.1)), mask, options);
      const auto gradient = differentiate<Compute<T>>(problem, output, mask, options, false, Serial{});
      check_sum(problem, output, gradient, mask, options, Serial{});
      check_sum(problem, output, gradient, mask, options, three);
      check_sum(problem, output, gradient, mask, options, test_executors::Reverse{64});
    };
    check(Causal{}, {});
    check(SlidingWindow{40}, {});
    if (shape.d > 1) check(Full{}, {.rope = &rope, .key_position = 1700});
  });
}

template <class T>
void check_all(const Shape& large) {
  for (const Shape& shape : shapes) check_shape<T>(shape);
  check_shape<T>(large);
}

TEST_CASE("accumulate: dq, dk and dv are old value + gradient", "[attention][backward][accumulate][slow]") {
  check_all<float>(many_keys);
  check_all<double>(many_queries);
  check_all<ssmax::half>(many_queries);
  check_all<ssmax::bfloat16>(many_keys);
}

TEST_CASE("accumulate: the other type of each large shape", "[attention][backward][accumulate][exhaustive]") {
  check_shape<float>(many_queries);
  check_shape<double>(many_keys);
  check_shape<ssmax::half>(many_keys);
  check_shape<ssmax::bfloat16>(many_queries);
}

TEST_CASE("accumulate: NaN in old values stays in its channel", "[attention][backward][accumulate]") {
  const Problem<float> problem(shapes[0], 1, Dlse::left_out);
  const Output<float> output = run(problem, Softmax{}, Causal{});
  backward_problem::Result<float> result(problem);
  result.dq[7] = result.dk[8] = result.dv[9] = nan<float>;
  AttentionGradients<float> gradients = gradients_to(problem, result);
  gradients.accumulate = true;
  ssmax::attention_backward(backward_arguments_of(problem, output), gradients, Causal{});
  const auto nan_count = [](const std::vector<float>& numbers) {
    return std::ranges::count_if(numbers, [](float x) { return std::isnan(x); });
  };
  CHECK((nan_count(result.dq) == 1 && nan_count(result.dk) == 1 && nan_count(result.dv) == 1));
}

TEST_CASE("accumulate: the bf16 path rounds old value + gradient once",
          "[attention][backward][accumulate][bfloat16][products]") {
  const Problem<ssmax::bfloat16> problem(shapes[0]);
  for_each_target_of_products([&](const std::string&) {
    const Output<ssmax::bfloat16> output = run(problem, SSMax<float>(0.4F, 0.1F), Causal{});
    const auto gradient = differentiate<ssmax::bfloat16>(problem, output, Causal{}, {}, false, Serial{}),
               got = differentiate<ssmax::bfloat16>(problem, output, Causal{}, {}, true, Serial{});
    const Result<ssmax::bfloat16> old(problem.shape);
    const auto check = [](Gradient<ssmax::bfloat16> sums, Gradient<ssmax::bfloat16> before,
                          Gradient<ssmax::bfloat16> by) {
      reference::for_each_index(sums.extents, [&](auto... index) {
        const auto at = [&](auto& g) { return static_cast<float>(g.view()(index...)); };
        // Rounding to bfloat16 changes the gradient and the sum by at most 2^-8 of themselves.
        const float exact = at(before) + at(by);
        CHECK(std::abs(at(sums) - exact) <= 0x1.03p-8F * (std::abs(exact) + std::abs(at(by))));
      });
    };
    check(got.dq, old.dq, gradient.dq);
    check(got.dk, old.dk, gradient.dk);
    check(got.dv, old.dv, gradient.dv);
  });
}

}  // namespace attention_problem::backward_problem::attention_backward_accumulate_test
