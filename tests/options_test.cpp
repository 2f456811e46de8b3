// Every option on every entry point: the call takes the option, or throws with its name.

#include "call.hpp"
#include "options_table.hpp"

namespace options_test {

using namespace options_table;

/// The entry points that take options.
struct Call : Tensors {
  std::vector<float> shift = lse, sum = lse;

  void views(const Options& options) {
    attention(with({.q = view(q), .k = view(q), .v = view(q), .out = view(out), .lse = rows(lse)}, options),
              Full{});
  }
  void partial(const Options& options) {
    attention(with({.q = view(q),
                    .k = view(q),
                    .v = view(q),
                    .state = {rows(shift), rows(sum), view(out)},
                    .all_keys = n},
                   options),
              Full{});
  }
  void backward(const Options& options) {
    views({});
    attention_backward(
        backward_with({.q = view(q), .k = view(q), .v = view(q), .out = view(out), .lse = rows(lse)},
                      options),
        {.dout = view(gradient), .dq = view(dq), .dk = view(dk), .dv = view(dv)}, Full{});
  }
  void source(const Options& options) {
    attention(with({.q = view(q), .keys = cache, .out = view(out)}, options), Full{});
  }
  void decoded(const Options& options) {
    attention(with({.q = view(q), .keys = cache, .out = view(out)}, options), Causal{});
  }
  void plan(const Options& options) {
    (void)Plan<float>(with({.q = view(q), .k = view(q), .v = view(q)}, options));
  }
  void source_plan(const Options& options) {
    (void)Plan<float, Causal>(with({.q = view(q), .keys = cache}, options), 1, Causal{});
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
