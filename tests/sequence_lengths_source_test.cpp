// Sequences with their own numbers of queries against a source of keys: each is bit-identical to a call with it alone.

#include "sequence_lengths_problem.hpp"

#include "refusal.hpp"
#include "test_executors.hpp"
#include "wrapped_source.hpp"

namespace sequence_lengths_problem::sequence_lengths_source_test {

/// One sequence of a source.
template <class K>
struct Alone {
  using Element = typename K::Element;

  const K& source;
  index_t sequence;

  KeySourceShape shape() const {
    KeySourceShape all = source.shape();
    all.batch = 1;
    return all;
  }
  index_t length(index_t) const { return source.length(sequence); }
  KeyRange stored(index_t) const { return source.stored(sequence); }
  KeyRun<Element> run(index_t, index_t h, index_t key) const { return source.run(sequence, h, key); }
};

/// The keys of a cache, `page` keys at a time.
template <class T>
struct Pages : WrappedSource<KvCache<T>> {
  index_t page;

  KeyRun<T> run(index_t b, index_t h, index_t key) const {
    KeyRun<T> run = this->source.run(b, h, key);
    run.count = std::min(run.count, page - key % page);
    return run;
  }
};

template <class T>
KvCache<T> cache_of(const Sequences& sequences, const Sizes& sizes, index_t ring = 0) {
  const Sequences padded(sequences.queries, sequences.keys, false);
  const auto k = Tensor<Compute<T>>::random(padded, false, sizes.kv_heads, sizes.d, 100);
  const auto v = Tensor<Compute<T>>::random(padded, false, sizes.kv_heads, sizes.dv, 200);
  KvCache<T> cache({.batch = sequences.count(),
                    .kv_heads = sizes.kv_heads,
                    .width = sizes.d,
                    .value_width = sizes.dv,
                    .capacity = ring > 0 ? ring : padded.most_keys() + 3,
                    .ring = ring > 0});
  cache.append(k.view(), v.view(), nullptr, sequences.keys);
  return cache;
}

SequenceLengths queries_of(const Sequences& sequences, std::vector<index_t>& cumulative) {
  if (!sequences.is_packed) return SequenceLengths::padded_queries(sequences.queries);
  cumulative.assign(1, 0);
  for (const index_t count : sequences.queries) cumulative.push_back(cumulative.back() + count);
  return SequenceLengths::packed_queries(cumulative);
}

template <class T, class K, class M, class C>
void check_bits(const Sequences& sequences, const Sizes& sizes, const K& source, const M& mask,
                const C& score, const AttentionOptions<T>& options, const std::set<Path>& expected) {
  static ThreadPool three(3);
  const LogN scaling;
  std::vector<index_t> cumulative;
  const auto q = Tensor<T>::random(sequences, true, sizes.heads, sizes.d, 1);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << " packed " << sequences.is_packed);
    Tensor<T> out(sequences, true, sizes.heads, sizes.dv);
    Tensor<Compute<T>> lse(sequences, true, sizes.heads, 1);
    const auto paths = paths_alone(sequences, options, [&](index_t b, const AttentionOptions<T>& alone) {
      attention<Compute<T>>(with({.q = q.alone(b),
                                  .keys = Alone<K>{source, b},
                                  .out = out.alone(b),
                                  .lse = lse.numbers_alone(b)},
                                 alone),
                            scaling, mask, score);
    });
    if (ssmax::shared::base_of(active_target()) == active_target()) CHECK(paths == expected);
    AttentionOptions<T> together = options;
    together.lengths = queries_of(sequences, cumulative);
    const auto check = [&](const auto& call, auto&& executor) {
      Tensor<T> result(sequences, true, sizes.heads, sizes.dv);
      Tensor<Compute<T>> result_lse(sequences, true, sizes.heads, 1);
      call({.q = q.view(), .out = result.view(), .lse = result_lse.numbers()}, executor);
      CHECK(result == out);
      CHECK(result_lse == lse);
    };
    const auto attend = [&](const ssmax::AttentionArguments<Compute<T>>& a, auto&& executor) {
      attention<Compute<T>>(with(over(a, source), together), scaling, mask, score, executor);
    };
    check(attend, ssmax::Serial{});
    check(attend, test_executors::Reverse{7});
    check(attend, three);
  });
}

/// Lengths that take every path. As many keys as queries, or more.
Sequences every_path(bool is_packed) {
  return {{0, 1, 7, 40, 3, 0, 128, 5, 61, 300, 2, 17},
          {5, 1, 7, 300, 300, 0, 128, 1500, 70, 1030, 2100, 129},
          is_packed};
}

template <class T>
void check_all(const Sizes& sizes) {
  const std::set<Path> all{Path::short_keys, Path::decode, Path::prefill};
  const ssmax::Rope<Compute<T>> rope({.width = sizes.d / 2 * 2}, 2200);
  const std::vector<Compute<T>> sinks(static_cast<std::size_t>(sizes.heads), Compute<T>(0.5));
  for (const bool is_packed : {true, false}) {
    const Sequences sequences = every_path(is_packed);
    const KvCache<T> cache = cache_of<T>(sequences, sizes);
    check_bits<T>(sequences, sizes, cache, Causal{}, Identity{}, {.rope = &rope}, all);
    check_bits<T>(sequences, sizes, Pages<T>{{cache}, 16}, Causal{}, Identity{}, {.sinks = sinks}, all);
    check_bits<T>(sequences, sizes, Pages<T>{{cache}, 7}, SlidingWindow{50}, Softcap{5},
                  {.rope = &rope, .rotate_source_keys = true}, all);
  }
}

TEST_CASE("lengths of queries over a source: bit-identical to calls with each sequence alone",
          "[decode][lengths][bfloat16][slow]") {
  check_all<float>({4, 2, 16, 16});
  check_all<double>({4, 1, 8, 8});
  check_all<ssmax::half>({4, 4, 8, 9});
  check_all<ssmax::bfloat16>({4, 2, 32, 32});
}

TEST_CASE("lengths of queries over a ring that has forgotten keys", "[decode][lengths]") {
  const Sizes sizes{4, 2, 16, 16};
  for (const bool is_packed : {true, false}) {
    const Sequences sequences({3, 0, 20, 1, 9}, {300, 80, 1500, 90, 40}, is_packed);
    const KvCache<float> ring = cache_of<float>(sequences, sizes, 90);
    check_bits<float>(sequences, sizes, ring, SlidingWindow{60}, Identity{}, {},
                      {Path::short_keys, Path::decode, Path::prefill});
  }
}

/// Checks the message of a call over two sequences of 5 and 3 keys, and that nothing is written.
void check_refused(const SequenceLengths& lengths, index_t batch, index_t rows, const std::string& message) {
  KvCache<float> cache({.batch = 2, .width = 4, .capacity = 8});
  const std::vector<index_t> counts{5, 3};
  const std::vector<float> numbers(std::size_t{2} * 5 * 4, 1.0F);
  const View<const float, 4> keys(numbers.data(), {2, 1, 5, 4});
  cache.append(keys, keys, nullptr, counts);
  const std::vector<float> in(static_cast<std::size_t>(batch * rows * 4), 1.0F);
  std::vector<float> out(in.size(), -77.0F);
  const ssmax::AttentionArguments<float> arguments{.q = {in.data(), {batch, 1, rows, 4}},
                                                   .out = {out.data(), {batch, 1, rows, 4}}};
  const std::string refused = refusal([&] {
    attention(with(over(arguments, cache), AttentionOptions<float>{.lengths = lengths}), Causal{});
  });
  CHECK(std::ranges::all_of(out, [](float x) { return x == -77.0F; }));
  CHECK(refused == "ssmax::attention: " + message);
}

TEST_CASE("lengths of queries over a source: refused before anything is written", "[decode][lengths]") {
  using V = std::vector<index_t>;
  const V cumulative{0, 4, 5}, three{0, 1, 2, 5}, late{0, 4, 6}, two{4, 1}, one{4}, longer{4, 4};
  check_refused(SequenceLengths::packed(cumulative), 1, 5,
                "lengths.keys have extent 3, must be 0 over a source: use packed_queries");
  check_refused(SequenceLengths::packed_queries(three), 1, 5,
                "lengths.queries have sequence count 3, the source has 2");
  check_refused(SequenceLengths::packed_queries(late), 1, 5, "lengths.queries end with 6, q has 5 rows");
  check_refused(SequenceLengths::packed_queries(cumulative), 2, 5,
                "q has 2 batch entries, must have 1 where lengths are packed");
  check_refused(SequenceLengths::padded_queries(two), 2, 3,
                "lengths.queries of sequence 0 are 4, must be within 0 and the rows of q, 3");
  check_refused(SequenceLengths::padded_queries(one), 2, 5,
                "lengths.queries have extent 1, q has 2 batch entries");
  check_refused(SequenceLengths::padded_queries(longer), 2, 5,
                "q has 4 positions of sequence 1, which has 3 keys: append the keys first, or set "
                "more_queries_than_keys");
  // Calls over views need the lengths of keys.
  const std::vector<float> in(20, 1.0F);
  std::vector<float> out(20);
  const View<const float, 4> view(in.data(), {1, 1, 5, 4});
  CHECK(refusal([&] {
          attention({.q = view,
                     .k = view,
                     .v = view,
                     .out = {out.data(), {1, 1, 5, 4}},
                     .lengths = SequenceLengths::packed_queries(cumulative)},
                    Causal{});
        }) == "ssmax::attention: lengths.queries have extent 3, lengths.keys have 0");
}

}  // namespace sequence_lengths_problem::sequence_lengths_source_test
