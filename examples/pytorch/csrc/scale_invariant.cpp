#include "scale_invariant.hpp"

#include "kept.hpp"

namespace ssmax_torch {

std::shared_ptr<const ssmax::ScaleInvariant> scale_invariant(double tau, index_t positions) {
  static Kept<double, ssmax::ScaleInvariant> kept(8);
  return kept.get(tau, positions, [&](index_t count) { return ssmax::ScaleInvariant(tau, count); });
}

}  // namespace ssmax_torch
