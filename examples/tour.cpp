// docs/get_started.md and the guides show these functions. The program compares ds with differences of a loss.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <span>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

// Scores [batch, head, query, key] become weights, causally; then their gradient, with ds and db for each head.
void rows(View<const float, 4> scores, View<float, 4> weights, View<const float, 4> dweights,
          View<float, 4> dscores, std::span<const float> s, std::span<const float> b, std::span<float> ds,
          std::span<float> db) {
  const SSMax<float> scaling{s, b};
  softmax(scores, weights, scaling, Causal{});
  softmax_backward<float, 4>({.out = weights, .dout = dweights, .logits = scores, .dlogits = dscores},
                             scaling.gradient(ds, db), Causal{});
}

// Weights of a graph's edges: the edges of node r are [first_edge[r], first_edge[r + 1]).
void edges(View<const float, 1> scores, View<float, 1> weights, const std::vector<int>& first_edge, float s) {
  softmax(scores, weights, SSMax<float>{s}, RaggedRows(first_edge));
}

struct Layer {
  View<float, 4> q, k, v, out, dout, dq, dk, dv;  // [batch, head, position, channel]
  View<float, 3> lse;                             // [batch, head, position]: what the backward needs
};

// dq, dk and dv are overwritten, or added to with .accumulate = true. The gradients of parameters, as ds,
// are always added.
void attention_in_training(const Layer& x, std::span<const float> s, std::span<float> ds,
                           const Rope<float>& rope, ThreadPool& pool) {
  const SSMax<float> scaling{s};
  const Softcap score{50};
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .lse = x.lse, .rope = &rope}, scaling, Causal{},
            score, pool);
  // Here the rest of the model makes dout of out.
  attention_backward({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .lse = x.lse, .rope = &rope},
                     {.dout = x.dout, .dq = x.dq, .dk = x.dk, .dv = x.dv}, scaling.gradient(ds), Causal{},
                     score, pool);
}

// Returns whether the call multiplies in bfloat16, and prints why not.
bool multiplies_in_bfloat16(View<const bfloat16, 4> q, View<const bfloat16, 4> k, View<const bfloat16, 4> v,
                            View<bfloat16, 4> out) {
  Explanation explanation;
  attention({.q = q, .k = k, .v = v, .out = out, .explanation = &explanation}, Causal{});
  std::puts(to_string(explanation).c_str());
  return explanation.path == Path::prefill_bf16 || explanation.path == Path::decode_bf16;
}

// One multiplication made qkv [tokens, (heads + 2·kv_heads)·d]; out [tokens, heads·d] goes into the next one.
void packed_attention(View<const float, 2> qkv, View<float, 2> out, index_t heads, index_t kv_heads,
                      std::span<const float> s) {
  const auto [q, k, v] = qkv_views(qkv, heads, kv_heads);
  attention({.q = q, .k = k, .v = v, .out = heads_view(out, heads)}, SSMax<float>{s}, Causal{},
            DefaultExecutor{});
}

// keys and values [tokens so far, kv_heads·d] are the caller's; their last rows are those of the new token.
void next_token(View<const float, 2> q, View<const float, 2> keys, View<const float, 2> values,
                View<float, 2> out, index_t heads, index_t kv_heads, std::span<const float> s) {
  attention({.q = heads_view(q, heads),  // one row
             .k = heads_view(keys, kv_heads),
             .v = heads_view(values, kv_heads),
             .out = heads_view(out, heads)},
            SSMax<float>{s}, Causal{});
}

// The first 4 keys and the last 512 of a sequence without an end.
KvCache<float> ring_of(index_t kv_heads, index_t d) {
  return KvCache<float>({.kv_heads = kv_heads, .width = d, .capacity = 4 + 512, .ring = true, .first = 4});
}

void next_of_stream(KvCache<float>& ring, View<const float, 4> q, View<const float, 4> k,
                    View<const float, 4> v, View<float, 4> out, std::span<const float> s,
                    const Rope<float>& rope) {
  ring.append(k, v, &rope);  // one position
  attention({.q = q, .keys = ring, .out = out, .rope = &rope}, SSMax<float>{s}, SlidingWindow{511, 0, 4});
}

// Positions inside the cache, as in StreamingLLM: 0 to first + window - 1. For one new token per call.
struct CachePositions {
  index_t first, window;

  // The number of keys between the first keys and the window.
  index_t gap(const Query& query) const { return std::max<index_t>(query.shape.keys - first - window, 0); }
  KeyRange keys(const Query& query) const { return {0, query.position() + 1}; }
  index_t query_position(const Query& query) const { return query.position() - gap(query); }
  index_t key_position(const Query& query, index_t key) const {
    return key < first ? key : std::max(first, key - gap(query));
  }
};

// The tables of the rope need first + window positions. The call rotates all keys of the ring.
void next_of_endless_stream(KvCache<float>& ring, View<const float, 4> q, View<const float, 4> k,
                            View<const float, 4> v, View<float, 4> out, const Rope<float>& rope) {
  ring.append(k, v);
  attention({.q = q, .keys = ring, .out = out, .rope = &rope, .rotate_source_keys = true},
            SlidingWindow{511, 0, 4} & CachePositions{4, 512});
}

namespace {

constexpr index_t kHeads = 2, kLength = 24, kWidth = 8;

class Numbers {
 public:
  explicit Numbers(index_t last) : last_(last), values_(static_cast<std::size_t>(kHeads * kLength * last)) {
    for (float& value : values_) value = random().standard();
  }
  View<float, 4> view() { return {values_.data(), {1, kHeads, kLength, last_}}; }
  // Returns Σ this·other: the change of a loss whose gradient is `other`.
  double dot(const Numbers& other) const {
    double sum = 0;
    for (std::size_t i = 0; i < values_.size(); ++i) {
      sum += static_cast<double>(values_[i]) * static_cast<double>(other.values_[i]);
    }
    return sum;
  }

 private:
  static examples::Random& random() {
    static examples::Random random(1);
    return random;
  }
  index_t last_;
  std::vector<float> values_;
};

}  // namespace

int main() {
  examples::Check check;
  const float step = 0.01f;
  {
    Numbers scores(kLength), weights(kLength), dweights(kLength), dscores(kLength);
    const auto loss = [&](std::vector<float> s, std::vector<float>& ds, std::vector<float>& db) {
      const std::vector<float> b(kHeads, 0.1f);
      rows(scores.view(), weights.view(), dweights.view(), dscores.view(), s, b, ds, db);
      return weights.dot(dweights);
    };
    std::vector<float> ds(kHeads), db(kHeads), unused(kHeads);
    loss({0.4f, 0.5f}, ds, db);
    const double difference =
        loss({0.4f + step, 0.5f}, unused, unused) - loss({0.4f - step, 0.5f}, unused, unused);
    check.near("ds of rows", static_cast<double>(ds[0]), difference / (2 * static_cast<double>(step)), 0.01);
  }
  {
    const std::vector<float> scores{1, 1, 5};
    std::vector<float> weights(3);
    edges({scores.data(), {3}}, {weights.data(), {3}}, {0, 2, 3}, 0.4f);
    check.near("a weight of two equal edges", static_cast<double>(weights[0]), 0.5, 1e-6);
    check.near("the weight of an only edge", static_cast<double>(weights[2]), 1, 1e-6);
  }
  {
    Numbers q(kWidth), k(kWidth), v(kWidth), out(kWidth), dout(kWidth), dq(kWidth), dk(kWidth), dv(kWidth);
    std::vector<float> lse(kHeads * kLength);
    const Layer layer{q.view(),   k.view(),    v.view(),
                      out.view(), dout.view(), dq.view(),
                      dk.view(),  dv.view(),   {lse.data(), {1, kHeads, kLength}}};
    const Rope<float> rope({.width = kWidth, .theta = 10'000}, kLength);
    ThreadPool pool(2);
    const auto loss = [&](std::vector<float> s, std::vector<float>& ds) {
      attention_in_training(layer, s, ds, rope, pool);
      return out.dot(dout);
    };
    std::vector<float> ds(kHeads), unused(kHeads);
    loss({0.4f, 0.5f}, ds);
    const double difference = loss({0.4f + step, 0.5f}, unused) - loss({0.4f - step, 0.5f}, unused);
    check.near("ds of attention", static_cast<double>(ds[0]), difference / (2 * static_cast<double>(step)),
               0.01);
  }
  {
    // Compute all tokens at once. Then compute the last token against the keys and values of all tokens.
    constexpr index_t heads = 4, kv_heads = 2, tokens = 5, d = 8, channels = (heads + 2 * kv_heads) * d;
    std::vector<float> qkv(tokens * channels), out(tokens * heads * d), last(heads * d);
    examples::Random random(2);
    for (float& value : qkv) value = random.standard();
    const std::vector<float> s(heads, 0.43f);
    packed_attention({qkv.data(), {tokens, channels}}, {out.data(), {tokens, heads * d}}, heads, kv_heads, s);
    const auto columns = [&](index_t first_head, index_t count, index_t row, index_t rows) {
      return View<const float, 2>(qkv.data() + row * channels + first_head * d, {rows, count * d},
                                  {channels, 1});
    };
    next_token(columns(0, heads, tokens - 1, 1), columns(heads, kv_heads, 0, tokens),
               columns(heads + kv_heads, kv_heads, 0, tokens), {last.data(), {1, heads * d}}, heads, kv_heads,
               s);
    for (std::size_t i = 0; i < last.size(); ++i) {
      check.near("the last token", static_cast<double>(last[i]),
                 static_cast<double>(out[out.size() - last.size() + i]), 1e-5);
    }
  }
  {
    // Decode a stream of 700 tokens. The last output equals the output of attention over all tokens.
    constexpr index_t tokens = 700, d = 8;
    std::vector<float> qkv(3 * tokens * d), out(tokens * d), last(d);
    examples::Random random(3);
    for (float& value : qkv) value = random.standard();
    const std::vector<float> s(1, 0.43f);
    const Rope<float> rope({.width = d}, tokens);
    const auto rows = [&](index_t tensor, index_t first, index_t count) {
      return View<const float, 4>(qkv.data() + (tensor * tokens + first) * d, {1, 1, count, d});
    };
    KvCache<float> ring = ring_of(1, d);
    for (index_t token = 0; token < tokens; ++token) {
      next_of_stream(ring, rows(0, token, 1), rows(1, token, 1), rows(2, token, 1),
                     {last.data(), {1, 1, 1, d}}, s, rope);
    }
    attention({.q = rows(0, 0, tokens),
               .k = rows(1, 0, tokens),
               .v = rows(2, 0, tokens),
               .out = {out.data(), {1, 1, tokens, d}},
               .rope = &rope},
              SSMax<float>{s}, SlidingWindow{511, 0, 4});
    for (std::size_t i = 0; i < last.size(); ++i) {
      check.near("the last token of a stream", static_cast<double>(last[i]),
                 static_cast<double>(out[out.size() - last.size() + i]), 1e-5);
    }
  }
  {
    // Decode 700 tokens with positions inside the cache. The last output equals attention over the 516 stored tokens.
    constexpr index_t tokens = 700, kept = 516, d = 8;
    std::vector<float> qkv(3 * tokens * d), stored[3], out(kept * d), last(d);
    examples::Random random(4);
    for (float& value : qkv) value = random.standard();
    const Rope<float> rope({.width = d}, kept);
    const auto row = [&](index_t tensor, index_t token) {
      return View<const float, 4>(qkv.data() + (tensor * tokens + token) * d, {1, 1, 1, d});
    };
    KvCache<float> ring = ring_of(1, d);
    for (index_t token = 0; token < tokens; ++token) {
      next_of_endless_stream(ring, row(0, token), row(1, token), row(2, token), {last.data(), {1, 1, 1, d}},
                             rope);
      if (token >= 4 && token < tokens - 512) continue;
      for (index_t i = 0; i < 3; ++i)
        stored[i].insert(stored[i].end(), &row(i, token)(0, 0, 0, 0), &row(i, token)(0, 0, 0, 0) + d);
    }
    const auto all = [&](index_t i) { return View<const float, 4>(stored[i].data(), {1, 1, kept, d}); };
    attention({.q = all(0), .k = all(1), .v = all(2), .out = {out.data(), {1, 1, kept, d}}, .rope = &rope},
              Causal{});
    for (std::size_t i = 0; i < last.size(); ++i) {
      const float same = out[out.size() - d + i];
      check.holds("the last token, with positions inside the cache", std::abs(last[i] - same) < 1e-6f);
    }
  }
  {
    const std::vector<bfloat16> numbers(200 * 8, bfloat16(0.5f));
    std::vector<bfloat16> out(numbers.size());
    const View<const bfloat16, 4> q(numbers.data(), {1, 1, 200, 8});
    const bool in_bfloat16 = multiplies_in_bfloat16(q, q, q, {out.data(), {1, 1, 200, 8}});
    const Target target = active_target();
    const bool has_products =
        target == Target::amx || target == Target::avx512_bf16 || target == Target::neon_bf16;
    check.near("bfloat16 products", in_bfloat16, has_products, 0);
  }
  return check.exit_code();
}
