// A sequence that is appended and decoded in pieces, or speculated and taken back: which bits must be those
// of one call, and how near the others are.

#include "decode_problem.hpp"
#include "test.hpp"

namespace decode_problem::decode_pieces_test {

// ---- A sequence in pieces ---------------------------------------------------------------------------------

/// A whole sequence of queries, keys and values: all positions are new.
Shape whole(index_t heads, index_t kv_heads, index_t d, index_t dv, index_t length, index_t batch = 1) {
  return {heads, kv_heads, length, d, dv, std::vector<index_t>(static_cast<std::size_t>(batch), length)};
}

template <class T, class S, class M>
Output<T> at_once(const Data<T>& data, const S& scaling, const M& mask, const AttentionOptions<T>& options) {
  const Shape& s = data.shape;
  Output<T> result(s);
  attention<Compute<T>>(with({.q = data.q_view(),
                              .k = data.k_view(0, s.longest()),
                              .v = data.v_view(0, s.longest()),
                              .out = {result.out.data(), {s.batch(), s.heads, s.queries, s.dv}},
                              .lse = {result.lse.data(), {s.batch(), s.heads, s.queries}}},
                             options),
                        scaling, mask);
  return result;
}

/// append, decode, append, decode …, with as many positions a time as `steps` say, over and over.
template <class X, class T, class S, class M>
Output<T> in_pieces(const Data<T>& data, const std::vector<index_t>& steps, const S& scaling, const M& mask,
                    const AttentionOptions<T>& options, index_t ring_capacity = 0) {
  const Shape& s = data.shape;
  KvCache<X> cache(options_of(s, ring_capacity, ring_capacity != 0));
  Output<T> result(s);
  const index_t q_head = s.queries * s.d, out_head = s.queries * s.dv;
  for (index_t begin = 0, step = 0; begin < s.queries; ++step) {
    const index_t end = std::min(s.queries, begin + steps[static_cast<std::size_t>(step) % steps.size()]);
    const index_t count = end - begin;
    cache.append(data.k_view(begin, end), data.v_view(begin, end), options.rope);
    attention<Compute<T>>(with({.q = {data.q.data() + begin * s.d,
                                      {s.batch(), s.heads, count, s.d},
                                      {s.heads * q_head, q_head, s.d, 1}},
                                .keys = cache,
                                .out = {result.out.data() + begin * s.dv,
                                        {s.batch(), s.heads, count, s.dv},
                                        {s.heads * out_head, out_head, s.dv, 1}},
                                .lse = {result.lse.data() + begin,
                                        {s.batch(), s.heads, count},
                                        {s.heads * s.queries, s.queries, 1}}},
                               options),
                          scaling, mask);
    begin = end;
  }
  return result;
}

/// Steps that sum to the length, so that no step is shorter than these.
template <class T, class X = T>
void check_same_bits_in_pieces(const Shape& shape, const std::vector<index_t>& steps, bool rotated) {
  const Data<T> data(shape);
  const Rope<Compute<T>> rope({.width = shape.d / 2 * 2}, shape.longest());
  const AttentionOptions<T> options{.rope = rotated ? &rope : nullptr};
  const SSMax<Compute<T>> scaling{Compute<T>(0.4)};
  INFO(name_of(shape));
  CHECK(in_pieces<X>(data, steps, scaling, Causal{}, options) == at_once(data, scaling, Causal{}, options));
  const SlidingWindow window{60};
  const Output<T> expected = at_once(data, scaling, window, options);
  CHECK(in_pieces<X>(data, steps, scaling, window, options) == expected);
  const index_t largest_step = *std::ranges::max_element(steps);
  CHECK(in_pieces<X>(data, steps, scaling, window, options, 60 + largest_step) == expected);
}

TEST_CASE("a prefill in calls of more than 16 queries per kv head is bit-identical to one call",
          "[decode][bfloat16]") {
  for_each_target_of<bfloat16>([](const std::string&) {
    check_same_bits_in_pieces<float>(whole(1, 1, 8, 9, 300), {17, 40, 33, 70, 18, 23, 99}, true);
    check_same_bits_in_pieces<float>(whole(6, 2, 16, 16, 290, 2), {6, 40, 11, 128, 7, 98}, true);
    check_same_bits_in_pieces<float>(whole(4, 1, 5, 3, 130), {5}, true);
    check_same_bits_in_pieces<float>(whole(1, 1, 2, 1, 2300), {1000, 24, 300, 976}, true);
    check_same_bits_in_pieces<double>(whole(3, 1, 8, 9, 300), {17, 40, 33, 70, 18, 23, 99}, true);
    check_same_bits_in_pieces<half>(whole(2, 1, 8, 9, 300), {17, 40, 33, 70, 18, 23, 99}, false);
    check_same_bits_in_pieces<bfloat16>(whole(2, 1, 16, 8, 300), {17, 40, 33, 70, 18, 23, 99}, false);
  });
}

/// |difference| <= 4·(d + 1024 + n / 1024)·ε·Σ p |v|, as decode.hpp says, and the rule of everything else.
template <class T>
void check_bounded_in_pieces(const Shape& shape, const std::vector<index_t>& steps) {
  const ssmax::RopeOptions turn{.width = shape.d};
  const Rope<T> rope(turn, shape.longest());
  const AttentionOptions<T> options{.rope = &rope};
  const Data<T> data(shape);
  const Expected<T> expected(data, {.rope = &turn});
  for_each_target_of<T>([&](const std::string&) {
    const Output<T> together = at_once(data, Softmax{}, Causal{}, options);
    const Output<T> pieces = in_pieces<T>(data, steps, Softmax{}, Causal{}, options);
    const Real factor =
        4 * (static_cast<Real>(shape.d) + 1024 + static_cast<Real>(shape.longest()) / 1024) * 2 * rounding<T>;
    Real over = -reference::infinity;
    for (std::size_t i = 0; i < pieces.out.size(); ++i) {
      over = worse(over, std::abs(Real(pieces.out[i]) - Real(together.out[i])) -
                             factor * expected.exact.value_sums[i]);
    }
    CHECK(over <= 0);
    check_output(pieces, expected, name_of(shape));
  });
}

TEST_CASE("a prefill, then one position after the other, is as good as one prefill", "[decode]") {
  check_bounded_in_pieces<float>(whole(3, 1, 16, 9, 150), {100, 1, 1, 1, 2, 3, 1});
  check_bounded_in_pieces<float>(whole(2, 2, 8, 16, 270, 2), {1, 16, 3, 200, 2});
  check_bounded_in_pieces<double>(whole(4, 2, 8, 5, 150), {100, 1, 1, 1, 2, 3, 1});
}

/// Compares calls with one position each with calls of at most 16 rows, after a prompt.
template <class T>
void check_few_rows(index_t heads, index_t kv_heads, index_t d, index_t dv) {
  for_each_target([&](const std::string& target) {
    INFO(target << " " << heads << " on " << kv_heads << ", " << d << ", " << dv);
    const Data<T> data(whole(heads, kv_heads, d, dv, 1200));
    const SSMax<Compute<T>> scaling{Compute<T>(0.4)};
    const AttentionOptions<T> options{.float_products = true};
    // A prompt of 1160 positions, then 40 positions.
    std::vector<index_t> one(41, 1), several{1160, 16 / (heads / kv_heads), 1, 2, 3, 1};
    one[0] = 1160;
    several.resize(41, 4);
    CHECK(in_pieces<T>(data, several, scaling, Causal{}, options) ==
          in_pieces<T>(data, one, scaling, Causal{}, options));
  });
}

TEST_CASE("decode: results are bit-identical for any number of rows up to 16", "[decode][pieces][slow]") {
  check_few_rows<float>(2, 2, 24, 9);
  check_few_rows<float>(3, 1, 64, 64);
  check_few_rows<float>(4, 1, 130, 128);
  check_few_rows<half>(4, 2, 16, 33);
  check_few_rows<bfloat16>(2, 1, 64, 64);
  check_few_rows<double>(2, 2, 24, 9);
}

// ---- Speculation ------------------------------------------------------------------------------------------

TEST_CASE("what was speculated and taken back leaves no trace", "[decode]") {
  for_each_target([](const std::string&) {
    for (const index_t heads : {2, 20}) {
      const Shape shape{heads, 1, 4, 16, 8, {300, 300}};
      const Data<float> data(shape), wrong(Shape{heads, 1, 4, 16, 8, {301, 301}});
      const Rope<float> rope({.width = 16}, 301);
      const AttentionOptions<float> options{.rope = &rope};
      for (const bool ring : {false, true}) {
        const KvCache<half> expected_cache = filled<half>(data, &rope, 310, ring);
        const auto at = [&](const KvCache<half>& cache) {
          return run(data, cache, LogN{}, Causal{}, Identity{}, options);
        };
        const Output<float> expected = at(expected_cache);
        KvCache<half> cache(options_of(shape, 310, ring));
        cache.append(data.k_view(0, 296), data.v_view(0, 296), &rope);
        cache.append(data.k_view(296, 300), data.v_view(296, 300), &rope);
        CHECK(at(cache) == expected);
        for (index_t b = 0; b < 2; ++b) cache.truncate(b, 296);
        cache.append(data.k_view(296, 300), data.v_view(296, 300), &rope);
        CHECK(at(cache) == expected);
        // One sequence keeps one of four, the other none; then they catch up.
        for (index_t b = 0; b < 2; ++b) cache.truncate(b, 297 - b);
        cache.append(wrong.k_view(296, 301), wrong.v_view(296, 301), &rope, std::vector<index_t>{4, 5});
        CHECK_FALSE(at(cache) == expected);
        cache.truncate(0, 297);
        cache.truncate(1, 296);
        cache.append(data.k_view(296, 297), data.v_view(296, 297), &rope, std::vector<index_t>{0, 1});
        cache.append(data.k_view(297, 300), data.v_view(297, 300), &rope);
        CHECK(at(cache) == expected);
        cache.clear();
        cache.append(data.k_view(0, 300), data.v_view(0, 300), &rope);
        CHECK(at(cache) == expected);
      }
    }
  });
}

}  // namespace decode_problem::decode_pieces_test
