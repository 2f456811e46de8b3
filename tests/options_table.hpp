// Every member of the arguments of a call except q and out, and the entry points that refuse or ignore it. All other
// entry points take the member, which changes their results.
#pragma once

#include "call.hpp"
#include "refusal.hpp"
#include "same_bits.hpp"
#include "test.hpp"

namespace options_table {

using namespace ssmax;
using Arguments = AttentionArguments<float>;
using Names = std::vector<std::string>;

constexpr index_t heads = 2, n = 3, d = 4;

/// Does not compile if the arguments have another member than these. Add a row to the table for a new member.
inline void list_members(const Arguments& forward, const BackwardArguments<float>& backward) {
  [[maybe_unused]] const auto& [q, k, v, keys, out, lse, scale, rope, key_position, sinks, workspace,
                                float_products, rounded_rotation, batch_invariant, scaled_sinks,
                                rotate_source_keys, more_queries_than_keys, dropout, statistics, lengths,
                                explanation, state, continues, first_key, all_keys, first_query,
                                all_queries] = forward;
  [[maybe_unused]] const auto& [bq, bk, bv, bout, blse, bscale, brope, bkey_position, bsinks, bworkspace,
                                bfloat_products, brounded_rotation, bbatch_invariant, bscaled_sinks, bdropout,
                                blengths, bexplanation, bfirst_key, ball_keys, bfirst_query, ball_queries] =
      backward;
}

/// A mask that reads every index and extent of a query.
struct EveryIndex {
  KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
  bool sees(const Query& query, index_t key) const {
    return (query.index + key + query.shape.queries + query.shape.keys) % 3 != 0;
  }
};

/// The tensors of a small call.
struct Tensors {
  std::vector<float> q = sines(1), gradient = sines(2), out = gradient;
  std::vector<float> dq = q, dk = q, dv = q, lse = std::vector<float>(heads * n), dsinks{0, 0};
  KvCache<float> cache = cache_of(q);

  static std::vector<float> sines(float factor) {
    std::vector<float> result;
    for (int i = 0; i < heads * n * d; ++i) result.push_back(std::sin(factor * static_cast<float>(i)));
    return result;
  }
  static KvCache<float> cache_of(std::vector<float>& keys) {
    KvCache<float> cache({.batch = 1, .kv_heads = heads, .width = d, .capacity = n});
    cache.append(view(keys), view(keys));
    return cache;
  }
  template <class T>
  static View<T, 4> view(std::vector<T>& tensor) {
    return {tensor.data(), {1, heads, n, d}};
  }
  static View<float, 3> rows(std::vector<float>& numbers) { return {numbers.data(), {1, heads, n}}; }

  /// Returns the options with the tensors of a call over views. k and v of the options stay.
  Arguments of_views(Arguments options) {
    if (!detail::is_given(options.k)) options.k = view(q);
    if (!detail::is_given(options.v)) options.v = view(q);
    options.q = view(q);
    options.out = view(out);
    return options;
  }
  /// Returns the options with the tensors of a call over a cache. `keys` of the options stays.
  Arguments of_cache(Arguments options) {
    if (!options.keys.is_given()) options.keys = cache;
    options.q = view(q);
    options.out = view(out);
    return options;
  }
  /// Returns the options that the backward has, with its tensors.
  BackwardArguments<float> of_backward(const Arguments& options) {
    const Arguments a = of_views(options);
    return with_options(BackwardArguments<float>{.q = view(q),
                                                 .k = a.k,
                                                 .v = a.v,
                                                 .out = view(out),
                                                 .lse = rows(lse),
                                                 .first_key = a.first_key,
                                                 .all_keys = a.all_keys,
                                                 .first_query = a.first_query,
                                                 .all_queries = a.all_queries},
                        a);
  }
  AttentionGradients<float> gradients(bool has_sinks) {
    return {.dout = view(gradient),
            .dq = view(dq),
            .dk = view(dk),
            .dv = view(dv),
            .dsinks = std::span(dsinks).first(has_sinks ? heads : 0)};
  }
};

/// An entry point of the object `Call`, which has its tensors.
template <class Call>
struct Entry {
  std::string name;
  void (Call::*call)(const Arguments&);
};

/// One row of the table. A name stands for every entry point whose name contains it. All other entry points return
/// other results than without the options, and than with the options of the row before.
struct Row {
  std::string name{};
  Arguments options{};
  Names refused{};  // They throw an error with all of `words`.
  std::vector<std::string_view> words{};
  std::string_view bound{};  // If given, calls of a plan throw an error with this text instead.
  Names same{};             // They ignore the options. Takes precedence over `bound` and over refused by all.
  bool any_result = false;  // Results are not compared.
};

/// Checks each row of the table with each entry point.
template <class Call>
void check_options(const std::vector<Entry<Call>>& entries) {
  const Rope<float> rope({.width = d}, 64);
  const std::vector<float> sinks(heads, 0.25F);
  const std::vector<index_t> lengths{n - 1};
  const std::vector<std::uint64_t> seeds{5, 6};
  std::vector<float> keys = Tensors::sines(3), numbers(heads * n), more_numbers = numbers, o = keys;
  const KvCache<float> cache = Tensors::cache_of(keys);
  Workspace workspace;
  Explanation explanation;
  const auto clear = [&] {
    for (std::vector<float>* written : {&numbers, &more_numbers, &o}) std::ranges::fill(*written, 0.0F);
    workspace = {};
    explanation = {};
  };
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(),
                   inf = std::numeric_limits<double>::infinity();
  const Names all{""};
  constexpr std::string_view own = "is given, the plan has its own";
  const std::vector<Row> table{
      {.name = "none", .any_result = true},
      {.name = "scale", .options = {.scale = 0.75}, .bound = own},
      {.name = "scale NaN",
       .options = {.scale = nan},
       .refused = all,
       .words = {"scale is", "must be finite"},
       .bound = own},
      {.name = "scale infinite",
       .options = {.scale = -inf},
       .refused = all,
       .words = {"scale is -inf", "must be finite"},
       .bound = own},
      {.name = "rope", .options = {.rope = &rope}, .bound = own},
      {.name = "rope, key_position",
       .options = {.rope = &rope, .key_position = 5},
       .refused = {"source"},
       .words = {"key_position is 5", "0"},
       .bound = own},
      {.name = "rope, rotate_source_keys",
       .options = {.rope = &rope, .rotate_source_keys = true},
       .refused = {"views", "partial"},
       .words = {"rotate_source_keys is"},
       .bound = own},
      {.name = "rope, key_position, rotate_source_keys",
       .options = {.rope = &rope, .key_position = 5, .rotate_source_keys = true},
       .refused = {"views", "partial"},
       .words = {"rotate_source_keys is"},
       .bound = own},
      {.name = "rotate_source_keys",
       .options = {.rotate_source_keys = true},
       .refused = {"views", "partial", "source"},
       .words = {"rotate_source_keys is"},
       .bound = own,
       .same = {"backward"}},
      {.name = "key_position",
       .options = {.key_position = 5},
       .refused = all,
       .words = {"key_position is 5", "0"},
       .bound = own},
      {.name = "sinks",
       .options = {.sinks = sinks},
       .refused = {"partial"},
       .words = {"sinks have extent 2"},
       .same = {"count", "backward_bind"}},  // such a plan has no memory for dsinks
      {.name = "sinks, scaled_sinks",
       .options = {.sinks = sinks, .scaled_sinks = true},
       .refused = {"partial"},
       .words = {"sinks have extent 2"},
       .bound = own,
       .same = {"count"}},
      {.name = "scaled_sinks",
       .options = {.scaled_sinks = true},
       .refused = all,
       .words = {"scaled_sinks is true", "sinks"},
       .bound = own,
       .same = {"count"}},
      {.name = "workspace", .options = {.workspace = &workspace}, .bound = own, .same = {"plan"}},
      {.name = "float_products", .options = {.float_products = true}, .bound = own, .any_result = true},
      {.name = "rounded_rotation", .options = {.rounded_rotation = true}, .bound = own, .any_result = true},
      {.name = "batch_invariant", .options = {.batch_invariant = true}, .bound = own, .any_result = true},
      {.name = "more_queries_than_keys",
       .options = {.more_queries_than_keys = true},
       .refused = {"views", "partial"},
       .words = {"more_queries_than_keys is true"},
       .bound = own,
       .same = {"backward"},
       .any_result = true},
      {.name = "dropout",
       .options = {.dropout = {.p = 0.5, .seed = 3}},
       .bound = "dropout.p is",
       .same = {"count"}},
      {.name = "dropout.seeds",
       .options = {.dropout = {.p = 0.5, .seed = 3, .seeds = std::span(seeds).first(1)}},
       .bound = "dropout.p is",
       .same = {"count"}},
      {.name = "dropout.seeds of two sequences",
       .options = {.dropout = {.p = 0.5, .seeds = seeds}},
       .refused = all,
       .words = {"dropout.seeds has size 2", "1"},
       .bound = "dropout.p is",
       .same = {"count"}},
      {.name = "dropout of 1",
       .options = {.dropout = {.p = 1}},
       .refused = all,
       .words = {"dropout.p is 1", "below 1"},
       .bound = "dropout.p is",
       .same = {"count"}},
      {.name = "statistics",
       .options = {.statistics = {.entropy = {numbers.data(), {1, heads, n}}}},
       .refused = {"partial"},
       .words = {"statistics.entropy has rows 3", "must be 0"},
       .bound = "statistics are given",
       .same = {"backward", "plan", "count"}},
      {.name = "lengths",
       .options = {.lengths = SequenceLengths::padded(lengths)},
       .refused = {"partial", "source", "mpi"},
       .words = {"lengths"},
       .bound = own},
      {.name = "lengths of queries",
       .options = {.lengths = SequenceLengths::padded_queries(lengths)},
       .refused = {"views", "partial", "backward", "mpi"},
       .words = {"lengths"},
       .bound = own},
      {.name = "explanation", .options = {.explanation = &explanation}, .bound = own, .same = {"plan"}},
      {.name = "lse",
       .options = {.lse = Tensors::rows(numbers)},
       .refused = {"partial"},
       .words = {"lse has rows 3", "must be 0"},
       .same = {"backward", "plan", "count"}},
      {.name = "state",
       .options = {.state = {.shift = Tensors::rows(numbers),
                             .sum = Tensors::rows(more_numbers),
                             .o = Tensors::view(o)}},
       .refused = {"views", "source"},
       .words = {"out"},
       .same = {"backward"}},
      {.name = "continues",
       .options = {.continues = true},
       .refused = {"views", "source"},
       .words = {"continues is 1"},
       .same = {"backward"}},
      {.name = "first_key, all_keys",
       .options = {.first_key = 1, .all_keys = 10},
       .refused = {"views", "source", "mpi", "bind"},
       .words = {"first_key is 1"}},
      {.name = "all_keys",
       .options = {.all_keys = 10},
       .refused = {"views", "source", "mpi", "bind"},
       .words = {"all_keys is 10"}},
      {.name = "first_query",
       .options = {.first_query = 1},
       .refused = {"views", "source", "mpi", "bind"},
       .words = {"first_query is 1"}},
      {.name = "all_queries",
       .options = {.all_queries = 10},
       .refused = {"views", "source", "mpi", "bind"},
       .words = {"all_queries is 10"}},
      {.name = "k",
       .options = {.k = Tensors::view(keys)},
       .refused = {"source"},
       .words = {"k and keys are given"},
       .same = {"plan"}},
      {.name = "v",
       .options = {.v = Tensors::view(keys)},
       .refused = {"source"},
       .words = {"v and keys are given"},
       .same = {"plan", "count"}},
      {.name = "keys",
       .options = {.keys = cache},
       .refused = {"views", "partial"},
       .words = {"keys"},
       .same = {"backward", "plan"}},
  };
  const auto has = [](const Names& parts, const std::string& name) {
    return std::ranges::any_of(parts, [&](const std::string& part) { return name.find(part) != name.npos; });
  };
  for (const Entry<Call>& entry : entries) {
    std::vector<float> without, previous;
    for (const Row& row : table) {
      INFO(entry.name << ", " << row.name);
      clear();
      Call call;
      const std::vector<float> before = call.out;
      const std::string message = refusal([&] { (call.*entry.call)(row.options); });
      INFO(message);
      const bool is_bound = !row.bound.empty() && has({"bind", "run"}, entry.name),
                 ignores = has(row.same, entry.name);
      const bool refuses = row.refused == all || is_bound ? !ignores : has(row.refused, entry.name);
      CHECK((message != "(nothing was thrown)") == refuses);
      if (refuses) {
        for (const std::string_view word : is_bound ? std::vector{row.bound} : row.words)
          CHECK(message.find(word) != std::string::npos);
        if (!has({"backward"}, entry.name)) CHECK(call.out == before);
        continue;
      }
      std::vector<float> results{workspace.size() > 0 ? 1.0F : 0.0F, static_cast<float>(explanation.path)};
      for (const std::vector<float>* part :
           {&call.out, &call.dq, &call.dk, &call.dv, &call.lse, &call.dsinks, &numbers, &more_numbers, &o})
        results.insert(results.end(), part->begin(), part->end());
      if (without.empty()) without = results;
      if (!row.any_result) {
        CHECK(same_bits(results, without) == ignores);
        CHECK((ignores || !same_bits(results, previous)));
      }
      previous = results;
    }
  }
}

}  // namespace options_table
