// Attention's backward in special cases: rows of one key or no key, zeros of both signs, huge logits.

#include "attention_backward_problem.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::attention_backward_special_test {

// ---- Lanes without a query, and infinities ----------------------------------------------------------------

/// A score that is undefined at 0. No logit of the test is 0.
struct Reciprocal {
  template <class T>
  T operator()(T z, const ssmax::Key&) const {
    return 1 / (4 * z);
  }
  template <class T>
  T derivative(T z, const ssmax::Key&) const {
    return -1 / (4 * z * z);
  }
};

TEST_CASE("a score is not called for unused lanes", "[attention][backward][special]") {
  Problem<float> problem({1, 1, 1, 17, 3, 2, 2});
  for (float& x : problem.q) x = 1 + std::abs(x);
  for (float& x : problem.k) x = 1 + std::abs(x);
  const std::vector<float> far(3, 363'497.5F);
  const ssmax::Bias bias(View<const float, 4>(far.data(), {1, 1, 17, 3}, {0, 0, 0, 1}));
  for_each_target([&](const std::string&) {
    const Result<float> result = run_backward(problem, SSMax<float>{}, ssmax::Full{}, Reciprocal{});
    const Result<float> offset = run_backward(problem, SSMax<float>{}, ssmax::Full{}, bias);
    for (const std::vector<float>& values :
         {result.dq, result.dk, result.dv, offset.dq, offset.dk, offset.dv}) {
      CHECK(std::ranges::all_of(values, [](float x) { return std::isfinite(x); }));
      CHECK(std::ranges::any_of(values, [](float x) { return x != 0; }));
    }
  });
}

TEST_CASE("an infinite key of weight 0 does not affect gradients", "[attention][backward][special]") {
  Problem<float> problem({1, 1, 1, 2, 2, 1, 1});
  problem.q = {1, 1};
  problem.k = {0, -infinity<float>};
  for_each_target([&](const std::string&) {
    for (const Result<float>& result : {run_backward(problem, ssmax::Softmax{}, ssmax::Full{}),
                                        run_backward(problem, ssmax::Softmax{}, Causal{})}) {
      CHECK(std::isfinite(result.dq[0]));
      CHECK(std::isfinite(result.dq[1]));
      CHECK(result.dk[1] == 0);
      CHECK(result.dv[1] == 0);
    }
  });
}

TEST_CASE("huge logits give finite gradients", "[attention][backward][special]") {
  for (const Shape& shape : few_and_many) {
    Problem<float> problem(shape);
    for (float& x : problem.q) x *= 1e7F;
    for (float& x : problem.k) x *= 1e7F;
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const Result<float> result = run_backward(problem, ssmax::Softmax{}, Causal{});
      for (const std::vector<float>& values : {result.dq, result.dk, result.dv}) {
        CHECK(std::ranges::all_of(values, [](float x) { return std::isfinite(x); }));
      }
    });
  }
}

// Each lse is too large for an integer in T, so all lanes are irregular. One of their roundings changes a weight by at
// most a factor of 4.
TEMPLATE_TEST_CASE("far below 0, the last key has all weight", "[attention][backward][special]", float,
                   double) {
  using T = TestType;
  for (const index_t keys : {index_t{63}, index_t{65}, index_t{129}, index_t{400}}) {
    Problem<T> problem({1, 1, 1, 16, keys, 1, 1}, 1, Dlse::left_out);
    const T far = 2 * ssmax::detail::largest_shift<T>;
    std::ranges::fill(problem.q, T(1));
    std::ranges::fill(problem.k, -2 * far);
    problem.k.back() = -far;
    std::ranges::fill(problem.v, T(3));
    std::ranges::fill(problem.dout, T(0));
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << keys);
      for (std::size_t query = 0; query < 16; ++query) {
        problem.dout[query] = 1;
        const Result<T> result = run_backward(problem, ssmax::Softmax{}, ssmax::Full{});
        problem.dout[query] = 0;
        const auto is_zero = [](T x) { return x == 0; };
        CHECK(std::ranges::all_of(result.dq, is_zero));
        CHECK(std::ranges::all_of(result.dk, is_zero));
        CHECK(std::all_of(result.dv.begin(), result.dv.end() - 1, is_zero));
        CHECK(result.dv.back() > T(0.25));
        CHECK(result.dv.back() <= 1);
      }
    });
  }
}

// ---- One key or no key ------------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("a row with one key has a gradient only for its value", "[attention][backward][special]",
                   float, double) {
  using T = TestType;
  for (const Shape& shape : {Shape{1, 1, 1, 1, 1, 4, 3}, {2, 4, 2, 33, 33, 8, 5}, {1, 2, 1, 5, 70, 3, 17}}) {
    const Problem<T> problem(shape, 1, Dlse::left_out);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      std::vector<T> ds(static_cast<std::size_t>(shape.heads)), db(ds.size());
      // c is 0 there, and ln n.
      const Result<T> zero = run_backward(problem, SSMax<T>{T(2)}.gradient(ds, db), SlidingWindow(0));
      const auto is_zero = [](T x) { return x == 0; };
      CHECK(std::ranges::all_of(zero.dq, is_zero));
      CHECK(std::ranges::all_of(zero.dk, is_zero));
      CHECK(std::ranges::all_of(ds, is_zero));
      const Result<T> some = run_backward(problem, SSMax<T>{T(2), T(0.5)}, SlidingWindow(0));
      // The difference of two equal sums of up to 17 products below 9: only roundings remain.
      const auto is_small = [](T x) { return std::abs(Real(x)) <= 2000 * std::numeric_limits<T>::epsilon(); };
      CHECK(std::ranges::all_of(some.dq, is_small));
      CHECK(std::ranges::all_of(some.dk, is_small));
      CHECK(std::ranges::all_of(db, is_small));
      CHECK(std::ranges::any_of(some.dv, [](T x) { return std::abs(x) > T(0.1); }));
    });
  }
}

TEST_CASE("a query without visible keys has gradient 0 and adds 0 to other gradients",
          "[attention][backward][special]") {
  const auto every_third = [](const Query& query, index_t key) {
    return query.index % 3 == 0 && key % 7 != 5;
  };
  for (const Shape& shape :
       {Shape{2, 4, 2, 33, 40, 8, 5}, {1, 2, 1, 5, 150, 8, 5}, {1, 1, 1, 70, 20, 4, 4}}) {
    const Problem<float> problem(shape);
    const std::vector<float> sinks{0.5F, -2, 1, 0};
    for_each_target([&](const std::string& target) {
      for (const bool with_sinks : {false, true}) {
        INFO(target << ' ' << name_of(shape) << with_sinks);
        AttentionOptions<float> options;
        if (with_sinks) options.sinks = std::span(sinks).first(static_cast<std::size_t>(shape.heads));
        const Result<float> result = run_backward(problem, SSMax<float>{}, Where(every_third), options);
        int wrong = 0;
        for (std::size_t i = 0; i < result.dq.size(); ++i) {
          const auto query = static_cast<index_t>(i) / shape.d % shape.queries;
          if (query % 3 != 0) wrong += result.dq[i] == 0 ? 0 : 1;
        }
        for (index_t row = 0; row < shape.batch * shape.kv_heads * shape.keys; ++row) {
          if (row % shape.keys % 7 != 5) continue;
          for (index_t c = 0; c < shape.d; ++c)
            wrong += result.dk[static_cast<std::size_t>(row * shape.d + c)] != 0;
          for (index_t c = 0; c < shape.dv; ++c)
            wrong += result.dv[static_cast<std::size_t>(row * shape.dv + c)] != 0;
        }
        CHECK(wrong == 0);
      }
    });
  }
}

TEST_CASE("an infinite sink makes all other gradients 0", "[attention][backward][special]") {
  for (const Shape& shape : {Shape{1, 2, 2, 3, 40, 8, 5}, {1, 2, 2, 33, 40, 8, 5}}) {
    const Problem<float> problem(shape);
    const std::vector<float> infinite{infinity<float>, 0.5F}, finite{0.5F, 0.5F};
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const Result<float> result = run_backward(problem, SSMax<float>{}, Causal{}, {.sinks = infinite}),
                          expected = run_backward(problem, SSMax<float>{}, Causal{}, {.sinks = finite});
      const auto check = [](std::vector<float> values, std::vector<float> of_finite) {
        const auto half = values.size() / 2;
        CHECK(std::all_of(values.begin(), values.begin() + static_cast<index_t>(half),
                          [](float x) { return x == 0; }));
        values.erase(values.begin(), values.begin() + static_cast<index_t>(half));
        of_finite.erase(of_finite.begin(), of_finite.begin() + static_cast<index_t>(half));
        CHECK(same_bits(values, of_finite));
      };
      check(result.dq, expected.dq);
      check(result.dk, expected.dk);
      check(result.dv, expected.dv);
      CHECK(same_bits(result.dsinks[1], expected.dsinks[1]));
    });
  }
}

// ---- Zeros and large numbers ------------------------------------------------------------------------------

TEST_CASE("zeros of either sign", "[attention][backward][special]") {
  for (const Shape& shape : few_and_many) {
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      Problem<float> plus(shape, 1, Dlse::left_out);
      for (std::vector<float>* values : {&plus.q, &plus.k, &plus.v, &plus.dout}) {
        for (std::size_t i = 0; i < values->size(); i += 3) (*values)[i] = 0;
      }
      Problem<float> minus = plus;
      for (std::vector<float>* values : {&minus.q, &minus.k, &minus.v, &minus.dout}) {
        for (std::size_t i = 0; i < values->size(); i += 3) (*values)[i] = -0.0F;
      }
      const Result<float> of_plus = run_backward(plus, SSMax<float>{}, Causal{}),
                          of_minus = run_backward(minus, SSMax<float>{}, Causal{});
      CHECK((of_plus.dq == of_minus.dq && of_plus.dk == of_minus.dk && of_plus.dv == of_minus.dv));
      std::ranges::fill(minus.dout, -0.0F);
      const Result<float> nothing = run_backward(minus, SSMax<float>{}, Causal{});
      for (const auto* values : {&nothing.dq, &nothing.dk, &nothing.dv}) {
        CHECK(std::ranges::all_of(*values, [](float x) { return x == 0; }));
      }
    });
  }
}

template <class T>
void check_huge(double deviation, double multiplier) {
  const auto c = [multiplier](index_t, index_t, index_t) { return static_cast<Real>(multiplier); };
  std::vector<Problem<T>> problems;
  problems.reserve(few_and_many.size());
  std::vector<Expectation<T>> expectations;
  for (const Shape& shape : few_and_many) {
    problems.emplace_back(shape, deviation);
    expectations.push_back(expect(problems.back(), before, c));
  }
  for_each_target([&](const std::string& target) {
    INFO(target << ' ' << deviation << ' ' << multiplier);
    Average<T> dq, dk, dv;
    bool finite = true;
    for (std::size_t i = 0; i < problems.size(); ++i) {
      const Problem<T>& problem = problems[i];
      const Constant scaling{multiplier};
      const Output<T> output = run<T>(problem, scaling, Causal{});
      const Result<T> result = backward(problem, output, scaling, Causal{});
      const Expected<T> expected = expectations[i](output);
      dq.take(result.dq, expected.naive.dq, expected.exact.dq);
      dk.take(result.dk, expected.naive.dk, expected.exact.dk);
      dv.take(result.dv, expected.naive.dv, expected.exact.dv);
      for (const auto* values : {&result.dq, &result.dk, &result.dv}) {
        finite = finite && std::ranges::all_of(*values, [](T x) { return std::isfinite(x); });
      }
    }
    const auto ratio = [](const Average<T>& average) {
      return static_cast<double>(average.ours / average.naive);
    };
    INFO("average errors are " << ratio(dq) << ", " << ratio(dk) << ", " << ratio(dv)
                               << " of the naive loop's");
    CHECK(finite);
    CHECK(dq.holds());
    CHECK(dk.holds());
    CHECK(dv.holds());
  });
}

TEST_CASE("gradients where logits are huge", "[attention][backward][special]") {
  for (const double multiplier : {1.0, -1.0, 1e3}) {
    check_huge<float>(4, multiplier);
    check_huge<double>(4, multiplier);
  }
  check_huge<float>(40, 1e3);
  check_huge<double>(40, -1e3);
}

}  // namespace attention_problem::backward_problem::attention_backward_special_test
