// The exponential in the kernels, float by float. It is reached through exp_store with shift 0, so that the
// argument of exp is the element itself.

#include <bit>

#include "target_scope.hpp"
#include "test.hpp"

namespace exp_test {

using ssmax::index_t;

constexpr float flushed_below = -86.98f;  // e^x = 2^(-125.5)

/// Distance of `value` from `exact` in units in the last place of the float nearest to `exact`.
double ulps(float value, double exact) {
  const int exponent = std::max(std::ilogb(exact), -126);
  return std::abs(static_cast<double>(value) - exact) / std::ldexp(1.0, exponent - 23);
}

struct Sweep {
  double worst = 0;
  float worst_at = 0;
};

/// Every `stride`-th float from -0 down to `lowest`.
Sweep sweep(float lowest, std::uint32_t stride) {
  const auto& kernels = ssmax::detail::kernels<ssmax::detail::RowKernels<float>>();
  ssmax::detail::OverlappedWork<float> nothing;
  const auto scale = ssmax::detail::split_scale<float>(1.0);
  std::vector<float> x, y(4096);
  Sweep result;
  const auto flush = [&] {
    kernels.exp_store(x.data(), static_cast<index_t>(x.size()), scale, 0.0f, y.data(), nothing);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double error = ulps(y[i], std::exp(static_cast<double>(x[i])));
      if (!(error <= result.worst)) result = {error, x[i]};
    }
    x.clear();
  };
  for (std::uint32_t bits = 0x80000000u; bits <= std::bit_cast<std::uint32_t>(lowest); bits += stride) {
    x.push_back(std::bit_cast<float>(bits));
    if (x.size() == y.size()) flush();
  }
  flush();
  return result;
}

TEST_CASE("exp is within 1 ulp at every 1009th float", "[exp]") {
  for_each_target([](const std::string& target) {
    const Sweep result = sweep(flushed_below, 1009);
    CAPTURE(target, result.worst_at);
    CHECK(result.worst <= 1.0);
    CHECK(result.worst > 0.4);  // else nothing was compared: rounding alone errs by half an ulp
  });
}

// 1.1e9 floats. On the active target only: ctest runs it once for each.
TEST_CASE("exp is within 1 ulp at every float", "[exhaustive]") {
  const Sweep result = sweep(flushed_below, 1);
  CAPTURE(result.worst_at);
  CHECK(result.worst <= 1.0);
  CHECK(result.worst > 0.5);
  WARN("largest error " << result.worst << " ulp at " << result.worst_at);
}

TEST_CASE("exp falls to exactly 0 and keeps its sum", "[exp]") {
  for_each_target([](const std::string& target) {
    CAPTURE(target);
    const auto& kernels = ssmax::detail::kernels<ssmax::detail::RowKernels<float>>();
    ssmax::detail::OverlappedWork<float> nothing;
    const auto scale = ssmax::detail::split_scale<float>(1.0);
    const std::vector<float> x{0.0f, -87.4f, -88.0f, -1e3f, -1e30f, -INFINITY, -1.0f};
    std::vector<float> y(x.size());
    const float sum =
        kernels.exp_store(x.data(), static_cast<index_t>(x.size()), scale, 0.0f, y.data(), nothing);
    CHECK(y[0] == 1.0f);
    CHECK(std::vector<float>(y.begin() + 1, y.end() - 1) == std::vector<float>(5, 0.0f));
    CHECK(sum == y.front() + y.back());
  });
}

// Rounded twice, r = x·log2(e) - n costs 0.35 ulp and the two last steps 0.75; only float is swept to its last bit.
TEST_CASE("exp in double is within 1.25 ulp", "[exp]") {
  for_each_target([](const std::string& target) {
    const auto& kernels = ssmax::detail::kernels<ssmax::detail::RowKernels<double>>();
    ssmax::detail::OverlappedWork<double> nothing;
    const auto scale = ssmax::detail::split_scale<double>(1.0);
    std::vector<double> x, y;
    for (int i = 0; i < 700'000; ++i) x.push_back(-0.001 * i - 1e-7 * (i % 977));
    y.resize(x.size());
    kernels.exp_store(x.data(), static_cast<index_t>(x.size()), scale, 0.0, y.data(), nothing);
    long double worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const long double exact = std::exp(static_cast<long double>(x[i]));
      const long double ulp = std::ldexp(1.0L, std::ilogb(exact) - 52);
      worst = std::max(worst, std::abs(static_cast<long double>(y[i]) - exact) / ulp);
    }
    CAPTURE(target);
    CHECK(worst <= 1.25L);
    CHECK(worst > 0.4L);
  });
}

}  // namespace exp_test
