// A plan gives the bits of attention, refuses what does not fit, and names the memory that a call needs.

#include "allocation_count.hpp"
#include "call.hpp"
#include "planned_memory.hpp"
#include "refusal.hpp"
#include "same_bits.hpp"
#include "test.hpp"

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

template <class T>
void check_plan(const Shape& shape, const AttentionOptions<T>& options) {
  const FourHeads<Compute<T>> heads(shape.heads);
  const Problem<T> problem(shape);
  static ThreadPool pool(3);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << ' ' << name_of(shape));
    const Output<T> expected = run(problem, heads.scaling(), Causal{}, Softcap{7}, options);
    for (const index_t threads : {1, 2, 3}) {
      const Plan plan(extents_of(problem, options), threads, Causal{});
      const GuardedMemory memory(plan.bytes());
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

TEST_CASE("a plan is bit-identical to attention and uses exactly bytes()", "[attention][plan][bfloat16]") {
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
  const Plan plan(extents_of(problem, options), 2, Causal{});
  const GuardedMemory memory(plan.bytes());
  Output<float> output(shape);
  plan.bind(arguments_of(problem, output), LogN{}).run(memory.span());
  CHECK(memory.is_intact());
  CHECK(output == run(problem, LogN{}, Causal{}, Identity{}, options));
}

/// A cache with the keys of a problem. Sequence b has `keys - b` of them.
template <class X, class T>
KvCache<X> cache_of(const Problem<T>& problem, bool is_ring = false) {
  const Shape& s = problem.shape;
  KvCache<X> cache({.batch = s.batch,
                    .kv_heads = s.kv_heads,
                    .width = s.d,
                    .value_width = s.dv,
                    .capacity = is_ring ? 80 : s.keys + 2,
                    .ring = is_ring});
  const std::vector<float> k(problem.k.begin(), problem.k.end()), v(problem.v.begin(), problem.v.end());
  std::vector<index_t> counts;
  for (index_t b = 0; b < s.batch; ++b) counts.push_back(s.keys - b);
  cache.append({k.data(), {s.batch, s.kv_heads, s.keys, s.d}},
               {v.data(), {s.batch, s.kv_heads, s.keys, s.dv}}, nullptr, counts);
  return cache;
}

template <class T>
ssmax::AttentionArguments<Compute<T>> decode_arguments_of(const Problem<T>& problem, Output<T>& output,
                                                          const ssmax::Keys<Compute<T>>& keys) {
  return {.q = problem.q_view(), .keys = keys, .out = output.out_view(), .lse = output.lse_view()};
}

template <class X, class T, class M>
void check_source_plan(const Shape& shape, const M& mask, const AttentionOptions<T>& options, bool is_ring) {
  const FourHeads<float> heads(shape.heads);
  const Problem<T> problem(shape);
  const KvCache<X> cache = cache_of<X>(problem, is_ring), layer = cache;
  static ThreadPool pool(3);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << ' ' << name_of(shape));
    Output<T> expected(shape);
    AttentionOptions<T> explained = options;
    explained.explanation = &expected.explanation;
    ssmax::attention<Compute<T>>(with(decode_arguments_of(problem, expected, cache), explained),
                                 heads.scaling(), mask, Softcap{7});
    for (const index_t threads : {1, 3}) {
      Output<T> none(shape);
      const Plan<Compute<T>> plan(with(decode_arguments_of(problem, none, cache), options), threads, mask);
      CHECK(plan.explanation().path == expected.explanation.path);
      const GuardedMemory memory(plan.bytes());
      const auto check_run = [&](auto&& executor) {
        Output<T> output(shape);
        plan.bind(decode_arguments_of(problem, output, layer), heads.scaling(), Softcap{7})
            .run(memory.span(), executor);
        CHECK(output == expected);
        CHECK(memory.is_intact());
      };
      check_run(Serial{});
      check_run(pool);
    }
  });
}

TEST_CASE("a plan over a source is bit-identical to attention", "[decode][plan][bfloat16]") {
  for (const Shape& shape : {Shape{2, 4, 2, 5, 300, 8, 5}, Shape{2, 4, 2, 61, 300, 8, 8},
                             Shape{1, 1, 1, 1, 5000, 16, 8}, Shape{3, 2, 1, 0, 30, 8, 5}}) {
    const Rope<float> rope({.width = 8}, shape.keys + 1);
    const std::vector<float> sinks(static_cast<std::size_t>(shape.heads), 0.3F);
    check_source_plan<float, float>(shape, Causal{}, {.rope = &rope, .sinks = sinks}, false);
    check_source_plan<ssmax::half, float>(shape, Causal{}, {}, false);
    check_source_plan<bfloat16, bfloat16>(shape, Causal{}, {}, false);
    check_source_plan<float, float>(shape, SlidingWindow{9}, {}, true);
    check_source_plan<float, float>(shape, Chunks{64}, {}, false);
    if (shape.queries < shape.keys - 1)
      check_source_plan<float, float>(shape, CausalTopLeft{}, {.rope = &rope}, false);
  }
}

TEST_CASE("a plan over a source of sequences with their own numbers of queries", "[decode][plan]") {
  const std::vector<index_t> cumulative{0, 40, 41, 41};
  const Shape packed{1, 4, 2, 41, 0, 8, 8};
  const Problem<float> keys({3, 4, 2, 1, 300, 8, 8}), queries(packed);
  const KvCache<float> cache = cache_of<float>(keys);
  const AttentionOptions<float> options{.lengths = SequenceLengths::packed_queries(cumulative)};
  Output<float> expected(packed), output(packed);
  const Plan plan(with(decode_arguments_of(queries, output, cache), options), 2, Causal{});
  const GuardedMemory memory(plan.bytes());
  ssmax::attention(with(decode_arguments_of(queries, expected, cache), options), LogN{}, Causal{});
  plan.run(decode_arguments_of(queries, output, cache), memory.span(), LogN{});
  CHECK(memory.is_intact());
  CHECK(same_bits(output.out, expected.out));
  CHECK(same_bits(output.lse, expected.lse));
}

/// A cache that counts the calls of `length`.
struct Counted : KvCache<float> {
  std::vector<int>& calls;

  index_t length(index_t b) const { return ++calls[static_cast<std::size_t>(b)], KvCache<float>::length(b); }
};

TEST_CASE("the run of a plan does not ask for the lengths of sequences", "[decode][plan]") {
  const std::vector<index_t> cumulative{0, 40, 41, 42, 82};
  const Shape packed{1, 4, 2, 82, 0, 8, 8};
  const Problem<float> keys({4, 4, 2, 1, 300, 8, 8}), queries(packed);
  std::vector<int> calls(4);
  const Counted source{cache_of<float>(keys), calls};
  const AttentionOptions<float> options{.lengths = SequenceLengths::packed_queries(cumulative)};
  Output<float> output(packed);
  const Plan plan(with(decode_arguments_of(queries, output, source), options), 3, Causal{});
  const GuardedMemory memory(plan.bytes());
  const auto bound = plan.bind(decode_arguments_of(queries, output, source), LogN{});
  std::fill(calls.begin(), calls.end(), 0);
  bound.run(memory.span(), ssmax::Serial{});
  CHECK(calls == std::vector<int>(4));
}

TEST_CASE("a plan over a source refuses another source", "[decode][plan][errors]") {
  const Shape shape{2, 4, 2, 5, 300, 8, 8};
  const Problem<float> problem(shape);
  const KvCache<float> cache = cache_of<float>(problem);
  Output<float> output(shape);
  const auto over_keys = [&](const KvCache<float>& other) {
    return decode_arguments_of(problem, output, other);
  };
  const Plan plan(over_keys(cache), 1, Causal{});
  const auto refused = [&](const KvCache<float>& other) {
    return refusal([&] { (void)plan.bind(over_keys(other), LogN{}); });
  };
  KvCache<float> shorter = cache;
  shorter.truncate(1, 298);
  CHECK(refused(shorter) == "ssmax::Plan::bind: sequence 1 of the source has length 298, the plan has 299");
  const KvCache<float> narrow({.batch = 2, .kv_heads = 2, .width = 4, .value_width = 8, .capacity = 1});
  CHECK(refused(narrow) == "ssmax::Plan::bind: k has extent 4 in dimension 3, the plan has 8");
  const KvCache<float> wider({.batch = 2, .kv_heads = 4, .width = 8, .capacity = 1});
  CHECK(refused(wider) == "ssmax::Plan::bind: k has extent 4 in dimension 1, the plan has 2");
  auto fewer = over_keys(cache);
  fewer.q = {problem.q.data(), {2, 4, 4, 8}};
  CHECK(refusal([&] { (void)plan.bind(fewer, LogN{}); }) ==
        "ssmax::Plan::bind: q has extent 4 in dimension 2, the plan has 5");
  // A plan of a ring refuses a mask that shows forgotten keys.
  const KvCache<float> ring = cache_of<float>(problem, true);
  CHECK(refusal([&] { const Plan of_ring(over_keys(ring), 1, Causal{}); }).find("no longer stores keys") !=
        std::string::npos);
  CHECK(refusal([&] {
          const Plan of_three({.q = {problem.q.data(), {2, 3, 5, 8}}, .keys = cache}, 1, Causal{});
        }).find("has heads 3") != std::string::npos);
}

TEST_CASE("bind and run over a source do not allocate", "[decode][plan]") {
  const Shape shape{2, 4, 2, 5, 300, 8, 8};
  const Problem<float> problem(shape);
  const KvCache<float> cache = cache_of<float>(problem);
  Output<float> output(shape);
  const Plan plan(decode_arguments_of(problem, output, cache), 1, Causal{});
  const GuardedMemory memory(plan.bytes());
  CHECK(allocations(
            [&] { plan.bind(decode_arguments_of(problem, output, cache), LogN{}).run(memory.span()); }) == 0);
}

TEST_CASE("bind and run do not allocate", "[attention][plan]") {
  const Shape shape{2, 4, 2, 61, 300, 8, 8};
  const Problem<float> problem(shape);
  Output<float> output(shape);
  const Plan plan(extents_of(problem), 1, Causal{});
  const GuardedMemory memory(plan.bytes());
  CHECK(allocations([&] { plan.bind(arguments_of(problem, output), LogN{}).run(memory.span()); }) == 0);
}

TEST_CASE("a plan refuses what does not fit", "[attention][plan][errors]") {
  const Shape shape{2, 4, 2, 5, 30, 8, 5};
  const Problem<float> problem(shape);
  const auto plan_of = [](const AttentionArguments<float>& a, index_t threads = 1) {
    return Plan(a, threads, Causal{});
  };
  AttentionArguments<float> wrong = extents_of(problem);
  wrong.q = {nullptr, {2, 5, 5, 8}};
  check_refused({"ssmax::Plan", "q", "5", "2"}, [&] { plan_of(wrong); });
  check_refused({"ssmax::Plan", "max_threads", "0", "1"}, [&] { plan_of(extents_of(problem), 0); });
  const Rope<float> rope({.width = 8}, 10);
  check_refused({"ssmax::Plan", "29", "9"},
                [&] { plan_of(extents_of(problem, AttentionOptions<float>{.rope = &rope})); });

  const auto plan = plan_of(extents_of(problem));
  Output<float> output(shape);
  const Output<float> untouched = output;
  const AttentionArguments<float> fits = arguments_of(problem, output);
  const auto refuses = [&](const AttentionArguments<float>& a,
                           std::initializer_list<std::string_view> parts) {
    check_refused(parts, [&] { (void)plan.bind(a, LogN{}); });
  };
  AttentionArguments<float> a = fits;
  a.q = {problem.q.data(), {2, 4, 4, 8}};
  refuses(a, {"Plan::bind", "q", "4", "5"});
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
  check_refused({"s", "3", "4"}, [&] { (void)plan.bind(fits, SSMax<float>{s}); });

  const auto call = plan.bind(fits, LogN{});
  const GuardedMemory memory(plan.bytes());
  const std::string need = std::to_string(plan.bytes()), have = std::to_string(plan.bytes() - 1);
  check_refused({need, have}, [&] { call.run(memory.span().first(plan.bytes() - 1)); });
  check_refused({"Workspace", "memory", "8", "64"}, [&] { call.run(memory.span().subspan(8)); });
  CHECK(output == untouched);
}

}  // namespace attention_problem::plan_test
