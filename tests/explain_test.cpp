// Explanations: every path is reached by a call that reports it, with its reason and its sizes.

#include <cstring>

#include "attention_backward_problem.hpp"
#include "attention_problem.hpp"
#include "decode_problem.hpp"
#include "test.hpp"

namespace attention_problem::explain_test {

using ssmax::Explanation, ssmax::Path, ssmax::Target;

constexpr const char *no_products = "bfloat16: this target has no bfloat16 products",
                     *set = "bfloat16: float_products is set",
                     *few_rows = "bfloat16: fewer than 5 rows per kv head",
                     *other_queries = "bfloat16: queries are stored in another type",
                     *other_keys = "bfloat16: keys are stored in another type",
                     *rotated = "bfloat16: keys are rotated in the call",
                     *cached = "short_keys: keys are in a cache",
                     *continued = "short_keys: the state continues another one",
                     *invariant = "decode: batch_invariant is set",
                     *invariant_short = "short_keys: batch_invariant is set";

void check(const Explanation& e, const char* function, Path path, const char* reason) {
  INFO(to_string(e));
  CHECK(std::string_view(e.function) == function);
  CHECK(e.path == path);
  CHECK(e.target == ssmax::active_target());
  CHECK(std::string_view(e.reason) == reason);
  const bool is_bf16 = std::string_view(path_name(path)).ends_with("_bf16");
  CHECK((std::string_view(e.operands) == "bfloat16") == is_bf16);
}

/// One kv head of width 16, so that rows are heads times queries.
constexpr Shape shape_of(index_t queries, index_t keys) { return {1, 1, 1, queries, keys, 16, 16}; }

template <class T>
Explanation explain(const Shape& shape, const AttentionOptions<T>& options = {}) {
  return run(Problem<T>(shape), ssmax::Softmax{}, Causal{}, options).explanation;
}

bool has_pair_dots() { return has_bfloat16_products() && ssmax::active_target() != Target::amx; }

TEST_CASE("attention reports its path and the reason against a faster one",
          "[attention][explain][bfloat16]") {
  const ssmax::Rope<float> rope({.width = 16}, 400);
  for_each_target_of<bfloat16>([&](const std::string&) {
    const bool products = has_bfloat16_products(), dots = has_pair_dots();
    const auto bf16 = [&](const Explanation& e, bool takes, Path fast, Path slow, const char* reason) {
      check(e, "attention", takes ? fast : slow, takes ? "" : products ? reason : no_products);
    };
    bf16(explain<bfloat16>(shape_of(20, 300)), products, Path::prefill_bf16, Path::prefill, "");
    bf16(explain<bfloat16>(shape_of(20, 300), {.rope = &rope}), products, Path::prefill_bf16, Path::prefill,
         "");
    bf16(explain<bfloat16>(shape_of(20, 300), {.float_products = true}), false, {}, Path::prefill, set);
    bf16(explain<bfloat16>(shape_of(5, 300)), products, bfloat16_path(5), Path::decode, "");
    bf16(explain<bfloat16>(shape_of(16, 300)), products, bfloat16_path(16), Path::decode, "");
    bf16(explain<bfloat16>(shape_of(4, 300)), false, {}, Path::decode, few_rows);
    bf16(explain<bfloat16>(shape_of(1, 100)), false, {}, Path::decode, few_rows);
    bf16(explain<bfloat16>(shape_of(5, 300), {.rope = &rope}), products && !dots, Path::prefill_bf16,
         Path::decode, rotated);
    check(explain<bfloat16>(shape_of(4, 128)), "attention", Path::short_keys, "");

    // batch_invariant: rows of a bf16 call without rotated keys may take decode_bf16.
    bf16(explain<bfloat16>(shape_of(1, 300), {.batch_invariant = true}), products,
         dots ? Path::decode_bf16 : Path::prefill_bf16, Path::prefill, "");
    bf16(explain<bfloat16>(shape_of(1, 300), {.rope = &rope, .batch_invariant = true}), products,
         Path::prefill_bf16, Path::prefill, "");
    check(explain<double>(shape_of(1, 300), {.batch_invariant = true}), "attention", Path::prefill,
          invariant);
    check(explain<double>(shape_of(1, 100), {.batch_invariant = true}), "attention", Path::prefill,
          invariant);
    check(explain<double>(shape_of(9, 100), {.batch_invariant = true}), "attention", Path::prefill,
          invariant_short);
    check(explain<double>(shape_of(17, 300), {.batch_invariant = true}), "attention", Path::prefill, "");

    const char* const of_float = products ? other_queries : "";
    check(explain<float>(shape_of(17, 129)), "attention", Path::prefill, of_float);
    check(explain<float>(shape_of(16, 129)), "attention", Path::decode, of_float);
    check(explain<half>(shape_of(17, 129)), "attention", Path::prefill, of_float);
    check(explain<float>(shape_of(17, 128)), "attention", Path::short_keys, "");
    check(explain<double>(shape_of(17, 129)), "attention", Path::prefill, "");
    CHECK(std::string_view(explain<double>(shape_of(17, 129)).operands) == "double");
    CHECK(std::string_view(explain<float>(shape_of(17, 129)).operands) == "float");
  });
}

template <class T, class X>
Explanation explain_decode(index_t queries, index_t keys, const AttentionOptions<T>& options = {}) {
  const decode_problem::Shape shape{1, 1, queries, 16, 16, {keys}};
  const decode_problem::Data<T> data(shape);
  const ssmax::KvCache<X> cache = decode_problem::filled<X>(decode_problem::Data<Compute<T>>(shape));
  return decode_problem::run(data, cache, ssmax::Softmax{}, Causal{}, Identity{}, options).explanation;
}

TEST_CASE("decode reports its path and the reason against a faster one", "[decode][explain][bfloat16]") {
  const ssmax::Rope<float> rope({.width = 16}, 400);
  for_each_target_of<bfloat16>([&](const std::string&) {
    const bool products = has_bfloat16_products();
    const auto bf16 = [&](const Explanation& e, bool takes, Path fast, Path slow, const char* reason) {
      check(e, "attention", takes ? fast : slow, takes ? "" : products ? reason : no_products);
    };
    bf16(explain_decode<bfloat16, bfloat16>(1, 300), false, {}, Path::decode, few_rows);
    bf16(explain_decode<bfloat16, bfloat16>(8, 300), products, bfloat16_path(8), Path::decode, "");
    bf16(explain_decode<bfloat16, bfloat16>(8, 300, {.rope = &rope}), products, bfloat16_path(8),
         Path::decode, "");
    bf16(explain_decode<bfloat16, bfloat16>(8, 300, {.float_products = true}), false, {}, Path::decode, set);
    bf16(explain_decode<bfloat16, bfloat16>(17, 300), products, Path::prefill_bf16, Path::prefill, "");
    check(explain_decode<bfloat16, half>(8, 300), "attention", Path::decode, products ? other_keys : "");
    check(explain_decode<float, bfloat16>(8, 300), "attention", Path::decode, products ? other_queries : "");
    check(explain_decode<double, double>(16, 100), "attention", Path::decode, cached);
    check(explain_decode<double, double>(17, 100), "attention", Path::short_keys, "");  // not prefill
    check(explain_decode<double, double>(3, 100), "attention", Path::decode, "");
    check(explain_decode<double, double>(8, 300), "attention", Path::decode, "");
    if (products) {
      check(explain_decode<bfloat16, bfloat16>(20, 100), "attention", Path::prefill_bf16, cached);
    }
  });
}

TEST_CASE("attention_backward reports its path and the reason against a faster one",
          "[attention][backward][explain][bfloat16]") {
  using Problem = backward_problem::Problem<bfloat16>;
  const auto explain_backward = [](const Shape& shape, const AttentionOptions<bfloat16>& options = {}) {
    return backward_problem::run_backward(Problem(shape), ssmax::Softmax{}, Causal{}, options).explanation;
  };
  for_each_target_of<bfloat16>([&](const std::string&) {
    const bool products = has_bfloat16_products();
    for (const Shape& shape : {shape_of(1, 1), shape_of(40, 300)}) {
      check(explain_backward(shape), "attention_backward", products ? Path::backward_bf16 : Path::backward,
            products ? "" : no_products);
      check(explain_backward(shape, {.float_products = true}), "attention_backward", Path::backward,
            products ? set : no_products);
    }
    const backward_problem::Problem<float> in_float(shape_of(40, 300));
    check(backward_problem::run_backward(in_float, ssmax::Softmax{}, Causal{}).explanation,
          "attention_backward", Path::backward, products ? other_queries : "");
  });
}

TEST_CASE("attention_partial reports its path; a state that continues does not take short_keys",
          "[attention][explain]") {
  const Shape shape = shape_of(20, 100);
  const Problem<double> problem(shape);
  Output<double> shift(shape), sum(shape);
  const auto check_call = [&](index_t first_key, index_t keys, bool continues, const char* reason) {
    Explanation explanation;
    ssmax::attention<double>({.q = problem.q_view(),
                              .k = problem.k_view(),
                              .v = problem.v_view(),
                              .explanation = &explanation,
                              .state = {shift.lse_view(), sum.lse_view(), sum.out_view()},
                              .continues = continues,
                              .first_key = first_key,
                              .all_keys = keys});
    check(explanation, "attention", Path::prefill, reason);
  };
  // The number of all keys counts, not those of the part.
  check_call(0, 1024 + 100, false, "");
  check_call(1024, 1024 + 100, true, "");
  check_call(0, 100, true, continued);
}

TEST_CASE("the sizes are those that the call takes", "[attention][explain][bfloat16]") {
  ThreadPool pool(3);
  for_each_target_of<bfloat16>([&](const std::string& target) {
    for (const Shape& shape : every_driver) {
      INFO(target << ' ' << name_of(shape));
      const Problem<bfloat16> problem(shape);
      const backward_problem::Problem<bfloat16> of_backward(shape);
      const Output<bfloat16> output = run(problem, ssmax::Softmax{}, Causal{});
      for (const bool is_backward : {false, true}) {
        for (const bool is_serial : {false, true}) {
          Workspace workspace;
          AttentionOptions<bfloat16> options{.workspace = &workspace};
          const auto call = [&](auto&& executor) {
            return is_backward ? backward_problem::backward(of_backward, output, ssmax::Softmax{}, Causal{},
                                                            ssmax::Identity{}, options, executor)
                                     .explanation
                               : run(problem, ssmax::Softmax{}, Causal{}, options, executor).explanation;
          };
          const Explanation e = is_serial ? call(ssmax::Serial{}) : call(pool);
          INFO(to_string(e));
          CHECK(e.workspace_bytes == workspace.size());
          CHECK(e.threads >= 1);
          CHECK(e.threads <= (is_serial ? 1 : 3));
          CHECK(e.rows == shape.queries * shape.heads / shape.kv_heads);
          CHECK(e.tasks >= shape.batch * shape.kv_heads / (e.path == Path::short_keys ? 64 : 1));
          CHECK(e.query_block > 0);
          CHECK(e.key_block >= 64);
          const bool has_tiles = e.path != Path::decode;
          CHECK((e.tile_lanes > 0) == has_tiles);
          CHECK(e.key_chunks == 1);
        }
      }
    }
  });
}

TEST_CASE("keys are split into chunks where tasks are fewer than threads", "[attention][explain]") {
  ThreadPool pool(3);
  const Problem<float> problem(shape_of(1, 5000));
  const Explanation serial = run(problem, ssmax::Softmax{}, Causal{}).explanation,
                    parallel = run(problem, ssmax::Softmax{}, Causal{}, {}, pool).explanation;
  CHECK(serial.key_chunks == 1);
  CHECK(parallel.key_chunks == 5);
  CHECK(parallel.tasks == 1);
  CHECK(parallel.threads == 3);
}

TEST_CASE("a call without queries has no path, and overwrites an older explanation", "[attention][explain]") {
  Explanation explanation;
  explanation.path = Path::prefill;
  explanation.tasks = 7;
  explanation.reason = "old";
  const Problem<float> problem(shape_of(0, 10));
  Output<float> none(problem.shape);
  ssmax::attention(with(arguments_of(problem, none), AttentionOptions<float>{.explanation = &explanation}),
                   Full{});
  check(explanation, "attention", Path::none, "");
  CHECK(explanation.tasks == 0);
  CHECK(to_string(explanation) == "ssmax::attention: path=none");
}

TEST_CASE("an explanation changes no result", "[attention][explain][bfloat16]") {
  for_each_target_of<bfloat16>([&](const std::string& target) {
    for (const Shape& shape : every_driver) {
      INFO(target << ' ' << name_of(shape));
      const Problem<bfloat16> problem(shape);
      Output<bfloat16> output(shape);  // of a call without an explanation
      ssmax::attention(arguments_of(problem, output), Causal{});
      CHECK(run(problem, ssmax::Softmax{}, Causal{}) == output);
    }
  });
}

TEST_CASE("an explanation is one line of text", "[explain]") {
  Explanation e;
  e.function = "attention";
  e.path = Path::decode_bf16;
  e.target = Target::scalar;
  e.operands = "bfloat16";
  e.rows = 8;
  e.query_block = 16;
  e.key_block = 1024;
  e.tile_lanes = 0;
  e.tasks = 3;
  e.key_chunks = 2;
  e.heads_together = 5;
  e.threads = 4;
  e.workspace_bytes = 1234;
  e.reason = "short_keys: keys are in a cache";
  CHECK(
      to_string(e) ==
      "ssmax::attention: path=decode_bf16 target=scalar operands=bfloat16 rows=8 query_block=16 "
      "key_block=1024 "
      "tile_lanes=0 tasks=3 key_chunks=2 heads_together=5 threads=4 shared_sequences=0 workspace_bytes=1234 "
      "reason=\"short_keys: keys are in a "
      "cache\"");
  CHECK(std::strcmp(path_name(Path::none), "none") == 0);
  CHECK(std::strcmp(path_name(Path::short_keys), "short_keys") == 0);
  CHECK(std::strcmp(path_name(Path::backward_bf16), "backward_bf16") == 0);
}

}  // namespace attention_problem::explain_test
