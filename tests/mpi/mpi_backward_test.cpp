// Attention and its gradients over ranks against one process: bit-identical if sums are not split, within bounds
// otherwise.

#include <ssmax/mpi.hpp>

#include "../test.hpp"
#include "mpi_problem.hpp"

namespace mpi_problem::mpi_backward_test {

struct Run {
  bool same_outputs = false, same_queries = false, same_keys = false;
  // the largest, of all ranks
  double distance_of_outputs = 0, distance_of_queries = 0, distance_of_keys = 0;
};

/// Checks that all results are bit-identical to one process.
void check_same(const Run& result) {
  CHECK(result.same_outputs);
  CHECK(result.same_queries);
  CHECK(result.same_keys);
}

template <class T>
double distance(const std::vector<T>& a, const std::vector<T>& b) {
  double worst = reference::largest_difference(a, b);
  MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return worst;
}

/// Runs forward and backward in one process and over ranks. The runs over ranks use `score_here`.
template <class T, class M, class C>
Run compare(const Problem<T>& problem, const Layout& layout, const M& mask, const C& score,
            const C& score_here, const AttentionOptions<T>& options) {
  const Shape& shape = problem.shape;
  const auto heads = static_cast<std::size_t>(shape.heads);
  using A = attention_problem::Compute<T>;
  const std::vector<A> s(heads, A(0.4)), b(heads, A(-0.1));
  std::vector<A> ds(heads), db(heads), ds_here(heads), db_here(heads);
  const SSMax<A> scaling{s, b};
  const Output<T> output = run<T>(problem, scaling, mask, score, options);
  const Result<T> whole = backward<T>(problem, output, scaling.gradient(ds, db), mask, score, options);

  const int rank = world().rank();
  Share<T> share(problem, layout, rank);
  ssmax::mpi::attention<A>(world(), layout, share.forward(options), scaling, mask, score);
  ssmax::mpi::attention_backward<A>(world(), layout, share.backward(options),
                                    share.gradients(!options.sinks.empty()),
                                    scaling.gradient(ds_here, db_here), mask, score_here);

  const auto cut = [&](const auto& of_whole, index_t of_heads, index_t channels) {
    return share_of(of_whole, shape.batch * of_heads, channels, layout, rank);
  };
  const auto out = cut(output.out, shape.heads, shape.dv);
  const auto lse = cut(output.lse, shape.heads, 1);
  const auto dq = cut(whole.dq, shape.heads, shape.d), dk = cut(whole.dk, shape.kv_heads, shape.d),
             dv = cut(whole.dv, shape.kv_heads, shape.dv);
  share.dsinks.resize(options.sinks.size());
  Run result;
  result.same_outputs = everywhere(same_bits(share.out, out) && same_bits(share.lse, lse));
  result.same_queries = everywhere(same_bits(share.dq, dq) && same_bits(ds_here, ds) &&
                                   same_bits(db_here, db) && same_bits(share.dsinks, whole.dsinks));
  result.same_keys = everywhere(same_bits(share.dk, dk) && same_bits(share.dv, dv));
  result.distance_of_outputs = std::max(distance(share.out, out), distance(share.lse, lse));
  result.distance_of_queries = std::max({distance(share.dq, dq), distance(ds_here, ds), distance(db_here, db),
                                         distance(share.dsinks, whole.dsinks)});
  result.distance_of_keys = std::max(distance(share.dk, dk), distance(share.dv, dv));
  return result;
}

template <class T, class M, class C>
Run compare(const Problem<T>& problem, const Layout& layout, const M& mask, const C& score,
            const AttentionOptions<T>& options) {
  return compare<T>(problem, layout, mask, score, score, options);
}

TEST_CASE("gradients are bit-identical to one process if no sum is split between ranks", "[mpi][backward]") {
  const index_t n = 3 * 2048 + 500;
  const std::vector<float> sinks{0.5f, -1, 0, 2};
  const std::array<index_t, 4> documents{0, 900, 4000, n};
  const std::vector<double> slopes = Alibi::slopes(2);
  const ssmax::Rope<float> rope({.width = 8}, n);
  const int ranks = world().ranks();
  const Problem<float> two_heads({1, 2, 1, n, n, 8, 8});
  check_same(compare<float>(two_heads, Layout::contiguous(n, ranks), SlidingWindow{700},
                            Alibi(slopes) | Softcap{5}, {}));
  check_same(compare<float>(two_heads, Layout::zigzag(n, ranks), Documents(documents, true), Identity{},
                            {.rope = &rope}));
  const index_t shorter = 2 * 2048 + 300;
  const Problem<float> batch({2, 4, 2, shorter, shorter, 8, 5});
  check_same(compare<float>(batch, Layout::zigzag(shorter, ranks), Causal{}, Identity{},
                            {.rope = &rope, .sinks = sinks}));
  check_same(compare<float>(batch, Layout::zigzag(shorter, ranks), Causal{}, Identity{},
                            {.dropout = {.p = 0.1, .seed = 1}}));
  const std::array<std::uint64_t, 2> seeds{7, 5};
  check_same(compare<float>(batch, Layout::contiguous(shorter, ranks), SlidingWindow{100}, Identity{},
                            {.dropout = {.p = 0.3, .offset = 2, .seeds = seeds}}));
}

TEST_CASE("gradients of keys are bit-identical if a sum continues on other ranks", "[mpi][backward]") {
  const index_t n = 2 * 2048 + 300;
  const int ranks = world().ranks();
  const Problem<float> problem({1, 3, 1, n, n, 8, 8});
  const auto causal = compare<float>(problem, Layout::zigzag(n, ranks, 1024), Causal{}, Identity{}, {});
  CHECK((causal.same_outputs && causal.same_keys));
  const auto window =
      compare<float>(problem, Layout::contiguous(n, ranks, 1024), SlidingWindow{200}, Identity{}, {});
  CHECK((window.same_outputs && window.same_keys));
  // The sums of all heads would exceed the memory limit.
  const Problem<float> wide({1, 12, 12, 2100, 2100, 64, 64});
  const auto units = compare<float>(wide, Layout::contiguous(2100, ranks, 1024), Causal{}, Identity{}, {});
  CHECK((units.same_outputs && units.same_keys));
}

TEST_CASE("bfloat16 gradients by keys are rounded once and bit-identical to one process", "[mpi][backward]") {
  using ssmax::bfloat16, ssmax::half;
  const index_t n = 2 * 2048 + 300;
  const ssmax::Rope<float> rope({.width = 8}, n);
  const std::vector<float> sinks{0.5f, -1};
  const std::array<index_t, 3> documents{0, 900, n};
  const Layout layout = Layout::zigzag(n, world().ranks());
  const auto check_all = [&]<class T>(const Problem<T>& problem, const auto& check) {
    check(compare<T>(problem, layout, Causal{}, Identity{}, {.sinks = sinks}), false);
    check(compare<T>(problem, layout, Documents(documents, true), Softcap{5}, {.rope = &rope}), false);
    check(
        compare<T>(problem, layout, SlidingWindow{700}, Identity{}, {.rope = &rope, .float_products = true}),
        true);
  };
  check_all(Problem<half>({2, 2, 2, n, n, 8, 5}), [](const Run& result, bool) { check_same(result); });
  check_all(Problem<bfloat16>({1, 2, 1, n, n, 8, 8}), [](const Run& result, bool in_float) {
    CHECK(result.same_outputs);
    CHECK(result.same_queries);
    // The bf16 path adds several rows at once, and here ranks may begin with different rows.
    CHECK((result.same_keys || (!in_float && attention_problem::has_bfloat16_products())));
    CHECK(result.distance_of_keys < 0.05);
  });
}

TEST_CASE("gradients of keys on the bf16 path are bit-identical if no query block is split",
          "[mpi][backward]") {
  const index_t n = 30720 + 400;
  const Problem<ssmax::bfloat16> problem({1, 1, 1, n, n, 8, 8});
  const Layout layout = Layout::contiguous(n, world().ranks(), 30720);
  check_same(compare<ssmax::bfloat16>(problem, layout, SlidingWindow{600}, Identity{}, {}));
}

TEST_CASE("gradients of scaled sinks and of c are bit-identical to one process", "[mpi][backward][heads]") {
  const index_t n = 2048 + 300;
  const int ranks = world().ranks();
  const std::vector<float> sinks{0.5f, -1, 0, 2};
  const std::array<index_t, 2> seen{n - 50, 0};  // all keys, or no key
  const AttentionOptions<float> options{.sinks = sinks, .scaled_sinks = true};
  const Problem<float> problem({2, 4, 2, n, n, 8, 8});
  const Layout layout = Layout::contiguous(n, ranks);
  check_same(compare<float>(problem, layout, ssmax::KeyLengths{seen}, Identity{}, options));
  check_same(compare<float>(problem, layout, SlidingWindow{200}, Softcap{5}, options));
  check_same(compare<float>(problem, layout.by_heads(), SlidingWindow{200}, Identity{}, options));
  const Problem<ssmax::half> narrow({1, 4, 1, n, n, 8, 8});
  check_same(compare<ssmax::half>(narrow, layout, SlidingWindow{200}, Identity{},
                                  {.sinks = sinks, .scaled_sinks = true}));
}

TEST_CASE("all gradients by heads are bit-identical to one process", "[mpi][backward][heads]") {
  const int ranks = world().ranks();
  const index_t n = 500;
  const std::vector<float> sinks{0.5f, -1, 0, 2, 1, 0.25f};
  const std::array<index_t, 3> documents{0, 200, n};
  const std::vector<double> slopes = Alibi::slopes(6);
  std::vector<double> dslopes(6), dslopes_here(6);
  const ssmax::Rope<float> rope({.width = 8}, n);
  const Problem<float> problem({2, 6, 3, n, n, 8, 5});
  std::vector<index_t> uneven(static_cast<std::size_t>(ranks));
  uneven.back() = n;  // the other ranks hold no positions, but get heads
  for (const Layout& layout : {Layout::zigzag(n, ranks, 1), Layout::contiguous(uneven)}) {
    check_same(
        compare<float>(problem, layout.by_heads(), Causal{}, Identity{}, {.rope = &rope, .sinks = sinks}));
  }
  check_same(compare<float>(problem, Layout::contiguous(n, ranks, 9).by_heads(), Documents(documents, true),
                            Alibi(slopes).gradient(dslopes) | Softcap{5},
                            Alibi(slopes).gradient(dslopes_here) | Softcap{5}, {.rope = &rope}));
  CHECK(everywhere(same_bits(dslopes_here, dslopes)));
  const Problem<ssmax::bfloat16> narrow({1, 4, 2, n, n, 8, 8});
  check_same(compare<ssmax::bfloat16>(narrow, Layout::zigzag(n, ranks, 1).by_heads(), SlidingWindow{90},
                                      Identity{}, {.dropout = {.p = 0.1, .seed = 1}}));
  const std::array<std::uint64_t, 2> seeds{7, 5};
  check_same(compare<float>(problem, Layout::zigzag(n, ranks, 1).by_heads(), Causal{}, Identity{},
                            {.dropout = {.p = 0.3, .offset = 2, .seeds = seeds}}));
}

TEST_CASE("masks and scores over ranks are bit-identical to one process", "[mpi][backward][heads]") {
  const std::vector<double> slopes{0.5, -2, 1, -0.75};
  const auto modulo = ssmax::HeadsOfMatrix::modulo;
  const Alibi absolute(slopes, ssmax::AlibiDistance::absolute);
  const auto check_all = [&](index_t n, const Layout& layout) {
    const Shape shape{1, 4, 4, n, n, 8, 5};
    const Problem<float> problem(shape);
    const ssmax::Rope<float> rope({.width = 8}, n);
    const std::vector<float> numbers = numbers_with_infinities(shape);
    const View<const float, 4> matrix = matrix_of(numbers, shape);
    const SlidingWindow window(50, 50);
    const auto check = [&](const auto& mask, const auto& score, const auto& score_here) {
      check_same(compare<float>(problem, layout, mask, score, score_here, {.rope = &rope}));
    };
    check(ssmax::Chunks{70}, Identity{}, Identity{});
    check(ssmax::CausalTopLeft{}, Identity{}, Identity{});
    const ssmax::SlopedBias sloped(matrix, slopes, modulo);
    check(window & ssmax::MatrixMask(matrix, modulo), sloped, sloped);
    const Bias bias(matrix, modulo);
    check(window & ssmax::MatrixRuns(matrix, modulo), bias, bias);
    std::vector<double> dslopes(4), dslopes_here(4);
    check(window, absolute.gradient(dslopes), absolute.gradient(dslopes_here));
    CHECK(everywhere(same_bits(dslopes_here, dslopes)));
  };
  check_all(2048 + 100, Layout::contiguous(2048 + 100, world().ranks()));
  check_all(200, Layout::zigzag(200, world().ranks(), 7).by_heads());
}

TEST_CASE("every kind of rope over ranks is bit-identical to one process", "[mpi][backward][heads]") {
  const index_t n = 2048 + 100;
  const Layout layout = Layout::contiguous(n, world().ranks());
  const Problem<float> problem({2, 2, 2, n, n, 8, 5});
  const Problem<ssmax::half> narrow(problem);  // a rank rotates the keys that it receives
  const SlidingWindow window(50, 50);
  for (const ssmax::Rope<float>& rope : every_rope(n)) {
    check_same(compare<float>(problem, layout, window, Identity{}, {.rope = &rope}));
    check_same(compare<float>(problem, layout.by_heads(), window, Identity{}, {.rope = &rope}));
    check_same(compare<ssmax::half>(narrow, layout, window, Identity{}, {.rope = &rope}));
  }
}

TEST_CASE("gradients agree with one process for every layout", "[mpi][backward]") {
  const index_t n = 203;
  const std::vector<double> sinks{0.5, -1};
  const ssmax::Rope<double> rope({.width = 6}, n);
  const Problem<double> problem({2, 2, 1, n, n, 6, 5});
  const int ranks = world().ranks();
  std::vector<index_t> uneven(static_cast<std::size_t>(ranks));
  uneven.back() = n;  // the other ranks hold no positions
  for (std::size_t i = 0; i + 1 < uneven.size(); i += 2) {
    uneven[i] = 11;
    uneven.back() -= 11;
  }
  for (const Layout& layout : {Layout::zigzag(n, ranks, 1), Layout::contiguous(n, ranks, 7),
                               Layout::contiguous(uneven), Layout::zigzag(n, ranks)}) {
    const auto causal =
        compare<double>(problem, layout, Causal{}, Identity{}, {.rope = &rope, .sinks = sinks});
    CHECK(causal.distance_of_outputs < 1e-13);
    CHECK(causal.distance_of_queries < 1e-11);
    CHECK(causal.distance_of_keys < 1e-12);
    const auto full = compare<double>(problem, layout, Full{}, Softcap{5}, {});
    CHECK(full.distance_of_outputs < 1e-13);
    CHECK(full.distance_of_queries < 1e-11);
    CHECK(full.distance_of_keys < 1e-12);
  }
}

}  // namespace mpi_problem::mpi_backward_test
