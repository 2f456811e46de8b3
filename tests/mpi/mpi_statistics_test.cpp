// Statistics of attention over ranks are bit-identical to those of one process.

#include <ssmax/mpi.hpp>

#include "../test.hpp"
#include "mpi_call.hpp"
#include "mpi_problem.hpp"

namespace mpi_problem::mpi_statistics_test {

using attention_problem::Compute;

/// The statistics of each query.
template <class A>
struct Rows {
  std::vector<A> largest, smallest, squares, entropy;

  explicit Rows(std::size_t count)
      : largest(count, A(-77)), smallest(largest), squares(largest), entropy(largest) {}
  RowStatistics<A> view(const Shape& s) {
    const std::array<index_t, 3> rows{s.batch, s.heads, s.queries};
    return {{largest.data(), rows}, {smallest.data(), rows}, {squares.data(), rows}, {entropy.data(), rows}};
  }
  /// Returns the rows of a rank.
  Rows share(const Shape& s, const Layout& layout) const {
    const auto cut = [&](const std::vector<A>& all) {
      return share_of(all, s.batch * s.heads, 1, layout, world().rank());
    };
    Rows result(0);
    result.largest = cut(largest), result.smallest = cut(smallest);
    result.squares = cut(squares), result.entropy = cut(entropy);
    return result;
  }
  bool operator==(const Rows& other) const {
    return same_bits(largest, other.largest) && same_bits(smallest, other.smallest) &&
           same_bits(squares, other.squares) && same_bits(entropy, other.entropy);
  }
};

/// Returns true if the results of every rank are bit-identical to one process.
template <class T, class M, class S>
bool has_same_bits(const Problem<T>& problem, const Layout& layout, const M& mask, const S& scaling,
                   AttentionOptions<T> options = {}) {
  const Shape& s = problem.shape;
  Rows<Compute<T>> whole(static_cast<std::size_t>(s.batch * s.heads * s.queries));
  options.statistics = whole.view(s);
  const Output<T> output = run<T>(problem, scaling, mask, Identity{}, options);
  Share<T> share(problem, layout, world().rank());
  Rows<Compute<T>> rows(share.lse.size());
  options.statistics = rows.view(share.shape);
  ssmax::mpi::attention<Compute<T>>(world(), layout, share.forward(options), scaling, mask);
  return everywhere(
      rows == whole.share(s, layout) &&
      same_bits(share.out, share_of(output.out, s.batch * s.heads, s.dv, layout, world().rank())) &&
      same_bits(share.lse, share_of(output.lse, s.batch * s.heads, 1, layout, world().rank())));
}

TEST_CASE("statistics over ranks are bit-identical to one process", "[mpi][heads]") {
  const int ranks = world().ranks();
  const index_t n = 3 * 1024 + 300;
  const std::vector<float> strength{0.4f, -0.5f, 0.3f, 0}, sinks{0.5f, -1, 0, 2};
  const SSMax<float> scaling{strength};
  const Problem<float> problem({1, 4, 2, n, n, 8, 5});
  const Problem<ssmax::bfloat16> narrow({1, 4, 2, n, n, 8, 8});
  const Layout contiguous = Layout::contiguous(n, ranks, 1024), zigzag = Layout::zigzag(n, ranks, 1024);
  std::vector<index_t> uneven(static_cast<std::size_t>(ranks));
  uneven.back() = n;  // the other ranks hold no positions, but get heads
  for (const Layout& layout :
       {contiguous, zigzag, zigzag.by_heads(), Layout::contiguous(uneven).by_heads()}) {
    CHECK(has_same_bits<float>(problem, layout, Causal{}, scaling, {.sinks = sinks}));
    CHECK(has_same_bits<float>(problem, layout, SlidingWindow{1500}, Softmax{},
                               {.sinks = sinks, .scaled_sinks = true}));
    CHECK(has_same_bits<ssmax::bfloat16>(narrow, layout, Causal{}, scaling));
  }
}

/// Returns a cache of all keys, and one of this rank's.
std::pair<KvCache<float>, KvCache<float>> caches_of(const Problem<float>& problem, const Layout& layout) {
  const Shape& s = problem.shape;
  const auto make = [&](index_t capacity) {
    return KvCache<float>({.batch = s.batch, .kv_heads = s.kv_heads, .width = s.d, .capacity = capacity});
  };
  std::pair caches(make(s.keys), make(std::max<index_t>(1, layout.count(world().rank()))));
  caches.first.append(problem.k_view(), problem.v_view());
  ssmax::mpi::append(caches.second, layout, world().rank(), 0, problem.k_view(), problem.v_view());
  return caches;
}

TEST_CASE("statistics of decode over ranks are bit-identical to one cache", "[mpi][decode]") {
  const index_t n = 2 * 1024 + 700, d = 8;
  const Problem<float> problem({2, 4, 2, n, n, d, d});
  const Layout layout = Layout::zigzag(n, world().ranks(), 1024);
  const auto [whole, share] = caches_of(problem, layout);
  for (const index_t queries : {1, 3, 30}) {
    const Shape shape{2, 4, 2, queries, 0, d, d};
    const auto rows = static_cast<std::size_t>(8 * queries);
    Output<float> one(shape), many(shape);
    Rows<float> of_one(rows), of_many(rows);
    const auto arguments = [&](Output<float>& to, Rows<float>& statistics, const KvCache<float>& cache) {
      return AttentionArguments<float>{.q = ssmax::detail::rows_of(problem.q_view(), n - queries, queries),
                                       .keys = cache,
                                       .out = to.out_view(),
                                       .lse = to.lse_view(),
                                       .statistics = statistics.view(shape)};
    };
    const SSMax<float> scaling{0.4f};
    ssmax::attention(arguments(one, of_one, whole), scaling, Causal{});
    ssmax::mpi::attention(world(), layout, n, arguments(many, of_many, share), scaling, Causal{});
    CHECK(everywhere(one == many && of_one == of_many));
  }
}

/// The largest logits and the counts of each query.
template <class A>
struct Counts {
  std::vector<A> gaps{0, A(0.3), 2, std::numeric_limits<A>::infinity()}, largest, counts;

  explicit Counts(std::size_t rows) : largest(rows, A(-77)), counts(gaps.size() * rows, A(-77)) {}
  GapCounts<A> view(const Shape& s) {
    return {gaps,
            {largest.data(), {s.batch, s.heads, s.queries}},
            {counts.data(), {std::ssize(gaps), s.batch, s.heads, s.queries}}};
  }
  bool operator==(const Counts& other) const {
    return same_bits(largest, other.largest) && same_bits(counts, other.counts);
  }
};

/// Returns true if the counts of every rank are those of one process.
template <class T, class... P>
bool has_same_counts(const Problem<T>& problem, const Layout& layout, const AttentionOptions<T>& options,
                     const P&... policies) {
  using A = Compute<T>;
  const Shape& s = problem.shape;
  const auto heads = s.batch * s.heads, gaps = std::ssize(Counts<A>(0).gaps);
  Counts<A> whole(static_cast<std::size_t>(heads * s.queries));
  ssmax::count_within_gaps<A>(with({.q = problem.q_view(), .k = problem.k_view()}, options), whole.view(s),
                              policies...);
  Share<T> share(problem, layout, world().rank());
  Counts<A> counts(share.lse.size());
  ssmax::mpi::count_within_gaps<A>(world(), layout, share.forward(options), counts.view(share.shape),
                                   policies...);
  return everywhere(
      same_bits(counts.largest, share_of(whole.largest, heads, 1, layout, world().rank())) &&
      same_bits(counts.counts, share_of(whole.counts, gaps * heads, 1, layout, world().rank())));
}

TEST_CASE("counts within gaps over ranks are those of one process", "[mpi]") {
  const int ranks = world().ranks();
  const index_t n = 1500;
  const Problem<float> problem({2, 4, 2, n, n, 8, 5});
  const Problem<ssmax::bfloat16> narrow({1, 4, 2, n, n, 8, 8});
  const Rope<float> rope({.width = 8}, n);
  std::vector<index_t> uneven(static_cast<std::size_t>(ranks));
  uneven.back() = n;
  for (const Layout& layout : {Layout::zigzag(n, ranks, 64), Layout::contiguous(n, ranks, 64).by_heads(),
                               Layout::contiguous(uneven)}) {
    CHECK(has_same_counts<float>(problem, layout, {.rope = &rope}, Causal{}, Softcap{2}));
    CHECK(has_same_counts<float>(problem, layout, {}, SlidingWindow{700}));
    CHECK(has_same_counts<ssmax::bfloat16>(narrow, layout, {}, Full{}));
  }
}

TEST_CASE("counts within gaps over the caches of ranks are those of one cache", "[mpi][decode]") {
  const index_t n = 1500, d = 8;
  const Problem<float> problem({2, 4, 2, n, n, d, d});
  const Layout layout = Layout::zigzag(n, world().ranks(), 64);
  const auto [whole, share] = caches_of(problem, layout);
  for (const index_t queries : {1, 30}) {
    const Shape shape{2, 4, 2, queries, 0, d, d};
    Counts<float> one(static_cast<std::size_t>(8 * queries)), many = one;
    const auto q = ssmax::detail::rows_of(problem.q_view(), n - queries, queries);
    ssmax::count_within_gaps({.q = q, .keys = whole}, one.view(shape), Causal{});
    ssmax::mpi::count_within_gaps(world(), layout, n, {.q = q, .keys = share}, many.view(shape), Causal{});
    CHECK(everywhere(one == many));
  }
}

TEST_CASE("gaps that differ between ranks are refused on every rank", "[mpi][errors]") {
  if (world().ranks() == 1) return;
  mpi_call::Call call;
  Counts<double> counts(call.share.lse.size());
  const Counts<double> untouched = counts;
  if (mpi_call::is_last()) counts.gaps[1] = 1;
  const std::string message = refusal([&] {
    ssmax::mpi::count_within_gaps<double>(world(), call.layout, call.arguments,
                                          counts.view(call.share.shape));
  });
  mpi_call::check_refused_alike(call, message, {"mpi::count_within_gaps", "gaps", "differs"});
  CHECK(everywhere(counts == untouched));
}

TEST_CASE("statistics that only some ranks ask for are refused on every rank", "[mpi][errors]") {
  if (world().ranks() == 1) return;
  for (const bool by_heads : {false, true}) {
    mpi_call::Call call;
    if (by_heads) call.layout = call.layout.by_heads();
    Rows<double> rows(call.share.lse.size());
    if (mpi_call::is_last()) call.arguments.statistics.entropy = rows.view(call.share.shape).entropy;
    AttentionOptions<double> options;
    options.statistics = call.arguments.statistics.views();
    mpi_call::check_refused_alike(call, call.refused(Full{}, Identity{}, options), {"statistic", "differs"});
  }
}

}  // namespace mpi_problem::mpi_statistics_test
