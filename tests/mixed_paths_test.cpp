// Calls over sequences that take different paths: all paths with the same operand type share the runs of the executor.

#include <set>

#include "allocation_count.hpp"
#include "guarded_memory.hpp"
#include "refusal.hpp"
#include "sequence_lengths_problem.hpp"
#include "test_executors.hpp"

namespace sequence_lengths_problem::mixed_paths_test {

/// A call over all sequences, and its results with each sequence alone.
template <class T>
struct Mixed {
  Sequences sequences;
  Sizes sizes;
  Tensor<T> q, k, v, expected;
  Tensor<Compute<T>> expected_lse;
  std::set<Path> paths;  // of the sequences

  Mixed(const Sequences& of, const Sizes& with)
      : sequences(of),
        sizes(with),
        q(Tensor<T>::random(sequences, true, sizes.heads, sizes.d, 1)),
        k(Tensor<T>::random(sequences, false, sizes.kv_heads, sizes.d, 100)),
        v(Tensor<T>::random(sequences, false, sizes.kv_heads, sizes.dv, 200)),
        expected(sequences, true, sizes.heads, sizes.dv),
        expected_lse(sequences, true, sizes.heads, 1) {
    for (index_t b = 0; b < sequences.count(); ++b) {
      Explanation explanation;
      const Tensor<T>&in_q = q, &in_k = k, &in_v = v;
      attention<Compute<T>>({.q = in_q.alone(b),
                             .k = in_k.alone(b),
                             .v = in_v.alone(b),
                             .out = expected.alone(b),
                             .lse = expected_lse.numbers_alone(b),
                             .explanation = &explanation},
                            LogN{}, Causal{});
      paths.insert(explanation.path);
    }
  }
  Mixed(const Mixed&) = delete;
  Mixed& operator=(const Mixed&) = delete;

  template <class E>
  void run(Tensor<T>& out, Tensor<Compute<T>>& lse, Workspace* workspace, Explanation* explanation,
           E&& executor) const {
    attention<Compute<T>>({.q = q.view(),
                           .k = k.view(),
                           .v = v.view(),
                           .out = out.view(),
                           .lse = lse.numbers(),
                           .workspace = workspace,
                           .lengths = sequences.lengths(),
                           .explanation = explanation},
                          LogN{}, Causal{}, executor);
  }

  template <class E>
  Explanation check_bits(E&& executor) const {
    Tensor<T> out(sequences, true, sizes.heads, sizes.dv);
    Tensor<Compute<T>> lse(sequences, true, sizes.heads, 1);
    Explanation explanation;
    run(out, lse, nullptr, &explanation, executor);
    CHECK(out == expected);
    CHECK(lse == expected_lse);
    CHECK(paths.contains(explanation.path));
    return explanation;
  }

  /// Checks the results and the number of runs of the executor.
  void check(index_t threads, index_t expected_runs) const {
    INFO(threads << " threads");
    index_t runs = 0;
    const Explanation explanation = check_bits(test_executors::Reverse{threads, &runs});
    CHECK(runs == expected_runs);
    CHECK(explanation.threads <= threads);
  }

  /// Checks that a workspace of the explained size is large enough, and no larger than needed. With a smaller one, the
  /// call throws before it writes.
  template <class E>
  void check_workspace(index_t threads, E&& executor) const {
    INFO(threads << " threads");
    Tensor<T> out(sequences, true, sizes.heads, sizes.dv);
    Tensor<Compute<T>> lse(sequences, true, sizes.heads, 1);
    Explanation explanation;
    run(out, lse, nullptr, &explanation, executor);
    const std::size_t bytes = explanation.workspace_bytes;
    const GuardedMemory memory(bytes);
    Workspace exact(memory.span());
    CHECK(allocations([&] { run(out, lse, &exact, nullptr, executor); }) == 0);
    CHECK(memory.is_intact());
    CHECK(out == expected);
    CHECK(lse == expected_lse);
    const Tensor<T> untouched(sequences, true, sizes.heads, sizes.dv);
    for (const std::size_t fewer : {std::size_t{0}, bytes / 2, bytes - 64, bytes - 1}) {
      INFO(fewer << " bytes of " << bytes);
      Tensor<T> none = untouched;
      Workspace small(memory.span().first(fewer));
      CHECK(refusal([&] {
              run(none, lse, &small, nullptr, executor);
            }).starts_with("ssmax: a call needs memory"));
      CHECK(none == untouched);
    }
    const Plan<ssmax::ComputeType<T>> plan(
        {.q = q.view(), .k = k.view(), .v = v.view(), .lengths = sequences.lengths()}, threads, Causal{});
    CHECK(plan.bytes() < bytes);  // the plan has the list
    CHECK(plan.explanation().path == explanation.path);
  }
};

/// Prompts, and as many single tokens as seven threads need: no keys are split.
Sequences prompts_and_tokens(bool is_packed, bool has_short) {
  std::vector<index_t> queries{1, 150, 1, 140, 0}, keys{700, 150, 1500, 300, 5};
  if (has_short) {
    queries.push_back(40);
    keys.push_back(60);
  }
  for (index_t i = 0; i < 14; ++i) {
    queries.push_back(1);
    keys.push_back(140 + 17 * i);
  }
  return {queries, keys, is_packed};
}

template <class T, class Check>
void check_paths(const Sequences& sequences, const Sizes& sizes, const std::set<Path>& floats,
                 const Check& check) {
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << " packed " << sequences.is_packed);
    const Mixed<T> mixed(sequences, sizes);
    const auto capabilities = ssmax::detail::bf16_capabilities(active_target());
    std::set<Path> paths = floats;
    if (std::same_as<T, bfloat16> && capabilities.has_products) {
      paths = {Path::prefill_bf16};
      if (capabilities.has_pair_dots) paths.insert(Path::decode_bf16);
    }
    paths.insert(Path::none);  // of sequences without queries
    CHECK(mixed.paths == paths);
    check(mixed);
  });
}

TEST_CASE("mixed paths: one run of the executor if no keys are split",
          "[attention][lengths][bfloat16][slow]") {
  static ThreadPool three(3);
  const auto check = [](const auto& mixed) {
    for (const index_t threads : {1, 2, 3, 7}) mixed.check(threads, 1);
    mixed.check_bits(test_executors::Threads{7});
    mixed.check_workspace(7, test_executors::Reverse{7});
    mixed.check_workspace(3, three);
  };
  for (const bool is_packed : {true, false}) {
    check_paths<float>(prompts_and_tokens(is_packed, true), {4, 2, 16, 16},
                       {Path::short_keys, Path::decode, Path::prefill}, check);
    check_paths<bfloat16>(prompts_and_tokens(is_packed, false), {16, 2, 32, 32},
                          {Path::decode, Path::prefill}, check);
  }
}

TEST_CASE("mixed paths: paths of two operand types share one run", "[attention][lengths][bfloat16]") {
  for_each_target_of<bfloat16>([&](const std::string&) {
    // Single tokens have one row per kv head. Their products are in float.
    const Mixed<bfloat16> mixed(prompts_and_tokens(true, true), {2, 2, 32, 32});
    for (const index_t threads : {1, 7}) mixed.check(threads, 1);
    mixed.check_workspace(7, test_executors::Reverse{7});
  });
}

TEST_CASE("mixed paths: two runs of the executor if keys are split", "[attention][lengths][bfloat16][slow]") {
  const auto check = [](const auto& mixed) {
    mixed.check(1, 1);
    mixed.check(7, 2);  // two and three threads split keys only if the vectors of the target are long
    for (const index_t threads : {2, 3}) mixed.check_bits(test_executors::Reverse{threads});
    mixed.check_bits(test_executors::Threads{7});
    mixed.check_workspace(7, test_executors::Reverse{7});
  };
  for (const bool is_packed : {true, false}) {
    // Both paths split their keys.
    const Sequences both({1, 20, 0}, {5000, 3000, 5}, is_packed);
    check_paths<float>(both, {1, 1, 16, 16}, {Path::decode, Path::prefill}, check);
    check_paths<bfloat16>(both, {8, 1, 32, 32}, {Path::decode, Path::prefill}, check);
    // The prompt splits its keys. Tokens do not.
    std::vector<index_t> queries{0, 20}, keys{5, 3000};
    queries.resize(20, 1);
    keys.resize(20, 200);
    check_paths<float>({queries, keys, is_packed}, {1, 1, 16, 16}, {Path::decode, Path::prefill}, check);
  }
}

}  // namespace sequence_lengths_problem::mixed_paths_test
