// Attention over a key source, against the reference and against attention over views of the same keys.

#include "attention_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace attention_problem::attention_source_test {

/// Keys of a problem in pages of `page` keys, each page followed by one row of NaN.
template <class T>
struct Pages {
  using Element = T;

  Shape extents;
  index_t page;
  std::vector<T> k, v;

  Pages(const Problem<T>& problem, index_t a_page) : extents(problem.shape), page(a_page) {
    const auto fill = [&](std::vector<T>& rows, const std::vector<T>& from, index_t width) {
      rows.assign(static_cast<std::size_t>(extents.batch * extents.kv_heads * rows_of_head() * width),
                  T(nan<float>));
      for (index_t head = 0; head < extents.batch * extents.kv_heads; ++head) {
        for (index_t key = 0; key < extents.keys; ++key) {
          std::copy_n(from.data() + (head * extents.keys + key) * width, width,
                      rows.data() + row(head, key) * width);
        }
      }
    };
    fill(k, problem.k, extents.d);
    fill(v, problem.v, extents.dv);
  }

  index_t rows_of_head() const { return (extents.keys / page + 1) * (page + 1); }
  index_t row(index_t head, index_t key) const {
    return head * rows_of_head() + key / page * (page + 1) + key % page;
  }

  KeySourceShape shape() const { return {extents.batch, extents.kv_heads, extents.d, extents.dv}; }
  std::int32_t length(index_t) const { return static_cast<std::int32_t>(extents.keys); }
  KeyRange stored(index_t) const { return {0, extents.keys}; }
  KeyRun<T> run(index_t b, index_t h, index_t key) const {
    const index_t at = row(b * extents.kv_heads + h, key);
    return {.k = k.data() + at * extents.d,
            .k_stride = extents.d,
            .v = v.data() + at * extents.dv,
            .v_stride = extents.dv,
            .count = std::min(page - key % page, extents.keys - key)};
  }
};

template <class T, class K, class S, class M, class C, class E = ssmax::Serial>
Output<T> run_over(const K& source, const Problem<T>& problem, const S& scaling, const M& mask,
                   const C& score, const AttentionOptions<T>& options = {}, E&& executor = {}) {
  Output<T> result(problem.shape);
  AttentionOptions<T> explained = options;
  explained.explanation = &result.explanation;
  AttentionArguments<Compute<T>> a{
      .q = problem.q_view(), .keys = source, .out = result.out_view(), .lse = result.lse_view()};
  a.more_queries_than_keys = true;
  ssmax::attention<Compute<T>>(with(a, explained), executor, mask, scaling, score);
  return result;
}

constexpr std::array<Shape, 10> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 0, 3, 1, 1},
    {2, 4, 2, 3, 0, 4, 5},  // no keys
    {1, 2, 1, 40, 0, 4, 5},
    {1, 1, 1, 1, 1, 1, 1},
    {2, 4, 2, 7, 2, 8, 5},  // more queries than keys, few and many
    {1, 4, 2, 61, 17, 9, 7},
    {2, 4, 1, 300, 131, 16, 3},
    {1, 4, 2, 5, 1100, 8, 5},
    {1, 3, 3, 67, 1100, 17, 33},
    {1, 4, 4, 40, 70, 9, 24},
}};

/// Checks each use of positions: no rope, keys rotated by the call, and keys rotated by the test.
template <class T>
void check_source(const Shape& shape) {
  const FourHeads<Compute<T>> heads(shape.heads);
  const Problem<T> problem(shape);
  const auto check = [&](const auto& mask, const Visible& visible) {
    const Expected<T> expected = expect(problem, visible, heads.multiplier());
    for_each_target_of<T>([&](const std::string& target) {
      for (const index_t page : {1, 16, 4096}) {
        INFO("page " << page);
        Rules<T> rules;
        const Pages<T> pages(problem, page);
        const Output<T> output = run_over(pages, problem, heads.scaling(), mask, ssmax::Identity{});
        rules.take(output, expected, name_of(shape));
        rules.check(target);
        CHECK(run_over(pages, problem, heads.scaling(), mask, ssmax::Identity{}, {},
                       test_executors::Threads{3}) == output);
      }
    });
  };
  check(Full{}, all_keys);
  check(Causal{}, keys_before);
}

TEST_CASE("attention over a key source agrees with the reference, also with more queries than keys",
          "[attention][key_source][bfloat16]") {
  for (const Shape& shape : shapes) {
    check_source<float>(shape);
    check_source<double>(shape);
    check_source<half>(shape);
    check_source<bfloat16>(shape);
  }
}

TEST_CASE("attention over a key source is bit-identical to attention over views", "[attention][key_source]") {
  for_each_target([](const std::string& target) {
    for (const Shape& shape : shapes) {
      if (shape.queries * shape.heads <= 16 * shape.kv_heads) continue;
      INFO(target << ' ' << name_of(shape));
      const FourHeads<float> heads(shape.heads);
      const Problem<float> problem(shape);
      const Pages<float> pages(problem, 48);
      const auto output = run_over(pages, problem, heads.scaling(), Causal{}, ssmax::Softcap(3));
      CHECK(output == run(problem, heads.scaling(), Causal{}, ssmax::Softcap(3)));
      CHECK(output.explanation.path == (shape.keys <= 128 ? ssmax::Path::short_keys : ssmax::Path::prefill));
      CHECK(run_over(pages, problem, heads.scaling(), Causal{}, ssmax::Softcap(3),
                     {.batch_invariant = true}) == output);  // prefill
    }
  });
}

TEST_CASE("a rope rotates only queries, and also keys if the option is set", "[attention][key_source]") {
  const ssmax::Rope<float> rope({.width = 8, .theta = 100}, 2000);
  const FourHeads<float> heads(4);
  for (const Shape& shape :
       {Shape{2, 4, 2, 3, 300, 8, 5}, {2, 4, 2, 61, 300, 9, 7}, {1, 4, 2, 60, 70, 9, 7}}) {
    const Problem<float> problem(shape);
    Problem<float> rotated(shape);
    ssmax::rope(problem.k_view(),
                View<float, 4>(rotated.k.data(), {shape.batch, shape.kv_heads, shape.keys, shape.d}), rope,
                0);
    const Visible visible(before);
    const Expected<float> expected = expect(problem, visible, heads.multiplier(), {.rope = &rope}),
                          moved = expect(problem, visible, heads.multiplier(),
                                         {.rope = &rope, .key_position = 5});
    for_each_target([&](const std::string& target) {
      const auto check = [&](const Problem<float>& keys, const Expected<float>& of,
                             const AttentionOptions<float>& options) {
        const Output<float> output =
            run_over(Pages<float>(keys, 48), problem, heads.scaling(), Causal{}, ssmax::Identity{}, options);
        CHECK((output.explanation.path == ssmax::Path::decode) == (shape.queries == 3));
        Rules<float> rules;
        rules.take(output, of, name_of(shape));
        rules.check(target);
      };
      check(rotated, expected, {.rope = &rope});
      check(problem, expected, {.rope = &rope, .rotate_source_keys = true});
      check(problem, moved, {.rope = &rope, .key_position = 5, .rotate_source_keys = true});
    });
  }
}

TEST_CASE("a rope rotates by the positions of the mask, as for views", "[attention][key_source]") {
  const ssmax::Rope<float> rope({.width = 8, .theta = 100}, 2000);
  const std::vector<index_t> ends{0, 100, 130, 300};
  const ssmax::Documents mask(ends, true);
  const Problem<float> problem({1, 4, 2, 300, 300, 8, 5});
  const FourHeads<float> heads(4);
  for_each_target([&](const std::string&) {
    const Output<float> output = run_over(Pages<float>(problem, 48), problem, heads.scaling(), mask,
                                          ssmax::Identity{}, {.rope = &rope, .rotate_source_keys = true});
    CHECK(output == run(problem, heads.scaling(), mask, {.rope = &rope}));
  });
}

TEST_CASE("a source with several new positions needs a mask, and the keys of the positions",
          "[attention][key_source][errors]") {
  const Problem<float> problem({1, 2, 1, 3, 4, 8, 5});
  const Pages<float> pages(problem, 2);
  Output<float> result(problem.shape);
  AttentionArguments<float> a{.q = problem.q_view(), .keys = pages, .out = result.out_view()};
  CHECK(refusal([&] { ssmax::attention(a, ssmax::LogN{}); }) ==
        "ssmax::attention: no mask is given for the 3 queries of sequence 0 of a source: pass Causal{} (new "
        "positions) or Full{} (every query sees every key)");
  CHECK(
      refusal([&] { const ssmax::Plan plan(a, 1); }).starts_with("ssmax::Plan: no mask is given for the 3"));
  CHECK(result == Output<float>(problem.shape));
  Pages<float> fewer = pages;
  fewer.extents.keys = 2;
  a.keys = fewer;
  CHECK(refusal([&] { ssmax::attention(a, Causal{}); }) ==
        "ssmax::attention: q has 3 positions of sequence 0, which has 2 keys: append the keys first, or set "
        "more_queries_than_keys");
  a.more_queries_than_keys = true;
  CHECK(refusal([&] { ssmax::attention(a, Causal{}); }) == "(nothing was thrown)");
  a.q = {problem.q.data(), {1, 2, 1, 8}};
  a.out = {result.out.data(), {1, 2, 1, 5}};
  CHECK(refusal([&] { ssmax::attention(a); }) == "(nothing was thrown)");
}

TEST_CASE("a call over a source refuses what belongs to views and to states",
          "[attention][key_source][errors]") {
  const Problem<float> problem({1, 2, 1, 3, 4, 8, 5});
  const Pages<float> pages(problem, 2);
  Output<float> result(problem.shape);
  const AttentionArguments<float> fits{.q = problem.q_view(), .keys = pages, .out = result.out_view()};
  const auto message = [&](const auto& change) {
    AttentionArguments<float> a = fits;
    change(a);
    const std::string planned = refusal([&] { const ssmax::Plan plan(a, 1, Causal{}); });
    const std::string called = refusal([&] { ssmax::attention(a, Causal{}); });
    CHECK(called.substr(called.find(':', 8)).substr(0, 12) ==
          planned.substr(planned.find(':', 8)).substr(0, 12));
    return called;
  };
  CHECK(message([&](auto& a) {
          a.k = problem.k_view();
        }).ends_with("k and keys are given, must be one of them"));
  CHECK(message([&](auto& a) {
          a.v = problem.v_view();
        }).ends_with("v and keys are given, must be one of them"));
  CHECK(message([&](auto& a) { a.state.sum = result.lse_view(); }).find("state is given") !=
        std::string::npos);
  CHECK(message([](auto& a) { a.first_key = 1; }).ends_with("first_key is 1, without a state it must be 0"));
  CHECK(message([](auto& a) {
          a.all_queries = 9;
        }).ends_with("all_queries is 9, without a state it must be 0"));
  CHECK(
      message([](auto& a) { a.continues = true; }).ends_with("continues is 1, without a state it must be 0"));
}

/// Arguments whose source was a temporary or, if `has_name`, a variable.
AttentionArguments<float> over_pages(bool has_name, const Problem<float>& problem, Output<float>& output,
                                     const std::vector<std::int32_t>& table,
                                     const std::vector<std::int64_t>& lengths) {
  const View<const float, 4> k(problem.k.data(), {4, 75, 1, 8}), v(problem.v.data(), {4, 75, 1, 8});
  AttentionArguments<float> a{.q = problem.q_view()};
  const PagedKeys pages(k, v, PageTable(View<const std::int32_t, 2>(table.data(), {1, 4}), lengths));
  a.keys = has_name ? Keys<float>(pages) : Keys<float>(PagedKeys(pages));
  a.out = output.out_view();
  return a;
}

TEST_CASE("named arguments keep a source of pages that has gone out of scope", "[attention][key_source]") {
  const Problem<float> problem({1, 2, 1, 40, 300, 8, 8});
  const std::vector<std::int32_t> table{-1, 1, 2, 3};  // PagedKeys with a gap owns memory
  const std::vector<std::int64_t> lengths{300};
  Output<float> got(problem.shape), expected(problem.shape);
  ssmax::attention(
      {.q = problem.q_view(), .k = problem.k_view(), .v = problem.v_view(), .out = expected.out_view()},
      ssmax::SlidingWindow(150));
  for (const bool has_name : {false, true}) {
    const AttentionArguments<float> named = over_pages(has_name, problem, got, table, lengths);
    AttentionArguments<float> copy = named;
    copy.keys = Keys<float>();
    copy.keys = named.keys;
    ssmax::attention(copy, ssmax::SlidingWindow(150));
    CHECK(same_bits(got.out, expected.out));
    got = Output<float>(problem.shape);
  }
}

/// A source with a length near the largest one, and no memory.
struct EmptySource {
  using Element = float;
  KeySourceShape shape() const { return {1, 1, 8, 8}; }
  index_t length(index_t) const { return index_t{1} << 60; }
  ssmax::KeyRange stored(index_t) const { return {0, index_t{1} << 60}; }
  ssmax::KeyRun<float> run(index_t, index_t, index_t) const { return {}; }
};

TEST_CASE("a long source without visible keys", "[attention][key_source]") {
  const std::vector<float> q(8, 1);
  std::vector<float> out(8, -7);
  const std::vector<index_t> none{0};
  // UndefinedBehaviorSanitizer reports products that overflow.
  ssmax::attention({.q = {q.data(), {1, 1, 1, 8}}, .keys = EmptySource{}, .out = {out.data(), {1, 1, 1, 8}}},
                   ssmax::KeyLengths{none});
  CHECK(out == std::vector<float>(8));
}

TEST_CASE("attention over a key source throws for an invalid argument and names it",
          "[attention][key_source][errors]") {
  const Problem<float> problem({1, 2, 1, 3, 4, 8, 5});
  Pages<float> pages(problem, 2);
  const auto message = [&](const AttentionOptions<float>& options = {}) {
    return refusal([&] { run_over(pages, problem, SSMax<float>{}, Full{}, ssmax::Identity{}, options); });
  };
  CHECK(message() == "(nothing was thrown)");
  CHECK(message({.key_position = 3}) == "ssmax::attention: key_position is 3, the source's is 0");
  const ssmax::Rope<float> rope({.width = 8}, 20);
  CHECK(message({.rope = &rope, .key_position = 3, .rotate_source_keys = true}) == "(nothing was thrown)");
  pages.extents.d = 7;
  CHECK(message() == "ssmax::attention: k has extent 7 in dimension 3, q has 8");
  KvCache<float> ring({.kv_heads = 1, .width = 8, .value_width = 5, .capacity = 2, .ring = true});
  ring.append(problem.k_view(), problem.v_view());
  CHECK(refusal([&] { run_over(ring, problem, SSMax<float>{}, Full{}, ssmax::Identity{}); }) ==
        "ssmax::attention: mask shows key 0, k no longer stores keys [0, 2)");
}

}  // namespace attention_problem::attention_source_test
