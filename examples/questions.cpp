// docs/faq.md and docs/comparison.md show these calls: padding before a sequence, PyTorch's causal mask, rows of 8 bits
// with factors of your own, a list of keys per query, the memory of a call, a function for C, and tensors of ggml. The
// program compares the results with other calls, and the memory with the bounds of docs/guarantees.md.
//
// `questions time` prints the times of a mask by a function and of the same mask by a range.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <numeric>
#include <span>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

struct Tensors {
  View<const float, 4> q, k, v;  // [batch, head, position, channel]
  View<float, 4> out;
};

// Sequence b has padding[b] rows of padding before its tokens. Positions begin at its first token.
void padded_before(const Tensors& x, std::span<const index_t> padding, const Rope<float>& rope) {
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .rope = &rope}, SSMax<float>{0.43f},
            LeftPadding{padding});
}

// The same over a cache: padded prompts, or new tokens. The rope counts the padding in the positions of q and k.
void padded_before(KvCache<float>& cache, const Tensors& x, std::span<const index_t> padding,
                   const Rope<float>& rope) {
  cache.append(x.k, x.v, &rope);
  attention({.q = x.q, .keys = cache, .out = x.out, .rope = &rope}, SSMax<float>{0.43f},
            LeftPadding{padding});
}

// The same keys by two masks of the library. n is right, but positions count the padding.
void padded_before_by_where(const Tensors& x, std::span<const index_t> padding, const Rope<float>& rope) {
  const auto is_token = [padding](const Query& query, index_t key) {
    return key >= padding[static_cast<std::size_t>(query.batch)];
  };
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .rope = &rope}, SSMax<float>{0.43f},
            Causal{} & Where(is_token));
}

// PyTorch's is_causal=True: query i sees keys 0 to i, for any number of keys.
void causal_as_in_pytorch(const Tensors& x) {
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, Softmax{}, CausalTopLeft{});
}

// The same mask by a function.
void causal_by_where(const Tensors& x) {
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, Softmax{},
            Where([](const Query& query, index_t key) { return key <= query.index; }));
}

// Rows of 8 bits with a factor per row, [sequence, position, kv head, channel]. Each sequence is one page.
struct EightBitRows {
  View<const Int8, 4> k, v;
  View<const float, 3> k_factors, v_factors;  // [sequence, position, kv head]
};

void over_rows_of_8_bits(const EightBitRows& rows, const View<const float, 4>& q, const View<float, 4>& out) {
  const index_t sequences = rows.k.extent(0);
  std::vector<index_t> pages(static_cast<std::size_t>(sequences)), lengths(pages.size(), rows.k.extent(1));
  std::iota(pages.begin(), pages.end(), 0);
  const PageTable table(View<const index_t, 2>(pages.data(), {sequences, 1}), lengths);
  const PagedKeys keys(rows.k, rows.v, table, {.k = rows.k_factors, .v = rows.v_factors});
  attention({.q = q, .keys = keys, .out = out}, SSMax<float>{0.43f}, Causal{});
}

// Makes a batch entry of each query: [1, heads, queries, d] becomes [queries, heads, 1, d].
template <class T>
View<T, 4> entries(const View<T, 4>& x) {
  return {x.data_handle(),
          {x.extent(2), x.extent(1), 1, x.extent(3)},
          {x.stride(2), x.stride(1), x.stride(2), 1}};
}

// Each query of a sequence has a list of its own: lists is [queries, 1, most], lengths[i] counts the keys of query i.
// k and v are pages of one key: [tokens, 1, kv heads, width].
void a_list_per_query(const View<const float, 4>& k, const View<const float, 4>& v,
                      const View<const std::int32_t, 3>& lists, std::span<const std::int32_t> lengths,
                      const View<const float, 4>& q, const View<float, 4>& out) {
  const PagedKeys keys(k, v, PageTable(lists, lengths));
  attention({.q = entries(q), .keys = keys, .out = entries(out)}, Softmax{}, Full{});
}

struct Bytes {
  std::size_t forward, backward;
};

// The workspace of a causal call and of its backward. Plans read extents and types only, so the pointers may be null.
Bytes workspace_bytes(index_t heads, index_t kv_heads, index_t n, index_t d, index_t threads) {
  const View<const float, 4> q(nullptr, {1, heads, n, d}), k(nullptr, {1, kv_heads, n, d});
  const View<float, 4> dq(nullptr, {1, heads, n, d}), dk(nullptr, {1, kv_heads, n, d});
  const View<const float, 3> lse(nullptr, {1, heads, n});
  const Plan forward({.q = q, .k = k, .v = k}, threads, Causal{});
  const BackwardPlan backward({.q = q, .k = k, .v = k, .out = q, .lse = lse},
                              {.dout = q, .dq = dq, .dk = dk, .dv = dk}, threads, Causal{});
  return {forward.bytes(), backward.bytes()};
}

// A function that C calls: packed qkv [tokens, 3·heads·d], one sequence. Returns 0, or 1 after an error.
extern "C" int causal_attention(const float* qkv, float* out, int tokens, int heads, int d) {
  try {
    const auto [q, k, v] = qkv_views(View<const float, 2>(qkv, {tokens, 3 * heads * d}), heads);
    const View<float, 2> rows(out, {tokens, heads * d});
    attention({.q = q, .k = k, .v = v, .out = heads_view(rows, heads)}, Causal{});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

// The members of a ggml_tensor that a view needs: extents and strides in bytes, the channels first.
struct GgmlTensor {
  void* data;
  std::int64_t ne[4];
  std::size_t nb[4];
};

// A view [batch, head, position, channel]. ggml's q, k and v have the dimensions channel, position, head, batch. The
// result has channel, head, position, batch.
template <class T>
View<T, 4> view_of(const GgmlTensor& x, int head = 2, int position = 1) {
  const auto stride = [&](int i) { return static_cast<index_t>(x.nb[i] / sizeof(T)); };
  return {static_cast<T*>(x.data),
          {x.ne[3], x.ne[head], x.ne[position], x.ne[0]},
          {stride(3), stride(head), stride(position), 1}};
}

// ggml_flash_attn_ext with keys and values of f16 under a causal mask. Every thread of ggml enters, with its number.
void flash_attn_ext(const GgmlTensor& q, const GgmlTensor& k, const GgmlTensor& v, const GgmlTensor& out,
                    double scale, SpmdTeam& team, index_t ith) {
  const Spmd executor(team, ith);
  executor.lead_or_help([&] {
    attention({.q = view_of<const float>(q),
               .k = view_of<const half>(k),
               .v = view_of<const half>(v),
               .out = view_of<float>(out, 1, 2),
               .scale = scale},
              Causal{}, executor);
  });
}

namespace {

constexpr index_t kHeads = 4, kKvHeads = 2, kWidth = 32;

std::vector<float> random_numbers(index_t count, examples::Random& random) {
  std::vector<float> result(static_cast<std::size_t>(count));
  for (float& x : result) x = random.standard();
  return result;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, static_cast<double>(std::abs(a[i] - b[i])));
  return a.size() == b.size() ? largest : 1;
}

// The tensors of a batch, and their views.
struct Batch {
  index_t sequences, queries, keys;
  std::vector<float> q, k, v, out;

  Batch(index_t batch, index_t rows, index_t key_rows, examples::Random& random)
      : sequences(batch),
        queries(rows),
        keys(key_rows),
        q(random_numbers(batch * kHeads * rows * kWidth, random)),
        k(random_numbers(batch * kKvHeads * key_rows * kWidth, random)),
        v(random_numbers(std::ssize(k), random)),
        out(q.size()) {}

  // The rows of sequence b from `first` on.
  Tensors tensors(index_t b, index_t count, index_t first) {
    const auto part = [&](auto& x, index_t heads, index_t rows) {
      using T = std::remove_reference_t<decltype(*x.data())>;
      return View<T, 4>(x.data() + (b * heads * rows + first) * kWidth, {count, heads, rows - first, kWidth},
                        {heads * rows * kWidth, rows * kWidth, kWidth, 1});
    };
    return {part(q, kHeads, queries), part(k, kKvHeads, keys), part(v, kKvHeads, keys),
            part(out, kHeads, queries)};
  }
  Tensors tensors() { return tensors(0, sequences, 0); }
};

void check_padding(examples::Check& check, examples::Random& random) {
  const Rope<float> rope({.width = kWidth}, 100);
  const std::vector<index_t> padding{7, 0, 20};
  Batch batch(3, 50, 50, random), expected = batch;
  for (index_t b = 0; b < 3; ++b) {
    const Tensors x = expected.tensors(b, 1, padding[static_cast<std::size_t>(b)]);
    attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .rope = &rope}, SSMax<float>{0.43f}, Causal{});
  }
  padded_before(batch.tensors(), padding, rope);
  check.holds("padding before a sequence, by a range", difference(batch.out, expected.out) < 1e-5);
  padded_before_by_where(batch.tensors(), padding, rope);
  check.holds("padding before a sequence, by a function", difference(batch.out, expected.out) < 1e-4);
  std::fill(batch.out.begin(), batch.out.end(), 1.0f);
  KvCache<float> cache({.batch = 3, .kv_heads = kKvHeads, .width = kWidth, .capacity = 50});
  padded_before(cache, batch.tensors(), padding, rope);
  check.holds("padding before a sequence, over a cache", difference(batch.out, expected.out) < 1e-4);
}

void check_top_left(examples::Check& check, examples::Random& random) {
  Batch batch(1, 40, 60, random), expected = batch;
  causal_as_in_pytorch(batch.tensors());
  causal_by_where(expected.tensors());
  check.holds("both top-left masks agree", difference(batch.out, expected.out) < 1e-6);
}

void check_eight_bits(examples::Check& check, examples::Random& random) {
  constexpr index_t sequences = 2, keys = 70, rows = sequences * keys * kKvHeads;
  std::vector<Int8> codes[2];
  std::vector<float> factors[2], numbers[2];
  for (int i = 0; i < 2; ++i) {
    numbers[i] = random_numbers(rows * kWidth, random);
    for (index_t row = 0; row < rows; ++row) {
      float* const x = numbers[i].data() + row * kWidth;
      factors[i].push_back(StorageTraits<Int8>::scale(x, kWidth));
      for (index_t c = 0; c < kWidth; ++c) {
        codes[i].push_back(Int8(x[c] / factors[i].back()));
        x[c] = static_cast<float>(codes[i].back()) * factors[i].back();
      }
    }
  }
  const std::vector<float> q = random_numbers(sequences * kHeads * kWidth, random);
  std::vector<float> out(q.size()), expected(out);
  const View<const float, 4> q_view(q.data(), {sequences, kHeads, 1, kWidth});
  const auto rows_of = [](const auto& x) {
    return View<const Int8, 4>(x.data(), {sequences, keys, kKvHeads, kWidth});
  };
  const auto factors_of = [](const auto& x) {
    return View<const float, 3>(x.data(), {sequences, keys, kKvHeads});
  };
  over_rows_of_8_bits({rows_of(codes[0]), rows_of(codes[1]), factors_of(factors[0]), factors_of(factors[1])},
                      q_view, {out.data(), {sequences, kHeads, 1, kWidth}});
  const auto widened = [](const std::vector<float>& x) {
    return View<const float, 4>(x.data(), {sequences, kKvHeads, keys, kWidth},
                                {keys * kKvHeads * kWidth, kWidth, kKvHeads * kWidth, 1});
  };
  attention({.q = q_view,
             .k = widened(numbers[0]),
             .v = widened(numbers[1]),
             .out = {expected.data(), {sequences, kHeads, 1, kWidth}}},
            SSMax<float>{0.43f}, Causal{});
  check.holds("rows of 8 bits agree with their numbers in float", difference(out, expected) < 1e-5);
}

void check_lists(examples::Check& check, examples::Random& random) {
  constexpr index_t tokens = 90, queries = 5, most = 12;
  Batch batch(1, queries, tokens, random), expected = batch;
  // The pool is [token, 1, kv head, channel]: the rows of the batch in another order.
  const auto pool = [](const std::vector<float>& x) {
    return View<const float, 4>(x.data(), {tokens, 1, kKvHeads, kWidth},
                                {kWidth, kWidth, tokens * kWidth, 1});
  };
  std::vector<std::int32_t> lists, lengths;
  for (index_t i = 0; i < queries; ++i) {
    lengths.push_back(static_cast<std::int32_t>(most - i));
    for (index_t j = 0; j < most; ++j) lists.push_back(static_cast<std::int32_t>((7 * j + 11 * i) % tokens));
  }
  const Tensors x = batch.tensors();
  a_list_per_query(pool(batch.k), pool(batch.v), {lists.data(), {queries, 1, most}}, lengths, x.q, x.out);
  const Tensors y = expected.tensors();
  attention({.q = y.q, .k = y.k, .v = y.v, .out = y.out}, Where([&](const Query& query, index_t key) {
              const auto begin = lists.begin() + query.index * most;
              return std::find(begin, begin + most - query.index, key) != begin + most - query.index;
            }));
  check.holds("a list per query", difference(batch.out, expected.out) < 1e-5);
}

// The bounds of docs/guarantees.md, for the largest task of any target.
void check_memory(examples::Check& check) {
  for (const index_t d : {32, 64, 80, 128, 576}) {
    const Bytes bytes = workspace_bytes(32, 32, 8192, d, 4);
    const index_t rows = 8400, keys = 8192, forward = 1152 * 12 * d + 1200 * d + 200'000,
                  backward = rows * (4 * d + 40) + keys * (8 * d + 1) + 4000 * d + 220'000;
    check.holds("forward bytes", static_cast<index_t>(bytes.forward) <= 4 * forward);
    check.holds("backward bytes", static_cast<index_t>(bytes.backward) <= 4 * backward);
  }
}

void check_c(examples::Check& check, examples::Random& random) {
  constexpr int tokens = 20, heads = 2, d = 16;
  const std::vector<float> qkv = random_numbers(tokens * 3 * heads * d, random);
  std::vector<float> out(tokens * heads * d);
  check.holds("C gets 0", causal_attention(qkv.data(), out.data(), tokens, heads, d) == 0);
  for (std::size_t i = 0; i < heads * d; ++i)
    check.holds("the first token's result is its value", std::abs(out[i] - qkv[2 * heads * d + i]) < 1e-5f);
}

void check_ggml(examples::Check& check, examples::Random& random) {
  constexpr index_t tokens = 30;
  Batch batch(1, tokens, tokens, random);
  std::vector<half> k(batch.k.begin(), batch.k.end()), v(batch.v.begin(), batch.v.end());
  const auto tensor = [](auto& x, index_t heads) {
    const std::size_t size = sizeof(x[0]), row = kWidth * size, all = x.size() * size;
    return GgmlTensor{x.data(), {kWidth, tokens, heads, 1}, {size, row, row * tokens, all}};
  };
  std::vector<float> out(batch.q.size()), expected(out);
  GgmlTensor result = tensor(out, kHeads);  // [position][head][channel]
  std::swap(result.ne[1], result.ne[2]);
  result.nb[2] = kHeads * result.nb[1];
  SpmdTeam team(1);
  flash_attn_ext(tensor(batch.q, kHeads), tensor(k, kKvHeads), tensor(v, kKvHeads), result, 0.2, team, 0);
  const Tensors x = batch.tensors();
  attention({.q = x.q,
             .k = {k.data(), {1, kKvHeads, tokens, kWidth}},
             .v = {v.data(), {1, kKvHeads, tokens, kWidth}},
             .out = heads_view(View<float, 2>(expected.data(), {tokens, kHeads * kWidth}), kHeads),
             .scale = 0.2},
            Causal{});
  check.holds("tensors of ggml are bit-identical to views", out == expected);
}

void print_times(examples::Random& random) {
  Batch batch(1, 1024, 1024, random);
  const Tensors x = batch.tensors();
  const auto time_of = [&](const char* name, void (*call)(const Tensors&)) {
    std::vector<double> times;
    for (int i = 0; i < 21; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      call(x);
      times.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    }
    std::ranges::sort(times);
    std::printf("%-24s %8.2f ms\n", name, times[times.size() / 2]);
  };
  time_of("a range", causal_as_in_pytorch);
  time_of("Where", causal_by_where);
  time_of("Causal & Where", [](const Tensors& t) {
    attention({.q = t.q, .k = t.k, .v = t.v, .out = t.out}, Softmax{},
              Causal{} & Where([](const Query& query, index_t key) { return key <= query.index; }));
  });
}

}  // namespace

int main(int argc, char**) {
  examples::Check check;
  examples::Random random(1);
  if (argc > 1) {
    print_times(random);
    return 0;
  }
  check_padding(check, random);
  check_top_left(check, random);
  check_eight_bits(check, random);
  check_lists(check, random);
  check_memory(check);
  check_c(check, random);
  check_ggml(check, random);
  return check.exit_code();
}
