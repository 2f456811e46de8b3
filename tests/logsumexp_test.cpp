// logsumexp: of one row, as a number; its output, which must lie apart from the logits.

#include "reference.hpp"
#include "refusal.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace logsumexp_test {

using reference::Real;
using namespace ssmax;

TEMPLATE_TEST_CASE("logsumexp of one row is a number", "[logsumexp]", float, double, half, bfloat16) {
  using T = TestType;
  for_each_target([](const std::string&) {
    for (const index_t n : {1, 2, 7, 100, 5000}) {
      const std::vector<T> z = reference::normals<T>(static_cast<std::size_t>(n), 5, 2);
      for (const double c : {1.0, 0.4, -1.3}) {
        const View<const T, 1> row(z);
        const auto value = ssmax::logsumexp(row, Constant{c});
        static_assert(std::is_same_v<decltype(value),
                                     const std::conditional_t<std::is_same_v<T, double>, double, float>>);
        const Real exact =
            reference::logsumexp(reference::whole_row(std::span<const T>(z), static_cast<Real>(c)));
        const Real u = std::is_same_v<T, double> ? 0x1p-53L : 0x1p-24L;
        CAPTURE(n, c);
        CHECK(std::abs(static_cast<Real>(value) - exact) <= 6 * u * (1 + std::abs(exact)));
        // A vector is a row as well, and rows of a matrix are the same rows.
        CHECK(ssmax::logsumexp(z, Constant{c}) == value);
        using Out = std::remove_const_t<decltype(value)>;
        std::array<Out, 1> out{};
        ssmax::logsumexp(View<const T, 2>(z.data(), {1, n}), View<Out, 1>(out), Constant{c});
        CHECK(out[0] == value);
      }
    }
  });
}

TEST_CASE("logsumexp of one row under a mask, and of no key", "[logsumexp]") {
  const std::vector<double> z{3, 1, 2, 50};
  const std::vector<index_t> three{3}, none{0};
  const View<const double, 1> row(z);
  const double expected = std::log(std::exp(3.0) + std::exp(1.0) + std::exp(2.0));
  CHECK(std::abs(ssmax::logsumexp(row, Softmax{}, Lengths{three}) - expected) < 1e-15);
  CHECK(ssmax::logsumexp(row, Softmax{}, Lengths{none}) == -std::numeric_limits<double>::infinity());
  CHECK(ssmax::logsumexp(std::vector<float>{}) == -std::numeric_limits<float>::infinity());
  const std::vector<index_t> two_rows{1, 2};
  CHECK_THROWS_AS(ssmax::logsumexp(row, Softmax{}, Lengths{two_rows}), std::invalid_argument);
}

TEST_CASE("out of logsumexp must not overlap the logits", "[logsumexp][errors]") {
  const std::vector<float> before = reference::normals<float>(64, 7);
  std::vector<float> memory = before;
  const View<const float, 2> logits(memory.data(), {4, 8});
  const auto refused = [&](auto out) {
    const std::string message = refusal([&] { ssmax::logsumexp(logits, out); });
    CAPTURE(message);
    CHECK(message.find("logsumexp: out (16 bytes) overlaps logits (128 bytes)") != std::string::npos);
    CHECK(memory == before);
  };
  refused(View<float, 1>(memory.data(), {4}));       // over the first logits
  refused(View<float, 1>(memory.data() + 8, {4}));   // over a later row
  refused(View<float, 1>(memory.data() + 31, {4}));  // over the last logit
  const View<const float, 3> three(memory.data(), {2, 2, 8});
  CHECK(refusal([&] {
          ssmax::logsumexp(three, View<float, 2>(memory.data(), {2, 2}));
        }).find("overlaps") != std::string::npos);
  CHECK(memory == before);
}

TEST_CASE("out of logsumexp may lie between the logits' rows", "[logsumexp]") {
  // [head, query, key] with a gap after each head's queries, where that head's results go.
  constexpr index_t heads = 3, queries = 4, keys = 8, pitch = queries * keys + queries;
  std::vector<float> memory = reference::normals<float>(heads * pitch, 9), expected(heads * queries);
  const std::vector<float> before = memory;
  const View<const float, 3> logits(memory.data(), {heads, queries, keys}, {pitch, keys, 1});
  ssmax::logsumexp(logits, View<float, 2>(expected.data(), {heads, queries}));
  const View<float, 2> between(memory.data() + queries * keys, {heads, queries}, {pitch, 1});
  ssmax::logsumexp(logits, between);
  bool same = true;
  for (index_t h = 0; h < heads; ++h) {
    for (index_t q = 0; q < queries; ++q) {
      same = same && between(h, q) == expected[static_cast<std::size_t>(h * queries + q)];
      for (index_t k = 0; k < keys; ++k) {
        same = same && logits(h, q, k) == before[static_cast<std::size_t>(h * pitch + q * keys + k)];
      }
    }
  }
  CHECK(same);
}

}  // namespace logsumexp_test
