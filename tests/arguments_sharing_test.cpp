// Gradients of parameters that heads share, and infinite sinks.

#include "attention_backward_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::arguments_sharing_test {

// ---- Gradients of shared parameters -----------------------------------------------------------------------

TEST_CASE("all heads add to the gradient of a shared parameter: attention",
          "[attention][backward][arguments]") {
  ssmax::ThreadPool pool(3);
  for (const Shape& shape : {Shape{2, 4, 2, 5, 40, 8, 5}, {1, 4, 1, 70, 300, 8, 5}}) {
    const Problem<float> problem(shape);
    const SSMax<float> scaling{0.43F, 0.1F};
    const std::vector<float> p(300, 0.75F);
    const ssmax::SizeTable<float> table{p, 0.5F, 0.25F};
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const auto check = [&](const auto& with, const auto& gradient) {
        const Output<float> output = run(problem, with, Causal{});
        std::vector<float> ds(1), db(1), ds_again(1), db_again(1), ds_each(4), db_each(4);
        const Result<float> together = backward(problem, output, gradient(ds, db), Causal{});
        const Result<float> each = backward(problem, output, gradient(ds_each, db_each), Causal{});
        backward(problem, output, gradient(ds_again, db_again), Causal{}, ssmax::Identity{}, {}, pool);
        CHECK(together == each);
        CHECK((same_bits(ds, ds_again) && same_bits(db, db_again)));
        const auto is_sum = [](float sum, const std::vector<float>& terms) {
          float expected = 0, size = 1;
          for (const float term : terms) {
            expected += term;
            size += std::abs(term);
          }
          INFO(sum << ' ' << expected);
          CHECK(std::abs(sum - expected) <= 1e-5F * size);
          CHECK(std::abs(sum) > 1e-3F);
          CHECK(std::abs(sum - terms[0]) > 1e-3F);
        };
        is_sum(ds[0], ds_each);
        is_sum(db[0], db_each);
      };
      check(scaling, [&](auto& ds, auto& db) { return scaling.gradient(ds, db); });
      check(table, [&](auto& ds, auto& db) { return table.gradient({}, ds, db); });
    });
  }
}

TEST_CASE("all heads add to the gradient of a shared parameter: rows", "[arguments]") {
  const std::vector<float> z = reference::normals<float>(4 * 3 * 7, 1),
                           dy = reference::normals<float>(4 * 3 * 7, 2);
  std::vector<float> y(z.size()), dz(z.size()), ds(1), db(1), ds_each(4), db_each(4);
  const View<const float, 3> logits(z.data(), {4, 3, 7}), dout(dy.data(), {4, 3, 7});
  const View<float, 3> out(y.data(), {4, 3, 7}), dlogits(dz.data(), {4, 3, 7});
  const SSMax scaling{0.43F, 0.1F};
  ssmax::softmax(logits, out, scaling, Causal{});
  const auto run = [&](const auto& gradient) {
    ssmax::softmax_backward<float, 3>({.out = out, .dout = dout, .logits = logits, .dlogits = dlogits},
                                      gradient, Causal{});
  };
  run(scaling.gradient(ds, db));
  run(scaling.gradient(ds_each, db_each));
  CHECK(std::abs(ds[0] - (ds_each[0] + ds_each[1] + ds_each[2] + ds_each[3])) < 1e-5F);
  CHECK(std::abs(db[0] - (db_each[0] + db_each[1] + db_each[2] + db_each[3])) < 1e-5F);
  CHECK(std::abs(ds[0] - ds_each[0]) > 1e-3F);
  // ds or db alone.
  std::vector<float> alone(1);
  run(scaling.gradient(alone));
  CHECK(same_bits(alone, ds));
  alone = {0};
  run(scaling.gradient({}, alone));
  CHECK(same_bits(alone, db));
}

TEST_CASE("a scaling deduces its type from the container of the parameters", "[arguments]") {
  std::vector<float> floats(1, 0.5F);
  const std::vector<double> doubles(1, 0.5);
  const std::array<float, 1> array{0.5F};
  SSMax of_floats{floats}, of_both{floats, floats}, of_span{std::span(floats)}, of_array{array};
  SSMax of_doubles{doubles}, of_number{0.5};
  SSMax of_numbers{0.5F, 0.25F};
  ssmax::SizeTable table{doubles, doubles};
  static_assert(std::is_same_v<decltype(of_floats), SSMax<float>>);
  static_assert(std::is_same_v<decltype(of_both), SSMax<float>>);
  static_assert(std::is_same_v<decltype(of_span), SSMax<float>>);
  static_assert(std::is_same_v<decltype(of_array), SSMax<float>>);
  static_assert(std::is_same_v<decltype(of_doubles), SSMax<double>>);
  static_assert(std::is_same_v<decltype(of_number), SSMax<double>>);
  static_assert(std::is_same_v<decltype(of_numbers), SSMax<float>>);
  static_assert(std::is_same_v<decltype(table), ssmax::SizeTable<double>>);
  static_assert(!std::is_constructible_v<SSMax<float>, std::vector<float>>);
  static_assert(!std::is_constructible_v<View<const float, 1>, std::vector<float>>);
  static_assert(std::is_constructible_v<View<const float, 1>, std::span<const float>>);
  for (const double c :
       {of_floats({0, 0, 7}), of_both({0, 0, 7}) - 0.5, of_span({0, 0, 7}), of_array({0, 0, 7}),
        of_doubles({0, 0, 7}), of_number({0, 0, 7}), of_numbers({0, 0, 7}) - 0.25}) {
    CHECK(std::abs(c - 0.5 * std::log(7.0)) < 1e-12);
  }
}

// ---- Infinite sinks ---------------------------------------------------------------------------------------

TEST_CASE("gradients of sinks of +inf, -inf and NaN", "[attention][backward][arguments]") {
  const std::vector<float> sinks{infinity<float>, -infinity<float>, nan<float>, 0.5F};
  for (const Shape& shape : {Shape{2, 4, 2, 3, 40, 8, 5}, {1, 4, 4, 65, 40, 8, 5}, {1, 4, 4, 5, 0, 8, 5}}) {
    const Problem<float> problem(shape);
    const Problem<float> without_dlse(shape, 1, Dlse::left_out);
    const SSMax<float> scaling{0.7F, 0.3F};
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      std::vector<float> ds(4), db(4);
      const Output<float> output = run(problem, scaling, Causal{}, {.sinks = sinks});
      const Result<float> result =
          backward(problem, output, scaling.gradient(ds, db), Causal{}, ssmax::Identity{}, {.sinks = sinks});
      // The sink's weight is 1 and out is 0, so the gradient -weight·(⟨dout, out⟩ - dlse) is dlse.
      double expected = 0;
      for (index_t row = 0; row < problem.rows(); ++row) {
        if (row / shape.queries % 4 == 0)
          expected += static_cast<double>(problem.dlse[static_cast<std::size_t>(row)]);
      }
      CHECK(std::abs(static_cast<double>(result.dsinks[0]) - expected) < 1e-5 * (1 + std::abs(expected)));
      CHECK((ds[0] == 0 && db[0] == 0));
      CHECK(result.dsinks[1] == 0);
      CHECK(std::isnan(result.dsinks[2]));
      CHECK(std::isfinite(result.dsinks[3]));
      const Result<float> no_dlse =
          backward(without_dlse, output, scaling, Causal{}, ssmax::Identity{}, {.sinks = sinks});
      CHECK(no_dlse.dsinks[0] == 0);
    });
  }
}

TEST_CASE("the gradient of a growing sink tends to the gradient of a sink of +inf",
          "[attention][backward][arguments]") {
  const Problem<double> problem({1, 2, 2, 20, 30, 6, 5});
  const auto dsinks = [&](double sink) {
    const std::vector<double> sinks{sink, 0};
    return run_backward(problem, SSMax<double>{}, Causal{}, {.sinks = sinks}).dsinks[0];
  };
  CHECK(std::abs(dsinks(60) - dsinks(infinity<double>)) < 1e-12);
  CHECK(std::abs(dsinks(1e300) - dsinks(infinity<double>)) < 1e-12);
  CHECK(std::abs(dsinks(5) - dsinks(infinity<double>)) > 1e-3);
}

TEST_CASE("a sink of +inf makes out 0 and lse +inf in attention, finish and decode",
          "[attention][decode][arguments]") {
  const std::vector<float> sinks{infinity<float>, -infinity<float>};
  for (const index_t queries : {3, 40}) {
    const Problem<float> problem({1, 2, 2, queries, 50, 8, 5});
    const Output<float> plain = run(problem, Softmax{}, Causal{});
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << queries);
      const auto rows = static_cast<std::size_t>(2 * queries);
      std::vector<float> shift(rows), sum(rows), o(rows * 5), out(rows * 5, -7), lse(rows, -7);
      const View<float, 4> to(out.data(), {1, 2, queries, 5});
      const View<float, 3> to_lse(lse.data(), {1, 2, queries});
      const auto check = [&] {
        const auto half = static_cast<index_t>(rows / 2);
        CHECK(std::all_of(out.begin(), out.begin() + 5 * half, [](float x) { return x == 0; }));
        CHECK(std::all_of(lse.begin(), lse.begin() + half, [](float x) { return x == infinity<float>; }));
        for (std::size_t i = rows / 2; i < rows; ++i) CHECK(std::abs(lse[i] - plain.lse[i]) < 1e-5F);
        std::ranges::fill(out, -7.0F);
        std::ranges::fill(lse, -7.0F);
      };
      const AttentionState<float> state{
          {shift.data(), {1, 2, queries}}, {sum.data(), {1, 2, queries}}, {o.data(), {1, 2, queries, 5}}};
      ssmax::attention({.q = problem.q_view(),
                        .k = problem.k_view(),
                        .v = problem.v_view(),
                        .state = state,
                        .all_keys = 50},
                       Causal{});
      ssmax::finish<float>(state, to, to_lse, sinks);
      check();
      KvCache<float> cache({.kv_heads = 2, .width = 8, .value_width = 5, .capacity = 50});
      cache.append(problem.k_view(), problem.v_view());
      ssmax::attention({.q = problem.q_view(), .keys = cache, .out = to, .lse = to_lse, .sinks = sinks},
                       Causal{});
      check();
    });
  }
}

}  // namespace attention_problem::backward_problem::arguments_sharing_test
