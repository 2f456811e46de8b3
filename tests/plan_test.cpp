// A plan gives the bits of attention, refuses what does not fit, and names the memory that a call needs.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <ssmax/plan.hpp>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "allocation_count.hpp"
#include "attention_problem.hpp"
#include "catch.hpp"
#include "refusal.hpp"

namespace attention_problem::plan_test {

constexpr std::array<Shape, 7> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 2, 1, 0, 30, 8, 5},      // no query
    {1, 2, 1, 3, 0, 8, 5},       // no key
    {2, 4, 2, 5, 300, 8, 5},     // few queries
    {2, 4, 4, 40, 70, 9, 24},    // few keys
    {2, 4, 2, 61, 300, 8, 8},    // many queries
    {1, 1, 1, 1, 5000, 16, 8},   // chunks of keys
    {1, 4, 1, 130, 130, 16, 4},  // several tasks
}};

AttentionShape shape_of(const Shape& s) {
  return {.batch = s.batch,
          .heads = s.heads,
          .kv_heads = s.kv_heads,
          .queries = s.queries,
          .keys = s.keys,
          .width = s.d,
          .value_width = s.dv};
}

template <class T>
AttentionArguments<T> arguments_of(const Problem<T>& problem, Output<T>& output) {
  const Shape& s = problem.shape;
  return {.q = problem.q_view(),
          .k = problem.k_view(),
          .v = problem.v_view(),
          .out = {output.out.data(), {s.batch, s.heads, s.queries, s.dv}},
          .lse = {output.lse.data(), {s.batch, s.heads, s.queries}}};
}

/// Memory of exactly the given size, followed by bytes that must not change.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : bytes_(bytes), memory_(bytes + 128, std::byte{0x5A}) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    begin_ = memory_.data() + (64 - address % 64) % 64;
  }
  std::span<std::byte> span() const { return {begin_, bytes_}; }
  bool is_intact() const {
    return std::all_of(begin_ + bytes_, begin_ + bytes_ + 64,
                       [](std::byte b) { return b == std::byte{0x5A}; });
  }

 private:
  std::size_t bytes_;
  std::vector<std::byte> memory_;
  std::byte* begin_;
};

template <class T>
void check_plan(const Shape& shape, const AttentionOptions<T>& options) {
  const FourHeads<Compute<T>> heads(shape.heads);
  const Problem<T> problem(shape);
  static ThreadPool pool(3);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << ' ' << name_of(shape));
    const Output<T> expected = run(problem, heads.scaling(), Causal{}, Softcap{7}, options);
    for (const index_t threads : {1, 2, 3}) {
      const AttentionPlan<T, Causal> plan(shape_of(shape), Causal{}, options, threads);
      const Guarded memory(plan.bytes());
      const auto check_run = [&](auto&& executor) {
        Output<T> output(shape);
        plan.bind(arguments_of(problem, output), heads.scaling(), Softcap{7}).run(memory.span(), executor);
        CHECK(output == expected);
        CHECK(memory.is_intact());
      };
      check_run(Serial{});
      check_run(pool);
      CHECK(plan.explanation().path == expected.explanation.path);
    }
  });
}

TEST_CASE("a plan gives the bits of attention, with the memory that it names", "[attention][plan]") {
  for (const Shape& shape : shapes) {
    const Rope<float> rope({.width = shape.d / 2 * 2}, shape.keys + shape.queries + 1);
    const std::vector<float> sinks(static_cast<std::size_t>(shape.heads), 0.3F);
    check_plan<float>(shape, {});
    check_plan<bfloat16>(shape, {});
    if (shape.queries <= shape.keys) check_plan<float>(shape, {.rope = &rope, .sinks = sinks});
    check_plan<double>(shape, {.scale = 0.3});
  }
}

TEST_CASE("a plan of sequences with their own lengths", "[attention][plan]") {
  const std::vector<index_t> cumulative{0, 5, 5, 45, 200, 205};
  const Shape shape{1, 4, 2, 205, 205, 8, 8};
  const Problem<float> problem(shape);
  const AttentionOptions<float> options{.lengths = SequenceLengths::packed(cumulative)};
  const AttentionPlan<float, Causal> plan(shape_of(shape), Causal{}, options, 2);
  const Guarded memory(plan.bytes());
  Output<float> output(shape);
  plan.bind(arguments_of(problem, output), LogN{}).run(memory.span());
  CHECK(memory.is_intact());
  CHECK(output == run(problem, LogN{}, Causal{}, Identity{}, options));
}

TEST_CASE("bind and run do not allocate", "[attention][plan]") {
  const Shape shape{2, 4, 2, 61, 300, 8, 8};
  const Problem<float> problem(shape);
  Output<float> output(shape);
  const AttentionPlan<float, Causal> plan(shape_of(shape), Causal{});
  const Guarded memory(plan.bytes());
  CHECK(allocations([&] { plan.bind(arguments_of(problem, output), LogN{}).run(memory.span()); }) == 0);
}

TEST_CASE("a plan refuses what does not fit", "[attention][plan][errors]") {
  const Shape shape{2, 4, 2, 5, 30, 8, 5};
  const Problem<float> problem(shape);
  const auto plan_of = [](const AttentionShape& s, const AttentionOptions<float>& options = {},
                          index_t threads = 1) {
    return AttentionPlan<float, Causal>(s, Causal{}, options, threads);
  };
  AttentionShape wrong = shape_of(shape);
  wrong.heads = 5;
  check_refused([&] { plan_of(wrong); }, {"AttentionPlan", "q", "5", "2"});
  check_refused([&] { plan_of(shape_of(shape), {}, 0); }, {"AttentionPlan", "max_threads", "0", "1"});
  const Rope<float> rope({.width = 8}, 10);
  check_refused([&] { plan_of(shape_of(shape), {.rope = &rope}); }, {"AttentionPlan", "29", "9"});

  const auto plan = plan_of(shape_of(shape));
  Output<float> output(shape);
  const Output<float> untouched = output;
  const AttentionArguments<float> fits = arguments_of(problem, output);
  const auto refuses = [&](const AttentionArguments<float>& a,
                           std::initializer_list<std::string_view> parts) {
    check_refused([&] { (void)plan.bind(a, LogN{}); }, parts);
  };
  AttentionArguments<float> a = fits;
  a.q = {problem.q.data(), {2, 4, 4, 8}};
  refuses(a, {"AttentionPlan::bind", "q", "4", "5"});
  a = fits;
  a.k = {problem.k.data(), {2, 2, 29, 8}};
  refuses(a, {"k", "29", "30"});
  a = fits;
  a.v = {problem.v.data(), {2, 2, 30, 4}};
  refuses(a, {"v", "4", "5"});
  a = fits;
  a.out = {output.out.data(), {2, 4, 5, 4}};
  refuses(a, {"out", "4", "5"});
  const std::vector<float> s(3, 1.F);
  check_refused([&] { (void)plan.bind(fits, SSMax<float>{s}); }, {"s", "3", "4"});

  const auto call = plan.bind(fits, LogN{});
  const Guarded memory(plan.bytes());
  const std::string need = std::to_string(plan.bytes()), have = std::to_string(plan.bytes() - 1);
  check_refused([&] { call.run(memory.span().first(plan.bytes() - 1)); }, {need, have});
  check_refused([&] { call.run(memory.span().subspan(8)); }, {"Workspace", "memory", "8", "64"});
  CHECK(output == untouched);
}

}  // namespace attention_problem::plan_test
