// Attention on the bf16 path, on targets with pair dots or AMX tiles. Other targets skip these tests. Errors are
// measured against long double on the same inputs.

#include <ssmax/detail/kernels/statistics.hpp>

#include <cstring>
#include <functional>
#include <numeric>
#include <random>

#include "attention_problem.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace attention_problem::attention_bfloat16_test {

using ssmax::detail::kernels;

using Products = ssmax::detail::PrefillKernels<float, bfloat16>;

constexpr std::array<Shape, 15> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 17, 129, 64, 64},
    {1, 1, 1, 17, 130, 1, 1},
    {1, 20, 1, 1, 133, 32, 32},  // one query, twenty heads per kv head
    {1, 1, 1, 48, 256, 64, 64},
    {2, 2, 1, 49, 129, 64, 96},
    {1, 2, 2, 50, 257, 33, 31},
    {1, 1, 1, 97, 300, 31, 33},
    {1, 3, 1, 20, 140, 16, 17},
    {1, 1, 1, 145, 170, 128, 128},
    {1, 1, 1, 33, 1100, 80, 40},
    {1, 1, 1, 170, 133, 5, 100},  // queries without visible keys
    {1, 1, 1, 20, 0, 8, 8},       // short_keys
    {1, 1, 1, 20, 140, 0, 8},
    {1, 1, 1, 20, 140, 8, 0},
    {1, 75, 1, 1, 300, 576, 72},  // long sums, 256 keys held at once, a tile of three vectors and one of two
}};

template <class R>
void check_path(const R& result, ssmax::Path path = ssmax::Path::prefill_bf16) {
  INFO(to_string(result.explanation));
  CHECK(result.explanation.path == path);
}

/// The multipliers of the four heads of SSMax are positive, negative and 0.
TEST_CASE("the bf16 path stays within the bound of rounding the weights",
          "[attention][bfloat16][products][slow]") {
  const std::vector<float> sinks(75, 0.5F);
  for (const Shape& shape : shapes) {
    const Problem<bfloat16> problem(shape);
    const ssmax::AttentionOptions<bfloat16> options{.scale = 0.3, .sinks = for_heads_of(shape, sinks)};
    for (const double c : {1.0, -2.5, 0.0}) {
      const auto multiplier = [c](index_t, index_t, index_t) { return Real(c); };
      const Expected<bfloat16> full = expect(problem, all_keys, multiplier, {.scale = 0.3});
      const Expected<bfloat16> causal = expect(problem, keys_before, multiplier, options);
      for_each_target_of_products([&](const std::string& target) {
        Rules<bfloat16> rules;
        const Output<bfloat16> of_full = run(problem, Constant{c}, Full{}, {.scale = 0.3}),
                               of_causal = run(problem, Constant{c}, Causal{}, options);
        for (const auto* output : {&of_full, &of_causal}) {
          check_path(*output, shape.keys == 0 ? ssmax::Path::short_keys : ssmax::Path::prefill_bf16);
        }
        rules.take(of_full, full, name_of(shape) + "full");
        rules.take(of_causal, causal, name_of(shape) + "causal");
        rules.check(target);
      });
    }
  }
}

/// Rounding rotated queries and keys to bfloat16 would make the error of lse ten times larger.
TEST_CASE("RoPE on the bf16 path adds no error that grows with the multiplier",
          "[attention][bfloat16][products]") {
  const ssmax::Rope<float> rope({.width = 64}, 400);
  const Problem<bfloat16> problem({1, 2, 1, 40, 300, 64, 32});
  const auto ten = [](index_t, index_t, index_t) { return Real(10); };
  const Expected<bfloat16> expected = expect(problem, keys_before, ten, {.rope = &rope});
  for_each_target_of_products([&](const std::string& target) {
    Rules<bfloat16> rules;
    const Output<bfloat16> output = run(problem, Constant{10}, Causal{}, {.rope = &rope});
    check_path(output);
    rules.take(output, expected, "rope");
    rules.check(target);
  });
}

/// A cache rounds its keys after rotation, so only the query is split into parts.
TEST_CASE("a cache with RoPE on the bf16 path differs from float by the rounding of weights",
          "[attention][bfloat16][products]") {
  constexpr index_t queries = 40, keys = 300, d = 48;
  const ssmax::Rope<float> rope({.width = d}, keys);
  const std::vector<float> k = reference::normals<float>(keys * d, 1),
                           v = reference::normals<float>(keys * d, 2);
  const std::vector<bfloat16> q = reference::normals<bfloat16>(queries * d, 3);
  ssmax::KvCache<bfloat16> cache({.kv_heads = 1, .width = d, .capacity = keys});
  cache.append({k.data(), {1, 1, keys, d}}, {v.data(), {1, 1, keys, d}}, &rope);
  for_each_target_of_products([&](const std::string&) {
    const auto lse_of = [&](bool float_products) {
      std::vector<bfloat16> out(q.size());
      std::vector<float> lse(queries);
      ssmax::Explanation explanation;
      ssmax::attention({.q = {q.data(), {1, 1, queries, d}},
                        .keys = cache,
                        .out = {out.data(), {1, 1, queries, d}},
                        .lse = {lse.data(), {1, 1, queries}},
                        .rope = &rope,
                        .float_products = float_products,
                        .explanation = &explanation},
                       Constant{10}, Causal{});
      CHECK(explanation.path == (float_products ? ssmax::Path::prefill : ssmax::Path::prefill_bf16));
      return lse;
    };
    const std::vector<float> ours = lse_of(false), in_float = lse_of(true);
    Real worst = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      worst = std::max(worst, std::abs(Real(ours[i]) - Real(in_float[i])));
    }
    CHECK(worst > 0);
    CHECK(worst <= rounded_sum);
  });
}

TEST_CASE("float_products is bit-identical to float on every target", "[attention][bfloat16][products]") {
  const Problem<bfloat16> problem({1, 2, 1, 40, 300, 64, 32});
  const Problem<float> wide(problem);
  for_each_target_of_products([&](const std::string&) {
    const Output<float> in_float = run(wide, Constant{2}, Causal{});
    const Output<bfloat16> asked = run(problem, Constant{2}, Causal{}, {.float_products = true}),
                           rounded = run(problem, Constant{2}, Causal{});
    CHECK(same_bits(asked.lse, in_float.lse));
    CHECK_FALSE(same_bits(rounded.lse, in_float.lse));
    check_path(asked, ssmax::Path::prefill);
    CHECK(asked.explanation.reason == std::string("bfloat16: float_products is set"));
    check_path(rounded);
  });
}

TEST_CASE("the bf16 path is bit-identical for any number of threads", "[attention][bfloat16][products]") {
  const Problem<bfloat16> problem({1, 4, 2, 100, 2300, 40, 24});
  for_each_target_of_products([&](const std::string&) {
    const Output<bfloat16> serial = run(problem, Constant{3}, Causal{});
    ssmax::ThreadPool pool(3);
    const Output<bfloat16> parallel = run(problem, Constant{3}, Causal{}, {}, pool);
    check_path(serial);
    check_path(parallel);
    CHECK(parallel.explanation.threads == 3);
    CHECK(parallel == serial);
  });
}

// ---- NaN, infinity and subnormal numbers ------------------------------------------------------------------

TEST_CASE("NaN and infinity in masked keys do not affect the bf16 path", "[attention][bfloat16][products]") {
  const Shape shape{1, 1, 1, 200, 200, 32, 32};
  const Problem<bfloat16> clean(shape);
  for (const float poison : {std::numeric_limits<float>::quiet_NaN(), infinity<float>, -infinity<float>}) {
    Problem<bfloat16> problem = clean;
    for (std::size_t i = 190 * 32; i < 200 * 32; ++i) problem.k[i] = problem.v[i] = bfloat16(poison);
    for_each_target_of_products([&](const std::string& target) {
      INFO(target << ' ' << poison);
      const Output<bfloat16> output = run(problem, Constant{2}, Causal{}),
                             expected = run(clean, Constant{2}, Causal{});
      CHECK(std::equal(output.lse.begin(), output.lse.begin() + 190, expected.lse.begin()));
      CHECK(same_bits(std::vector(output.out.begin(), output.out.begin() + 190 * 32),
                      std::vector(expected.out.begin(), expected.out.begin() + 190 * 32)));
      if (std::isnan(poison)) CHECK(std::isnan(output.lse[195]));
      check_path(output);
      check_path(expected);
    });
  }
}

TEST_CASE("an infinite value reaches only the queries that see the value",
          "[attention][bfloat16][products]") {
  const Shape shape{1, 1, 1, 200, 200, 32, 32};
  Problem<bfloat16> problem(shape);
  problem.v[50 * 32 + 3] = bfloat16(infinity<float>);
  for_each_target_of_products([&](const std::string&) {
    const Output<bfloat16> output = run(problem, Constant{1}, Causal{});
    check_path(output);
    for (std::size_t row = 0; row < 200; ++row) {
      const auto value = static_cast<float>(output.out[row * 32 + 3]);
      CHECK((row < 50 ? std::isfinite(value) : value == infinity<float>));
      CHECK(std::isfinite(static_cast<float>(output.out[row * 32 + 4])));
    }
  });
}

/// The hardware treats subnormal numbers as 0.
TEST_CASE("subnormal numbers of bfloat16 count as 0 in products", "[attention][bfloat16][products]") {
  Problem<bfloat16> problem({1, 1, 1, 20, 140, 32, 32});
  bfloat16 subnormal;
  subnormal.bits = 0x0001;
  std::fill(problem.k.begin(), problem.k.end(), subnormal);
  std::fill(problem.v.begin(), problem.v.end(), subnormal);
  for_each_target_of_products([&](const std::string&) {
    const Output<bfloat16> output = run(problem, Constant{1}, Full{});
    check_path(output);
    for (const bfloat16 value : output.out) CHECK(static_cast<float>(value) <= static_cast<float>(subnormal));
    for (const float lse : output.lse) CHECK(std::abs(lse - std::log(140.F)) <= 1e-6F);
  });
}

TEST_CASE("logits beyond the range of an integer shift use double", "[attention][bfloat16][products]") {
  const Problem<bfloat16> problem({1, 1, 1, 40, 200, 16, 8}, 40);
  const auto thousand = [](index_t, index_t, index_t) { return Real(1000); };
  const Expected<bfloat16> expected = expect(problem, all_keys, thousand);
  for_each_target_of_products([&](const std::string& target) {
    Rules<bfloat16> rules;
    const Output<bfloat16> output = run(problem, Constant{1000}, Full{});
    check_path(output);
    rules.take(output, expected, "large");
    rules.check(target);
  });
}

// ---- The kernel of weights --------------------------------------------------------------------------------

TEST_CASE("weights are 2^x rounded to bfloat16, and the sum adds the rounded weights",
          "[attention][bfloat16][products][pair_dot]") {
  for_each_target_of_products([&](const std::string&) {
    const Products& products = kernels<Products>();
    const index_t keys = 128, width = products.width, group = width * ssmax::detail::tile_vectors;
    Real worst = 0, wrong_sums = 0;
    for (int sweep = 0; sweep < 400; ++sweep) {
      std::vector<float> s(static_cast<std::size_t>(keys * group)), logits;
      for (std::size_t i = 0; i < s.size(); ++i)
        s[i] = -30 + 0.09F * static_cast<float>((i * 7919 + static_cast<std::size_t>(sweep)) % 341);
      s[5] = -infinity<float>;
      s[6] = -1e4F;
      logits = s;
      std::vector<float> shift(static_cast<std::size_t>(width), -infinity<float>), sum(shift.size(), 0.F),
          factor(sum), multiplier(sum);
      for (std::size_t lane = 0; lane < multiplier.size(); ++lane)
        multiplier[lane] = sweep % 2 == 0 ? 1.F : 0.37F * static_cast<float>(lane + 1);
      auto* weights = reinterpret_cast<bfloat16*>(s.data());
      const auto change = products.weights(
          s.data(), keys, {shift.data(), sum.data(), factor.data(), multiplier.data()}, weights);
      REQUIRE(change == ssmax::detail::TileChange::raised);
      for (index_t lane = 0; lane < width; ++lane) {
        Real total = 0;
        for (index_t key = 0; key < keys; ++key) {
          bfloat16 weight;
          std::memcpy(&weight, weights + ssmax::detail::tuple_at<float, bfloat16>(key, lane, group),
                      sizeof(weight));
          const auto at = static_cast<std::size_t>(lane);
          const Real x = Real(logits[static_cast<std::size_t>(key * group + lane)]) * Real(multiplier[at]) -
                         Real(shift[at]);
          const Real exact = std::exp2(x), value = static_cast<float>(weight);
          total += value;
          if (x < -125) {
            CHECK(value <= 0x1p-124L);
          } else {
            worst = std::max(worst, std::abs(value / exact - 1));
          }
        }
        wrong_sums = std::max(wrong_sums,
                              std::abs(static_cast<Real>(sum[static_cast<std::size_t>(lane)]) / total - 1));
      }
    }
    INFO("relative error " << static_cast<double>(worst) << ", of sums " << static_cast<double>(wrong_sums));
    CHECK(worst <= rounded_weights / 2);
    CHECK(worst >= 0x1p-9L);
    CHECK(wrong_sums <= 1e-5L);
  });
}

/// A group of queries, a block of keys and the state before it.
struct Block {
  std::vector<float> s, shift, sum, factor, multiplier, o, largest, smallest, distances, squares;
  std::vector<bfloat16> values;

  Block(const Products& products, index_t keys, index_t channels, bool is_first) {
    const index_t group = products.width * ssmax::detail::tile_vectors;
    std::mt19937 generator(static_cast<unsigned>(keys));
    std::normal_distribution<float> normal;
    const auto fill = [&](auto& numbers, index_t size) {
      for (index_t i = 0; i < size; ++i)
        numbers.push_back(typename std::decay_t<decltype(numbers)>::value_type(normal(generator)));
    };
    fill(s, keys * group);
    fill(o, channels * group);
    fill(values, keys * channels);
    shift.assign(static_cast<std::size_t>(group), is_first ? -infinity<float> : 1.5F);
    sum.assign(shift.size(), is_first ? 0.F : 7.F);
    factor.assign(shift.size(), 1.F);
    multiplier.assign(shift.size(), 0.8F);
    largest.assign(shift.size(), is_first ? -infinity<float> : 1.25F);
    smallest.assign(shift.size(), is_first ? infinity<float> : -0.5F);
    distances.assign(shift.size(), is_first ? 0.F : -3.F);
    squares.assign(shift.size(), is_first ? 0.F : 2.F);
  }
  ssmax::detail::TileState<float> state() {
    return {shift.data(),
            sum.data(),
            factor.data(),
            multiplier.data(),
            {largest.data(), smallest.data(), distances.data(), squares.data()}};
  }
  bfloat16* weights() { return reinterpret_cast<bfloat16*>(s.data()); }
  bool operator==(const Block& other) const {
    return s == other.s && shift == other.shift && sum == other.sum && o == other.o &&
           largest == other.largest && smallest == other.smallest && distances == other.distances &&
           squares == other.squares;
  }
};

using Statistics = ssmax::detail::StatisticsKernels<float, bfloat16>;

TEST_CASE("attend_group is bit-identical to its three steps, and leaves an irregular block unchanged",
          "[attention][bfloat16][products][tile_product]") {
  for_each_target_of_products([&](const std::string& target) {
    const Products& products = kernels<Products>();
    const Statistics& statistics = kernels<Statistics>();
    CHECK((products.group.attend[0] != nullptr) == (target == "amx"));
    CHECK((statistics.group.attend[0] != nullptr) == (target == "amx"));
    if (products.group.attend[0] == nullptr) return;
    products.acquire();
    for (const auto* group : {&products.group, &statistics.group}) {
      for (const index_t vectors : {1, 2, 3}) {
        for (const index_t keys : {32, 64}) {
          for (const bool is_first : {false, true}) {
            INFO(target << ", " << vectors << " vectors, " << keys << " keys");
            const index_t panels = 3, channels = panels * products.pass, panel = keys * products.pass;
            const auto i = static_cast<std::size_t>(vectors - 1);
            Block steps(products, keys, channels, is_first), at_once = steps;
            const auto attend = [&](Block& block) {
              return group->attend[i](block.s.data(), keys, block.state(), block.weights(),
                                      {block.values.data(), products.pass, panel, panels}, block.o.data());
            };
            const auto change = group->weights[i](steps.s.data(), keys, steps.state(), steps.weights());
            products.rescale(steps.o.data(), channels, steps.factor.data());
            products.accumulate[i]({steps.values.data(), products.pass, panel, panels}, steps.weights(), keys,
                                   steps.o.data());
            CHECK(attend(at_once) == change);
            CHECK(at_once == steps);
            Block irregular(products, keys, channels, is_first);
            irregular.s[static_cast<std::size_t>(vectors * products.width - 1)] = infinity<float>;
            const Block before = irregular;
            CHECK(attend(irregular) == ssmax::detail::TileChange::irregular);
            CHECK(irregular == before);
          }
        }
      }
    }
    products.release();
  });
}

TEST_CASE("statistics of a group are bit-identical to those of its vectors, and do not change weights",
          "[attention][bfloat16][products][statistics][pair_dot]") {
  for_each_target_of_products([&](const std::string& target) {
    const Products& products = kernels<Products>();
    const Statistics& statistics = kernels<Statistics>();
    for (const index_t vectors : {1, 2, 3}) {
      for (const bool is_first : {false, true}) {
        for (const bool is_masked : {false, true}) {
          INFO(target << ", " << vectors << " vectors, "
                      << (is_masked ? "a masked key" : "all keys visible"));
          constexpr index_t keys = 64;
          const auto i = static_cast<std::size_t>(vectors - 1);
          Block by_vector(products, keys, 0, is_first);
          if (is_masked)
            by_vector.s[static_cast<std::size_t>(vectors * products.width - 1)] = -infinity<float>;
          Block of_group = by_vector, plain = by_vector;
          const auto change =
              statistics.group.weights[i](of_group.s.data(), keys, of_group.state(), of_group.weights());
          if (is_masked) {
            CHECK(change == ssmax::detail::TileChange::irregular);
            CHECK(of_group == by_vector);
            continue;
          }
          for (index_t v = 0; v < vectors; ++v) {
            const index_t lane = v * products.width;
            auto state = by_vector.state();
            statistics.weights(by_vector.s.data() + lane, keys,
                               {state.shift + lane, state.sum + lane, state.factor + lane,
                                state.multiplier + lane, state.statistics.from(lane)},
                               by_vector.weights() + 2 * lane);
          }
          CHECK(of_group == by_vector);
          products.group.weights[i](plain.s.data(), keys, plain.state(), plain.weights());
          CHECK(plain.s == of_group.s);
          CHECK(plain.sum == of_group.sum);
          CHECK(plain.squares != of_group.squares);
        }
      }
    }
  });
}

/// A target may copy rows of K that are not aligned.
TEST_CASE("the bf16 path is bit-identical for every alignment of the keys",
          "[attention][bfloat16][products]") {
  const Shape shape{1, 2, 2, 100, 200, 64, 64};
  const Problem<bfloat16> problem(shape);
  for_each_target_of_products([&](const std::string&) {
    const auto size = static_cast<std::size_t>(shape.queries * shape.heads * shape.dv);
    std::vector<std::vector<bfloat16>> results;
    for (const int offset : {0, 1, 8, 32}) {
      std::vector<bfloat16> memory(problem.k.size() + 64), out(size);
      const std::size_t to_aligned =
          (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64 / sizeof(bfloat16);
      bfloat16* k = memory.data() + to_aligned + offset;
      std::copy(problem.k.begin(), problem.k.end(), k);
      ssmax::attention({.q = {problem.q.data(), {1, shape.heads, shape.queries, shape.d}},
                        .k = {k, {1, shape.kv_heads, shape.keys, shape.d}},
                        .v = {problem.v.data(), {1, shape.kv_heads, shape.keys, shape.dv}},
                        .out = {out.data(), {1, shape.heads, shape.queries, shape.dv}}},
                       ssmax::Full{});
      results.push_back(std::move(out));
    }
    for (const auto& result : results)
      CHECK(std::memcmp(result.data(), results[0].data(), size * sizeof(bfloat16)) == 0);
  });
}

/// Returns the last `queries` queries of a problem with one batch entry.
Problem<bfloat16> last_queries(const Problem<bfloat16>& problem, index_t queries) {
  Shape shape = problem.shape;
  const index_t left_out = shape.queries - queries;
  shape.queries = queries;
  Problem<bfloat16> result(shape);
  result.k = problem.k;
  result.v = problem.v;
  for (index_t head = 0; head < shape.heads; ++head) {
    const auto from = problem.q.begin() + (head * problem.shape.queries + left_out) * shape.d;
    std::copy_n(from, queries * shape.d, result.q.begin() + head * queries * shape.d);
  }
  return result;
}

template <class S>
void check_cuts(const Shape& shape, const S& scaling) {
  const Problem<bfloat16> problem(shape);
  for_each_target_of_products([&](const std::string&) {
    const Output<bfloat16> whole = run(problem, scaling, Causal{});
    check_path(whole);
    index_t differ = 0;
    for (const index_t left_out : {1, 7, 15, 16, 31, 40, 47, 60, 77}) {
      const index_t queries = shape.queries - left_out;
      const Output<bfloat16> part = run(last_queries(problem, queries), scaling, Causal{});
      check_path(part);
      for (index_t head = 0; head < shape.heads; ++head) {
        const auto row = static_cast<std::size_t>(head * shape.queries + left_out);
        const auto* lse = part.lse.data() + head * queries;
        differ += queries - std::inner_product(lse, lse + queries, whole.lse.data() + row, index_t{0},
                                               std::plus<>(), [](float a, float b) { return a == b; });
      }
    }
    CHECK(differ == 0);
  });
}

TEST_CASE("the bf16 path is bit-identical for a query whatever its neighbours in a vector",
          "[attention][bfloat16][products]") {
  check_cuts({1, 1, 1, 192, 192, 64, 64}, Constant{4.3});
  check_cuts({1, 2, 2, 200, 300, 32, 32}, Constant{37});
  check_cuts({1, 2, 2, 200, 300, 32, 32}, Constant{-3.7});
  const FourHeads<float> heads;
  check_cuts({1, 4, 1, 100, 150, 64, 32}, heads.scaling());
}

}  // namespace attention_problem::attention_bfloat16_test
