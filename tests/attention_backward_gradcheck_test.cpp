// Attention's backward against finite differences of its forward in double: every input and every parameter,
// under a loss of out and of lse.

#include "attention_backward_problem.hpp"
#include "gradcheck.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::attention_backward_gradcheck_test {

constexpr double tolerance = 1e-7;

constexpr std::array<Shape, 4> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 4, 6, 4, 3},
    {1, 4, 1, 7, 4, 4, 2},  // queries without visible keys under the causal mask
    {1, 3, 3, 5, 5, 6, 5},
    {2, 2, 1, 1, 9, 2, 1},
}};

/// The parameters of a scaling or a score, and their gradients.
struct Learnt {
  std::string name;
  std::vector<double>*values, *gradient;
};

/// A problem whose inputs and parameters vary. dout and dlse are the weights of the loss <dout, out> + <dlse, lse>.
struct Model {
  Problem<double> problem;
  std::vector<double> sinks, s, b, p, slopes, bias;
  std::vector<double> ds, db, dp, dslopes, dbias;

  explicit Model(const Shape& shape) : problem(shape, 0.8), dp(16) {
    const auto heads = static_cast<std::size_t>(shape.heads);
    for (std::vector<double>* gradient : {&ds, &db, &dslopes}) gradient->resize(heads);
    sinks = reference::normals<double>(heads, 21);
    s = reference::normals<double>(heads, 22, 0.5, 0.5);
    b = reference::normals<double>(heads, 23, 0.5);
    p = reference::normals<double>(16, 24, 0.5, 1);
    slopes = reference::normals<double>(heads, 25, 0.3);
    bias = reference::normals<double>(
        static_cast<std::size_t>(shape.batch * shape.heads * shape.queries * shape.keys), 26);
    dbias.resize(bias.size());
  }
  const Shape& shape() const { return problem.shape; }
  auto ssmax() { return SSMax<double>{s, b}.gradient(ds, db); }
  std::vector<Learnt> of_ssmax() { return {{"s", &s, &ds}, {"b", &b, &db}}; }
  auto alibi() { return Alibi{slopes}.gradient(dslopes); }
  /// Returns a bias that is broadcast along the dimensions whose bit in `broadcast` is set.
  auto biased(int broadcast = 0) {
    const std::array<index_t, 4> extents{shape().batch, shape().heads, shape().queries, shape().keys};
    std::array<index_t, 4> strides{};
    index_t stride = 1;
    for (std::size_t i = 4; i-- > 0;) {
      if ((broadcast >> i & 1) != 0) continue;
      strides[i] = stride;
      stride *= extents[i];
    }
    return Bias(View<const double, 4>(bias.data(), extents, strides))
        .gradient(View<double, 4>(dbias.data(), extents, strides));
  }
  Learnt of_alibi() { return {"slopes", &slopes, &dslopes}; }
  Learnt of_bias() { return {"bias", &bias, &dbias}; }
};

template <class S, class M, class C>
double loss(const Problem<double>& problem, const S& scaling, const M& mask, const C& score,
            const AttentionOptions<double>& options) {
  const Output<double> output = run(problem, scaling, mask, score, options);
  double sum = 0;
  for (std::size_t i = 0; i < output.out.size(); ++i) sum += problem.dout[i] * output.out[i];
  for (std::size_t i = 0; i < output.lse.size(); ++i) {
    if (std::isfinite(output.lse[i])) sum += problem.dlse[i] * output.lse[i];
  }
  return sum;
}

template <class S, class M, class C>
void check(Model& model, const S& scaling, const M& mask, const C& score, std::vector<Learnt> learnt,
           const AttentionOptions<double>& options = {}) {
  Result<double> result(model.problem);
  learnt.push_back({"q", &model.problem.q, &result.dq});
  learnt.push_back({"k", &model.problem.k, &result.dk});
  learnt.push_back({"v", &model.problem.v, &result.dv});
  if (!options.sinks.empty()) learnt.push_back({"sinks", &model.sinks, &result.dsinks});
  std::vector<std::vector<double>> numeric;
  for (const Learnt& parameter : learnt) {
    numeric.push_back(gradcheck::finite_differences(
        *parameter.values, [&] { return loss(model.problem, scaling, mask, score, options); }));
  }
  for_each_target([&](const std::string& target) {
    for (const Learnt& parameter : learnt) parameter.gradient->assign(parameter.values->size(), 0);
    result = run_backward(model.problem, scaling, mask, score, options);
    for (std::size_t i = 0; i < learnt.size(); ++i) {
      INFO(target << ' ' << name_of(model.shape()) << " d" << learnt[i].name);
      CHECK(gradcheck::relative_error(*learnt[i].gradient, numeric[i]) <= tolerance);
    }
  });
}

/// Checks without options, with sinks, with rope (both pairings, full and partial), and with all of them and a scale.
template <class S, class M, class C>
void check_options(Model& model, const S& scaling, const M& mask, const C& score,
                   const std::vector<Learnt>& learnt) {
  check(model, scaling, mask, score, learnt);
  check(model, scaling, mask, score, learnt, {.sinks = model.sinks});
  const ssmax::Rope<double> whole({.width = model.shape().d, .theta = 10}, 40),
      part({.width = 2, .pairing = ssmax::Pairing::interleaved}, 40);
  check(model, scaling, mask, score, learnt, {.rope = &whole, .key_position = 5});
  check(model, scaling, mask, score, learnt,
        {.scale = -0.4, .rope = &part, .key_position = 20, .sinks = model.sinks});
}

// ---- Scalings ---------------------------------------------------------------------------------------------

template <class M>
void check_scalings(const Shape& shape, const M& mask) {
  Model model(shape);
  check_options(model, Softmax{}, mask, Identity{}, {});
  check_options(model, ssmax::LogN{}, mask, Identity{}, {});
  check_options(model, model.ssmax(), mask, Identity{}, model.of_ssmax());
  for (double& s : model.s) s = -s;
  check_options(model, model.ssmax(), mask, Softcap(2), model.of_ssmax());
  for (double& s : model.s) s = 0;
  for (double& b : model.b) b = 0;
  check_options(model, model.ssmax(), mask, Softcap(2), model.of_ssmax());
  Model table(shape);
  check_options(
      table, ssmax::SizeTable<double>{table.p, table.s, table.b}.gradient(table.dp, table.ds, table.db), mask,
      Identity{}, {{"p", &table.p, &table.dp}, {"s", &table.s, &table.ds}, {"b", &table.b, &table.db}});
}

TEST_CASE("finite differences: scalings", "[attention][backward][gradcheck][slow]") {
  for (const Shape& shape : shapes) {
    check_scalings(shape, Full{});
    check_scalings(shape, Causal{});
  }
}

// ---- Scores -----------------------------------------------------------------------------------------------

/// A non-linear user score, neither vectorized nor with parameters.
struct Bent {
  template <class T>
  T operator()(T z, const Key& key) const {
    return z + z * z * (T(0.25) + T(0.125) * static_cast<T>(key.index % 3));
  }
  template <class T>
  T derivative(T z, const Key& key) const {
    return 1 + 2 * z * (T(0.25) + T(0.125) * static_cast<T>(key.index % 3));
  }
};

template <class M>
void check_scores(const Shape& shape, const M& mask) {
  Model model(shape);
  const auto with = [&](std::vector<Learnt> more) {
    for (const Learnt& one : model.of_ssmax()) more.push_back(one);
    return more;
  };
  check_options(model, model.ssmax(), mask, Softcap(1.5), with({}));
  check_options(model, model.ssmax(), mask, Bent{}, with({}));
  check_options(model, model.ssmax(), mask, model.alibi(), with({model.of_alibi()}));
  check_options(model, model.ssmax(), mask, model.alibi() | Softcap(2), with({model.of_alibi()}));
  check_options(model, model.ssmax(), mask, Softcap(3) | model.biased() | model.alibi(),
                with({model.of_bias(), model.of_alibi()}));
  check_options(model, model.ssmax(), mask, model.alibi() | Bent{} | model.biased() | Softcap(2),
                with({model.of_bias(), model.of_alibi()}));
}

TEST_CASE("finite differences: scores", "[attention][backward][gradcheck][slow]") {
  for (const Shape& shape : shapes) check_scores(shape, Causal{});
}

TEST_CASE("finite differences: a bias and every kind of broadcast",
          "[attention][backward][gradcheck][slow]") {
  for (const Shape& shape : shapes) {
    for (int broadcast = 0; broadcast < 16; ++broadcast) {
      Model model(shape);
      INFO("broadcast along " << broadcast);
      check(model, model.ssmax(), Causal{}, model.biased(broadcast), {model.of_bias()});
      check(model, model.ssmax(), Full{}, model.biased(broadcast) | Softcap(2), {model.of_bias()},
            {.sinks = model.sinks});
    }
  }
}

// ---- Masks ------------------------------------------------------------------------------------------------

/// Checks with all options together, and with SSMax alone.
template <class M>
void check_mask(const Shape& shape, const M& mask) {
  Model model(shape);
  std::vector<Learnt> learnt = model.of_ssmax();
  check_options(model, model.ssmax(), mask, Identity{}, learnt);
  learnt.push_back(model.of_alibi());
  learnt.push_back(model.of_bias());
  check_options(model, model.ssmax(), mask, model.biased() | Softcap(3) | model.alibi(), learnt);
}

TEST_CASE("finite differences: masks", "[attention][backward][gradcheck][slow]") {
  const auto picked = [](const Query& query, index_t key) {
    return (query.index * 3 + query.head + key * 5) % 4 != 1;
  };
  for (const Shape& shape : shapes) {
    check_mask(shape, Full{});
    check_mask(shape, ssmax::SlidingWindow(2, 1));
    check_mask(shape, ssmax::Where(picked));
    check_mask(shape, Causal{} & ssmax::Where(picked));
    const std::vector<index_t> lengths{3, 2}, prefix{2, 4};
    const auto of_batch = [&](const std::vector<index_t>& values) {
      return std::span<const index_t>(values).first(static_cast<std::size_t>(shape.batch));
    };
    check_mask(shape, ssmax::KeyLengths{of_batch(lengths)} & Causal{});
    check_mask(shape, ssmax::PrefixLM{of_batch(prefix)});
    if (shape.queries > shape.keys) continue;
    const std::vector<index_t> queries{0, shape.queries / 2, shape.queries},
        keys{0, shape.keys / 2, shape.keys};
    check_mask(shape, ssmax::Documents(queries, keys, false));
    check_mask(shape, ssmax::Documents(queries, keys, true));
  }
}

// ---- Dropout ----------------------------------------------------------------------------------------------

TEST_CASE("finite differences: dropout with a fixed seed",
          "[attention][backward][gradcheck][dropout][slow]") {
  for (const Shape& shape : shapes) {
    for (const double p : {0.1, 0.5}) {
      Model model(shape);
      const ssmax::Dropout dropout{.p = p, .seed = 7, .offset = 3};
      std::vector<Learnt> learnt = model.of_ssmax();
      check(model, model.ssmax(), Causal{}, Identity{}, learnt, {.dropout = dropout});
      learnt.push_back(model.of_alibi());
      check(model, model.ssmax(), Causal{}, model.alibi() | Softcap(2), learnt,
            {.sinks = model.sinks, .dropout = dropout});
    }
  }
}

}  // namespace attention_problem::backward_problem::attention_backward_gradcheck_test
