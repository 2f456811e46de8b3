// A server with a paged cache: two continuations share the pages of a prompt, and a full pool loses its idle sequences.
// The program compares the results with a KvCache for each sequence.
#include <algorithm>
#include <span>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

// The new tokens of a step, packed. Token t belongs to sequence sequences[t]. Sequence ids[b] has the queries
// [cumulative[b], cumulative[b + 1]).
struct Step {
  View<const float, 2> q;     // [tokens, heads·width]
  View<const float, 3> k, v;  // [tokens, kv heads, width]
  View<float, 2> out;         // [tokens, heads·width]
  std::span<const index_t> sequences, ids, cumulative;
};

void compute(PagedKvCache<bfloat16>& cache, const Step& step, index_t heads, const Rope<float>& rope) {
  cache.append(step.k, step.v, step.sequences, &rope);
  attention({.q = heads_view(step.q, heads),
             .keys = cache.source(step.ids),
             .out = heads_view(step.out, heads),
             .rope = &rope,
             .batch_invariant = true,
             .lengths = SequenceLengths::packed_queries(step.cumulative)},
            SSMax<float>{0.43f}, Causal{});
}

// Removes idle sequences, the last one first, until enough pages are free for the step.
void compute_or_evict(PagedKvCache<bfloat16>& cache, const Step& step, index_t heads, const Rope<float>& rope,
                      std::vector<index_t>& idle) {
  for (;;) {
    try {
      return compute(cache, step, heads, rope);
    } catch (const PagedKvCacheFull&) {
      if (idle.empty()) throw;
      cache.remove(idle.back());
      idle.pop_back();
    }
  }
}

namespace {

constexpr index_t kHeads = 8, kKvHeads = 2, kWidth = 64, kPrompt = 40;

// The rows of random tokens.
struct Tokens {
  index_t count;
  std::vector<float> q, k, v;
  std::vector<float> out = std::vector<float>(q.size());

  Tokens(index_t tokens, examples::Random& random)
      : count(tokens), q(rows(kHeads, random)), k(rows(kKvHeads, random)), v(rows(kKvHeads, random)) {}

  std::vector<float> rows(index_t heads, examples::Random& random) const {
    std::vector<float> result(static_cast<std::size_t>(count * heads * kWidth));
    for (float& x : result) x = random.standard();
    return result;
  }
  Step step(std::span<const index_t> sequences, std::span<const index_t> ids,
            std::span<const index_t> cumulative) {
    const View<const float, 2> q_view(q.data(), {count, kHeads * kWidth});
    return {.q = q_view,
            .k = {k.data(), {count, kKvHeads, kWidth}},
            .v = {v.data(), {count, kKvHeads, kWidth}},
            .out = {out.data(), {count, kHeads * kWidth}},
            .sequences = sequences,
            .ids = ids,
            .cumulative = cumulative};
  }
};

// Appends `count` tokens, from `first` on, to a KvCache. Returns their attention.
std::vector<float> expected(KvCache<bfloat16>& cache, const Tokens& tokens, index_t first, index_t count,
                            const Rope<float>& rope) {
  const auto rows = [&](const std::vector<float>& all, index_t heads) {
    return heads_view(View<const float, 2>(all.data() + first * heads * kWidth, {count, heads * kWidth}),
                      heads);
  };
  std::vector<float> out(static_cast<std::size_t>(count * kHeads * kWidth));
  cache.append(rows(tokens.k, kKvHeads), rows(tokens.v, kKvHeads), &rope);
  attention({.q = rows(tokens.q, kHeads),
             .keys = cache,
             .out = heads_view(View<float, 2>(out.data(), {count, kHeads * kWidth}), kHeads),
             .rope = &rope,
             .batch_invariant = true},
            SSMax<float>{0.43f}, Causal{});
  return out;
}

}  // namespace

int main() {
  examples::Check check;
  examples::Random random(1);
  const Rope<float> rope({.width = kWidth}, 100);
  PagedKvCache<bfloat16> cache({.kv_heads = kKvHeads, .width = kWidth, .page = 16, .pages = 5});
  KvCache<bfloat16> of_a({.kv_heads = kKvHeads, .width = kWidth, .capacity = 100});

  // An idle sequence of two pages, and a prompt of three.
  Tokens old(20, random), prompt(kPrompt, random), next(2, random);
  std::vector<index_t> idle{cache.add()};
  compute(cache, old.step(std::vector<index_t>(20, idle[0]), idle, std::vector<index_t>{0, 20}), kHeads,
          rope);
  const index_t a = cache.add();
  compute(cache,
          prompt.step(std::vector<index_t>(kPrompt, a), std::vector{a}, std::vector<index_t>{0, kPrompt}),
          kHeads, rope);
  check.holds("the prompt is bit-identical to a KvCache",
              prompt.out == expected(of_a, prompt, 0, kPrompt, rope));
  check.holds("the pool is full", cache.free_pages() == 0);

  // A token for the prompt and one for a fork of it. The fork needs a copy of the last page.
  const std::vector<index_t> both{a, cache.fork(a)};
  KvCache<bfloat16> of_b = of_a;
  compute_or_evict(cache, next.step(both, both, std::vector<index_t>{0, 1, 2}), kHeads, rope, idle);
  std::vector<float> separate = expected(of_a, next, 0, 1, rope);
  const std::vector<float> second = expected(of_b, next, 1, 1, rope);
  separate.insert(separate.end(), second.begin(), second.end());
  check.holds("both continuations are bit-identical to a KvCache", next.out == separate);
  check.holds("the idle sequence is removed", idle.empty() && cache.sequences() == 2);
  check.holds("two full pages are shared", cache.free_pages() == 1);
  return check.exit_code();
}
