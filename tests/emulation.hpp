// Tells tests that they run in emulation, and which emulated units of bfloat16 products a test case has met.
#pragma once

#include <atomic>
#include <ssmax/target.hpp>

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

}  // namespace emulation
