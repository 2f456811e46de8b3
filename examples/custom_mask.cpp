// Adds a mask. The mask determines which keys a query sees, and so n. Here a query sees every `step`-th key up to its
// own: the dilated attention of long-context models.
#include <ssmax/ssmax.hpp>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "random.hpp"

struct Dilated {
  ssmax::index_t step;

  // Returns a range that contains every visible key; `sees` selects from the range. n counts the selected keys.
  ssmax::KeyRange keys(const ssmax::Query& query) const { return {0, query.position() + 1}; }
  bool sees(const ssmax::Query& query, ssmax::index_t key) const {
    return (query.position() - key) % step == 0;
  }
  // The library calls this before it writes any result.
  void check(const ssmax::QueryShape&) const {
    if (step < 1) throw std::invalid_argument("Dilated: step must be at least 1");
  }
};

namespace {

using ssmax::index_t;
constexpr index_t kHeads = 2, kLength = 100, kWidth = 16;

}  // namespace

int main() {
  examples::Random random(1);
  std::vector<float> q(kHeads * kLength * kWidth), k(q.size()), v(q.size()), out(q.size()),
      expected(q.size());
  for (auto* values : {&q, &k, &v}) {
    for (float& value : *values) value = random.standard();
  }
  const auto tensor = [](std::vector<float>& values) {
    return ssmax::View<float, 4>(values.data(), {1, kHeads, kLength, kWidth});
  };
  const ssmax::SSMax<float> scaling{0.43f};

  // Pass the mask in place of one of the library's masks. `&` joins masks.
  const auto mask = Dilated{4} & ssmax::SlidingWindow{63};
  ssmax::attention({.q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(out)}, scaling, mask);

  // Compute the same attention with a matrix of bool.
  bool seen[kLength * kLength];
  for (index_t query = 0; query < kLength; ++query) {
    for (index_t key = 0; key < kLength; ++key) {
      seen[query * kLength + key] = key <= query && query - key <= 63 && (query - key) % 4 == 0;
    }
  }
  ssmax::attention(
      {.q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(expected)}, scaling,
      ssmax::MatrixMask(ssmax::View<const bool, 4>(seen, {1, kHeads, kLength, kLength}, {0, 0, kLength, 1})));

  examples::Check check;
  check.holds("the mask shows what the matrix shows", out == expected);
  bool refused = false;
  try {
    ssmax::attention({.q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(out)}, scaling,
                     Dilated{0});
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  check.holds("a step of 0 is refused", refused);
  return check.exit_code();
}
