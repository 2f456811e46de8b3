// Counts of the keys within gaps of the largest logit, on every target. With small integers, logits are exact on every
// path, and counts equal those of plain loops. With other numbers, a key near the bound may count or not.

#include "attention_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace attention_problem::gap_counts_test {

const auto at = [](auto& numbers, index_t i) -> auto& { return numbers[static_cast<std::size_t>(i)]; };

/// Largest logits [batch, heads, queries] and counts [gaps, batch, heads, queries].
template <class A>
struct Counts {
  std::vector<A> gaps, largest, counts;
  Explanation explanation{};

  Counts(const Shape& s, const std::vector<A>& all_gaps)
      : gaps(all_gaps),
        largest(static_cast<std::size_t>(s.batch * s.heads * s.queries), A(-77)),
        counts(largest.size() * gaps.size(), A(-77)) {}
  GapCounts<A> view(const Shape& s) {
    return {gaps,
            {largest.data(), {s.batch, s.heads, s.queries}},
            {counts.data(), {std::ssize(gaps), s.batch, s.heads, s.queries}}};
  }
  bool operator==(const Counts& other) const {
    return same_bits(largest, other.largest) && same_bits(counts, other.counts);
  }
};

/// The gaps of exact logits, which are multiples of 1/8: ties, gaps at and between logits, and all keys.
template <class A>
std::vector<A> exact_gaps() {
  return {A(0), A(0.125), A(0.99), A(2.5), infinity<A>};
}

/// Integers from -2 to 2.
template <class T>
Problem<T> integers(const Shape& shape) {
  Problem<T> x(shape);
  for (auto* numbers : {&x.q, &x.k}) {
    for (std::size_t i = 0; i < numbers->size(); ++i)
      (*numbers)[i] = T(static_cast<float>((i * 7919 / 13 + i * i * 31) % 5) - 2.0F);
  }
  return x;
}

template <class T, class... P>
Counts<Compute<T>> count(const Problem<T>& x, const std::vector<Compute<T>>& gaps,
                         AttentionOptions<T> options, P&&... policies) {
  using A = Compute<T>;
  Counts<A> result(x.shape, gaps);
  options.explanation = &result.explanation;
  count_within_gaps<A>(with({.q = x.q_view(), .k = x.k_view(), .v = x.v_view()}, options),
                       result.view(x.shape), policies...);
  return result;
}

using Visible = std::function<bool(const Query&, index_t key)>;
using Formula = std::function<Real(Real z, const Query&, index_t key)>;
const Formula plain = [](Real z, const Query&, index_t) { return z; };

/// Calls f(row, z, size) for each query, with the logits of its visible keys. `size` is the largest scale·Σ|q_t k_t|.
template <class T, class F>
void for_each_row(const Problem<T>& x, Real scale, const Visible& sees, const Formula& score, const F& f) {
  const Shape& s = x.shape;
  index_t row = 0;
  for (Query query{0, 0, 0, x.query_shape()}; query.batch < s.batch; ++query.batch) {
    for (query.head = 0; query.head < s.heads; ++query.head) {
      const index_t kv = query.batch * s.kv_heads + query.head / (s.heads / s.kv_heads);
      for (query.index = 0; query.index < s.queries; ++query.index, ++row) {
        std::vector<Real> z;
        Real size = 0;
        for (index_t key = 0; key < s.keys; ++key) {
          if (!sees(query, key)) continue;
          Real sum = 0, absolute = 0;
          for (index_t t = 0; t < s.d; ++t) {
            const Real product = scale * static_cast<Real>(at(x.q, row * s.d + t)) *
                                 static_cast<Real>(at(x.k, (kv * s.keys + key) * s.d + t));
            sum += product;
            absolute += std::abs(product);
          }
          z.push_back(score(sum, query, key));
          size = std::max(size, absolute);
        }
        f(row, z, size);
      }
    }
  }
}

/// Checks the counts of exact logits.
template <class T>
void check_exact(const Problem<T>& x, Real scale, const Visible& sees, const Formula& score,
                 const Counts<Compute<T>>& counted) {
  index_t wrong = 0;
  for_each_row(x, scale, sees, score, [&](index_t row, const std::vector<Real>& z, Real) {
    const Real top = z.empty() ? -infinity<Real> : std::ranges::max(z);
    if (static_cast<Real>(at(counted.largest, row)) != top) ++wrong;
    for (index_t g = 0; g < std::ssize(counted.gaps); ++g) {
      const Real gap = static_cast<Real>(at(counted.gaps, g));
      const auto expected = std::ranges::count_if(z, [&](Real number) { return number >= top - gap; });
      if (static_cast<Real>(at(counted.counts, g * x.rows() + row)) != static_cast<Real>(expected)) ++wrong;
    }
  });
  CHECK(wrong == 0);
}

/// z / 2 + 1, key by key.
struct Halved {
  template <class T>
  T operator()(T z, const Key&) const {
    return z / 2 + 1;
  }
  template <class T>
  T derivative(T, const Key&) const {
    return T(0.5);
  }
};

constexpr std::array<Shape, 9> shapes{{
    {1, 4, 2, 1, 1, 8, 5},
    {2, 4, 4, 2, 2, 3, 8},
    {2, 4, 2, 5, 300, 8, 5},
    {1, 4, 1, 70, 33, 9, 9},      // some queries without visible keys
    {1, 4, 2, 53, 1031, 16, 4},   // two key chunks
    {1, 4, 4, 131, 127, 64, 24},  // a short sequence
    {1, 4, 2, 1, 4099, 17, 3},    // key chunks that threads share
    {1, 4, 2, 3, 7, 0, 4},        // logits of 0
    {2, 4, 2, 0, 5, 4, 4},
}};

TEMPLATE_TEST_CASE("keys within gaps of the largest logit: exact logits", "[attention][bfloat16]", float,
                   double, bfloat16) {
  using T = TestType;
  using A = Compute<T>;
  const std::vector<A> gaps = exact_gaps<A>();
  const Formula halved = [](Real z, const Query&, index_t) { return z / 2 + 1; };
  const Visible window = [](const Query& query, index_t key) {
    return before(query, key) && key >= query.position() - 37;
  };
  const Visible some = [](const Query& query, index_t key) {
    return before(query, key) && scattered(query, key);
  };
  const Visible every = [](const Query&, index_t) { return true; };
  for (const Shape& shape : shapes) {
    const Problem<T> x = integers<T>(shape);
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ", " << name_of(shape));
      ThreadPool three(3);
      const AttentionOptions<T> options{.scale = 0.25};
      check_exact(x, 0.25L, before, plain, count(x, gaps, options, Causal{}));
      check_exact(x, 0.25L, before, plain, count(x, gaps, options, Causal{}, three));
      check_exact(x, 0.25L, window, plain, count(x, gaps, options, SlidingWindow(37), Constant{-3}));
      check_exact(x, 0.25L, some, halved, count(x, gaps, options, Causal{} & Where(scattered), Halved{}));
      check_exact(x, 0.25L, every, halved, count(x, gaps, options, Halved{} | Identity{}, SSMax<A>{A(0.4)}));
      for (const auto& [float_products, batch_invariant] : {std::pair{true, false}, {false, true}}) {
        check_exact(
            x, 0.25L, before, plain,
            count(x, gaps,
                  {.scale = 0.25, .float_products = float_products, .batch_invariant = batch_invariant},
                  Causal{}));
      }
    });
  }
}

/// Masks with runs and by document, and packed sequences.
TEMPLATE_TEST_CASE("keys within gaps of the largest logit: runs and packed sequences",
                   "[attention][bfloat16]", float, bfloat16) {
  using T = TestType;
  using A = Compute<T>;
  const std::vector<A> gaps = exact_gaps<A>();
  for (const index_t queries : {3, 77}) {
    const Problem<T> x = integers<T>({1, 4, 2, queries, 300, 8, 8});
    const std::vector<index_t> query_ends{0, 1, queries}, key_ends{0, 130, 300};
    const Visible same_document = [](const Query& query, index_t key) {
      return (query.index < 1) == (key < 130);
    };
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ", " << queries);
      check_exact(x, 0.25L, same_document, plain,
                  count(x, gaps, {.scale = 0.25}, Documents(query_ends, key_ends, false)));
      const AttentionOptions<T> packed{.scale = 0.25,
                                       .lengths = SequenceLengths::packed(query_ends, key_ends)};
      check_exact(x, 0.25L, same_document, plain, count(x, gaps, packed, Full{}));
    });
  }
}

/// A cache, and lists of its tokens in another order: counts equal those of views.
TEMPLATE_TEST_CASE("keys within gaps of the largest logit over sources", "[attention][decode][bfloat16]",
                   float, bfloat16) {
  using T = TestType;
  using A = Compute<T>;
  const std::vector<A> gaps = exact_gaps<A>();
  for (const index_t queries : {1, 40}) {
    const Shape shape{2, 4, 2, queries, 1100, 16, 8};
    const Problem<T> x = integers<T>(shape);
    KvCache<T> cache({.batch = 2, .kv_heads = 2, .width = 16, .value_width = 8, .capacity = 1100});
    cache.append(x.k_view(), x.v_view());
    std::vector<T> k(x.k.size()), v(x.v.size());  // [token, 1, kv head, channel], the tokens reversed
    std::vector<int> lists;
    for (index_t token = 0; token < 2 * 1100; ++token) {
      const index_t batch = token / 1100, key = token % 1100, place = 2 * 1100 - 1 - token;
      lists.push_back(static_cast<int>(place));
      for (index_t h = 0; h < 2; ++h) {
        std::copy_n(&x.k_view()(batch, h, key, 0), 16, k.begin() + (place * 2 + h) * 16);
        std::copy_n(&x.v_view()(batch, h, key, 0), 8, v.begin() + (place * 2 + h) * 8);
      }
    }
    const std::vector<int> lengths{1100, 1100};
    const PagedKeys tokens(View<const T, 4>(k.data(), {2200, 1, 2, 16}),
                           View<const T, 4>(v.data(), {2200, 1, 2, 8}),
                           PageTable<int>(View<const int, 2>(lists.data(), {2, 1100}), lengths));
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ", " << queries);
      const auto check = [&](const Keys<A>& keys) {
        Counts<A> counted(shape, gaps);
        count_within_gaps<A>({.q = x.q_view(), .keys = keys, .scale = 0.25}, counted.view(shape), Causal{});
        check_exact(x, 0.25L, before, plain, counted);
      };
      check(cache);
      check(tokens);
    });
  }
}

TEMPLATE_TEST_CASE("keys within gaps of the largest logit: rounded logits, scores and ropes",
                   "[attention][bfloat16]", float, double, bfloat16) {
  using T = TestType;
  using A = Compute<T>;
  const std::vector<A> gaps{A(0), A(0.5), A(1.7), infinity<A>};
  const Formula softcap = [](Real z, const Query&, index_t) { return 3 * std::tanh(z / 3); };
  const Rope<A> rope({.width = 8}, 1100);
  for (const Shape& shape : {Shape{1, 4, 2, 3, 1050, 8, 5}, Shape{1, 4, 2, 65, 200, 16, 4}}) {
    const Problem<T> x(shape);
    const Real scale = 1 / std::sqrt(static_cast<Real>(shape.d));
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ", " << name_of(shape));
      const Counts<A> capped = count(x, gaps, {}, Causal{}, Softcap(3));
      index_t wrong = 0, loose = 0;
      for_each_row(x, scale, before, softcap, [&](index_t row, const std::vector<Real>& z, Real size) {
        const Real top = std::ranges::max(z), error = (static_cast<Real>(shape.d) + 20) *
                                                      Real(std::numeric_limits<A>::epsilon()) * (size + 3);
        for (index_t g = 0; g < std::ssize(gaps); ++g) {
          const Real gap = static_cast<Real>(at(gaps, g)),
                     n = static_cast<Real>(at(capped.counts, g * x.rows() + row));
          const auto least =
                         std::ranges::count_if(z, [&](Real some) { return some >= top - gap + 2 * error; }),
                     most =
                         std::ranges::count_if(z, [&](Real some) { return some >= top - gap - 2 * error; });
          if (n < static_cast<Real>(std::max<std::ptrdiff_t>(1, least)) || n > static_cast<Real>(most))
            ++wrong;
          if (least + 1 < most) ++loose;
        }
      });
      CHECK(wrong == 0);
      CHECK(loose < x.rows() / 4);
      // Ropes: the same for any threads, and the largest key counts.
      ThreadPool three(3);
      const Counts<A> turned = count(x, gaps, {.rope = &rope}, Causal{});
      CHECK(turned == count(x, gaps, {.rope = &rope}, Causal{}, three));
      for (index_t row = 0; row < x.rows(); ++row) {
        CHECK(at(turned.counts, row) >= 1);
        CHECK(at(turned.counts, row) <= at(turned.counts, x.rows() + row));
        CHECK(at(turned.counts, 3 * x.rows() + row) ==
              static_cast<A>(shape.keys - shape.queries + 1 + row % shape.queries));
      }
      CHECK(turned.counts != capped.counts);
    });
  }
}

TEMPLATE_TEST_CASE("keys within gaps of the largest logit: NaN and infinities", "[attention][bfloat16]",
                   float, double, bfloat16) {
  using T = TestType;
  using A = Compute<T>;
  for (const index_t queries : {3, 40}) {
    Problem<T> x({1, 4, 4, queries, 150, 8, 8});
    std::ranges::fill(x.q, T(1));
    const auto key = [&](index_t head, index_t j) -> T& { return at(x.k, (head * 150 + j) * 8); };
    key(0, 150 - queries + 1) = T(nan<float>);  // masked for query 0 alone
    key(1, 3) = T(infinity<float>);
    key(2, 3) = T(-infinity<float>);
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ", " << queries);
      const Counts<A> counted = count(x, {A(0), infinity<A>}, {}, Causal{});
      const index_t rows = x.rows();
      for (index_t row = 0; row < rows; ++row) {
        const index_t head = row / queries, i = row % queries;
        const A top = at(counted.largest, row), ties = at(counted.counts, row),
                all = at(counted.counts, rows + row);
        const A visible = static_cast<A>(150 - queries + 1 + i);
        if (head == 1 || (head == 0 && i > 0)) {
          CHECK((std::isnan(top) && std::isnan(ties) && std::isnan(all)));
        } else {
          CHECK(std::isfinite(top));
          CHECK(ties >= 1);
          CHECK(all == (head == 2 ? visible - 1 : visible));  // a logit of -inf counts as masked
        }
      }
    });
  }
}

TEST_CASE("gaps: rows of padding are neither read nor written", "[attention]") {
  const Shape s{2, 4, 2, 5, 30, 8, 8};
  const Problem<float> x = integers<float>(s);
  const std::vector<index_t> queries{3, 5}, keys{20, 30};
  Counts<float> counts(s, {0, 1});
  std::ranges::fill(counts.counts, 0.25F);
  count_within_gaps({.q = x.q_view(), .k = x.k_view(), .lengths = SequenceLengths::padded(queries, keys)},
                    counts.view(s), Full{});
  for (index_t i = 0; i < std::ssize(counts.counts); ++i) {
    const bool is_padding = i / 20 % 2 == 0 && i % 5 >= 3;
    CHECK((is_padding ? at(counts.counts, i) == 0.25F : at(counts.counts, i) >= 1));
    if (i < 40) CHECK((at(counts.largest, i) == -77) == is_padding);
  }
}

TEST_CASE("gaps: without keys the largest logit is -inf and counts are 0", "[attention]") {
  const Shape s{1, 4, 2, 5, 0, 8, 8};
  const Problem<float> x = integers<float>(s);
  const float number = 1;
  for (const float* k : {static_cast<const float*>(nullptr), &number}) {
    Counts<float> counts(s, {0, 1});
    count_within_gaps({.q = x.q_view(), .k = View<const float, 4>(k, {1, 2, 0, 8})}, counts.view(s), Full{});
    CHECK(std::ranges::all_of(counts.largest, [](float z) { return z == -infinity<float>; }));
    CHECK(std::ranges::all_of(counts.counts, [](float n) { return n == 0; }));
  }
}

TEST_CASE("gaps: options that have no effect, strides and wrong arguments", "[attention][errors]") {
  const Shape s{1, 4, 2, 6, 30, 8, 8};
  const Problem<float> x = integers<float>(s);
  const std::vector<float> gaps{0, 1};
  const Counts<float> expected = count(x, gaps, {}, Causal{});
  std::vector<float> out(4 * 6 * 8, -77), sinks(4, 50.0F), numbers(4 * 10, -77);
  Counts<float> given(s, gaps);
  AttentionArguments<float> a{
      .q = x.q_view(), .k = x.k_view(), .v = x.v_view(), .out = {out.data(), {1, 4, 6, 8}}};
  a.sinks = sinks;
  a.scaled_sinks = true;
  a.dropout = {.p = 0.5};
  count_within_gaps(a, given.view(s), Causal{}, Constant{7});
  CHECK(given == expected);
  CHECK(std::ranges::count(out, -77.0F) == std::ssize(out));

  GapCounts<float> strided = given.view(s);
  strided.largest = {numbers.data(), {1, 4, 6}, {40, 10, 1}};
  count_within_gaps({.q = a.q, .k = a.k}, strided, Causal{});  // v may be left out
  CHECK(given == expected);
  for (index_t i = 0; i < 40; ++i)
    CHECK(at(numbers, i) == (i % 10 < 6 ? at(expected.largest, i / 10 * 6 + i % 10) : -77));

  std::vector<float> bad{1, -0.5F}, memory(x.k.begin(), x.k.end());
  const auto refused = [&](std::initializer_list<std::string_view> words, const auto& change) {
    Counts<float> untouched(s, gaps);
    GapCounts<float> to = untouched.view(s);
    AttentionArguments<float> b{.q = a.q, .k = {memory.data(), {1, 2, 30, 8}}};
    change(b, to);
    check_refused(words, [&] { count_within_gaps(b, to, Causal{}); });
    CHECK(std::ranges::count(untouched.largest, -77.0F) == 24);
  };
  refused({"ssmax::count_within_gaps: gaps[1] is -0.5", "at least 0"},
          [&](auto&, auto& to) { to.gaps = bad; });
  bad[1] = nan<float>;
  refused({"gaps[1] is", "at least 0"}, [&](auto&, auto& to) { to.gaps = bad; });
  refused({"counts has extent 2 in dimension 0", "gaps has 1"},
          [&](auto&, auto& to) { to.gaps = to.gaps.first(1); });
  refused({"largest has extent 5 in dimension 2", "q has 6"}, [&](auto&, auto& to) {
    to.largest = {numbers.data(), {1, 4, 5}};
  });
  refused({"counts has extent 3 in dimension 2", "q has 4"}, [&](auto&, auto& to) {
    to.counts = {numbers.data(), {2, 1, 3, 6}};
  });
  refused({"counts", "overlaps largest"}, [&](auto&, auto& to) {
    to.counts = {to.largest.data_handle(), {2, 1, 4, 6}};
  });
  refused({"largest", "overlaps k"}, [&](auto&, auto& to) { to.largest = {memory.data(), {1, 4, 6}}; });
  refused({"state is given"}, [&](auto& b, auto&) { b.state.sum = {numbers.data(), {1, 4, 6}}; });
  refused({"first_key is 1"}, [&](auto& b, auto&) { b.first_key = 1; });
}

}  // namespace attention_problem::gap_counts_test
