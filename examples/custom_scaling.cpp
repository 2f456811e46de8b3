// Adds a scaling: any callable that returns the multiplier c for a Row {head, position, n}. Here the scaling of Grok-2:
// c is 1 up to the trained length T, and log2(position) / log2(T) after T.
#include <cmath>
#include <cstdio>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "check.hpp"

struct Grok2 {
  double trained_length;

  double operator()(const ssmax::Row& row) const {
    const auto position = static_cast<double>(row.position);
    return position > trained_length ? std::log2(position) / std::log2(trained_length) : 1.0;
  }
};

namespace {

using ssmax::index_t;
constexpr index_t kLength = 600;
constexpr index_t kTrainedLength = 64;

float logit(index_t query, index_t key) {
  return 4.0f * static_cast<float>(std::sin(static_cast<double>(query * 7 + key * 13)));
}

// Returns the largest relative error of a row of `y`. The reference is the formula in long double.
double worst_error(const ssmax::View<const float, 2>& y, index_t query) {
  const long double c =
      query > kTrainedLength ? std::log2(static_cast<long double>(query)) / 6 : 1;  // T = 2^6
  long double sum = 0;
  for (index_t key = 0; key <= query; ++key) sum += std::exp(c * static_cast<long double>(logit(query, key)));
  double worst = 0;
  for (index_t key = 0; key <= query; ++key) {
    const long double exact = std::exp(c * static_cast<long double>(logit(query, key))) / sum;
    worst =
        std::fmax(worst, static_cast<double>(std::abs(static_cast<long double>(y(query, key)) / exact - 1)));
  }
  return worst;
}

}  // namespace

int main() {
  std::vector<float> z(kLength * kLength), y(kLength * kLength);
  const ssmax::View<float, 2> logits{z.data(), {kLength, kLength}};
  const ssmax::View<float, 2> out{y.data(), {kLength, kLength}};
  for (index_t query = 0; query < kLength; ++query) {
    for (index_t key = 0; key < kLength; ++key) logits(query, key) = logit(query, key);
  }

  ssmax::softmax(logits, out, Grok2{double{kTrainedLength}}, ssmax::Causal{});

  // A lambda is a scaling too.
  std::vector<float> y2(y.size());
  const auto grok2 = [](const ssmax::Row& row) { return Grok2{double{kTrainedLength}}(row); };
  ssmax::softmax(logits, ssmax::View<float, 2>{y2.data(), {kLength, kLength}}, grok2, ssmax::Causal{});

  examples::Check check;
  std::printf("query   multiplier   largest relative error\n");
  for (const index_t query : {0, 1, 63, 64, 65, 128, 599}) {
    const double error = worst_error(out, query);
    std::printf("%5td %12.4f %24.1e\n", query, Grok2{double{kTrainedLength}}({0, query, query + 1}), error);
    check.holds("row " + std::to_string(query) + " follows the formula", error < 5e-7);
    if (query + 1 < kLength) check.holds("keys to come get nothing", out(query, query + 1) == 0.0f);
  }
  check.holds("struct and lambda give the same bits", y == y2);
  return check.exit_code();
}
