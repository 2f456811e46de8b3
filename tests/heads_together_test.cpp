// kv heads whose keys lie between each other are computed together, chunk by chunk. Results are those of a cache, in
// which each kv head lies apart.

#include "decode_problem.hpp"
#include "own_policies.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace decode_problem::heads_together_test {

using ssmax::KeyRange, ssmax::KeyRun, ssmax::KeySourceShape, ssmax::PagedKeys, ssmax::PageTable;
using ssmax::SlidingWindow;
using test_executors::Threads;

/// The keys of a cache in memory [batch, key, kv_heads, channel]. Runs of sequences after the first one have at most
/// `longest_run` keys.
template <class X>
class TokenMajor {
 public:
  using Element = X;

  explicit TokenMajor(const KvCache<X>& cache, index_t longest_run = std::numeric_limits<index_t>::max())
      : cache_(cache), longest_run_(longest_run) {
    for (index_t b = 0; b < shape().batch; ++b) longest_ = std::max(longest_, cache.length(b));
    k_.resize(static_cast<std::size_t>(shape().batch * longest_ * shape().kv_heads * shape().width));
    v_.resize(static_cast<std::size_t>(shape().batch * longest_ * shape().kv_heads * shape().value_width));
    for (index_t b = 0; b < shape().batch; ++b) {
      for (index_t key = 0; key < cache.length(b); ++key) {
        for (index_t h = 0; h < shape().kv_heads; ++h) {
          const KeyRun<X> from = cache.run(b, h, key), to = run(b, h, key);
          std::copy_n(from.k, shape().width, const_cast<X*>(to.k));
          std::copy_n(from.v, shape().value_width, const_cast<X*>(to.v));
        }
      }
    }
  }
  TokenMajor(const TokenMajor&) = delete;
  TokenMajor& operator=(const TokenMajor&) = delete;

  KeySourceShape shape() const { return cache_.shape(); }
  index_t length(index_t batch) const { return cache_.length(batch); }
  KeyRange stored(index_t batch) const { return {0, length(batch)}; }
  KeyRun<X> run(index_t batch, index_t kv_head, index_t key) const {
    const index_t heads = shape().kv_heads, row = (batch * longest_ + key) * heads + kv_head;
    return {
        .k = k_.data() + row * shape().width,
        .k_stride = heads * shape().width,
        .v = v_.data() + row * shape().value_width,
        .v_stride = heads * shape().value_width,
        .count = std::min(length(batch) - key, batch == 0 ? length(0) : longest_run_ - key % longest_run_)};
  }

 private:
  const KvCache<X>& cache_;
  const index_t longest_run_;
  index_t longest_ = 0;
  std::vector<X> k_, v_;
};

struct EveryOther {
  KeyRange keys(const ssmax::Query& query) const { return Causal{}.keys(query); }
  bool sees(const ssmax::Query&, index_t key) const { return key % 2 == 0; }
};

/// Checks the bits of decode over [batch, key, kv_heads, channel], and how many heads one and three threads compute
/// together.
template <class T, class M = Causal>
void check(const Shape& shape, index_t alone, index_t together, const M& mask = {}) {
  const Data<T> data(shape);
  const KvCache<T> cache = filled<T>(data);
  const TokenMajor<T> keys(cache);
  const ssmax::SSMax<Compute<T>> scaling{Compute<T>(0.4)};
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << " " << name_of(shape));
    const Output<T> expected = run(data, cache, scaling, mask);
    CHECK(expected.explanation.heads_together == 1);
    const Output<T> serial = run(data, keys, scaling, mask);
    CHECK(serial.explanation.heads_together == alone);
    CHECK(serial == expected);
    const Output<T> parallel = run(data, keys, scaling, mask, Identity{}, {}, Threads{3});
    CHECK(parallel.explanation.heads_together == together);
    // Fewer than six tasks on three threads split their keys in any case.
    if (shape.kv_heads >= 6 && together == 1) CHECK(parallel.explanation.key_chunks == 1);
    CHECK(parallel == expected);
  });
}

TEST_CASE("kv heads between each other are computed together, bit by bit as alone", "[decode][bfloat16]") {
  SECTION("numbers of kv heads") {
    check<float>({12, 12, 1, 24, 9, {4500}}, 12, 4);
    check<float>({12, 12, 1, 24, 9, {2500}}, 12, 1);
    check<float>({3, 3, 1, 8, 8, {4096}}, 3, 1);
    check<float>({17, 17, 1, 8, 8, {1100}}, 1, 1);
    check<float>({17, 17, 1, 8, 8, {5000}}, 1, 1);
    check<float>({32, 32, 1, 8, 8, {1100, 2049}}, 16, 4);
  }
  SECTION("types and numbers of queries") {
    check<bfloat16>({6, 6, 1, 64, 64, {3000}}, 6, 1);
    check<bfloat16>({12, 6, 2, 64, 64, {3000}}, 6, 1);
    check<bfloat16>({16, 2, 1, 64, 64, {5000}}, 2, 1);
    check<half>({8, 4, 1, 40, 24, {1500}}, 4, 1);
    check<double>({4, 4, 3, 24, 24, {1500}}, 4, 1);
    check<float>({8, 2, 4, 24, 24, {3000}}, 2, 1);
  }
  SECTION("sequences of different lengths") {
    check<float>({4, 4, 1, 24, 9, {1, 2500, 1024, 3, 1025, 700, 2048, 64, 512, 9, 1300, 2, 44}}, 4, 1);
    check<float>({4, 4, 1, 24, 24, std::vector<index_t>(40, 1100)}, 4, 4);
    check<bfloat16>({16, 2, 1, 64, 64, {5000, 6, 1025}}, 2, 2);
  }
  SECTION("masks") {
    check<float>({8, 4, 1, 24, 24, {4000, 1200}}, 4, 2, SlidingWindow{3000});
    check<bfloat16>({16, 2, 1, 64, 64, {4000, 1200}}, 2, 1, SlidingWindow{3000});
    check<float>({8, 8, 5, 24, 24, {4000, 1200}}, 8, 4, ssmax::Full{});
    // Few of the keys are visible, or the mask has runs or a predicate.
    check<float>({8, 4, 1, 24, 24, {4000, 1200}}, 1, 1, SlidingWindow{60});
    check<float>({8, 8, 5, 24, 24, {4000, 1200}}, 1, 1, own_policies::Careless{});
    check<float>({8, 4, 1, 24, 24, {4000, 1200}}, 1, 1, ssmax::SlidingWindow{59, 0, 32});
    check<float>({8, 4, 1, 24, 24, {4000, 1200}}, 1, 1, EveryOther{});
  }
  SECTION("keys of one chunk") {
    check<float>({4, 4, 1, 24, 24, {1024, 5}}, 4, 1);
    check<float>({12, 12, 1, 16, 24, std::vector<index_t>(8, 300)}, 12, 6);
    check<bfloat16>({12, 12, 1, 16, 24, std::vector<index_t>(20, 300)}, 12, 12);
    check<float>({4, 4, 1, 24, 24, {255}}, 1, 1);
  }
  SECTION("a task has at most 16 rows") {
    check<float>({32, 8, 1, 24, 24, {600}}, 4, 1);
    check<half>({32, 8, 1, 24, 24, {1500}}, 8, 1);
    check<float>({8, 4, 3, 24, 24, {900}}, 2, 1);
    check<float>({18, 2, 1, 24, 24, {900}}, 1, 1);
  }
}

/// The distance between kv heads is not known for a source of one's own, so its rows are not listed.
TEMPLATE_TEST_CASE("kv heads are computed together if runs are long in one sequence and short in another",
                   "[decode]", float, half) {
  const Data<TestType> data({6, 6, 2, 24, 9, {1100, 1300, 40}});
  const KvCache<TestType> cache = filled<TestType>(data);
  const TokenMajor<TestType> keys(cache, 5);
  for_each_target_of<TestType>([&](const std::string& target) {
    INFO(target);
    const Output<TestType> expected = run(data, cache), got = run(data, keys);
    CHECK(got.explanation.heads_together == 6);
    CHECK(got == expected);
  });
}

TEST_CASE("a plan over one layout of the keys runs over another", "[decode][plan]") {
  constexpr index_t size = 16, pages = 160, heads = 6, d = 24;
  const Data<float> data({heads, heads, 1, d, d, {size * pages}});
  const KvCache<float> cache = filled<float>(data);
  std::vector<int> table(pages), lengths{size * pages};
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int>(i * 7 % table.size());
  std::vector<float> apart_k(static_cast<std::size_t>(heads * size * pages * d)), apart_v(apart_k),
      k(apart_k), v(k);
  const std::array<index_t, 4> extents{pages, size, heads, d};
  // The kv heads of the first layout lie apart, those of the second between each other.
  const std::array<index_t, 4> apart{size * d, d, pages * size * d, 1},
      between{size * heads * d, heads * d, d, 1};
  const auto pool = [&](std::vector<float>& of_k, std::vector<float>& of_v,
                        const std::array<index_t, 4>& strides) {
    for (index_t h = 0; h < heads; ++h) {
      for (index_t key = 0; key < size * pages; ++key) {
        const index_t page = table[static_cast<std::size_t>(key / size)];
        const auto at = page * strides[0] + key % size * strides[1] + h * strides[2];
        const KeyRun<float> from = cache.run(0, h, key);
        std::copy_n(from.k, d, of_k.data() + at);
        std::copy_n(from.v, d, of_v.data() + at);
      }
    }
    return PagedKeys(
        View<const float, 4>(of_k.data(), extents, strides),
        View<const float, 4>(of_v.data(), extents, strides),
        PageTable<int>(View<const int, 2>(table.data(), {1, pages}), std::span<const int>(lengths)));
  };
  const auto first = pool(apart_k, apart_v, apart), second = pool(k, v, between);
  const Output<float> expected = run(data, cache);
  CHECK(run(data, first).explanation.heads_together == 1);
  CHECK(run(data, second).explanation.heads_together == heads);
  for (const index_t threads : {1, 2, 5}) {
    INFO(threads << " threads");
    const auto check_plan = [&](const auto& planned, const auto& bound) {
      Output<float> got(data.shape);
      const ssmax::Plan plan(over(arguments_of(data, got), planned), threads, Causal{});
      ssmax::Workspace workspace;
      plan.bind(over(arguments_of(data, got), bound))
          .run(std::span(workspace.reserve(plan.bytes()), plan.bytes()), Threads{threads});
      CHECK(got == expected);
    };
    check_plan(first, second);
    check_plan(second, first);
  }
}

// ---- out is q ---------------------------------------------------------------------------------------------

/// kv heads computed together, and key chunks, with one thread and with three.
struct Cut {
  std::array<index_t, 2> together{1, 1}, chunks{1, 1};
};

/// Calls attend(arguments) with an out of its own and with q as out. Results have the same bits.
template <class T, class Attend>
void check_out_is_q(const Data<T>& data, const std::array<index_t, 3>& rows, const Attend& attend) {
  const auto run = [&](bool is_in_place) {
    std::vector<T> q = data.q, out(q.size());
    std::vector<Compute<T>> numbers(static_cast<std::size_t>(3 * data.shape.rows()));
    const auto tensor = [&](std::vector<T>& of) {
      return View<T, 4>(of.data(), {rows[0], rows[1], rows[2], data.shape.d});
    };
    const auto row_numbers = [&](index_t i) {
      return View<Compute<T>, 3>(numbers.data() + i * data.shape.rows(), rows);
    };
    attend(
        AttentionArguments<Compute<T>>{.q = tensor(q),
                                       .out = tensor(is_in_place ? q : out),
                                       .lse = row_numbers(0),
                                       .statistics = {.largest = row_numbers(1), .entropy = row_numbers(2)}});
    return std::pair(is_in_place ? q : out, numbers);
  };
  const auto [expected, expected_numbers] = run(false);
  const auto [got, numbers] = run(true);
  CHECK(same_bits(got, expected));
  CHECK(same_bits(numbers, expected_numbers));
}

/// Checks calls and plans over a source, with and without statistics, rope and batch_invariant. Calls of several queries
/// give no cut: it depends on the target's tiles.
template <class T, class K>
void check_out_is_q(const Data<T>& data, const K& keys, const std::optional<Cut>& cut,
                    const SequenceLengths& lengths = {}) {
  using A = AttentionArguments<Compute<T>>;
  const Shape& s = data.shape;
  const std::array<index_t, 3> rows{lengths.is_given() ? 1 : s.batch(), s.heads,
                                    lengths.is_given() ? s.batch() * s.queries : s.queries};
  const ssmax::Rope<Compute<T>> rope({.width = s.d}, s.longest());
  for (const bool has_options : {false, true}) {
    for (const bool has_statistics : {false, true}) {
      for (std::size_t i = 0; i < 2; ++i) {
        const Threads executor{i == 0 ? 1 : 3};
        const auto of_call = [&](A a) {
          a.keys = keys;
          if (!has_statistics) a.statistics = {};
          return a;
        };
        const auto with_all = [&](const A& a, Explanation* explanation) {
          A all = of_call(a);
          all.lengths = lengths;
          all.batch_invariant = has_options;
          all.rope = has_options ? &rope : nullptr;
          all.explanation = explanation;
          return all;
        };
        const auto check_cut = [&](const Explanation& e) {
          if (has_options || !cut) return;  // prefill, which has other query blocks
          INFO(to_string(e));
          CHECK(e.heads_together == cut->together[i]);
          CHECK(e.key_chunks == cut->chunks[i]);
        };
        check_out_is_q(data, rows, [&](const A& a) {
          Explanation explanation;
          attention<Compute<T>>(with_all(a, &explanation), Causal{}, executor);
          check_cut(explanation);
        });
        check_out_is_q(data, rows, [&](const A& a) {
          const ssmax::Plan<Compute<T>> plan(with_all(a, nullptr), executor.threads, Causal{});
          check_cut(plan.explanation());
          ssmax::Workspace workspace;
          plan.run(of_call(a), std::span(workspace.reserve(plan.bytes()), plan.bytes()), executor);
        });
      }
    }
  }
}

template <class T>
void check_out_is_q() {
  const Data<T> one({36, 6, 1, 16, 16, {4500}}), long_one({4, 2, 1, 16, 16, {3000}}),
      several({4, 2, 40, 16, 16, {300, 1100}}), packed({4, 2, 20, 16, 16, {300, 1100, 70}});
  const KvCache<T> cache = filled<T>(one), of_long = filled<T>(long_one), of_several = filled<T>(several),
                   of_packed = filled<T>(packed);
  const TokenMajor<T> between(cache);
  const std::vector<index_t> cumulative{0, 1, 40, 60};
  for_each_target_of<T>([&](const std::string&) {
    check_out_is_q(one, between, Cut{.together = {6, 2}, .chunks = {1, 5}});
    check_out_is_q(long_one, of_long, Cut{.chunks = {1, 3}});
    check_out_is_q(several, of_several, {});
    check_out_is_q(packed, of_packed, {}, SequenceLengths::packed_queries(cumulative));
  });
}

TEST_CASE("out is q over a source: bit-identical to an out of its own", "[decode][plan][bfloat16]") {
  check_out_is_q<float>();
  check_out_is_q<bfloat16>();
}

}  // namespace decode_problem::heads_together_test
