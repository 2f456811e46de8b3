// The option rounded_rotation: a call with a rope has the bits of a call without a rope over rotated and rounded q and
// k, on targets with the bf16 path. Other targets ignore the option.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::rounded_rotation_test {

using ssmax::Rope;
using ssmax::View;

/// Heads of bfloat16 rows, contiguous.
struct Heads {
  index_t heads, rows, width;
  std::vector<bfloat16> numbers;

  Heads(index_t a_heads, index_t a_rows, index_t a_width, unsigned seed)
      : heads(a_heads),
        rows(a_rows),
        width(a_width),
        numbers(reference::normals<bfloat16>(static_cast<std::size_t>(heads * rows * width), seed)) {}

  View<const bfloat16, 4> view() const { return {numbers.data(), {1, heads, rows, width}}; }
  View<bfloat16, 4> view() { return {numbers.data(), {1, heads, rows, width}}; }

  /// Returns the rows rotated to positions from `first` on, and rounded.
  Heads rotated(const Rope<float>& rope, index_t first) const {
    Heads result = *this;
    std::vector<float> row(static_cast<std::size_t>(width)), turned(row.size());
    for (index_t i = 0; i < heads * rows; ++i) {
      const auto at = result.numbers.begin() + i * width;
      std::transform(at, at + width, row.begin(), [](bfloat16 x) { return static_cast<float>(x); });
      ssmax::rope<float>(View<const float, 2>(row.data(), {1, width}),
                         View<float, 2>(turned.data(), {1, width}), rope, first + i % rows);
      std::transform(turned.begin(), turned.end(), at, [](float x) { return bfloat16(x); });
    }
    return result;
  }
};

struct Case {
  index_t heads, kv_heads, queries, keys, width, rope_width;
  ssmax::Pairing pairing = ssmax::Pairing::half_split;
};

const std::vector<Case> cases{
    {1, 1, 40, 300, 64, 64},
    {4, 2, 20, 150, 128, 128},
    {2, 1, 130, 1100, 80, 40},
    {1, 1, 17, 129, 2, 2},
    {6, 1, 3, 700, 48, 48, ssmax::Pairing::interleaved},
    {1, 1, 145, 145, 33, 32},
};

using Options = ssmax::AttentionOptions<bfloat16>;

std::vector<std::uint16_t> bits_of(const std::vector<bfloat16>& numbers) {
  std::vector<std::uint16_t> bits;
  for (const bfloat16 x : numbers) bits.push_back(x.bits);
  return bits;
}

TEST_CASE("rounded_rotation is bit-identical to attention over rotated and rounded rows",
          "[attention][rope][bfloat16][products]") {
  for (const Case& c : cases) {
    const Heads q(c.heads, c.queries, c.width, 1), k(c.kv_heads, c.keys, c.width, 2),
        v(c.kv_heads, c.keys, c.width, 3);
    const Rope<float> rope({.width = c.rope_width, .pairing = c.pairing}, c.keys);
    const Heads q_turned = q.rotated(rope, c.keys - c.queries), k_turned = k.rotated(rope, 0);
    for_each_target_of_products([&](const std::string& target) {
      INFO(target << ' ' << c.width << ' ' << c.queries);
      ssmax::Explanation explanation;
      const auto attend = [&](const Heads& queries, const Heads& keys, Options options) {
        Heads out(c.heads, c.queries, c.width, 4);
        options.explanation = &explanation;
        ssmax::attention(
            with({.q = queries.view(), .k = keys.view(), .v = v.view(), .out = out.view()}, options),
            ssmax::Constant{3}, Causal{});
        return bits_of(out.numbers);
      };
      const auto got = attend(q, k, {.rope = &rope, .rounded_rotation = true});
      const index_t rows = c.queries * c.heads / c.kv_heads;
      CHECK(explanation.path == (rows > 16 ? ssmax::Path::prefill_bf16 : ssmax::Path::decode));
      CHECK(got == attend(q_turned, k_turned, {}));
      CHECK(got != attend(q, k, {.rope = &rope}));
    });
  }
}

TEST_CASE("rounded_rotation rounds the queries over a cache, and its keys if the call rotates them",
          "[decode][rope][bfloat16][products]") {
  for (const index_t queries : {index_t{8}, index_t{30}}) {
    const index_t keys = 400, width = 64;
    const Heads q(1, queries, width, 1), k(1, keys, width, 2), v(1, keys, width, 3);
    const Rope<float> rope({.width = width}, keys);
    const Heads q_turned = q.rotated(rope, keys - queries), k_turned = k.rotated(rope, 0);
    ssmax::KvCache<bfloat16> plain({.width = width, .capacity = keys}), turned = plain;
    plain.append(k.view(), v.view());
    turned.append(k_turned.view(), v.view());
    for_each_target_of_products([&](const std::string& target) {
      INFO(target << ' ' << queries);
      const auto decode = [&](const Heads& rows, const ssmax::KvCache<bfloat16>& cache,
                              const Options& options) {
        Heads out(1, queries, width, 4);
        ssmax::attention(with({.q = rows.view(), .keys = cache, .out = out.view()}, options),
                         ssmax::Constant{3}, Causal{});
        return bits_of(out.numbers);
      };
      const auto expected = decode(q_turned, turned, {});
      CHECK(decode(q, turned, {.rope = &rope, .rounded_rotation = true}) == expected);
      CHECK(decode(q, turned, {.rope = &rope}) != expected);
      if (queries > 16)
        CHECK(decode(q, plain, {.rope = &rope, .rounded_rotation = true, .rotate_source_keys = true}) ==
              expected);
    });
  }
}

TEST_CASE("rounded_rotation has the gradients of rotated and rounded rows, rotated back",
          "[attention][backward][rope][bfloat16][products]") {
  const index_t n = 200, width = 64;
  const Heads q(1, n, width, 1), k(1, n, width, 2), v(1, n, width, 3), dout(1, n, width, 5);
  const Rope<float> rope({.width = width}, n);
  const Heads q_turned = q.rotated(rope, 0), k_turned = k.rotated(rope, 0);
  for_each_target_of_products([&](const std::string&) {
    struct Gradients {
      Heads dq, dk, dv;
    };
    const auto gradients = [&](const Heads& queries, const Heads& keys, const Options& options) {
      Heads out(1, n, width, 4);
      std::vector<float> lse(static_cast<std::size_t>(n));
      ssmax::attention(
          with(over_views(queries.view(), keys.view(), v.view(), out.view(), {lse.data(), {1, 1, n}}),
               options),
          Causal{});
      Gradients g{out, out, out};
      ssmax::attention_backward(
          backward_with(backward_over_views(queries.view(), keys.view(), v.view(), std::as_const(out).view(),
                                            {lse.data(), {1, 1, n}}),
                        options),
          {.dout = dout.view(), .dq = g.dq.view(), .dk = g.dk.view(), .dv = g.dv.view()}, Causal{});
      return g;
    };
    const Gradients got = gradients(q, k, {.rope = &rope, .rounded_rotation = true}),
                    expected = gradients(q_turned, k_turned, {});
    CHECK(bits_of(got.dv.numbers) == bits_of(expected.dv.numbers));
    // The expected gradients are rounded before they are compared, the others after they were rotated back.
    const auto compare = [&](const Heads& gradient, const Heads& of_turned) {
      const Heads turned = gradient.rotated(rope, 0);
      for (std::size_t i = 0; i < turned.numbers.size(); ++i) {
        const float a = static_cast<float>(turned.numbers[i]), b = static_cast<float>(of_turned.numbers[i]);
        const std::size_t pair = i % 64 < 32 ? i + 32 : i - 32;
        const float size = std::hypot(b, static_cast<float>(of_turned.numbers[pair]));
        CHECK(std::abs(a - b) <= 3 * 0x1p-8F * size);
      }
    };
    compare(got.dq, expected.dq);
    compare(got.dk, expected.dk);
  });
}

}  // namespace attention_problem::rounded_rotation_test
