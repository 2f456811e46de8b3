// Attention's backward on the bf16 path, on targets with pair dots or AMX tiles. Other targets skip these tests.
// Errors are measured against long double on the same inputs.

#include "attention_backward_problem.hpp"
#include "gradcheck.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace attention_problem::backward_problem::attention_backward_bfloat16_test {

constexpr std::array<Shape, 12> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 1, 1, 32, 32},  // one query, one key
    {1, 1, 1, 17, 1, 64, 64},
    {1, 1, 1, 1, 70, 16, 8},
    {1, 4, 2, 33, 65, 64, 32},
    {2, 2, 1, 49, 129, 33, 31},
    {1, 1, 1, 97, 300, 31, 33},
    {1, 1, 1, 250, 70, 48, 80},
    {1, 3, 1, 81, 81, 5, 100},  // three heads per kv head: more than one query block
    {1, 1, 1, 70, 33, 5, 16},   // queries without visible keys
    {1, 1, 1, 20, 0, 8, 8},
    {1, 1, 1, 20, 40, 0, 8},
    {1, 1, 1, 20, 40, 8, 0},
}};

void check_path(const Result<bfloat16>& result, ssmax::Path path = ssmax::Path::backward_bf16) {
  INFO(to_string(result.explanation));
  CHECK(result.explanation.path == path);
}

template <class M>
void check_products(const Problem<bfloat16>& problem, const M& mask, const Visible& visible,
                    const AttentionOptions<bfloat16>& options) {
  const FourHeads<float> heads(problem.shape.heads);
  const auto expectation = expect(problem, visible, heads.multiplier(), options);
  for_each_target_of_products([&](const std::string& target) {
    std::vector<float> ds(heads.s.size()), db(heads.s.size());
    Rules<bfloat16> rules;
    const auto got = rules.run(problem, expectation, heads.scaling().gradient(ds, db), mask, options);
    rules.take(
        ds, got, [&](const auto& g) { return per_head(g, problem.shape, ln); }, "ds");
    rules.take(
        db, got, [&](const auto& g) { return per_head(g, problem.shape, unweighted); }, "db");
    rules.check(target);
  });
}

TEST_CASE("gradients on the bf16 path stay within the bound of their roundings",
          "[attention][backward][bfloat16][products]") {
  const std::vector<float> sinks{0.5F, -1, 2, 0};
  for (const Shape& shape : shapes) {
    const AttentionOptions<bfloat16> options{.scale = 0.3, .sinks = for_heads_of(shape, sinks)};
    check_products(Problem<bfloat16>(shape), Full{}, all_keys, options);
    check_products(Problem<bfloat16>(shape, 1, Dlse::left_out), Causal{}, keys_before, {.scale = 0.3});
  }
}

TEST_CASE("gradients of rotated rows stay within the bound of one more rounding",
          "[attention][backward][bfloat16][products]") {
  const ssmax::Rope<float> rope({.width = 64}, 400);
  check_products(Problem<bfloat16>({1, 2, 1, 60, 300, 64, 32}), Causal{}, keys_before, {.rope = &rope});
}

/// Rounding the weights changes each row's lse, and dc by the same relative error. Roundings of the products do not
/// affect dc.
TEST_CASE("gradients of s and b are summed before rounding to bfloat16",
          "[attention][backward][bfloat16][products]") {
  const Problem<bfloat16> problem({1, 4, 2, 60, 200, 64, 32}, 2, Dlse::left_out);
  const FourHeads<float> heads;
  const auto expectation = expect(problem, keys_before, heads.multiplier());
  for_each_target_of_products([&](const std::string& target) {
    std::vector<float> ds(4), db(4);
    Rules<bfloat16> rules;
    const auto expected = rules.run(problem, expectation, heads.scaling().gradient(ds, db), Causal{});
    rules.check(target);
    const auto& dc = expected.exact.dc;
    std::vector<Real> allowed(4), of_s(4), of_b(4);
    for (std::size_t row = 0; row < dc.values.size(); ++row) {
      const Real n = ln(expected.exact.n[row]);
      // Products of bfloat16 are exact, but float sums round: an error relative to the terms.
      const Real error = rounded_sum * std::abs(dc.values[row]) + 8 * rounding<float> * dc.sizes[row];
      allowed[row / 60] += std::max(n, Real(1)) * error;
      of_s[row / 60] += n * dc.values[row];
      of_b[row / 60] += dc.values[row];
    }
    for (std::size_t head = 0; head < 4; ++head) {
      INFO(target << " head " << head << ' ' << static_cast<double>(allowed[head] / std::abs(of_s[head])));
      CHECK(std::abs(Real(ds[head]) - of_s[head]) <= allowed[head]);
      CHECK(std::abs(Real(db[head]) - of_b[head]) <= allowed[head]);
    }
  });
}

/// Computes the loss in double on the same inputs. δ uses `out` after rounding to bfloat16.
TEST_CASE("gradients of s and b agree with finite differences", "[attention][backward][bfloat16][products]") {
  const Shape shape{1, 2, 1, 40, 90, 32, 16};
  const Problem<bfloat16> problem(shape, 1, Dlse::left_out);
  const Problem<double> wide(problem);
  std::vector<double> parameters{0.8, 0.5, 0.1, -0.2};
  const auto forward = [&] {
    return run(wide, SSMax<double>{std::span(parameters).first(2), std::span(parameters).last(2)}, Causal{});
  };
  const auto numeric = gradcheck::finite_differences(parameters, [&] {
    const Output<double> output = forward();
    double loss = 0;
    for (std::size_t i = 0; i < wide.dout.size(); ++i) loss += wide.dout[i] * output.out[i];
    return loss;
  });
  // The error of Σ u·z: lse's relative error, and δ's error times the mean of z, which is below 4 here.
  const Output<double> exact = forward();
  double size = 0;
  for (std::size_t i = 0; i < wide.dout.size(); ++i) size += std::abs(wide.dout[i] * exact.out[i]);
  const std::vector<float> s{0.8F, 0.5F}, b{0.1F, -0.2F};
  for_each_target_of_products([&](const std::string& target) {
    std::vector<float> ds(2), db(2);
    const SSMax<float> scaling{s, b};
    check_path(run_backward(problem, scaling.gradient(ds, db), Causal{}));
    for (std::size_t i = 0; i < 2; ++i) {
      INFO(target << ' ' << ds[i] << ' ' << numeric[i] << ' ' << db[i] << ' ' << numeric[2 + i]);
      const double allowed = 0x1p-8 * 4 * size / 2;
      CHECK(std::abs(static_cast<double>(ds[i]) - numeric[i]) <=
            allowed * std::log(90) + 0.01 * std::abs(numeric[i]));
      CHECK(std::abs(static_cast<double>(db[i]) - numeric[2 + i]) <=
            allowed + 0.01 * std::abs(numeric[2 + i]));
    }
  });
}

TEST_CASE("gradients on the bf16 path are bit-identical for any number of threads",
          "[attention][backward][bfloat16][products]") {
  const Problem<bfloat16> problem({1, 4, 2, 300, 600, 40, 24});
  const Causal mask;
  for_each_target_of_products([&](const std::string&) {
    const Result<bfloat16> serial = run_backward(problem, Constant{3}, mask);
    ssmax::ThreadPool pool(3);
    const Result<bfloat16> parallel = run_backward(problem, Constant{3}, mask, {}, pool);
    check_path(serial);
    check_path(parallel);
    CHECK(parallel == serial);
  });
}

TEST_CASE("float_products computes gradients in float", "[attention][backward][bfloat16][products]") {
  const Problem<bfloat16> problem({1, 2, 1, 40, 300, 64, 32});
  const Problem<float> wide(problem);
  for_each_target_of_products([&](const std::string&) {
    const Output<bfloat16> output = run(problem, Constant{2}, Causal{}, {.float_products = true});
    Output<float> widened(problem.shape);
    widened.out.assign(output.out.begin(), output.out.end());
    widened.lse = output.lse;
    const auto in_float = backward(wide, widened, Constant{2}, Causal{});
    const auto asked =
        backward(problem, output, Constant{2}, Causal{}, ssmax::Identity{}, {.float_products = true});
    const auto rounded = backward(problem, output, Constant{2}, Causal{});
    std::vector<bfloat16> expected;
    for (const float value : in_float.dk) expected.push_back(bfloat16(value));
    CHECK(same_bits(asked.dk, expected));
    CHECK_FALSE(same_bits(rounded.dk, expected));
    check_path(asked, ssmax::Path::backward);
    CHECK(asked.explanation.reason == std::string("bfloat16: float_products is set"));
    check_path(rounded);
  });
}

// ---- NaN, infinity and subnormal numbers ------------------------------------------------------------------

TEST_CASE("NaN and infinity in a query or its dout reach only the keys visible to the query",
          "[attention][backward][bfloat16][products]") {
  const Shape shape{1, 1, 1, 300, 300, 32, 32};
  const Problem<bfloat16> clean(shape, 1, Dlse::left_out);
  for (const float poison : {std::numeric_limits<float>::quiet_NaN(), infinity<float>, -infinity<float>}) {
    for (const bool in_dout : {false, true}) {
      Problem<bfloat16> problem = clean;
      (in_dout ? problem.dout : problem.q)[100 * 32 + 7] = bfloat16(poison);
      for_each_target_of_products([&](const std::string& target) {
        INFO(target << ' ' << poison << ' ' << in_dout);
        const auto result = run_backward(problem, Constant{1}, Causal{}),
                   expected = run_backward(clean, Constant{1}, Causal{});
        check_path(result);
        for (std::size_t i = 101 * 32; i < 300 * 32; ++i) {
          REQUIRE(same_bits(std::vector{result.dk[i], result.dv[i]},
                            std::vector{expected.dk[i], expected.dv[i]}));
        }
        if (std::isnan(poison)) CHECK(std::isnan(static_cast<float>(result.dv[50 * 32 + 7])));
        for (std::size_t i = 0; i < 300 * 32; ++i) {
          if (i / 32 != 100) REQUIRE(same_bits(std::vector{result.dq[i]}, std::vector{expected.dq[i]}));
        }
      });
    }
  }
}

/// The first queries see all keys, the others the first 100.
struct FirstQueriesSeeAll {
  index_t first;

  KeyRange keys(const Query& query) const { return {0, query.index < first ? query.shape.keys : 100}; }
};

/// Tiles of the second half of the keys end before the query with NaN. Its weights of the first half are still in memory.
TEST_CASE("NaN in a query does not reach later keys, which the queries before it see",
          "[attention][backward][bfloat16][products]") {
  const Problem<bfloat16> clean({1, 1, 1, 150, 300, 32, 32}, 1, Dlse::left_out);
  for (index_t row = 16; row < 150; row += 16) {
    Problem<bfloat16> problem = clean;
    problem.q[static_cast<std::size_t>(row) * 32 + 7] = bfloat16(nan<float>);
    for_each_target_of_products([&](const std::string& target) {
      INFO(target << ' ' << row);
      const auto result = run_backward(problem, Constant{1}, FirstQueriesSeeAll{row}),
                 expected = run_backward(clean, Constant{1}, FirstQueriesSeeAll{row});
      check_path(result);
      CHECK(std::isnan(static_cast<float>(result.dv[99 * 32])));
      CHECK(std::equal(result.dv.begin() + 100 * 32, result.dv.end(), expected.dv.begin() + 100 * 32));
      CHECK(std::equal(result.dk.begin() + 100 * 32, result.dk.end(), expected.dk.begin() + 100 * 32));
    });
  }
}

TEST_CASE("NaN and infinity in K reach only the queries that see the key",
          "[attention][backward][bfloat16][products]") {
  const Shape shape{1, 1, 1, 300, 300, 32, 32};
  const Problem<bfloat16> clean(shape, 1, Dlse::left_out);
  for (const float poison : {std::numeric_limits<float>::quiet_NaN(), infinity<float>}) {
    Problem<bfloat16> problem = clean;
    problem.k[200 * 32 + 7] = bfloat16(poison);
    for_each_target_of_products([&](const std::string& target) {
      INFO(target << ' ' << poison);
      const auto result = run_backward(problem, Constant{1}, Causal{}),
                 expected = run_backward(clean, Constant{1}, Causal{});
      check_path(result);
      CHECK(std::equal(result.dq.begin(), result.dq.begin() + 200 * 32, expected.dq.begin()));
      if (std::isnan(poison)) CHECK(std::isnan(static_cast<float>(result.dq[250 * 32 + 7])));
    });
  }
}

/// The NaN's payload is all ones: rounding its bits as a number would give 0.
TEST_CASE("NaN in dlse or lse reaches the gradients", "[attention][backward][bfloat16][products]") {
  const std::uint32_t bits = 0x7FFFFFFF;
  float full;
  std::memcpy(&full, &bits, sizeof(full));
  Problem<bfloat16> problem({1, 1, 1, 40, 60, 32, 32});
  problem.dlse[11] = full;
  for_each_target_of_products([&](const std::string&) {
    const auto result = run_backward(problem, Constant{1}, Full{});
    check_path(result);
    CHECK(std::isnan(static_cast<float>(result.dq[11 * 32])));
    CHECK(std::isnan(static_cast<float>(result.dk[5])));
    CHECK_FALSE(std::isnan(static_cast<float>(result.dq[12 * 32])));
  });
}

/// The hardware treats subnormal numbers as 0.
TEST_CASE("subnormal numbers count as 0 in products of gradients",
          "[attention][backward][bfloat16][products]") {
  Problem<bfloat16> problem({1, 1, 1, 20, 40, 32, 32});
  std::fill(problem.q.begin(), problem.q.end(), bfloat16(0x1.fcp-127F));  // the largest one
  const auto is_0 = [](bfloat16 value) { return static_cast<float>(value) == 0; };
  for_each_target_of_products([&](const std::string&) {
    const auto result = run_backward(problem, Constant{1}, Full{});
    check_path(result);
    CHECK(std::all_of(result.dk.begin(), result.dk.end(), is_0));
    const auto in_float = run_backward(problem, Constant{1}, Full{}, {.float_products = true});
    CHECK_FALSE(std::all_of(in_float.dk.begin(), in_float.dk.end(), is_0));
  });
}

}  // namespace attention_problem::backward_problem::attention_backward_bfloat16_test
