// Every option on every entry point: the call takes the option, or throws with its name.

#include <limits>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "catch.hpp"
#include "refusal.hpp"

namespace options_test {

using namespace ssmax;
using Options = AttentionOptions<float>;

constexpr index_t heads = 2, n = 3, d = 4;

/// The tensors of a small call, and the entry points that take AttentionOptions.
struct Call {
  std::vector<float> q = std::vector<float>(heads * n * d, 0.5F), out = q, gradient = q;
  std::vector<float> dq = q, dk = q, dv = q;
  std::vector<float> lse = std::vector<float>(heads * n), shift = lse, sum = lse;
  KvCache<float> cache{{.batch = 1, .kv_heads = heads, .width = d, .capacity = n}};

  Call() { cache.append(view(q), view(q)); }

  template <class T>
  static View<T, 4> view(std::vector<T>& tensor) {
    return {tensor.data(), {1, heads, n, d}};
  }
  static View<float, 3> rows(std::vector<float>& numbers) { return {numbers.data(), {1, heads, n}}; }

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

struct Entry {
  std::string name;
  void (Call::*call)(const Options&);
};
const std::vector<Entry> entries{{"views", &Call::views},
                                 {"partial", &Call::partial},
                                 {"backward", &Call::backward},
                                 {"source", &Call::source},
                                 {"decode", &Call::decoded},
                                 {"plan", &Call::plan},
                                 {"source_plan", &Call::source_plan}};

/// One row of the table: options, and the entry points that refuse them with these words. "all": every entry point.
struct Row {
  std::string name;
  Options options;
  std::vector<std::string> refused{};
  std::vector<std::string_view> words{};
};

TEST_CASE("each entry point takes an option or throws with its name", "[errors]") {
  const Rope<float> rope({.width = d}, 64);
  const std::vector<float> sinks(heads, 0.25F);
  const std::vector<index_t> lengths{n};
  Workspace workspace;
  Explanation explanation;
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(),
                   inf = std::numeric_limits<double>::infinity();
  const std::vector<std::string> all{"all"}, over_views{"views", "partial", "backward", "plan"},
      over_sources{"source", "decode", "source_plan"};
  const std::vector<Row> table{
      {"none", {}},
      {"scale", {.scale = 0.5}},
      {"scale NaN", {.scale = nan}, all, {"scale is", "must be finite"}},
      {"scale infinite", {.scale = -inf}, all, {"scale is -inf", "must be finite"}},
      {"rope", {.rope = &rope}},
      {"rope, key_position", {.rope = &rope, .key_position = 5}, over_sources, {"key_position is 5", "0"}},
      {"key_position", {.key_position = 5}, all, {"key_position is 5", "0"}},
      {"sinks", {.sinks = sinks}, {"partial"}, {"sinks have extent 2"}},
      {"scaled_sinks", {.scaled_sinks = true}, all, {"scaled_sinks is true", "sinks"}},
      {"sinks, scaled_sinks", {.sinks = sinks, .scaled_sinks = true}, {"partial"}, {"sinks have extent 2"}},
      {"workspace", {.workspace = &workspace}},
      {"float_products", {.float_products = true}},
      {"rounded_rotation", {.rounded_rotation = true}},
      {"batch_invariant", {.batch_invariant = true}},
      {"rotate_source_keys", {.rotate_source_keys = true}, all, {"rotate_source_keys is true"}},
      {"rope, rotate_source_keys",
       {.rope = &rope, .rotate_source_keys = true},
       over_views,
       {"rotate_source_keys"}},
      {"rope, key_position, rotate_source_keys",
       {.rope = &rope, .key_position = 5, .rotate_source_keys = true},
       over_views,
       {"rotate_source_keys"}},
      {"lengths",
       {.lengths = SequenceLengths::padded(lengths)},
       {"partial", "source", "decode", "source_plan"},
       {"lengths"}},
      {"lengths of queries",
       {.lengths = SequenceLengths::padded_queries(lengths)},
       {"views", "partial", "backward", "plan"},
       {"lengths"}},
      {"explanation", {.explanation = &explanation}},
  };
  for (const Row& row : table) {
    for (const Entry& entry : entries) {
      INFO(row.name << ", " << entry.name);
      Call call;
      const std::vector<float> before = call.out;
      const std::string message = refusal([&] { (call.*entry.call)(row.options); });
      const bool refuses = row.refused == all || std::ranges::count(row.refused, entry.name) > 0;
      CHECK((message != "(nothing was thrown)") == refuses);
      if (!refuses) continue;
      for (const std::string_view word : row.words) {
        INFO(message);
        CHECK(message.find(word) != std::string::npos);
      }
      if (entry.name != "backward") CHECK(call.out == before);
    }
  }
}

}  // namespace options_test
