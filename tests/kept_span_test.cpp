// Every public type that keeps a span refuses a temporary vector, and accepts a vector with a name.

#include <concepts>

#include "call.hpp"
#include "test.hpp"

namespace kept_span_test {

using namespace ssmax;

using Numbers = std::vector<index_t>;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;
using Ints = std::vector<int>;

/// Type `Kept` made from Before..., then a vector, then After....
template <class Kept, class Vector, class Before = void(), class After = void()>
struct Constructor;
template <class Kept, class Vector, class... Before, class... After>
struct Constructor<Kept, Vector, void(Before...), void(After...)> {
  static constexpr bool accepts_names = std::is_constructible_v<Kept, Before..., Vector&, After...> &&
                                        std::is_constructible_v<Kept, Before..., const Vector&, After...>;
  static constexpr bool accepts_temporaries =
      std::is_constructible_v<Kept, Before..., Vector, After...> ||
      std::is_constructible_v<Kept, Before..., const Vector, After...>;
};

/// A function whose argument a result keeps.
template <auto call, class Vector>
struct Function {
  static constexpr bool accepts_names = std::invocable<decltype(call), Vector&>;
  static constexpr bool accepts_temporaries = std::invocable<decltype(call), Vector>;
};

template <class... Cases>
constexpr bool refuse_temporaries = ((Cases::accepts_names && !Cases::accepts_temporaries) && ...);

using Rows = View<const float, 3>;
using Table = View<const int, 2>;

static_assert(refuse_temporaries<Constructor<Lengths, Numbers>, Constructor<PrefixLM, Numbers>,
                                 Constructor<KeyLengths, Numbers>, Constructor<KeyLengths, Ints>,
                                 Constructor<Documents, Numbers, void(), void(bool)>,
                                 Constructor<Documents, Numbers, void(Numbers&), void(bool)>,
                                 Constructor<Documents, Numbers, void(), void(Numbers&, bool)>,
                                 Constructor<BlockSparse, std::vector<std::uint64_t>, void(SparseBlocks)>>);
// Scores and scalings.
static_assert(refuse_temporaries<
              Constructor<Alibi, Doubles>, Constructor<Alibi, Doubles, void(), void(AlibiDistance)>,
              Constructor<SlopedBias<float>, Doubles, void(View<const float, 4>)>,
              Constructor<SSMax<float>, Floats>, Constructor<SSMax<float>, Floats, void(Floats&)>,
              Constructor<SSMax<float>, Floats, void(), void(Floats&)>, Constructor<PerHead<float>, Floats>,
              Constructor<SizeTable<float>, Floats>, Constructor<SizeTable<float>, Floats, void(Floats&)>,
              Constructor<SizeTable<float>, Floats, void(Floats&, Floats&)>,
              Constructor<SizeTable<float>, Floats, void(), void(float, float)>>);
// Sources of keys.
static_assert(refuse_temporaries<Constructor<PageTable<int>, Ints, void(Table)>,
                                 Constructor<PageTable<int>, Ints, void(), void(Ints&, Ints&)>,
                                 Constructor<PageTable<int>, Ints, void(Ints&), void(Ints&)>,
                                 Constructor<PageTable<int>, Ints, void(Ints&, Ints&)>,
                                 Constructor<PageTable<int>, Ints, void(View<const int, 3>)>>);
// Options and views.
static_assert(refuse_temporaries<Constructor<decltype(AttentionOptions<float>::sinks), Floats>,
                                 Constructor<View<const float, 1>, Floats>>);
constexpr auto source = []<class V>(V && ids) requires requires(const PagedKvCache<float>& cache) {
  cache.source(std::forward<V>(ids));
}
{};
using Factory = SequenceLengths (*)(KeptIntegers);
static_assert(refuse_temporaries<Function<source, Numbers>, Function<source, Ints>,
                                 Function<Factory{SequenceLengths::padded}, Numbers>,
                                 Function<Factory{SequenceLengths::packed}, Ints>,
                                 Function<&SequenceLengths::padded_queries, Numbers>,
                                 Function<&SequenceLengths::packed_queries, Ints>>);
// A span and a part of it are no owners: their temporaries are accepted.
static_assert(std::is_constructible_v<KeyLengths, std::span<const index_t>>);
static_assert(std::is_constructible_v<Alibi, std::span<double>> &&
              std::is_constructible_v<Alibi, KeptSpan<double>>);
static_assert(std::is_trivially_copyable_v<KeptSpan<const float>> &&
              sizeof(KeptSpan<const float>) == sizeof(std::span<const float>));

TEST_CASE("Alibi of a number of heads has the slopes of the paper", "[score]") {
  for (const index_t heads : {1, 2, 8, 12, 20}) {
    const Doubles slopes = Alibi::slopes(heads);
    REQUIRE(std::ssize(slopes) == heads);
    const Alibi own(heads), given(slopes);
    for (index_t h = 0; h < heads; ++h) {
      CHECK(own.slope(h) == slopes[static_cast<std::size_t>(h)]);
      CHECK(own.slope(h) == given.slope(h));
    }
  }
  CHECK(Alibi(12).slope(8) == Approx(std::exp2(-0.5)));
  CHECK_THROWS_WITH(Alibi(-1), "ssmax::Alibi: heads are -1, must be at least 0");
}

TEST_CASE("PageTable deduces its types from vectors", "[paged_keys]") {
  const Ints table{0, 1, 2, 3}, begins{0, 1, 4}, lengths{2, 5};
  const PageTable rows(Table(table.data(), {2, 2}), lengths);
  const PageTable compressed(table, begins, lengths);
  CHECK(rows.page(1, 0, 0) == 2);
  CHECK(compressed.entries(1) == 3);
}

TEMPLATE_TEST_CASE("integers of any type are lengths, positions and targets", "[mask]", std::int8_t,
                   std::uint8_t, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t, long long,
                   std::uint64_t) {
  using Limits = std::numeric_limits<TestType>;
  const std::array ends{Limits::min(), Limits::max()};
  CHECK(Integers(ends).front() == static_cast<index_t>(Limits::min()));
  CHECK(Integers(ends).back() == static_cast<index_t>(Limits::max()));
  const std::vector<TestType> lengths{2, 3}, targets{1, 0, 2};
  const Numbers same{1, 0, 2};
  CHECK(KeyLengths(lengths).keys({.batch = 1, .shape = {2, 1, 1, 9}}).end == 3);
  const Floats logits{1, 2, 3, 4, 5, 6, 7, 8, 9};
  const View<const float, 2> rows(logits.data(), {3, 3});
  CHECK(cross_entropy<float>(rows, targets).loss == cross_entropy<float>(rows, same).loss);
  CHECK(SequenceLengths::padded(lengths).query_rows(1).count == 3);
}

}  // namespace kept_span_test
