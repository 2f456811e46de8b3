// Tells tests that they run in emulation, and which emulated units of bfloat16 products a test case has met.
#pragma once

#include <atomic>
#include <cstddef>
#include <ssmax/target.hpp>
#include <vector>

namespace emulation {

/// Is true in the binary whose library runs in emulation (emulated_main.cpp).
inline bool is_emulated = false;
/// Is true in a test case that has to meet the units. The test case then visits no other targets.
inline bool has_to_meet = false;

/// Whether a unit has computed a product on its target.
using Met = std::atomic<bool>;
inline Met pair_dot = false, tile_product = false;

/// Called by the emulation of a unit. Exception: the matrix kernels also use pair dots, which do not count.
inline void meet(Met& unit, ssmax::Target target) {
  if (!unit.load(std::memory_order_relaxed) && ssmax::active_target() == target) {
    unit.store(true, std::memory_order_relaxed);
  }
}

/// Returns the values. Exception: emulation takes only `count` of them, at equal distances.
template <class Values>
auto some(const Values& values, std::size_t count) {
  std::vector<typename Values::value_type> result(values.begin(), values.end());
  if (!is_emulated || count >= result.size()) return result;
  for (std::size_t i = 0; i < count; ++i) result[i] = values[i * values.size() / count];
  result.resize(count);
  return result;
}

}  // namespace emulation
