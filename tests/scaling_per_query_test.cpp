// A multiplier for every query, from outside: c[batch, head, query], and its gradient.

#include "attention_backward_problem.hpp"
#include "decode_problem.hpp"
#include "refusal.hpp"
#include "score_formulas.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::scaling_per_query_test {

static_assert(ssmax::Scaling<PerQuery<float>> && !ssmax::LearnableScaling<PerQuery<float>>);
static_assert(ssmax::LearnableScaling<ssmax::PerQueryGradient<ssmax::bfloat16, double>>);
static_assert(!ssmax::detail::reads_query<SSMax<>> &&
              !ssmax::detail::reads_query<ssmax::SSMaxGradient<float>>);
static_assert(ssmax::detail::reads_query<PerQuery<float>>);

// Few queries, short sequences, many queries; groups of one and of more.
constexpr std::array<Shape, 6> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 300, 8, 5},
    {2, 3, 3, 40, 70, 9, 24},
    {2, 4, 2, 61, 300, 8, 8},
    {3, 2, 2, 17, 129, 4, 6},
    {1, 4, 1, 70, 33, 8, 9},
    {2, 2, 1, 3, 1, 5, 4},
}};

/// Multipliers of all queries of a shape: of both signs, some of them 0.
template <class T>
struct Multipliers {
  std::array<index_t, 3> extents;
  std::vector<T> values;

  explicit Multipliers(const Shape& s) : extents{s.batch, s.heads, s.queries} {
    values = reference::normals<T>(static_cast<std::size_t>(s.batch * s.heads * s.queries), 31, 0.8, 0.7);
    for (std::size_t i = 0; i < values.size(); i += 7) values[i] = T(0);
  }
  View<const T, 3> view() const { return {values.data(), extents}; }
  Real of(const Query& query) const {
    return static_cast<Real>(view()(query.batch, query.head, query.index));
  }
};

/// The call's definition, with these multipliers.
template <class T, class C>
reference::Definition define(const Problem<T>& problem, const Visible& visible, const Multipliers<C>& c,
                             const Formula& formula) {
  reference::Definition definition = attention_problem::define(problem, visible, one, {}, formula, {});
  definition.multiplier = [&c](const Query& query, index_t) { return c.of(query); };
  return definition;
}

/// Attention and its backward are what the definition says, on every target.
template <class T, class M, class C = Identity>
void check(const Shape& shape, const M& mask, const Visible& visible, const C& score = {},
           const Formula& formula = {}) {
  using A = Compute<T>;
  const Problem<T> problem(shape);
  const Multipliers<A> c(shape);
  const reference::Definition definition = define(problem, visible, c, formula);
  const attention_problem::Expected<T> expected{
      reference::attend(inputs_of<Real>(problem, {}, {}), definition),
      reference::attend(inputs_of<A>(problem, {}, {}), definition)};
  const Expectation<T> gradients = expect(problem, definition);
  for_each_target([&](const std::string& target) {
    attention_problem::Rules<T> rules;
    rules.take(run(problem, PerQuery(c.view()), mask, score), expected, name_of(shape));
    rules.check(target);

    std::vector<A> dc(c.values.size());
    Rules<T> backward;
    const auto got = backward.run(problem, gradients,
                                  PerQuery(c.view()).gradient(View<A, 3>(dc.data(), c.extents)), mask, score);
    backward.take(
        dc, got, [](const auto& g) { return g.dc; }, name_of(shape) + "dc");
    backward.check(target);
  });
}

TEST_CASE("a multiplier for every query", "[attention][backward][scaling]") {
  for (const Shape& shape : shapes) {
    check<float>(shape, Full{}, all_keys);
    check<double>(shape, Causal{}, keys_before);
    check<float>(shape, Full{}, all_keys, Softcap{3}, Formula(Capped{3}));
  }
  check<double>(shapes[1], Full{}, all_keys);
  check<ssmax::half>(shapes[1], Full{}, all_keys);
}

/// Rows of a result that have a multiplier of their own.
template <class T>
std::vector<T> row_of(const std::vector<T>& values, std::size_t row, std::size_t rows) {
  const std::size_t width = values.size() / rows;
  const auto first = values.begin() + static_cast<std::ptrdiff_t>(row * width);
  return {first, first + static_cast<std::ptrdiff_t>(width)};
}

TEST_CASE("every query has the bits that its multiplier gives to all", "[attention][decode][scaling]") {
  // The library widens multipliers of 16 bits.
  const Shape shape{2, 4, 2, 21, 40, 8, 6};
  const Problem<float> problem(shape);
  const Multipliers<ssmax::bfloat16> c(shape);
  decode_problem::Shape sequences{4, 2, 3, 16, 9, {70, 3, 300}};
  const decode_problem::Data<float> data(sequences);
  const auto cache = decode_problem::filled<float>(data);
  const Multipliers<double> of_decode(Shape{3, 4, 2, 3, 0, 0, 0});
  for_each_target([&](const std::string&) {
    const auto got = run(problem, PerQuery(c.view()), Full{});
    for (std::size_t row = 0; row < c.values.size(); ++row) {
      const auto all = run(problem, Constant{static_cast<double>(c.values[row])}, Full{});
      CHECK(same_bits(row_of(got.out, row, c.values.size()), row_of(all.out, row, c.values.size())));
    }
    const auto decoded = run(data, cache, PerQuery(of_decode.view()));
    for (std::size_t row = 0; row < of_decode.values.size(); ++row) {
      const auto all = run(data, cache, Constant{of_decode.values[row]});
      CHECK(same_bits(row_of(decoded.out, row, of_decode.values.size()),
                      row_of(all.out, row, of_decode.values.size())));
    }
  });
}

TEST_CASE("multipliers of rows, and their gradient", "[softmax][scaling]") {
  const Shape shape{2, 3, 3, 70, 19, 0, 0};
  const Multipliers<float> c(shape);
  const std::array<index_t, 4> extents{2, 3, 70, 19};
  const auto count = static_cast<std::size_t>(2 * 3 * 70 * 19);
  const std::vector<float> z = reference::normals<float>(count, 1), dy = reference::normals<float>(count, 2);
  const View<const float, 4> logits(z.data(), extents), dout(dy.data(), extents);
  std::vector<float> y(count), log_y(count), dz(count), sums(c.values.size());
  const View<float, 4> out(y.data(), extents), log_out(log_y.data(), extents), dlogits(dz.data(), extents);
  ssmax::ThreadPool pool(3);
  const auto check_rows = [&](const auto& mask) {
    std::vector<float> dc(c.values.size(), 0.25F), threaded(dc);
    ssmax::softmax(logits, out, PerQuery(c.view()), mask);
    ssmax::log_softmax(logits, log_out, PerQuery(c.view()), mask, pool);
    ssmax::logsumexp(logits, View<float, 3>(sums.data(), c.extents), PerQuery(c.view()), mask);
    const auto backward = [&](std::vector<float>& into, auto&& executor) {
      ssmax::softmax_backward<float, 4>({.out = out, .dout = dout, .logits = logits, .dlogits = dlogits},
                                        PerQuery(c.view()).gradient(View<float, 3>(into.data(), c.extents)),
                                        mask, executor);
    };
    backward(threaded, pool);
    backward(dc, ssmax::Serial{});
    CHECK(same_bits(dc, threaded));
    for (index_t row = 0; row < 2 * 3 * 70; ++row) {
      const auto at = static_cast<std::size_t>(row);
      const Query query{row / 210, row / 70 % 3, row % 70, {2, 3, 70, 19}};
      const ssmax::KeyRange keys = mask.keys(query);
      if (keys.size() == 0) {
        CHECK(dc[at] == 0.25F);
        continue;
      }
      const Real multiplier = c.of(query);
      Real largest = -reference::infinity, sum = 0, inner = 0, exact_dc = 0;
      for (index_t key = 0; key < keys.end; ++key)
        largest = std::max(largest, multiplier * Real(z[at * 19 + static_cast<std::size_t>(key)]));
      std::vector<Real> p;
      for (index_t key = 0; key < keys.end; ++key) {
        p.push_back(std::exp(multiplier * Real(z[at * 19 + static_cast<std::size_t>(key)]) - largest));
        sum += p.back();
      }
      CHECK(std::abs(Real(sums[at]) - (largest + std::log(sum))) <=
            5e-7L * (1 + std::abs(largest + std::log(sum))));
      for (std::size_t key = 0; key < p.size(); ++key) {
        p[key] /= sum;
        inner += p[key] * Real(dy[at * 19 + key]);
        CHECK(std::abs(Real(y[at * 19 + key]) - p[key]) <= 5e-7L * p[key]);
        CHECK(std::abs(Real(log_y[at * 19 + key]) - std::log(p[key])) <= 5e-7L * (1 - std::log(p[key])));
      }
      for (std::size_t key = 0; key < p.size(); ++key) {
        const Real u = p[key] * (Real(dy[at * 19 + key]) - inner);
        exact_dc += u * Real(z[at * 19 + key]);
        CHECK(std::abs(Real(dz[at * 19 + key]) - multiplier * u) <= 3e-6L);
      }
      CHECK(std::abs(Real(dc[at]) - 0.25L - exact_dc) <= 3e-6L);
    }
  };
  check_rows(Full{});
  check_rows(Causal{});
}

TEST_CASE("a multiplier that queries share gets the sum of their gradients",
          "[attention][backward][scaling]") {
  const Shape shape{2, 4, 2, 20, 30, 8, 6};
  const Problem<double> problem(shape);
  const std::vector<double> c{0.7, -0.4, 1.5, 0.2};
  const std::array<index_t, 3> extents{2, 4, 20}, by_head{0, 1, 0};
  std::vector<double> dc(4), ds(4), db(4);
  // c = 0·ln n + b
  const std::vector<double> zeros(4);
  const auto shared = run_backward(problem,
                                   PerQuery(View<const double, 3>(c.data(), extents, by_head))
                                       .gradient(View<double, 3>(dc.data(), extents, by_head)),
                                   Causal{});
  const auto of_ssmax = run_backward(problem, SSMax<double>{zeros, c}.gradient(ds, db), Causal{});
  CHECK(shared == of_ssmax);
  CHECK(same_bits(dc, db));
}

TEST_CASE("a part's queries are counted among all", "[attention][backward][scaling]") {
  const Shape shape{2, 2, 1, 40, 50, 8, 6};
  const Problem<float> problem(shape);
  const Multipliers<float> c(shape);
  const auto whole = run(problem, PerQuery(c.view()), Causal{});
  std::vector<float> dc(c.values.size()), dc_of_parts(c.values.size());
  backward(problem, whole, PerQuery(c.view()).gradient(View<float, 3>(dc.data(), c.extents)), Causal{},
           Identity{});
  Result<float> result(problem);
  for (const index_t first : {0, 20}) {
    const auto rows = [&](const auto& view) {
      auto extents = std::array{view.extent(0), view.extent(1), index_t{20}, view.extent(3)};
      return std::remove_cvref_t<decltype(view)>(
          view.data_handle() + first * view.stride(2), extents,
          {view.stride(0), view.stride(1), view.stride(2), view.stride(3)});
    };
    const View<const float, 4> out(whole.out.data(), {2, 2, 40, 6}), dout(problem.dout.data(), {2, 2, 40, 6});
    const View<const float, 3> lse(whole.lse.data() + first, {2, 2, 20}, {80, 40, 1}),
        dlse(problem.dlse.data() + first, {2, 2, 20}, {80, 40, 1});
    ssmax::attention_backward({.q = rows(problem.q_view()),
                               .k = problem.k_view(),
                               .v = problem.v_view(),
                               .out = rows(out),
                               .lse = lse,
                               .first_query = first,
                               .all_queries = 40},
                              {.dout = rows(dout),
                               .dlse = dlse,
                               .dq = rows(View<float, 4>(result.dq.data(), {2, 2, 40, 8})),
                               .dk = {result.dk.data(), {2, 1, 50, 8}},
                               .dv = {result.dv.data(), {2, 1, 50, 6}}},
                              PerQuery(c.view()).gradient(View<float, 3>(dc_of_parts.data(), c.extents)),
                              Causal{});
  }
  CHECK(same_bits(dc, dc_of_parts));
}

TEST_CASE("scalings of one's own that ask which query it is", "[attention][backward][scaling]") {
  const Shape shape{2, 2, 2, 9, 12, 4, 4};
  const Problem<double> problem(shape);
  const auto multiplier = [](index_t batch, index_t head, index_t query) {
    return 0.5 + 0.1 * static_cast<double>(batch) - 0.3 * static_cast<double>(head) +
           0.05 * static_cast<double>(query);
  };
  std::vector<double> c;
  for (index_t i = 0; i < 2 * 2 * 9; ++i) c.push_back(multiplier(i / 18, i / 9 % 2, i % 9));
  const auto of_row = [&](const PlacedRow& row) { return multiplier(row.batch, row.head, row.query); };
  const View<const double, 3> values(c.data(), {2, 2, 9});
  CHECK(run(problem, of_row, Full{}) == run(problem, PerQuery(values), Full{}));
  // The multiplier of a row that is asked about by its size, its gradient by its query.
  struct Learns {
    std::vector<PlacedRow>& rows;
    double operator()(const Row& row) const { return std::log(static_cast<double>(row.n)); }
    void accumulate(const PlacedRow& row, double) const { rows.push_back(row); }
  };
  static_assert(ssmax::detail::reads_query<Learns>);
  std::vector<PlacedRow> rows;
  const std::vector<float> y(24);
  std::vector<float> dz(24);
  ssmax::softmax_backward<float, 3>({.out = {y.data(), {2, 4, 3}},
                                     .dout = {y.data(), {2, 4, 3}},
                                     .logits = {y.data(), {2, 4, 3}},
                                     .dlogits = {dz.data(), {2, 4, 3}}},
                                    Learns{rows});
  REQUIRE(rows.size() == 8);
  for (index_t i = 0; i < 8; ++i) {
    CHECK(rows[static_cast<std::size_t>(i)] ==
          PlacedRow{{.head = i / 4, .position = std::max<index_t>(0, i % 4 - 1), .n = 3}, 0, i % 4});
  }
}

TEST_CASE("what PerQuery refuses", "[attention][backward][scaling]") {
  const Shape shape{2, 4, 2, 5, 6, 4, 3};
  const Problem<float> problem(shape);
  std::vector<float> c(2 * 4 * 6), dc(2 * 4 * 6);
  const auto with = [&](const std::array<index_t, 3>& extents) {
    return [&, extents] { return run(problem, PerQuery(View<const float, 3>(c.data(), extents)), Full{}); };
  };
  check_refused_with_words({"ssmax::attention: c", "1", "2"}, with({1, 4, 5}));
  check_refused_with_words({"ssmax::attention: c", "3", "4"}, with({2, 3, 5}));
  check_refused_with_words({"ssmax::attention: c", "6", "5"}, with({2, 4, 6}));
  check_refused_with_words({"c", "null", "40"}, [&] {
    return run(problem, PerQuery(View<const float, 3>(nullptr, {2, 4, 5})), Full{});
  });
  const View<const float, 3> good(c.data(), {2, 4, 5});
  const auto output = run(problem, PerQuery(good), Full{});
  const auto into = [&](const View<float, 3>& view) {
    return [&, view] { return backward(problem, output, PerQuery(good).gradient(view), Full{}); };
  };
  check_refused_with_words({"ssmax::attention_backward: dc", "6", "5"}, into({dc.data(), {2, 4, 6}}));
  check_refused_with_words({"dc", "c", "overlaps"}, into({c.data() + 8, {2, 4, 5}}));
  check_refused_with_words({"dc", "0", "2"}, into({}));
}

}  // namespace attention_problem::backward_problem::scaling_per_query_test
