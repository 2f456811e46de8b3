// A plan of the backward is bit-identical to attention_backward. It refuses calls that do not fit.

#include <optional>

#include "allocation_count.hpp"
#include "attention_backward_problem.hpp"
#include "planned_memory.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace attention_problem::backward_problem::plan_test {

using namespace ssmax;

/// The gradients of a call: of tensors, of SSMax and of a score.
template <class T>
struct Learnt {
  Result<T> of_tensors;
  std::vector<Compute<T>> ds, db;
  std::vector<double> dslopes;
  std::vector<float> dbias;

  explicit Learnt(const Problem<T>& p, std::size_t sinks)
      : of_tensors(p, sinks), ds(static_cast<std::size_t>(p.shape.heads)), db(ds), dslopes(ds.size()) {
    dbias.resize(static_cast<std::size_t>(p.shape.heads * p.shape.queries * p.shape.keys));
  }
  bool operator==(const Learnt&) const = default;
};

/// Compares plans with attention_backward. score(learnt) returns a score function with its gradients.
template <class T, class MakeScore>
void check(const Shape& shape, const AttentionOptions<T>& options, const MakeScore& score,
           bool accumulate = false) {
  static ThreadPool pool(3);
  const FourHeads<Compute<T>> heads(shape.heads);
  const Problem<T> problem(shape);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << ' ' << name_of(shape));
    Learnt<T> expected(problem, options.sinks.size());
    const Output<T> output = run<T>(problem, heads.scaling(), Causal{}, score(expected), options);
    const auto gradients = [&](Learnt<T>& learnt) {
      AttentionGradients<Compute<T>> g = gradients_to(problem, learnt.of_tensors);
      g.dsinks = learnt.of_tensors.dsinks;
      g.accumulate = accumulate;
      return g;
    };
    const auto scaling = [&](Learnt<T>& learnt) {
      return SSMaxGradient<Compute<T>>(heads.scaling().gradient(learnt.ds, learnt.db));
    };
    const BackwardArguments<Compute<T>> arguments = backward_arguments_of(problem, output);
    attention_backward<Compute<T>>(backward_with(arguments, options), gradients(expected), scaling(expected),
                                   Causal{}, score(expected));
    for (const index_t threads : {1, 2, 3, 8}) {
      Learnt<T> example(problem, 0);
      const BackwardPlan plan(backward_with(arguments, options), gradients(example), threads,
                              scaling(example), Causal{}, score(example));
      const GuardedMemory memory(plan.bytes());
      const auto check_run = [&](auto&& executor) {
        Learnt<T> learnt(problem, options.sinks.size());
        const auto call = [&] {
          plan.bind(arguments, gradients(learnt), scaling(learnt), score(learnt))
              .run(memory.span(), executor);
        };
        CHECK(allocations(call) == 0);
        CHECK(learnt == expected);
        CHECK(memory.is_intact());
      };
      check_run(Serial{});
      check_run(pool);
    }
  });
}

TEST_CASE("a plan of the backward is bit-identical to attention_backward and uses exactly bytes()",
          "[attention][backward][plan][bfloat16]") {
  const std::vector<float> sinks{0.3F, -1, 0, 2};
  const std::vector<double> slopes{1, 0.5, -0.1, 0};
  const std::vector<index_t> queries{3, 300, 0, 9}, keys{7, 600, 0, 9}, packed{0, 2, 2, 302, 305, 320};
  const auto none = [](auto&) { return Identity{}; };
  for (const Shape& shape :
       {Shape{4, 4, 2, 300, 600, 8, 8}, Shape{2, 4, 4, 5, 9, 9, 5}, Shape{1, 4, 1, 0, 9, 8, 8}}) {
    check<float>(shape, {.sinks = sinks}, none);
    check<bfloat16>(shape, {}, none);
    check<ssmax::half>(shape, {}, none, true);
    check<float>(shape, {}, [&](auto& learnt) { return Alibi(slopes).gradient(learnt.dslopes); });
    const index_t n = shape.queries, m = shape.keys;
    const std::vector<float> bias = reference::normals<float>(static_cast<std::size_t>(n * m), 5);
    check<float>(shape, {}, [&](auto& learnt) {
      return Bias(View<const float, 4>(bias.data(), {shape.batch, 4, n, m}, {0, 0, m, 1}))
          .gradient(View<float, 4>(learnt.dbias.data(), {shape.batch, 4, n, m}, {0, n * m, m, 1}));
    });
  }
  check<float>({4, 4, 2, 300, 600, 8, 8}, {.sinks = sinks, .lengths = SequenceLengths::padded(queries, keys)},
               none);
  check<float>({1, 4, 2, 320, 320, 8, 8}, {.lengths = SequenceLengths::packed(packed)}, none, true);
  const std::vector<std::uint64_t> seeds{5, 1, 4, 2};
  const Shape some{4, 4, 2, 70, 150, 8, 8};
  check<float>(some, {.sinks = sinks, .dropout = {.p = 0.1, .offset = 3, .seeds = seeds}}, none);
  check<bfloat16>(some, {.dropout = {.p = 0.5, .seed = 7}}, none);
}

TEST_CASE("a call of a plan of the backward may have another dropout than the plan",
          "[attention][backward][plan][dropout]") {
  const Problem<float> problem({2, 4, 2, 5, 30, 8, 5});
  const AttentionOptions<float> options{.dropout = {.p = 0.5, .seed = 9}};
  const Output<float> output = run<float>(problem, Softmax{}, Causal{}, options);
  const Result<float> expected = backward(problem, output, Softmax{}, Causal{}, Identity{}, options);
  Result<float> result(problem);
  BackwardArguments<float> a = backward_arguments_of(problem, output);
  const AttentionGradients<float> gradients = gradients_to(problem, result);
  const auto plan_of = [&](const Dropout& dropout) {
    a.dropout = dropout;
    return BackwardPlan(a, gradients, 1, Causal{});
  };
  const BackwardPlan plan = plan_of({.p = 0.1, .seed = 3}), without = plan_of({});
  a.dropout = options.dropout;
  const GuardedMemory memory(plan.bytes());
  plan.bind(a, gradients).run(memory.span());
  CHECK(result == expected);
  check_refused({"ssmax::BackwardPlan::bind: dropout.p is 0.5, the plan was made without dropout"},
                [&] { std::ignore = without.bind(a, gradients); });
}

TEST_CASE("a plan of the backward has one type for all masks, scalings and scores",
          "[attention][backward][plan]") {
  const Problem<float> problem({2, 4, 2, 70, 150, 8, 8});
  const std::vector<double> slopes{1, 0.5, -0.1, 0};
  const std::vector<index_t> queries{0, 30, 70}, keys{0, 31, 150};
  const FourHeads<float> heads;
  const auto learnt_scaling = [&](Learnt<float>& learnt) {
    return heads.scaling().gradient(learnt.ds, learnt.db);
  };
  const auto learnt_score = [&](Learnt<float>& learnt) { return Alibi(slopes).gradient(learnt.dslopes); };
  std::optional<BackwardPlan<float>> plan;
  const auto check_call = [&](const auto& mask, const auto& scaling, const auto& score) {
    Learnt<float> expected(problem, 0), learnt(problem, 0), example(problem, 0);
    const Output<float> output = run<float>(problem, scaling(expected), mask, score(expected));
    const BackwardArguments<float> a = backward_arguments_of(problem, output);
    attention_backward<float>(a, gradients_to(problem, expected.of_tensors), scaling(expected), mask,
                              score(expected));
    plan.emplace(a, gradients_to(problem, example.of_tensors), 2, mask, learnt_scaling(example),
                 learnt_score(example));
    const GuardedMemory memory(plan->bytes());
    plan->bind(a, gradients_to(problem, learnt.of_tensors), scaling(learnt), score(learnt))
        .run(memory.span());
    CHECK(learnt == expected);
    CHECK(memory.is_intact());
  };
  const auto check_mask = [&](const auto& mask) {
    check_call(mask, learnt_scaling, learnt_score);
    check_call(
        mask, [](auto&) { return Softmax{}; }, [](auto&) { return Softcap{2}; });
    check_call(
        mask, [](auto&) { return LogN{}; }, [](auto&) { return Identity{}; });
  };
  for_each_target_of<float>([&](const std::string& target) {
    INFO(target);
    check_mask(SlidingWindow{40});
    check_mask(Documents(queries, keys, true));  // moves keys: Alibi is not vectorized
  });
}

TEST_CASE("a plan of the backward refuses a score and gradients that its examples lack",
          "[attention][backward][plan][errors]") {
  const Problem<float> problem({2, 4, 2, 5, 30, 8, 5});
  const Output<float> output = run<float>(problem, Softmax{}, Full{}, Identity{});
  Learnt<float> learnt(problem, 0);
  const Learnt<float> untouched = learnt;
  const BackwardArguments<float> a = backward_arguments_of(problem, output);
  const AttentionGradients<float> gradients = gradients_to(problem, learnt.of_tensors);
  const std::vector<double> slopes(4);
  const FourHeads<float> heads;
  const auto scaling = heads.scaling().gradient(learnt.ds, learnt.db);
  const auto score = Alibi(slopes).gradient(learnt.dslopes);
  const auto refuses = [&](const char* text, const auto& plan, const auto&... policies) {
    check_refused({text}, [&] { std::ignore = plan.bind(a, gradients, policies...); });
  };
  const BackwardPlan without(a, gradients, 1), with_score(a, gradients, 1, Softcap{2}),
      with_scaling(a, gradients, 1, scaling, Softcap{2});
  refuses("ssmax::BackwardPlan::bind: a score is given, the plan was made without one", without, Softcap{2});
  refuses("ssmax::BackwardPlan::bind: the scaling or the score has a gradient, the plan has no memory for it",
          with_score, scaling);
  refuses("ssmax::BackwardPlan::bind: the score has parameters with gradients 1, the plan's has 0",
          with_scaling, score);
  CHECK(learnt == untouched);
}

TEST_CASE("a plan of the backward refuses calls that do not fit", "[attention][backward][plan][errors]") {
  const Shape shape{2, 4, 2, 5, 30, 8, 5};
  const Problem<float> problem(shape);
  const Output<float> output = run<float>(problem, Softmax{}, Full{}, Identity{});
  const std::vector<float> sinks(4), dbias(600), bias(dbias);
  Result<float> result(problem, 4);
  const Result<float> untouched = result;
  BackwardArguments<float> fits = backward_arguments_of(problem, output);
  const AttentionGradients<float> gradients = gradients_to(problem, result);
  const BackwardPlan plan(fits, gradients, 1);
  fits.sinks = sinks;
  const auto refuses = [&](auto a, auto g, std::initializer_list<std::string_view> words) {
    check_refused_with_words(words, [&] { (void)plan.bind(a, g); });
  };
  auto a = fits;
  a.q = {problem.q.data(), {2, 4, 4, 8}};
  refuses(a, gradients, {"BackwardPlan::bind", "q", "4", "5"});
  a = fits;
  a.lse = {output.lse.data(), {2, 4, 4}};
  refuses(a, gradients, {"lse", "4", "5"});
  auto g = gradients;
  g.accumulate = true;
  refuses(fits, g, {"accumulate", "memory"});
  g = gradients;
  g.dsinks = result.dsinks;
  refuses(fits, g, {"dsinks", "memory"});
  check_refused({"max_threads"}, [&] { BackwardPlan<float>(fits, gradients, 0); });
  std::vector<float> summed(1200);
  const auto score = [&](index_t of_entry) {
    return Bias(View<const float, 4>(bias.data(), {2, 4, 5, 30}, {0, 150, 30, 1}))
        .gradient(View<float, 4>(summed.data(), {2, 4, 5, 30}, {of_entry, 150, 30, 1}));
  };
  fits.sinks = {};
  const BackwardPlan of_bias(fits, gradients, 1, score(600));
  check_refused({"shared"}, [&] { (void)of_bias.bind(fits, gradients, score(0)); });

  const auto call = plan.bind(fits, gradients);
  const GuardedMemory memory(plan.bytes());
  check_refused({std::to_string(plan.bytes() - 1)}, [&] { call.run(memory.span().first(plan.bytes() - 1)); });
  check_refused({"Workspace"}, [&] { call.run(memory.span().subspan(8)); });
  CHECK(result == untouched);
}

}  // namespace attention_problem::backward_problem::plan_test
