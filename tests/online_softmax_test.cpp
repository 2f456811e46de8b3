// The online softmax: a row cut into blocks in any way gives the weights and the lse of the whole row.

#include <numeric>

#include "reference.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace online_softmax_test {

using reference::Real;
using reference::rounding;
using reference::worse;
using ssmax::index_t;
using ssmax::OnlineSoftmax;

template <class T>
constexpr T inf = std::numeric_limits<T>::infinity();
template <class T>
constexpr T nan = std::numeric_limits<T>::quiet_NaN();

using Cut = std::vector<index_t>;  // the sizes of the blocks, one after the other

struct Result {
  std::vector<double> accumulated;  // as a caller holds it before the end
  std::vector<double> weights;      // after multiplication by finish()
  double finish = 0, lse = 0;
};

/// Does with every key what attention does with v: adds the weight, and rescales what was there before.
template <class T>
Result run(const std::vector<T>& logits, double c, const Cut& cut, bool in_place = false) {
  OnlineSoftmax<T> state(c);
  Result result;
  index_t begin = 0;
  for (const index_t count : cut) {
    std::vector<T> block(logits.begin() + begin, logits.begin() + begin + count);
    std::vector<T> out(block.size(), nan<T>);
    T* const to = in_place ? block.data() : out.data();
    const double factor = state.update(block.data(), count, to);
    for (double& weight : result.accumulated) weight *= factor;
    for (index_t i = 0; i < count; ++i) result.accumulated.push_back(static_cast<double>(to[i]));
    begin += count;
  }
  result.finish = state.finish();
  result.lse = state.lse();
  for (const double weight : result.accumulated) result.weights.push_back(weight * result.finish);
  return result;
}

Cut pieces(index_t n, index_t size) {
  Cut cut(static_cast<std::size_t>(n / size), size);
  if (n % size != 0) cut.push_back(n % size);
  return cut;
}

/// The whole row first.
std::vector<Cut> cuts_of(index_t n) {
  return {{n},          {1, n - 1},   {n - 1, 1},    {n / 2, n - n / 2}, {0, n, 0},
          pieces(n, 1), pieces(n, 7), pieces(n, 16), pieces(n, 64),      pieces(n, 257)};
}

/// Errors in units of what is allowed.
///
/// A weight: 6 roundings for exp, its scaled argument and the sum over at most 600 keys in vectors, pairwise between
/// blocks, and where the difference c (z - largest) = ln(y / largest y) is formed in T (c <= 0 or huge logits), three
/// roundings of that; there the shift, c times the largest logit of a block, is rounded to double as well. Weights may
/// vanish below 2^-120 of the largest in float. lse: the same of 1, and some roundings of its own size in double.
template <class T>
struct Errors {
  Real weights = 0, lse = 0;

  void take(const Result& result, const std::vector<T>& logits, double c, Real sum_roundings) {
    const auto row = reference::whole_row(std::span<const T>(logits), static_cast<Real>(c));
    const std::vector<Real> exact = reference::softmax(row);
    const Real largest = *std::ranges::max_element(exact), vanishing = std::ldexp(largest, -120);
    Real size = 0;  // of the logits, multiplied
    for (const T logit : logits) {
      if (std::isfinite(logit)) size = std::max(size, std::abs(row.multiplier * Real(logit)));
    }
    const Real shift_roundings = 4 * size * rounding<double>;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      const Real distance = exact[i] > 0 ? std::log(largest / exact[i]) : 0;
      const Real roundings = (6 + sum_roundings + 3 * distance) * rounding<T> + shift_roundings;
      const Real allowed = roundings * exact[i] + vanishing;
      weights = worse(weights, std::abs(Real(result.weights[i]) - exact[i]) / allowed);
    }
    const Real exact_lse = reference::logsumexp(row);
    const Real allowed = (6 + sum_roundings) * rounding<T> + shift_roundings;
    lse = worse(lse, std::abs(Real(result.lse) - exact_lse) / allowed);
  }
};

template <class T>
std::vector<T> sorted(std::vector<T> values, bool rising) {
  std::ranges::sort(values);
  if (!rising) std::ranges::reverse(values);
  return values;
}

template <class T>
void check_cuts(double mean, double deviation, std::initializer_list<double> multipliers) {
  for_each_target([&](const std::string&) {
    Errors<T> errors;
    bool in_place = true;
    for (const index_t n : {2, 17, 600}) {
      const std::vector<T> logits =
          reference::normals<T>(static_cast<std::size_t>(n), static_cast<unsigned>(n), deviation, mean);
      for (const std::vector<T>& row : {logits, sorted(logits, true), sorted(logits, false)}) {
        for (const double c : multipliers) {
          for (const Cut& cut : cuts_of(n)) {
            const Result result = run(row, c, cut);
            errors.take(result, row, c, 6);
            in_place = in_place && run(row, c, cut, true).weights == result.weights;
          }
        }
      }
    }
    CHECK(errors.weights <= 1);
    CHECK(errors.lse <= 1);
    CHECK(in_place);
  });
}

TEST_CASE("any cut gives the weights and the lse of the row", "[online][long_double]") {
  SECTION("float") { check_cuts<float>(0, 3, {1, 0.37, 6.5, -1, -6.5, 0, 1e-30, 1e-60}); }
  SECTION("double") { check_cuts<double>(0, 3, {1, 0.37, 6.5, -1, -6.5, 0, 1e-30, 1e-320}); }
}

TEST_CASE("logits far from zero, and far from each other", "[online][slow]") {
  // 7.27e5 is where c z log2(e) passes 2^20 and shifts stop being integers: rows on either side, and across.
  SECTION("float") {
    for (const double mean : {-1e6, -7.27e5, 7.27e5, 1e6}) check_cuts<float>(mean, 4, {1, -1, 0});
    check_cuts<float>(0, 1e6, {1, 1e-5, -1});
    check_cuts<float>(0, 1e30, {1, -1, 1e-29, -1e-29});
  }
  SECTION("double") {
    for (const double mean : {-1e6, -7.27e5, 7.27e5, 1e6}) check_cuts<double>(mean, 4, {1, -1, 0});
    check_cuts<double>(0, 1e6, {1, 1e-5, -1});
    check_cuts<double>(0, 1e30, {1, -1, 1e-29, -1e-29});
  }
}

TEST_CASE("SSMax multipliers of a million keys", "[online]") {
  for_each_target([](const std::string&) {
    const std::vector<float> logits = reference::normals<float>(20'000, 5, 2);
    Errors<float> errors;
    errors.take(run(logits, std::log(1e6), pieces(20'000, 256)), logits, std::log(1e6), 6);
    CHECK(errors.weights <= 1);
    CHECK(errors.lse <= 1);
  });
}

TEST_CASE("the caller's sums under positive multipliers do not depend on the cut at all", "[online]") {
  for_each_target([](const std::string&) {
    bool same = true;
    for (const double c : {1.0, 0.37, 6.5}) {
      const std::vector<float> logits = reference::normals<float>(600, 9, 3);
      const std::vector<double> whole = run(logits, c, {600}).accumulated;
      for (const Cut& cut : cuts_of(600)) {
        const std::vector<double> parts = run(logits, c, cut).accumulated;
        for (std::size_t i = 0; i < whole.size(); ++i) {
          // What the whole row flushes to zero may survive in a block with a shift of its own.
          same = same && (parts[i] == whole[i] || (whole[i] == 0 && parts[i] < 0x1p-120));
        }
      }
    }
    CHECK(same);
  });
}

TEMPLATE_TEST_CASE("a larger logit rescales by a power of two, a smaller one does not rescale", "[online]",
                   float, double) {
  using T = TestType;
  for_each_target([](const std::string&) {
    OnlineSoftmax<T> state(1);
    T low = -3, high = 40, same = 39;
    T weight{};
    CHECK(state.update(&low, 1, &weight) == 1);  // nothing to rescale yet
    int exponent = 0;
    const double factor = state.update(&high, 1, &weight);
    CHECK((factor < 1e-18 && std::frexp(factor, &exponent) == 0.5));  // an exact power of two, about e^-43
    CHECK(std::abs(std::log(factor) + 43) <= 1);
    CHECK(state.update(&same, 1, &weight) == 1);  // a smaller logit rescales nothing
  });
}

TEMPLATE_TEST_CASE("blocks without a visible key leave the state as it was", "[online]", float, double) {
  using T = TestType;
  for_each_target([](const std::string&) {
    Errors<T> errors;
    bool hidden_are_zero = true;
    std::vector<T> logits = reference::normals<T>(96, 21, 2);
    for (const std::ptrdiff_t block : {0, 2, 5}) std::fill_n(logits.begin() + 16 * block, 16, -inf<T>);
    logits[20] = logits[95 - 16] = -inf<T>;
    for (const double c : {1.5, -1.5, 0.0}) {
      for (const Cut& cut : cuts_of(96)) {
        const Result result = run(logits, c, cut);
        errors.take(result, logits, c, 6);
        for (std::size_t i = 0; i < logits.size(); ++i) {
          hidden_are_zero = hidden_are_zero && (logits[i] != -inf<T> || result.weights[i] == 0);
        }
      }
      const Result nothing = run(std::vector<T>(32, -inf<T>), c, {16, 16});
      hidden_are_zero = hidden_are_zero && std::ranges::count(nothing.weights, 0.0) == 32;
      CHECK(nothing.finish == 0);
      CHECK(nothing.lse == -inf<double>);
    }
    CHECK(errors.weights <= 1);
    CHECK(errors.lse <= 1);
    CHECK(hidden_are_zero);
    const OnlineSoftmax<T> untouched(2);
    CHECK(untouched.finish() == 0);
    CHECK(untouched.lse() == -inf<double>);
  });
}

TEMPLATE_TEST_CASE("NaN and +inf poison for good, from any block", "[online]", float, double) {
  using T = TestType;
  const std::vector<T> logits = reference::normals<T>(96, 31, 2);
  for_each_target([&](const std::string&) {
    int survived = 0, lost = 0;
    Errors<T> errors;
    const auto is_poisoned = [](const Result& result) {
      const auto is_nan = [](double weight) { return std::isnan(weight); };
      return std::isnan(result.finish) && std::isnan(result.lse) &&
             std::ranges::all_of(result.weights, is_nan);
    };
    for (const std::size_t at : {0U, 15U, 16U, 40U, 95U}) {
      std::vector<T> with_nan = logits, with_inf = logits, hidden_and_nan(96, -inf<T>);
      with_nan[at] = hidden_and_nan[at] = nan<T>;
      with_inf[at] = inf<T>;
      for (const Cut& cut : cuts_of(96)) {
        for (const double c : {1.5, 0.0, -1.5}) {
          if (!is_poisoned(run(with_nan, c, cut))) ++survived;
          if (!is_poisoned(run(hidden_and_nan, c, cut))) ++survived;
          if (c >= 0 && !is_poisoned(run(with_inf, c, cut))) ++survived;
          if (is_poisoned(run(logits, c, cut))) ++lost;
        }
        // c z = -inf under a negative c: the key gets nothing, the others all.
        const Result negative = run(with_inf, -1.5, cut);
        std::vector<T> without = with_inf;
        without[at] = -inf<T>;
        errors.take(negative, without, -1.5, 6);
      }
    }
    CHECK(survived == 0);
    CHECK(lost == 0);
    CHECK(errors.weights <= 1);
    CHECK(errors.lse <= 1);
  });
}

TEST_CASE("a multiplier of zero gives every visible key the same weight", "[online]") {
  for_each_target([](const std::string&) {
    std::vector<float> logits = reference::normals<float>(100, 3, 1e4);
    logits[7] = 3e38F;
    logits[8] = -3e38F;
    double worst = 0;
    for (const Cut& cut : cuts_of(100)) {
      const Result result = run(logits, 0, cut);
      for (const double weight : result.weights) {
        worst = std::isnan(weight) ? inf<double> : std::max(worst, std::abs(weight - 0.01));
      }
      worst = std::max(worst, std::abs(result.lse - std::log(100.0)) / 100);
    }
    CHECK(worst <= 1e-15);
  });
}

}  // namespace online_softmax_test
