// What each score makes of a logit, its derivative, and what it takes to be one.

#include "test.hpp"

namespace score_test {

using namespace ssmax;

using Limits = std::numeric_limits<double>;
constexpr double infinity = Limits::infinity();

/// A score of one's own, in double alone.
struct Square {
  double operator()(double z, const Key&) const { return z * z; }
  double derivative(double z, const Key&) const { return 2 * z; }
};
struct IgnoresItsKey {
  double operator()(double z) const { return z; }
  double derivative(double) const { return 1; }
};

static_assert(ssmax::Score<Identity> && ssmax::Score<Softcap> && ssmax::Score<Alibi> &&
              ssmax::Score<SlopedBias<half>>);
static_assert(ssmax::Score<Bias<float>> && ssmax::Score<Bias<double>> && ssmax::Score<Bias<ssmax::half>>);
static_assert(ssmax::Score<Square> && ssmax::Score<ssmax::Composed<Square, Softcap>>);
static_assert(!ssmax::Score<ssmax::Causal> && !ssmax::Score<IgnoresItsKey> && !ssmax::Score<int>);

/// The precision of z is that of the result.
template <class S>
constexpr bool keeps_precision = std::is_same_v<decltype(std::declval<const S&>()(1.0f, Key{})), float>&&
    std::is_same_v<decltype(std::declval<const S&>()(1.0, Key{})), double>&&
        std::is_same_v<decltype(std::declval<const S&>().derivative(1.0f, Key{})), float>&&
            std::is_same_v<decltype(std::declval<const S&>().derivative(1.0, Key{})), double>;
static_assert(keeps_precision<Identity> && keeps_precision<Softcap> && keeps_precision<Alibi>);
static_assert(keeps_precision<Bias<float>> && keeps_precision<Bias<double>>);
static_assert(keeps_precision<ssmax::Composed<Softcap, Alibi>> &&
              keeps_precision<ssmax::Composed<Square, Square>>);

constexpr QueryShape shape{2, 3, 4, 5};

Key key_at(index_t batch, index_t head, index_t query, index_t key) {
  const Query at{batch, head, query, shape};
  return {at, key, at.position(), key};
}

template <class S>
std::string refusal(const S& score, const QueryShape& of) {
  try {
    ssmax::detail::check_score(score, of);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool is_close(double actual, double expected, double relative, double absolute = 0) {
  return std::abs(actual - expected) <= std::abs(expected) * relative + absolute;
}

template <class S>
void check_derivative(const S& score, const Key& key) {
  constexpr double step = 1e-5;
  for (const double z : {-80.0, -7.5, -1.0, -0.25, 0.0, 1e-3, 0.5, 2.0, 9.0, 40.0}) {
    const double difference = (score(z + step, key) - score(z - step, key)) / (2 * step);
    INFO("z is " << z);
    CHECK(is_close(score.derivative(z, key), difference, 0, 1e-7));
    const float narrow = score.derivative(static_cast<float>(z), key);
    CHECK(is_close(static_cast<double>(narrow), score.derivative(z, key), 1e-4, 1e-7));
  }
}

/// Values that no two elements share.
template <class T>
std::vector<T> ramp(index_t count) {
  std::vector<T> result;
  for (index_t i = 0; i < count; ++i) result.push_back(static_cast<T>(0.125f * static_cast<float>(i) - 2));
  return result;
}

TEST_CASE("Identity keeps logits", "[score]") {
  for (const double z : {-infinity, -3.0, 0.0, 1e300, infinity}) CHECK(Identity{}(z, Key{}) == z);
  CHECK(std::isnan(Identity{}(Limits::quiet_NaN(), Key{})));
  check_derivative(Identity{}, Key{});
}

TEST_CASE("softcap is cap·tanh(z / cap)", "[score]") {
  for (const double cap : {0.5, 1.0, 30.0, 50.0, 1e6}) {
    const Softcap score(cap);
    for (const double z : {-1e30, -100.0, -3.0, -1e-9, 0.0, 0.75, 20.0, 1e308}) {
      CHECK(is_close(score(z, Key{}), cap * std::tanh(z / cap), 1e-15));
      CHECK(std::abs(score(z, Key{})) <= cap);
      const auto narrow = static_cast<float>(std::max(-1e30, std::min(1e30, z)));
      const double expected = cap * std::tanh(static_cast<double>(narrow) / cap);
      CHECK(is_close(static_cast<double>(score(narrow, Key{})), expected, 1e-6));
    }
    check_derivative(score, Key{});
  }
  CHECK(is_close(Softcap(30)(1.0, Key{}), 0.99962979, 1e-8));
}

TEST_CASE("Softcap keeps -inf, and makes -inf of no other logit", "[score]") {
  const Softcap score(2);
  CHECK(score(-infinity, Key{}) == -infinity);
  CHECK(score(-std::numeric_limits<float>::infinity(), Key{}) == -std::numeric_limits<float>::infinity());
  CHECK(score(Limits::lowest(), Key{}) == -2);
  CHECK(score(std::numeric_limits<float>::lowest(), Key{}) == -2);
  CHECK(score(infinity, Key{}) == 2);
  CHECK(std::isnan(score(Limits::quiet_NaN(), Key{})));
  // A cap so small that z / cap overflows.
  const double smallest = static_cast<double>(std::numeric_limits<float>::min());
  CHECK(Softcap(smallest)(-3e38f, Key{}) == -std::numeric_limits<float>::min());
  CHECK(Softcap(smallest)(0.0f, Key{}) == 0);

  for (const double z : {-infinity, Limits::lowest(), -2000.0, 2000.0, infinity}) {
    CHECK(score.derivative(z, Key{}) == 0);
    CHECK(score.derivative(static_cast<float>(std::max(-1e38, std::min(1e38, z))), Key{}) == 0);
  }
  CHECK(std::isnan(score.derivative(Limits::quiet_NaN(), Key{})));
}

TEST_CASE("a cap must be above 0 and finite", "[score]") {
  for (const double cap : {0.0, -1.0, infinity, -infinity, Limits::quiet_NaN(), 1e-40, 1e39}) {
    const std::string message = refusal(Softcap(cap), shape);
    INFO(cap << ": " << message);
    CHECK(message.find("ssmax::Softcap: cap is ") == 0);
  }
  CHECK(refusal(Softcap(-1.5), shape) == "ssmax::Softcap: cap is -1.5, must be above 0 and finite");
  for (const double cap : {1e-30, 0.5, 50.0, 1e38}) CHECK(refusal(Softcap(cap), shape) == "");
}

/// As the paper's code and those after it have them.
std::vector<double> published_slopes(std::size_t heads) {
  const auto of_power_of_two = [](std::size_t n) {
    const double start = std::pow(2.0, -std::pow(2.0, -(std::log2(static_cast<double>(n)) - 3)));
    std::vector<double> result;
    for (std::size_t i = 0; i < n; ++i) result.push_back(start * std::pow(start, static_cast<double>(i)));
    return result;
  };
  const auto closest =
      static_cast<std::size_t>(std::pow(2.0, std::floor(std::log2(static_cast<double>(heads)))));
  std::vector<double> result = of_power_of_two(closest);
  const std::vector<double> more = of_power_of_two(2 * closest);
  for (std::size_t i = 0; result.size() < heads; i += 2) result.push_back(more[i]);
  return result;
}

TEST_CASE("ALiBi's slopes are the published ones for any number of heads", "[score]") {
  CHECK(Alibi::slopes(8) == std::vector<double>{0.5, 0.25, 0.125, 0.0625, 0x1p-5, 0x1p-6, 0x1p-7, 0x1p-8});
  CHECK(Alibi::slopes(1) == std::vector<double>{0x1p-8});
  CHECK(Alibi::slopes(3) == std::vector<double>{0x1p-4, 0x1p-8, 0x1p-2});
  CHECK(Alibi::slopes(0).empty());
  for (std::size_t heads = 1; heads <= 130; ++heads) {
    const std::vector<double> slopes = Alibi::slopes(static_cast<index_t>(heads));
    const std::vector<double> expected = published_slopes(heads);
    REQUIRE(slopes.size() == heads);
    INFO(heads << " heads");
    double worst = 0;
    for (std::size_t i = 0; i < heads; ++i) worst = std::max(worst, std::abs(slopes[i] / expected[i] - 1));
    CHECK(worst <= 1e-13);
  }
  CHECK_THROWS_AS(Alibi::slopes(-1), std::invalid_argument);
}

TEST_CASE("ALiBi adds slope times distance, by head", "[score]") {
  const std::vector<double> slopes{0.5, 0.25, -3.0};
  const Alibi score(slopes);
  CHECK(score(1.5, key_at(0, 0, 3, 4)) == 1.5);
  CHECK(score(1.5, key_at(0, 0, 3, 1)) == 1.5 - 0.5 * 3);
  CHECK(score(1.5, key_at(1, 1, 0, 4)) == 1.5 + 0.25 * 3);
  CHECK(score(1.5f, key_at(1, 2, 2, 0)) == 1.5f + 3.0f * 3);
  CHECK(score(-infinity, key_at(0, 0, 3, 1)) == -infinity);
  check_derivative(score, key_at(1, 2, 2, 0));

  CHECK(refusal(score, shape) == "");
  CHECK(refusal(score, {1, 4, 1, 1}) == "ssmax::Alibi: slopes have extent 3, heads are 4");
  CHECK(refusal(score, {1, 2, 1, 1}) == "ssmax::Alibi: slopes have extent 3, heads are 2");
}

TEST_CASE("ALiBi of absolute distances subtracts slope times |distance|", "[score]") {
  const std::vector<double> slopes{0.5, 0.25, -3.0};
  const Alibi score(slopes, AlibiDistance::absolute);
  CHECK(score(1.5, key_at(0, 0, 3, 4)) == 1.5);
  CHECK(score(1.5, key_at(0, 0, 3, 1)) == 1.5 - 0.5 * 3);
  CHECK(score(1.5, key_at(1, 1, 0, 4)) == 1.5 - 0.25 * 3);
  CHECK(score(1.5f, key_at(1, 2, 2, 0)) == 1.5f + 3.0f * 3);
  CHECK(score(-infinity, key_at(0, 0, 3, 1)) == -infinity);
}

TEST_CASE("a sloped bias of another shape or number of heads is refused", "[score]") {
  const std::vector<float> values = ramp<float>(200);
  const std::vector<double> slopes{0.5, -2, 3};
  const View<const float, 4> matrix(values.data(), {2, 3, 4, 5});
  const SlopedBias score(matrix, slopes);
  CHECK(score(0.5, key_at(1, 1, 3, 4)) == 0.5 - 2 * static_cast<double>(matrix(1, 1, 3, 4)));
  check_derivative(score, key_at(1, 1, 3, 4));
  CHECK(refusal(score, shape) == "");
  CHECK(refusal(score, {2, 4, 4, 5}) ==
        "ssmax::SlopedBias: matrix has extent 3 in dimension 1, the attention has 4");
  CHECK(refusal(SlopedBias(matrix, std::span(slopes).first(2)), shape) ==
        "ssmax::SlopedBias: slopes have extent 2, heads are 3");
}

TEST_CASE("ALiBi uses the positions of the mask", "[score]") {
  const std::vector<index_t> queries{0, 1, 2}, keys{0, 5, 7};
  const ssmax::Documents documents(queries, keys, true);
  const Query query{0, 0, 0, {1, 1, 2, 7}};
  const Key key{query, 1, ssmax::detail::query_position(documents, query),
                ssmax::detail::key_position(documents, query, 1)};
  CHECK((key.query_position == 4 && key.key_position == 1));
  const std::vector<double> slope{0.5};
  CHECK(Alibi(slope)(10.0, key) == 8.5);
}

TEMPLATE_TEST_CASE("a bias is added, broadcast or not, from any type", "[score]", float, double, ssmax::half,
                   ssmax::bfloat16) {
  using T = TestType;
  const std::vector<T> values = ramp<T>(shape.rows() * shape.keys);
  const View<const T, 4> full(values.data(), {2, 3, 4, 5}),
      of_head(values.data(), {2, 3, 4, 5}, {0, 1, 0, 0}), of_pair(values.data(), {2, 3, 4, 5}, {0, 0, 5, 1});
  for (index_t query = 0; query < 4; ++query) {
    for (index_t key = 0; key < 5; ++key) {
      for (const View<const T, 4>& view : {full, of_head, of_pair}) {
        const Bias<T> score(view);
        CHECK(refusal(score, shape) == "");
        const auto bias = static_cast<double>(view(1, 2, query, key));
        CHECK(score(0.5, key_at(1, 2, query, key)) == 0.5 + bias);
        CHECK(score(0.5f, key_at(1, 2, query, key)) == 0.5f + static_cast<float>(bias));
      }
    }
  }
  check_derivative(Bias<T>(full), key_at(1, 2, 3, 4));
}

TEMPLATE_TEST_CASE("is_mask finds every element that is not 0 or -inf", "[score]", float, double, ssmax::half,
                   ssmax::bfloat16) {
  using T = TestType;
  const T zero(0.0F), masked(-std::numeric_limits<float>::infinity());
  const std::array<index_t, 4> extents{2, 3, 4, 5};
  std::vector<T> values(120, zero);
  for (std::size_t i = 0; i < values.size(); i += 3) values[i] = masked;
  values[1] = T(-0.0F);
  const View<const T, 4> full(values.data(), extents), row(values.data(), extents, {0, 0, 0, 1});
  CHECK(Bias(full).is_mask());
  for (const float other : {1e-7F, -6e4F, 1.0F, std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::size_t i : {0U, 4U, 5U, 60U, 119U}) {
      const T before = std::exchange(values[i], T(other));
      CHECK(!Bias(full).is_mask());
      CHECK(Bias(row).is_mask() == (i > 4));
      values[i] = before;
    }
  }
  CHECK(Bias(View<const T, 4>(nullptr, {2, 3, 0, 5}, {0, 0, 0, 1})).is_mask());
}

TEST_CASE("a bias finds its type by itself", "[score]") {
  std::vector<float> values(120);
  const std::array<index_t, 4> extents{2, 3, 4, 5};
  static_assert(std::is_same_v<decltype(Bias(View<float, 4>(values.data(), extents))), Bias<float>>);
  static_assert(std::is_same_v<decltype(Bias(View<const float, 4>(values.data(), extents))), Bias<float>>);
  CHECK(Bias(View<float, 4>(values.data(), extents))(2.0, key_at(0, 0, 0, 0)) == 2);
}

TEST_CASE("a bias of another shape is refused", "[score]") {
  const std::vector<float> values(200);
  const auto bias = [&](const std::array<index_t, 4>& extents) {
    return refusal(Bias(View<const float, 4>(values.data(), extents)), shape);
  };
  CHECK(bias({2, 3, 4, 5}) == "");
  CHECK(bias({1, 3, 4, 5}) ==
        "ssmax::Bias: bias has extent 1 in dimension 0, the attention has 2 (stride 0 broadcasts)");
  CHECK(bias({2, 3, 4, 4}) == "ssmax::Bias: bias has extent 4 in dimension 3, the attention has 5");
  CHECK(refusal(Bias(View<const float, 4>(values.data(), {2, 3, 4, 5}, {0, 0, 1, 4})), shape) ==
        "ssmax::Bias: bias has last stride 4, must be 0 or 1");
  CHECK(refusal(Bias(View<const float, 4>(nullptr, {2, 3, 4, 5})), shape) ==
        "ssmax::Bias: bias is null but has size 120, must be 0");
}

TEST_CASE("scores are applied from left to right", "[score]") {
  const std::vector<double> slopes{0.5, 0.25, 3.0};
  const std::vector<float> values = ramp<float>(120);
  const Bias bias(View<const float, 4>(values.data(), {2, 3, 4, 5}));
  const Key key = key_at(1, 2, 1, 0);
  const double distance = -2 * 3.0;
  for (const double z : {-4.0, 0.0, 1.25, 8.0}) {
    CHECK(is_close((Softcap(2) | Alibi(slopes))(z, key), 2 * std::tanh(z / 2) + distance, 1e-15));
    CHECK(is_close((Alibi(slopes) | Softcap(2))(z, key), 2 * std::tanh((z + distance) / 2), 1e-15));
    CHECK((Identity{} | Softcap(2) | Identity{})(z, key) == Softcap(2)(z, key));
  }
  check_derivative(Softcap(2) | Alibi(slopes), key);
  check_derivative(Alibi(slopes) | Softcap(2), key);
  check_derivative(bias | Softcap(7) | Alibi(slopes) | Softcap(30), key);
  check_derivative((Softcap(30) | bias) | (Softcap(7) | Softcap(5)), key);
}

TEST_CASE("a score of one's own in double composes with those of any precision", "[score]") {
  CHECK((Square{} | Softcap(4))(1.5f, Key{}) == Softcap(4)(2.25f, Key{}));
  CHECK(ssmax::Composed(Square{}, Square{}).derivative(3.0, Key{}) == 108);
  CHECK(ssmax::Composed(Square{}, Square{}).derivative(3.0f, Key{}) == 108);
}

TEST_CASE("a key with a bias of -inf has the weight 0 and the gradient 0", "[score]") {
  const std::vector<float> values(120, -std::numeric_limits<float>::infinity());
  const Bias bias(View<const float, 4>(values.data(), {2, 3, 4, 5}));
  const std::vector<double> slopes{0.5, 0.25, 3.0};
  const auto score = bias | Softcap(30) | Alibi(slopes) | Identity{};
  CHECK(score(12.0, key_at(1, 2, 0, 4)) == -infinity);
  CHECK(score(12.0f, key_at(1, 2, 0, 4)) == -std::numeric_limits<float>::infinity());
  CHECK(score.derivative(12.0, key_at(1, 2, 0, 4)) == 0);
}

TEST_CASE("both parts of a composition are checked, and a score without a check accepts all", "[score]") {
  CHECK(refusal(Softcap(0) | Identity{}, shape) != "");
  CHECK(refusal(Identity{} | Softcap(0), shape) != "");
  CHECK(refusal(Softcap(1) | Identity{}, shape) == "");
  CHECK(refusal(Square{}, shape) == "");
}

}  // namespace score_test
