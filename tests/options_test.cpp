// Every member of the arguments on every entry point: the call takes the member, or throws with its name.

#include "call.hpp"
#include "options_table.hpp"

namespace options_test {

using namespace options_table;

/// The entry points that take arguments.
struct Call : Tensors {
  const EveryIndex mask{};
  const LogN scaling{};
  Workspace memory;

  template <class P>
  std::span<std::byte> memory_of(const P& plan) {
    return {memory.reserve(plan.bytes()), plan.bytes()};
  }

  void views(const Arguments& options) { attention(of_views(options), scaling, mask); }
  void source(const Arguments& options) { attention(of_cache(options), scaling, mask); }
  void partial(const Arguments& options) {
    Arguments a = of_views(options);
    a.out = {};
    if (!detail::has_state(a.state)) a.state = {.shift = rows(lse), .sum = rows(dq), .o = view(out)};
    if (a.all_keys == 0) a.all_keys = n;
    attention(a, scaling, mask);
  }
  void views_plan(const Arguments& options) {
    const Plan plan(of_views(options), 1, mask);
    plan.run(of_views({}), memory_of(plan), scaling);
  }
  void source_plan(const Arguments& options) {
    const Plan plan(of_cache(options), 1, mask);
    plan.run(of_cache({}), memory_of(plan), scaling);
  }
  void views_bind(const Arguments& options) {
    const Plan plan(of_views({}), 1, mask);
    plan.bind(of_views(options), scaling).run(memory_of(plan));
  }
  void source_run(const Arguments& options) {
    const Plan plan(of_cache({}), 1, mask);
    plan.run(of_cache(options), memory_of(plan), scaling);
  }
  void views_count(const Arguments& options) {
    const std::array<float, 2> gaps{0, 1};
    count_within_gaps(of_views(options),
                      {.gaps = gaps, .largest = rows(lse), .counts = {dq.data(), {2, 1, heads, n}}}, scaling,
                      mask);
  }
  void backward(const Arguments& options) {
    views({.lse = rows(lse)});
    attention_backward(of_backward(options), gradients(!options.sinks.empty()), scaling, mask);
  }
  void backward_plan(const Arguments& options) {
    views({.lse = rows(lse)});
    const AttentionGradients<float> g = gradients(!options.sinks.empty());
    const BackwardPlan plan(of_backward(options), g, 1, mask, scaling);
    plan.bind(of_backward({}), g, scaling).run(memory_of(plan));
  }
  void backward_bind(const Arguments& options) {
    views({.lse = rows(lse)});
    const BackwardPlan plan(of_backward({}), gradients(false), 1, mask, scaling);
    plan.bind(of_backward(options), gradients(false), scaling).run(memory_of(plan));
  }
};

TEST_CASE("each entry point takes a member or throws with its name", "[errors]") {
  check_options<Call>({{"views", &Call::views},
                       {"source", &Call::source},
                       {"partial", &Call::partial},
                       {"views_plan", &Call::views_plan},
                       {"source_plan", &Call::source_plan},
                       {"views_bind", &Call::views_bind},
                       {"source_run", &Call::source_run},
                       {"views_count", &Call::views_count},
                       {"backward", &Call::backward},
                       {"backward_plan", &Call::backward_plan},
                       {"backward_bind", &Call::backward_bind}});
}

}  // namespace options_test
