// A rope with positions of its own for each sequence of a batch: each sequence has the bits of a call with it alone.

#include <ssmax/kv_cache.hpp>
#include <ssmax/paged_kv_cache.hpp>

#include "attention_backward_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace attention_problem::rope_sequences_test {

using namespace ssmax;

constexpr index_t batch = 3, tokens = 40;
const std::vector<index_t> axes{0, 1, 1, 0};

RopeOptions options(std::span<const double> frequencies = {}) {
  return {.width = 8, .frequencies = frequencies};
}

/// Positions [sequence, axis, token]: sequence b begins at its own position, and axis 1 stands still for a while.
std::vector<index_t> positions() {
  std::vector<index_t> all;
  for (index_t b = 0; b < batch; ++b) {
    for (index_t axis = 0; axis < 2; ++axis) {
      for (index_t t = 0; t < tokens; ++t)
        all.push_back(100 * b + (axis == 0 ? t : std::max<index_t>(t - 9, 0)));
    }
  }
  return all;
}

template <class T>
Rope<T> rope_of_all(const std::vector<index_t>& numbers, std::span<const double> frequencies = {}) {
  return {options(frequencies), View<const index_t, 3>(numbers.data(), {batch, 2, tokens}), axes};
}
template <class T>
Rope<T> rope_alone(const std::vector<index_t>& numbers, index_t b, std::span<const double> frequencies = {}) {
  return {options(frequencies), View<const index_t, 2>(numbers.data() + b * 2 * tokens, {2, tokens}), axes};
}

/// Returns entry b of the batch.
template <class T, int Rank>
View<T, Rank> entry(const View<T, Rank>& all, index_t b) {
  std::array<index_t, Rank> extents, strides;
  for (int i = 0; i < Rank; ++i) {
    extents[static_cast<std::size_t>(i)] = i == 0 ? 1 : all.extent(i);
    strides[static_cast<std::size_t>(i)] = all.stride(i);
  }
  return View<T, Rank>(all.data_handle() + b * all.stride(0), extents, strides);
}

TEMPLATE_TEST_CASE("a rope with positions of each sequence: attention, its gradients and caches",
                   "[attention][backward][bfloat16][rope]", float, double, bfloat16) {
  using T = TestType;
  using A = Compute<T>;
  const std::vector<index_t> numbers = positions();
  const std::vector<double> frequencies{1, 0.5, 0.1, 0};
  const backward_problem::Problem<T> x({batch, 4, 2, tokens, tokens, 12, 8});
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target);
    Output<T> together(x.shape), alone(x.shape), over_cache(x.shape);
    backward_problem::Result<T> of_all(x), of_each(x);
    /// Computes entry b of the batch, or all entries for b = -1.
    const auto run = [&](Output<T>& out, backward_problem::Result<T>& result, const Rope<A>& rope,
                         index_t b) {
      const auto of = [b](const auto& view) { return b < 0 ? view : entry(view, b); };
      const SSMax<A> scaling(A(0.4));
      attention<A>({.q = of(x.q_view()),
                    .k = of(x.k_view()),
                    .v = of(x.v_view()),
                    .out = of(out.out_view()),
                    .lse = of(out.lse_view()),
                    .rope = &rope},
                   scaling, Causal{});
      attention_backward<A>({.q = of(x.q_view()),
                             .k = of(x.k_view()),
                             .v = of(x.v_view()),
                             .out = of(out.out_view()),
                             .lse = of(out.lse_view()),
                             .rope = &rope},
                            {.dout = of(x.dout_view()),
                             .dq = of(View<T, 4>(result.dq.data(), {batch, 4, tokens, 12})),
                             .dk = of(View<T, 4>(result.dk.data(), {batch, 2, tokens, 12})),
                             .dv = of(View<T, 4>(result.dv.data(), {batch, 2, tokens, 8}))},
                            scaling, Causal{});
    };
    const Rope<A> rope = rope_of_all<A>(numbers, frequencies);
    run(together, of_all, rope, -1);
    for (index_t b = 0; b < batch; ++b) run(alone, of_each, rope_alone<A>(numbers, b, frequencies), b);
    CHECK(together == alone);
    CHECK(of_all == of_each);
    // A cache rotates the keys of a sequence to their own positions.
    if constexpr (std::same_as<T, A>) {
      KvCache<T> cache({.batch = batch, .kv_heads = 2, .width = 12, .value_width = 8, .capacity = tokens});
      cache.append(x.k_view(), x.v_view(), &rope);
      attention<A>({.q = x.q_view(),
                    .keys = cache,
                    .out = over_cache.out_view(),
                    .lse = over_cache.lse_view(),
                    .rope = &rope},
                   SSMax<A>{A(0.4)}, Causal{});
      CHECK(over_cache == together);
    }
  });
}

TEST_CASE("rope() with positions of each sequence", "[rope]") {
  const std::vector<index_t> numbers = positions();
  std::vector<float> in(batch * 2 * tokens * 8), together(in.size()), alone(in.size());
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 17) - 8;
  const View<const float, 4> from(in.data(), {batch, 2, tokens, 8});
  const View<float, 4> to(together.data(), {batch, 2, tokens, 8}),
      to_each(alone.data(), {batch, 2, tokens, 8});
  rope(from, to, rope_of_all<float>(numbers), 0);
  for (index_t b = 0; b < batch; ++b)
    rope(entry(from, b), entry(to_each, b), rope_alone<float>(numbers, b), 0);
  CHECK(same_bits(together, alone));
  // Positions of one sequence are those of all sequences.
  const Rope<float> shared(options(), View<const index_t, 3>(numbers.data(), {1, 2, tokens}), axes);
  rope(from, to, shared, 0);
  rope(from, to_each, rope_alone<float>(numbers, 0), 0);
  CHECK(same_bits(together, alone));
  CHECK(shared.sequences() == 1);
  CHECK(rope_of_all<float>(numbers).sequences() == batch);
  CHECK(rope_of_all<float>(numbers).positions() == tokens);
  CHECK(rope_alone<float>(numbers, 0).sequences() == 1);
}

TEST_CASE("a rope with positions of other sequences is refused", "[rope][errors]") {
  const std::vector<index_t> numbers = positions();
  const Rope<float> three = rope_of_all<float>(numbers);
  std::vector<float> memory(2 * 2 * 5 * 8);
  const View<float, 4> two(memory.data(), {2, 2, 5, 8});
  check_refused({"attention", "rope", "3", "2"}, [&] {
    std::vector<float> out(memory.size());
    attention({.q = two, .k = two, .v = two, .out = {out.data(), {2, 2, 5, 8}}, .rope = &three});
  });
  check_refused({"ssmax::rope", "rope", "3", "2"}, [&] { rope(View<const float, 4>(two), two, three, 0); });
  check_refused({"KvCache", "rope", "3", "2"}, [&] {
    KvCache<float> cache({.batch = 2, .kv_heads = 2, .width = 8, .capacity = 9});
    cache.append(two, two, &three);
  });
  check_refused({"PagedKvCache::append: rope has positions of 3 sequences", "1"}, [&] {
    PagedKvCache<float> cache({.kv_heads = 2, .width = 8, .page = 4, .pages = 4});
    const std::vector<index_t> ids(5, cache.add());
    const View<const float, 3> rows(memory.data(), {5, 2, 8});
    cache.append(rows, rows, ids, &three);
  });
  const auto refused = [&](const RopeOptions& of, index_t sequences, index_t stride, index_t count,
                           std::initializer_list<std::string_view> words) {
    const View<const index_t, 3> view(numbers.data(), {sequences, 2, count}, {stride, 0, 1});
    check_refused(words, [&] { Rope<float>(of, view, axes); });
  };
  refused(options(), 0, 8, 4, {"Rope", "sequences", "0", "1"});
  // Neither number alone makes the tables too large.
  constexpr index_t many = index_t{1} << (4 * sizeof(index_t) - 3);
  refused(options(), many, 0, many,
          {"Rope: positions are " + std::to_string(many), "sequences are " + std::to_string(many),
           "width is 8", "bytes"});
}

}  // namespace attention_problem::rope_sequences_test
