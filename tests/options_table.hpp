// Every option of a call, and the entry points that refuse it. An entry point takes a row's options, or throws with
// the name of the option.
#pragma once

#include "call.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace options_table {

using namespace ssmax;
using Options = AttentionOptions<float>;

constexpr index_t heads = 2, n = 3, d = 4;

/// The tensors of a small call.
struct Tensors {
  std::vector<float> q = std::vector<float>(heads * n * d, 0.5F), out = q, gradient = q;
  std::vector<float> dq = q, dk = q, dv = q, lse = std::vector<float>(heads * n);
  KvCache<float> cache{{.batch = 1, .kv_heads = heads, .width = d, .capacity = n}};

  Tensors() { cache.append(view(q), view(q)); }

  template <class T>
  static View<T, 4> view(std::vector<T>& tensor) {
    return {tensor.data(), {1, heads, n, d}};
  }
  static View<float, 3> rows(std::vector<float>& numbers) { return {numbers.data(), {1, heads, n}}; }
};

/// An entry point of the object `Call`, which has its tensors.
template <class Call>
struct Entry {
  std::string name;
  void (Call::*call)(const Options&);
};

/// One row of the table: options, and the entry points that refuse them with these words. "all": every entry point.
struct Row {
  std::string name;
  Options options;
  std::vector<std::string> refused{};
  std::vector<std::string_view> words{};
};

/// Checks each row of the table with each entry point.
template <class Call>
void check_options(const std::vector<Entry<Call>>& entries) {
  const Rope<float> rope({.width = d}, 64);
  const std::vector<float> sinks(heads, 0.25F);
  const std::vector<index_t> lengths{n};
  std::vector<float> entropy(heads * n);
  Workspace workspace;
  Explanation explanation;
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(),
                   inf = std::numeric_limits<double>::infinity();
  const std::vector<std::string> all{"all"}, over_views{"views", "partial", "plan", "mpi_attention"},
      over_sources{"source", "decode", "source_plan", "mpi_decode"};
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
      {"dropout", {.dropout = {.p = 0.1, .seed = 3}}},
      {"dropout of 1", {.dropout = {.p = 1}}, all, {"dropout.p is 1", "below 1"}},
      {"statistics",  // the backward has no such member
       {.statistics = {.entropy = {entropy.data(), {1, heads, n}}}},
       {"partial"},
       {"statistics.entropy has rows 3", "must be 0"}},
      {"rotate_source_keys",  // the backward has no such member
       {.rotate_source_keys = true},
       {"views", "partial", "plan", "source", "decode", "source_plan", "mpi_attention", "mpi_decode"},
       {"rotate_source_keys is true"}},
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
       {"partial", "source", "decode", "source_plan", "mpi_attention", "mpi_backward", "mpi_decode"},
       {"lengths"}},
      {"lengths of queries",
       {.lengths = SequenceLengths::padded_queries(lengths)},
       {"views", "partial", "backward", "plan", "mpi_attention", "mpi_backward", "mpi_decode"},
       {"lengths"}},
      {"explanation", {.explanation = &explanation}},
  };
  for (const Row& row : table) {
    for (const Entry<Call>& entry : entries) {
      INFO(row.name << ", " << entry.name);
      Call call;
      const std::vector<float> before = call.out;
      const std::string message = refusal([&] { (call.*entry.call)(row.options); });
      INFO(message);
      const bool refuses = row.refused == all || std::ranges::count(row.refused, entry.name) > 0;
      CHECK((message != "(nothing was thrown)") == refuses);
      if (!refuses) continue;
      for (const std::string_view word : row.words) CHECK(message.find(word) != std::string::npos);
      if (!entry.name.ends_with("backward")) CHECK(call.out == before);
    }
  }
}

}  // namespace options_table
