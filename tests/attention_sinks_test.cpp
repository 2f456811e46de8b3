// A sink adds exp(sink) to the denominator; c does not multiply the sink, and n does not count it. Fully masked rows
// are 0, as in ONNX's Attention.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_sinks_test {

constexpr std::array<Shape, 5> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 61, 300, 9, 24},
    {1, 4, 1, 70, 33, 8, 9},
    {2, 4, 4, 7, 3, 5, 4},
    {1, 4, 2, 3, 0, 5, 4},
}};

template <class T>
void check_sinks(const std::vector<T>& sinks) {
  const AttentionOptions<T> options{.sinks = sinks};
  for (const Shape& shape : shapes) {
    check_mask<T>(shape, Full{}, all_keys, options);
    check_mask<T>(shape, Causal{}, keys_before, options);
  }
}

TEST_CASE("a sink takes weight and is included in lse", "[attention][sinks][slow]") {
  check_sinks<float>({0.5F, -3, 4, 0});
  check_sinks<double>({0.5, -3, 4, 0});
}

TEST_CASE("very large and very small sinks, and no sinks", "[attention][sinks][slow]") {
  check_sinks<float>({500, -500, 80, -80});
  check_sinks<float>({-infinity<float>, 1e30F, -1e30F, 3e6F});
}

TEST_CASE("scores and masks do not affect a sink", "[attention][sinks]") {
  const std::vector<float> sinks{2.5F, -1, 0, 7};
  const auto capped = [](auto z, const Query&, index_t) { return std::tanh(z); };
  const auto picked = [](const Query& query, index_t key) {
    return query.index % 4 != 1 && (query.index + key) % 3 == 0;
  };
  for (const Shape& shape : shapes) {
    check_score(Problem<float>(shape), ssmax::Where(picked), picked, ssmax::Softcap(1), capped,
                {.sinks = sinks});
  }
}

TEST_CASE("for a query without visible keys, out is 0 and lse is the sink", "[attention][sinks]") {
  const std::vector<float> sinks{2.5F, -1, -infinity<float>, 1e4F};
  const auto every_third = [](const Query& query, index_t) { return query.index % 3 == 0; };
  for (const Shape& shape : shapes) {
    const Problem<float> problem(shape);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const Output<float> with = run(problem, SSMax<float>{}, ssmax::Where(every_third), {.sinks = sinks});
      const Output<float> without = run(problem, SSMax<float>{}, ssmax::Where(every_third));
      int wrong = 0;
      for (std::size_t row = 0; row < with.lse.size(); ++row) {
        const auto query = static_cast<index_t>(row) % shape.queries;
        if (query % 3 == 0 && shape.keys > 0) continue;
        const float sink = sinks[static_cast<std::size_t>(static_cast<index_t>(row) / shape.queries % 4)];
        if (with.lse[row] != sink || without.lse[row] != -infinity<float>) ++wrong;
        for (std::size_t i = 0; i < static_cast<std::size_t>(shape.dv); ++i) {
          const std::size_t at = row * static_cast<std::size_t>(shape.dv) + i;
          if (with.out[at] != 0 || without.out[at] != 0) ++wrong;
        }
      }
      CHECK(wrong == 0);
    });
  }
}

TEST_CASE("a sink of +inf takes all weight, and a sink of NaN makes its rows NaN", "[attention][sinks]") {
  const std::vector<float> sinks{infinity<float>, nan<float>, 0, 0}, no_sinks(4);
  for (const Shape& shape : {shapes[0], shapes[1]}) {
    const Problem<float> problem(shape);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const Output<float> output = run(problem, Softmax{}, Full{}, {.sinks = sinks});
      const Output<float> zeros = run(problem, Softmax{}, Full{}, {.sinks = no_sinks});
      int wrong = 0;
      for (std::size_t i = 0; i < output.out.size(); ++i) {
        const auto row = i / static_cast<std::size_t>(shape.dv);
        const auto head = static_cast<index_t>(row) / shape.queries % 4;
        const float out = output.out[i], lse = output.lse[row];
        const bool right = head == 0   ? out == 0 && lse == infinity<float>
                           : head == 1 ? std::isnan(out) && std::isnan(lse)
                                       : out == zeros.out[i] && lse == zeros.lse[row];
        wrong += right ? 0 : 1;
      }
      CHECK(wrong == 0);
    });
  }
}

// ---- Small cases to be checked by eye ---------------------------------------------------------------------

/// Two queries on two keys with an attn_mask of ONNX, repeated `copies` times.
struct TwoByTwo {
  index_t copies;
  std::vector<float> q, k{1, 0, 0, 1}, v{10, 20, 30, 40}, out, lse;

  explicit TwoByTwo(index_t count)
      : copies(count),
        out(static_cast<std::size_t>(4 * count), -77.0F),
        lse(static_cast<std::size_t>(2 * count), -77.0F) {
    for (index_t i = 0; i < count; ++i) q.insert(q.end(), {1, 0, 0, 1});
  }
  template <class M, class C>
  void run(const M& mask, const C& score) {
    ssmax::attention({.q = {q.data(), {1, 1, 2 * copies, 2}},
                      .k = {k.data(), {1, 1, 2, 2}},
                      .v = {v.data(), {1, 1, 2, 2}},
                      .out = {out.data(), {1, 1, 2 * copies, 2}},
                      .lse = {lse.data(), {1, 1, 2 * copies}},
                      .scale = 1.0},
                     mask, score);
  }
};

bool is_near(float value, double expected) {
  return std::abs(static_cast<double>(value) - expected) <= 4e-6 * std::abs(expected);
}

TEST_CASE("for a row of attn_mask with only false, out is 0", "[attention][sinks]") {
  for_each_target([](const std::string& target) {
    for (const index_t copies : {1, 20}) {
      INFO(target << ' ' << copies);
      TwoByTwo two(copies);
      std::vector<char> mask;
      std::vector<float> additive;
      for (index_t i = 0; i < copies; ++i) {
        mask.insert(mask.end(), {0, 0, 1, 0});
        additive.insert(additive.end(), {-infinity<float>, -infinity<float>, 0, -infinity<float>});
      }
      const std::array<index_t, 4> extents{1, 1, 2 * copies, 2};
      const auto check = [&] {
        for (std::size_t i = 0; i < static_cast<std::size_t>(copies); ++i) {
          CHECK(two.out[4 * i] == 0);
          CHECK(two.out[4 * i + 1] == 0);
          CHECK(two.lse[2 * i] == -infinity<float>);
          CHECK(is_near(two.out[4 * i + 2], 10));
          CHECK(is_near(two.out[4 * i + 3], 20));
          CHECK(two.lse[2 * i + 1] == 0);  // q1·k0
        }
      };
      two.run(ssmax::MatrixMask(View<const bool, 4>(reinterpret_cast<const bool*>(mask.data()), extents)),
              ssmax::Identity{});
      check();
      two.run(Full{}, ssmax::Bias(View<const float, 4>(additive.data(), extents)));
      check();
    }
  });
}

TEST_CASE("two keys whose logits differ by one", "[attention][sinks]") {
  const double e = std::exp(1.0);
  for_each_target([&](const std::string& target) {
    for (const index_t copies : {1, 20}) {
      INFO(target << ' ' << copies);
      TwoByTwo two(copies);
      two.run(Full{}, ssmax::Identity{});
      const std::size_t last = two.out.size() - 2;
      CHECK(is_near(two.out[0], (10 * e + 30) / (e + 1)));
      CHECK(is_near(two.out[1], (20 * e + 40) / (e + 1)));
      CHECK(is_near(two.out[last], (10 + 30 * e) / (e + 1)));
      CHECK(is_near(two.lse[0], std::log(e + 1)));
    }
  });
}

}  // namespace attention_problem::attention_sinks_test
