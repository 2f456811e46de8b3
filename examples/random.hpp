// Random numbers that are the same on every platform. The distributions of <random> and std::shuffle differ
// between standard libraries.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <ssmax/config.hpp>
#include <utility>
#include <vector>

namespace examples {

class Random {
 public:
  explicit Random(std::uint64_t seed) : bits_(seed) {}

  ssmax::index_t below(ssmax::index_t end) {
    return static_cast<ssmax::index_t>(bits_() % static_cast<std::uint64_t>(end));
  }

  // Returns a number in [0, 1).
  double unit() { return 0x1p-53 * static_cast<double>(bits_() >> 11); }

  // Returns a number with mean 0 and standard deviation 1, uniformly distributed.
  float standard() { return static_cast<float>(std::sqrt(3.0) * (2 * unit() - 1)); }

 private:
  std::mt19937_64 bits_;
};

template <class T>
void shuffle(std::vector<T>& items, Random& random) {
  for (std::size_t i = items.size(); i > 1; --i) {
    std::swap(items[i - 1], items[static_cast<std::size_t>(random.below(static_cast<ssmax::index_t>(i)))]);
  }
}

}  // namespace examples
