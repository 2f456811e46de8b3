// Gradients of sequences of different lengths: each has the bits of a call with it alone.

#include "refusal.hpp"
#include "sequence_lengths_problem.hpp"
#include "test_executors.hpp"

namespace sequence_lengths_problem::sequence_lengths_backward_test {

template <class T>
struct Gradient {
  Tensor<T> dq, dk, dv;
  std::vector<Compute<T>> ds, db, dsinks;

  Gradient(const Sequences& s, const Sizes& sizes)
      : dq(s, true, sizes.heads, sizes.d),
        dk(s, false, sizes.kv_heads, sizes.d),
        dv(s, false, sizes.kv_heads, sizes.dv),
        ds(static_cast<std::size_t>(sizes.heads)),
        db(ds),
        dsinks(ds) {}
  bool operator==(const Gradient& other) const {
    return dq == other.dq && dk == other.dk && dv == other.dv && same_bits(ds, other.ds) &&
           same_bits(db, other.db) && same_bits(dsinks, other.dsinks);
  }
};

template <class T, class M, class C>
void check_bits(const Sequences& sequences, const Sizes& sizes, const M& mask, const C& score,
                const AttentionOptions<T>& options, bool accumulate = false) {
  static ThreadPool three(3);
  const auto q = Tensor<T>::random(sequences, true, sizes.heads, sizes.d, 1);
  const auto k = Tensor<T>::random(sequences, false, sizes.kv_heads, sizes.d, 100);
  const auto v = Tensor<T>::random(sequences, false, sizes.kv_heads, sizes.dv, 200);
  const auto dout = Tensor<T>::random(sequences, true, sizes.heads, sizes.dv, 300);
  const std::vector<Compute<T>> s(static_cast<std::size_t>(sizes.heads), Compute<T>(0.4)), b(s.size());
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << " packed " << sequences.is_packed);
    Tensor<T> out_memory(sequences, true, sizes.heads, sizes.dv);
    Tensor<Compute<T>> lse_memory(sequences, true, sizes.heads, 1);
    const auto run = [&](Gradient<T>& g, index_t sequence, auto&& executor) {
      const Tensor<T>& out = out_memory;
      const Tensor<Compute<T>>& lse = lse_memory;
      AttentionOptions<T> own = options;
      const bool all = sequence < 0;
      const index_t i = sequence;
      if (all) own.lengths = sequences.lengths();
      const std::span<const Compute<T>> own_s = s, own_b = b;
      const SSMax<Compute<T>> scaling(own_s, own_b);
      attention_backward<Compute<T>>(
          backward_with(backward_over_views(all ? q.view() : q.alone(i), all ? k.view() : k.alone(i),
                                            all ? v.view() : v.alone(i), all ? out.view() : out.alone(i),
                                            all ? lse.numbers() : lse.numbers_alone(i)),
                        own),
          {.dout = all ? dout.view() : dout.alone(i),
           .dq = all ? g.dq.view() : g.dq.alone(i),
           .dk = all ? g.dk.view() : g.dk.alone(i),
           .dv = all ? g.dv.view() : g.dv.alone(i),
           .dsinks = options.sinks.empty() ? std::span<Compute<T>>() : std::span<Compute<T>>(g.dsinks),
           .accumulate = accumulate},
          scaling.gradient(std::span<Compute<T>>(g.ds), std::span<Compute<T>>(g.db)), mask, score, executor);
    };
    Gradient<T> alone(sequences, sizes);
    for (index_t i = 0; i < sequences.count(); ++i) {
      attention<Compute<T>>(with(over_views(q.alone(i), k.alone(i), v.alone(i), out_memory.alone(i),
                                            lse_memory.numbers_alone(i)),
                                 options),
                            SSMax<Compute<T>>(Compute<T>(0.4)), mask, score);
      run(alone, i, Serial{});
    }
    const auto check = [&](auto&& executor) {
      Gradient<T> together(sequences, sizes);
      run(together, -1, executor);
      CHECK(together.dq == alone.dq);
      CHECK(together.dk == alone.dk);
      CHECK(together.dv == alone.dv);
      CHECK(together.ds == alone.ds);
      CHECK(together.db == alone.db);
      CHECK(together.dsinks == alone.dsinks);
    };
    check(Serial{});
    check(three);
    check(test_executors::Reverse{64});
  });
}

template <class T>
void check_all(const Sizes& sizes) {
  const Rope<Compute<T>> rope({.width = 8}, 900);
  const std::vector<Compute<T>> sinks{Compute<T>(0.5), -1, 0, 3};
  for (const bool is_packed : {true, false}) {
    // Short ones that share threads, and long ones that do not.
    const Sequences sequences({0, 1, 7, 40, 3, 0, 128, 129, 5, 61, 300, 17, 70},
                              {5, 1, 7, 40, 300, 0, 128, 129, 800, 0, 530, 129, 33}, is_packed);
    check_bits<T>(sequences, sizes, Causal{}, Identity{}, {});
    check_bits<T>(sequences, sizes, Full{}, Softcap{5}, {.sinks = sinks});
    check_bits<T>(sequences, sizes, SlidingWindow{200, 3}, Identity{}, {.rope = &rope, .key_position = 40});
    check_bits<T>(sequences, sizes, Causal{}, Identity{}, {}, true);
    check_bits<T>(sequences, sizes, SlidingWindow{200, 3}, Identity{}, {.rope = &rope, .key_position = 40},
                  true);
    const std::vector<index_t> same(30, 33);
    check_bits<T>({same, same, is_packed}, sizes, Causal{}, Identity{}, {});
    check_bits<T>({{0, 0}, {20, 0}, is_packed}, sizes, Causal{}, Identity{}, {});
  }
}

TEST_CASE("lengths: gradients of a sequence are bit-identical to a call with it alone",
          "[attention][backward][lengths][bfloat16][slow]") {
  check_all<float>({4, 2, 16, 16});
  check_all<bfloat16>({4, 2, 32, 32});
}

TEST_CASE("lengths: gradients of a sequence are bit-identical to a call with it alone, other sizes",
          "[attention][backward][lengths][slow][exhaustive]") {
  check_all<float>({4, 4, 9, 5});
  check_all<double>({4, 1, 8, 8});
  check_all<ssmax::half>({4, 2, 16, 9});
}

TEST_CASE("lengths: dbias counts from the start of each sequence, and may be summed over sequences",
          "[attention][backward][lengths]") {
  const Sequences sequences({3, 40, 0, 50}, {30, 40, 7, 60}, true);
  const Sizes sizes{2, 2, 8, 8};
  const index_t most_queries = sequences.most_queries(), most_keys = sequences.most_keys();
  const std::size_t size = static_cast<std::size_t>(sizes.heads * most_queries * most_keys);
  static ThreadPool three(3);
  for (const bool is_shared : {false, true}) {
    const std::array<index_t, 4> extents{4, sizes.heads, most_queries, most_keys};
    const std::array<index_t, 4> strides{is_shared ? 0 : sizes.heads * most_queries * most_keys,
                                         most_queries * most_keys, most_keys, 1};
    const std::vector<float> values = reference::normals<float>(size * 4, 5);
    std::vector<float> alone(size * 4), together(size * 4);
    const auto q = Tensor<float>::random(sequences, true, sizes.heads, sizes.d, 1);
    const auto k = Tensor<float>::random(sequences, false, sizes.heads, sizes.d, 100);
    const auto v = Tensor<float>::random(sequences, false, sizes.heads, sizes.dv, 200);
    Tensor<float> out(sequences, true, sizes.heads, sizes.dv), lse(sequences, true, sizes.heads, 1);
    Gradient<float> g(sequences, sizes), h(sequences, sizes);
    const Tensor<float>&in = out, &in_lse = lse;
    const View<const float, 4> bias(values.data(), extents, strides);
    for (index_t b = 0; b < 4; ++b) {
      const auto i = static_cast<std::size_t>(b);
      const std::array<index_t, 4> own{1, sizes.heads, sequences.queries[i], sequences.keys[i]};
      const Bias own_bias(View<const float, 4>(values.data() + b * strides[0], own, strides));
      attention(over_views(q.alone(b), k.alone(b), v.alone(b), out.alone(b), lse.numbers_alone(b)), Causal{},
                own_bias);
      attention_backward(
          backward_over_views(q.alone(b), k.alone(b), v.alone(b), in.alone(b), in_lse.numbers_alone(b)),
          {.dout = q.alone(b), .dq = g.dq.alone(b), .dk = g.dk.alone(b), .dv = g.dv.alone(b)}, Causal{},
          own_bias.gradient(View<float, 4>(alone.data() + b * strides[0], own, strides)));
    }
    attention_backward({.q = q.view(),
                        .k = k.view(),
                        .v = v.view(),
                        .out = in.view(),
                        .lse = in_lse.numbers(),
                        .lengths = sequences.lengths()},
                       {.dout = q.view(), .dq = h.dq.view(), .dk = h.dk.view(), .dv = h.dv.view()}, Causal{},
                       Bias(bias).gradient(View<float, 4>(together.data(), extents, strides)), three);
    CHECK(h == g);
    CHECK(same_bits(together, alone));
  }
}

TEST_CASE("lengths: gradients of a part are refused", "[attention][backward][lengths]") {
  const std::vector<index_t> cumulative{0, 2, 3};
  const std::vector<float> in(12, 1.0F);
  std::vector<float> dq(12, -77.0F), dk(dq), dv(dq);
  const std::array<index_t, 4> extents{1, 1, 3, 4};
  const View<const float, 4> view(in.data(), extents);
  const std::string message = refusal([&] {
    attention_backward(
        {.q = view,
         .k = view,
         .v = view,
         .out = view,
         .lse = {in.data(), {1, 1, 3}},
         .lengths = SequenceLengths::packed(cumulative),
         .first_key = 2,
         .all_keys = 5},
        {.dout = view, .dq = {dq.data(), extents}, .dk = {dk.data(), extents}, .dv = {dv.data(), extents}},
        Causal{});
  });
  CHECK(
      message ==
      "ssmax::attention_backward: lengths are given for 2 sequences, the call of a part of the keys takes 0");
  CHECK(std::ranges::all_of(dq, [](float x) { return x == -77.0F; }));
}

}  // namespace sequence_lengths_problem::sequence_lengths_backward_test
