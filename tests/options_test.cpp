// Every option on every entry point: the call takes the option, or throws with its name.

#include <ssmax/ssmax.hpp>
#include <vector>

#include "options_table.hpp"

namespace options_test {

using namespace options_table;

/// The entry points that take AttentionOptions.
struct Call : Tensors {
  std::vector<float> shift = lse, sum = lse;

  void views(const Options& options) {
    attention<float>({.q = view(q), .k = view(q), .v = view(q), .out = view(out), .lse = rows(lse)},
                     Softmax{}, Full{}, options);
  }
  void partial(const Options& options) {
    attention_partial<float>(
        {.q = view(q), .k = view(q), .v = view(q), .keys = n, .state = {rows(shift), rows(sum), view(out)}},
        Softmax{}, Full{}, options);
  }
  void backward(const Options& options) {
    views({});
    attention_backward<float>({.q = view(q), .k = view(q), .v = view(q), .out = view(out), .lse = rows(lse)},
                              {.dout = view(gradient), .dq = view(dq), .dk = view(dk), .dv = view(dv)},
                              Softmax{}, Full{}, options);
  }
  void source(const Options& options) {
    attention<float>({.q = view(q), .out = view(out)}, cache, Softmax{}, Full{}, options);
  }
  void decoded(const Options& options) {
    decode<float>({.q = view(q), .out = view(out)}, cache, Softmax{}, Causal{}, options);
  }
  void plan(const Options& options) {
    (void)AttentionPlan<float>(
        {.batch = 1, .heads = heads, .kv_heads = heads, .queries = n, .keys = n, .width = d}, Full{},
        options);
  }
  void source_plan(const Options& options) {
    (void)SourcePlan<float, KvCache<float>>({.heads = heads, .queries = n}, cache, Causal{}, options);
  }
};

TEST_CASE("each entry point takes an option or throws with its name", "[errors]") {
  check_options<Call>({{"views", &Call::views},
                       {"partial", &Call::partial},
                       {"backward", &Call::backward},
                       {"source", &Call::source},
                       {"decode", &Call::decoded},
                       {"plan", &Call::plan},
                       {"source_plan", &Call::source_plan}});
}

}  // namespace options_test
