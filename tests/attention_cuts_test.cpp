// Queries split into several calls are bit-identical to one call if each call has more than 16 queries per kv head.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_cuts_test {

/// Runs queries [begin, end). The number of keys gives the last query its original position.
template <class T, class M, class C>
void run_part(const Problem<T>& problem, index_t begin, index_t end, bool whole, const M& mask,
              const C& score, const AttentionOptions<T>& options, Output<T>& output) {
  const Shape& s = problem.shape;
  const index_t keys = whole ? s.keys : s.keys - (s.queries - end), queries = end - begin;
  ssmax::attention<Compute<T>>(with({.q = {problem.q.data() + begin * s.d,
                                           {s.batch, s.heads, queries, s.d},
                                           {s.heads * s.queries * s.d, s.queries * s.d, s.d, 1}},
                                     .k = {problem.k.data(),
                                           {s.batch, s.kv_heads, keys, s.d},
                                           {s.kv_heads * s.keys * s.d, s.keys * s.d, s.d, 1}},
                                     .v = {problem.v.data(),
                                           {s.batch, s.kv_heads, keys, s.dv},
                                           {s.kv_heads * s.keys * s.dv, s.keys * s.dv, s.dv, 1}},
                                     .out = {output.out.data() + begin * s.dv,
                                             {s.batch, s.heads, queries, s.dv},
                                             {s.heads * s.queries * s.dv, s.queries * s.dv, s.dv, 1}},
                                     .lse = {output.lse.data() + begin,
                                             {s.batch, s.heads, queries},
                                             {s.heads * s.queries, s.queries, 1}}},
                                    options),
                               SSMax<Compute<T>>{Compute<T>(0.7)}, mask, score);
}

constexpr std::array<Shape, 4> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 200, 200, 8, 5},
    {2, 4, 2, 150, 700, 9, 24},
    {1, 1, 1, 100, 1500, 6, 3},
    {1, 4, 1, 60, 1100, 6, 3},
}};

/// Returns ways to split the queries: inside vectors, at vector borders, evenly and unevenly.
std::vector<std::vector<index_t>> cuts(const Shape& s) {
  const index_t least = 16 / (s.heads / s.kv_heads) + 1, q = s.queries;
  std::vector<std::vector<index_t>> result{
      {0, least, q}, {0, q - least, q}, {0, q / 2, q}, {0, 29, q}, {0, 32, q}};
  result.push_back({0});
  while (q - result.back().back() >= 2 * least + 1) result.back().push_back(result.back().back() + least + 1);
  result.back().push_back(q);
  return result;
}

/// `whole`: the mask does not depend on positions, so every call gets all keys.
template <class T, class M, class C = ssmax::Identity>
void check_cuts(const Shape& shape, bool whole, const M& mask, const C& score = {},
                const AttentionOptions<T>& options = {}) {
  const Problem<T> problem(shape);
  for_each_target([&](const std::string& target) {
    Output<T> expected(shape);
    run_part(problem, 0, shape.queries, whole, mask, score, options, expected);
    for (const std::vector<index_t>& cut : cuts(shape)) {
      Output<T> output(shape);
      for (std::size_t i = 0; i + 1 < cut.size(); ++i) {
        run_part(problem, cut[i], cut[i + 1], whole, mask, score, options, output);
      }
      INFO(target << ' ' << name_of(shape) << " cut at " << cut[1] << ", in " << cut.size() - 1);
      CHECK(output == expected);
    }
  });
}

TEST_CASE("queries in several calls: full", "[attention][cuts][slow]") {
  for (const Shape& shape : shapes) check_cuts<float>(shape, true, Full{});
  check_cuts<double>(shapes[1], true, Full{});
}

TEST_CASE("queries in several calls: causal", "[attention][cuts][slow]") {
  for (const Shape& shape : shapes) check_cuts<float>(shape, false, Causal{});
  check_cuts<double>(shapes[1], false, Causal{});
  check_cuts<ssmax::half>(shapes[1], false, Causal{});
}

TEST_CASE("queries in several calls: a window", "[attention][cuts][slow]") {
  for (const Shape& shape : shapes) {
    for (const index_t left : {0, 7, 50, 300, 1200}) check_cuts<float>(shape, false, SlidingWindow(left));
  }
}

TEST_CASE("queries in several calls: rope, scores and sinks", "[attention][cuts][slow]") {
  const std::vector<float> sinks{1, -2, 0, 3};
  const ssmax::Rope<float> rope({.width = 4}, 2000);
  for (const Shape& shape : shapes) {
    check_cuts<float>(shape, false, Causal{}, ssmax::Softcap(3),
                      {.rope = &rope, .key_position = 9, .sinks = for_heads_of(shape, sinks)});
  }
}

TEST_CASE("queries in several calls: a predicate", "[attention][cuts][slow]") {
  // The predicate uses positions, which are the same in each call.
  const auto picked = [](const Query& query, index_t key) {
    return key <= query.position() && (query.position() * 7919 + key * 104729) % 7 < 3;
  };
  for (const Shape& shape : shapes) check_cuts<float>(shape, false, ssmax::Where(picked));
}

TEST_CASE("queries in several calls: huge logits", "[attention][cuts][slow]") {
  for (const Shape& shape : shapes)
    check_cuts<float>(shape, false, Causal{}, ssmax::Identity{}, {.scale = 1e6});
}

}  // namespace attention_problem::attention_cuts_test
