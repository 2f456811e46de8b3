// Attention over ranks against one process: bit-identical for whole chunks, within bounds otherwise.

#include <ssmax/mpi.hpp>

#include "../test.hpp"
#include "mpi_problem.hpp"

namespace mpi_problem::mpi_attention_test {

const std::vector<float> strength{0.4f, 0.5f, 0.3f, 0.2f, 0.6f, 0.1f, 0.7f},
    bias{0.1f, -0.2f, 0, 0.3f, 0.2f, -0.1f, 0}, sinks{0.5f, -1, 0, 2};
const std::vector<double> slopes = Alibi::slopes(4);

/// Returns true if out and lse of every rank are bit-identical to one process.
template <class T, class M, class C = Identity>
bool has_same_bits(const Problem<T>& problem, const Layout& layout, const M& mask, const C& score = {},
                   const AttentionOptions<T>& options = {}) {
  const auto heads = static_cast<std::size_t>(problem.shape.heads);
  const std::vector<float> s(strength.begin(), strength.begin() + problem.shape.heads),
      b(bias.begin(), bias.begin() + static_cast<std::ptrdiff_t>(heads));
  const SSMax<float> scaling{s, b};
  const Output<T> whole = run<T>(problem, scaling, mask, score, options);
  const int rank = world().rank();
  Share<T> share(problem, layout, rank);
  ssmax::mpi::attention(world(), layout, share.forward(options), scaling, mask, score);
  const Shape& shape = problem.shape;
  const index_t outer = shape.batch * shape.heads;
  return everywhere(same_bits(share.out, share_of(whole.out, outer, shape.dv, layout, rank)) &&
                    same_bits(share.lse, share_of(whole.lse, outer, 1, layout, rank)));
}

TEST_CASE("attention on whole chunks is bit-identical to one process", "[mpi]") {
  const int ranks = world().ranks();
  const index_t n = 7 * 1024 + 300;
  const ssmax::Rope<float> rope({.width = 8}, n);
  const Problem<float> problem({1, 4, 2, n, n, 8, 5});
  for (const Layout& layout : {Layout::zigzag(n, ranks, 1024), Layout::contiguous(n, ranks, 1024)}) {
    CHECK(has_same_bits<float>(problem, layout, Causal{}, Identity{}, {.rope = &rope, .sinks = sinks}));
    CHECK(has_same_bits<float>(problem, layout, SlidingWindow{1500}, Alibi(slopes)));
  }
}

TEST_CASE("attention with documents, bfloat16 and batches is bit-identical to one process", "[mpi]") {
  const int ranks = world().ranks();
  const index_t n = 3 * 1024 + 100;
  const std::array<index_t, 4> documents{0, 900, 2000, n};
  const ssmax::Rope<float> rope({.width = 8}, n);
  const Problem<ssmax::bfloat16> problem({2, 2, 2, n, n, 8, 8});
  const Layout layout = Layout::zigzag(n, ranks, 1024);
  const auto check = [&](const AttentionOptions<ssmax::bfloat16>& options) {
    CHECK(has_same_bits<ssmax::bfloat16>(problem, layout, Documents(documents, true), Softcap{5}, options));
  };
  check({});
  check({.rope = &rope});
  check({.float_products = true});
  check({.rope = &rope, .float_products = true});
  const Problem<ssmax::half> half({1, 2, 1, n, n, 8, 5});
  CHECK(has_same_bits<ssmax::half>(half, layout, Causal{}, Identity{}, {.rope = &rope}));
}

TEST_CASE("attention with scaled sinks is bit-identical to one process", "[mpi][heads]") {
  const int ranks = world().ranks();
  const index_t n = 1024 + 300;
  const std::array<index_t, 2> seen{n - 50, 0};  // all keys, or no key
  const AttentionOptions<float> options{.sinks = sinks, .scaled_sinks = true};
  const Problem<float> problem({2, 4, 2, n, n, 8, 5});
  const Layout layout = Layout::contiguous(n, ranks, 1024);
  CHECK(has_same_bits<float>(problem, layout, Causal{}, Identity{}, options));
  CHECK(has_same_bits<float>(problem, layout, ssmax::KeyLengths{seen}, Softcap{5}, options));
  CHECK(has_same_bits<float>(problem, layout.by_heads(), ssmax::KeyLengths{seen}, Identity{}, options));
  const Problem<ssmax::bfloat16> narrow({1, 4, 1, n, n, 8, 8});
  CHECK(has_same_bits<ssmax::bfloat16>(narrow, layout, Causal{}, Identity{},
                                       {.sinks = sinks, .scaled_sinks = true}));
}

TEST_CASE("attention by heads is bit-identical to one process for every layout", "[mpi][heads]") {
  const int ranks = world().ranks();
  const index_t n = 700;
  const ssmax::Rope<float> rope({.width = 8}, n);
  const Problem<float> problem({2, 4, 2, n, n, 8, 5});
  std::vector<float> numbers(4 * static_cast<std::size_t>(n * n));
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i % 17) / 8 - 1;
  const ssmax::Bias bias_of_heads(View<const float, 4>{numbers.data(), {2, 4, n, n}, {0, n * n, n, 1}});
  std::vector<index_t> uneven(static_cast<std::size_t>(ranks));
  uneven.back() = n;  // the other ranks hold no positions, but get heads
  for (const Layout& layout :
       {Layout::zigzag(n, ranks, 1), Layout::contiguous(n, ranks), Layout::contiguous(uneven)}) {
    CHECK(has_same_bits<float>(problem, layout.by_heads(), Causal{}, bias_of_heads,
                               {.rope = &rope, .sinks = sinks}));
  }
  const Layout layout = Layout::zigzag(n, ranks, 7).by_heads();
  CHECK(has_same_bits<float>(problem, layout, SlidingWindow{150}, Alibi(slopes) | Softcap{5}));
  const Problem<ssmax::bfloat16> one_kv_head({1, 3, 1, n, n, 8, 8}), seven({1, 7, 7, 40, 40, 8, 8});
  const std::array<index_t, 3> documents{0, 300, n};
  CHECK(has_same_bits<ssmax::bfloat16>(one_kv_head, layout, Documents(documents, true), Identity{},
                                       {.rope = &rope}));
  CHECK(has_same_bits<ssmax::bfloat16>(seven, Layout::zigzag(40, ranks, 1).by_heads(), Full{}));
}

/// Compares with the reference in long double for several layouts.
TEST_CASE("attention stays within its error bound for every layout", "[mpi]") {
  const index_t n = 157;
  const int ranks = world().ranks(), rank = world().rank();
  const Problem<double> problem({2, 4, 2, n, n, 6, 5});
  const auto exact = attention_problem::expect(problem, attention_problem::keys_before,
                                               [](index_t head, index_t, index_t visible) {
                                                 const auto h = static_cast<std::size_t>(head);
                                                 return attention_problem::Real(strength[h]) *
                                                            std::log(attention_problem::Real(visible)) +
                                                        attention_problem::Real(bias[h]);
                                               })
                         .exact;
  std::vector<index_t> uneven(static_cast<std::size_t>(ranks));
  uneven[uneven.size() / 2] = n;  // the other ranks hold no positions
  for (const Layout& layout : {Layout::zigzag(n, ranks, 1), Layout::contiguous(n, ranks, 10),
                               Layout::contiguous(uneven), Layout::zigzag(n, ranks, 3).by_heads()}) {
    Share<double> share(problem, layout, rank);
    ssmax::mpi::attention<double>(world(), layout, share.forward(),
                                  SSMax<float>{std::span(strength).first(4), std::span(bias).first(4)},
                                  Causal{});
    CHECK(everywhere(attention_problem::largest_error(share.out, share_of(exact.out, 8, 5, layout, rank)) <
                     1e-14L));
    CHECK(everywhere(attention_problem::largest_error(share.lse, share_of(exact.lse, 8, 1, layout, rank)) <
                     1e-13L));
  }
}

}  // namespace mpi_problem::mpi_attention_test
