// Sequences of different lengths in one call: each has the bits of a call with it alone.

#include "sequence_lengths_problem.hpp"

#include "refusal.hpp"
#include "test_executors.hpp"

namespace sequence_lengths_problem::sequence_lengths_test {

/// Lengths that take every path: without queries or keys, few queries, short, many.
Sequences every_path(bool is_packed) {
  return {{0, 1, 7, 40, 3, 0, 128, 129, 5, 61, 300, 2, 17, 2, 70},
          {5, 1, 7, 40, 300, 0, 128, 129, 1500, 0, 1030, 20, 129, 2100, 33},
          is_packed};
}

template <class T, class S, class M, class C>
void check_bits(const Sequences& sequences, const Sizes& sizes, const S& scaling, const M& mask,
                const C& score, const AttentionOptions<T>& options, const std::set<Path>& expected) {
  static ThreadPool three(3);
  const auto q = Tensor<T>::random(sequences, true, sizes.heads, sizes.d, 1);
  const auto k = Tensor<T>::random(sequences, false, sizes.kv_heads, sizes.d, 100);
  const auto v = Tensor<T>::random(sequences, false, sizes.kv_heads, sizes.dv, 200);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << " packed " << sequences.is_packed);
    Tensor<T> out(sequences, true, sizes.heads, sizes.dv);
    Tensor<Compute<T>> lse(sequences, true, sizes.heads, 1);
    const auto paths = paths_alone(sequences, options, [&](index_t b, const AttentionOptions<T>& alone) {
      attention<Compute<T>>(
          with(over_views(q.alone(b), k.alone(b), v.alone(b), out.alone(b), lse.numbers_alone(b)), alone),
          scaling, mask, score);
    });
    if (ssmax::shared::base_of(active_target()) == active_target()) CHECK(paths == expected);
    AttentionOptions<T> together = options;
    together.lengths = sequences.lengths();
    const auto check = [&](auto&& executor) {
      Tensor<T> result(sequences, true, sizes.heads, sizes.dv);
      Tensor<Compute<T>> result_lse(sequences, true, sizes.heads, 1);
      Explanation explanation;
      together.explanation = &explanation;
      attention<Compute<T>>(
          with(over_views(q.view(), k.view(), v.view(), result.view(), result_lse.numbers()), together),
          scaling, mask, score, executor);
      CHECK(paths.empty() == (explanation.path == Path::none));
      CHECK((paths.empty() || paths.contains(explanation.path)));
      CHECK(result == out);
      CHECK(result_lse == lse);
    };
    check(Serial{});
    check(three);
    check(test_executors::Reverse{64});
  });
}

template <class T>
void check_all(const Sizes& sizes) {
  const Rope<Compute<T>> rope({.width = 8}, 2200);
  const std::vector<Compute<T>> sinks{Compute<T>(0.5), -1, 0, 3};
  const std::set<Path> all{Path::short_keys, Path::decode, Path::prefill};
  for (const bool is_packed : {true, false}) {
    const Sequences sequences = every_path(is_packed);
    const SSMax<Compute<T>> scaling(Compute<T>(0.4), Compute<T>(0.1));
    check_bits<T>(sequences, sizes, scaling, Causal{}, Identity{}, {}, all);
    check_bits<T>(sequences, sizes, scaling, Full{}, Softcap{5}, {.sinks = sinks}, all);
    check_bits<T>(sequences, sizes, LogN{}, SlidingWindow{200, 3}, Identity{},
                  {.rope = &rope, .key_position = 40}, all);
  }
}

TEST_CASE("lengths: a sequence is bit-identical to a call with it alone",
          "[attention][lengths][bfloat16][slow]") {
  check_all<float>({4, 2, 16, 16});
  check_all<ssmax::half>({4, 2, 16, 9});
  check_all<bfloat16>({4, 2, 32, 32});
}

TEST_CASE("lengths: a sequence is bit-identical to a call with it alone, other sizes",
          "[attention][lengths][bfloat16][slow][exhaustive]") {
  check_all<float>({4, 4, 9, 5});
  check_all<double>({4, 1, 8, 8});
  check_all<bfloat16>({4, 1, 9, 24});
}

TEST_CASE("lengths: sequences of one path, and few tasks", "[attention][lengths]") {
  for (const bool is_packed : {true, false}) {
    check_bits<float>({{40, 9, 64}, {40, 9, 64}, is_packed}, {4, 4, 16, 16}, LogN{}, Causal{}, Identity{}, {},
                      {Path::short_keys});
    check_bits<float>({{1, 2}, {5000, 300}, is_packed}, {4, 4, 16, 16}, LogN{}, Causal{}, Identity{}, {},
                      {Path::decode});
    check_bits<float>({{20}, {5000}, is_packed}, {4, 4, 16, 16}, LogN{}, Causal{}, Identity{}, {},
                      {Path::prefill});
    check_bits<float>({{0, 0}, {20, 0}, is_packed}, {4, 4, 16, 16}, LogN{}, Causal{}, Identity{}, {}, {});
  }
}

TEST_CASE("lengths: policies count queries and keys from the start of each sequence",
          "[attention][lengths]") {
  const Sizes sizes{4, 2, 16, 16};
  for (const bool is_packed : {true, false}) {
    const Sequences sequences({3, 40, 0, 150}, {300, 40, 7, 200}, is_packed);
    const index_t count = sequences.count(), queries = sequences.most_queries(), keys = sequences.most_keys();
    const std::array<index_t, 4> extents{count, sizes.heads, queries, keys};
    const std::vector<float> biases = reference::normals<float>(Sequences::size(extents), 5);
    const std::vector<float> multipliers =
        reference::normals<float>(static_cast<std::size_t>(count * sizes.heads * queries), 6);
    const View<const float, 4> bias(biases.data(), extents);
    const View<const float, 3> c(multipliers.data(), {count, sizes.heads, queries});
    const auto q = Tensor<float>::random(sequences, true, sizes.heads, sizes.d, 1);
    const auto k = Tensor<float>::random(sequences, false, sizes.kv_heads, sizes.d, 100);
    const auto v = Tensor<float>::random(sequences, false, sizes.kv_heads, sizes.dv, 200);
    Tensor<float> alone(sequences, true, sizes.heads, sizes.dv), together = alone;
    for (index_t b = 0; b < count; ++b) {
      const auto i = static_cast<std::size_t>(b);
      const View<const float, 4> own_bias(bias.data_handle() + b * bias.stride(0),
                                          {1, sizes.heads, sequences.queries[i], sequences.keys[i]},
                                          {0, bias.stride(1), bias.stride(2), 1});
      const View<const float, 3> own_c(c.data_handle() + b * c.stride(0),
                                       {1, sizes.heads, sequences.queries[i]}, {0, c.stride(1), 1});
      const Where mask([&](const Query& query, index_t key) { return (query.index + key + b) % 3 != 0; });
      attention({.q = q.alone(b), .k = k.alone(b), .v = v.alone(b), .out = alone.alone(b)}, PerQuery(own_c),
                mask, Bias(own_bias));
    }
    const Where mask([&](const Query& query, index_t key) {
      const auto i = static_cast<std::size_t>(query.batch);
      const bool fits = query.shape.batch == count && query.shape.queries == sequences.queries[i] &&
                        query.shape.keys == sequences.keys[i];
      return fits && (query.index + key + query.batch) % 3 != 0;
    });
    attention(
        {.q = q.view(), .k = k.view(), .v = v.view(), .out = together.view(), .lengths = sequences.lengths()},
        PerQuery(c), mask, Bias(bias));
    CHECK(together == alone);
  }
}

/// Checks the message of a call of two sequences with other lengths, and that nothing is written.
void check_refused(const SequenceLengths& lengths, index_t batch, index_t rows, const std::string& message) {
  const std::vector<float> in(static_cast<std::size_t>(batch * rows * 4), 1.0F);
  std::vector<float> out(in.size(), -77.0F);
  const View<const float, 4> view(in.data(), {batch, 1, rows, 4});
  const std::string refused = refusal([&] {
    attention({.q = view, .k = view, .v = view, .out = {out.data(), {batch, 1, rows, 4}}, .lengths = lengths},
              Causal{});
  });
  CHECK(std::ranges::all_of(out, [](float x) { return x == -77.0F; }));
  CHECK(refused == "ssmax::attention: " + message);
}

TEST_CASE("lengths: refused before anything is written", "[attention][lengths]") {
  using V = std::vector<index_t>;
  const V good{0, 3, 5}, other{0, 1, 2, 5}, falls{0, 6, 5}, late{1, 3, 5}, ends{0, 3, 6}, none;
  check_refused(SequenceLengths::packed(good, other), 1, 5,
                "lengths.queries have extent 3, lengths.keys have 4");
  check_refused(SequenceLengths::packed(falls), 1, 5, "lengths.queries fall from 6 to 5 in sequence 1");
  check_refused(SequenceLengths::packed(late), 1, 5, "lengths.queries begin with 1, must begin with 0");
  check_refused(SequenceLengths::packed(good, ends), 1, 5, "lengths.keys end with 6, k has 5 rows");
  check_refused(SequenceLengths::packed(none), 1, 5, "lengths.queries have extent 0, must have at least 1");
  check_refused(SequenceLengths::packed(good), 2, 5,
                "q has 2 batch entries, must have 1 where lengths are packed");
  const V two{3, 5}, three{3, 5, 1}, negative{3, -1}, long_one{6, 2};
  check_refused(SequenceLengths::padded(three), 2, 5, "lengths.queries have extent 3, q has 2 batch entries");
  check_refused(SequenceLengths::padded(two, negative), 2, 5,
                "lengths.keys of sequence 1 are -1, must be within 0 and the rows of k, 5");
  check_refused(SequenceLengths::padded(long_one, two), 2, 5,
                "lengths.queries of sequence 0 are 6, must be within 0 and the rows of q, 5");
}

TEST_CASE("the masks Lengths and Documents are refused with lengths", "[attention][lengths]") {
  const std::vector<index_t> rows{3, 1}, visible(6, 1), documents{0, 3};
  const std::vector<float> in(24, 1.0F);
  std::vector<float> out(24);
  const View<const float, 4> view(in.data(), {2, 1, 3, 4});
  const auto message = [&](const auto& mask) {
    return refusal([&] {
      attention({.q = view,
                 .k = view,
                 .v = view,
                 .out = {out.data(), {2, 1, 3, 4}},
                 .lengths = SequenceLengths::padded(rows)},
                mask);
    });
  };
  const std::string refused =
      "ssmax::attention: the masks Lengths and Documents do not take lengths, given for 2 sequences";
  CHECK(message(Lengths(visible)) == refused);
  CHECK(message(Documents(documents, true)) == refused);
  CHECK(message(Causal{} & Lengths(visible)) == refused);
  CHECK(message(Causal{} & SlidingWindow{3}) == "(nothing was thrown)");
}

}  // namespace sequence_lengths_problem::sequence_lengths_test
