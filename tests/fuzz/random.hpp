// Random numbers that are the same on every platform: each case draws from a generator of its own, so that a
// case can be repeated alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <numbers>
#include <ssmax/config.hpp>

namespace fuzz {

using ssmax::index_t;

class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t number) : state_(seed * 0xD1342543DE82EF95u + number) {
    for (int i = 0; i < 3; ++i) next();
  }

  /// splitmix64.
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  /// In [0, 1), never 0 exactly.
  double uniform() { return (static_cast<double>(next() >> 12) + 0.5) * 0x1p-52; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }
  /// One of low … high.
  index_t between(index_t low, index_t high) {
    return low + static_cast<index_t>(next() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return uniform() < probability; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<index_t>(values.size()) - 1)];
  }

 private:
  std::uint64_t state_;
};

}  // namespace fuzz
