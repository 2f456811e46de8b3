// What one call of attention's backward has to do.
#pragma once

#include <span>

#include "../problem.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {
namespace SSMAX_VISIBLE shared {

template <class T>
struct BackwardProblem {
  Problem<T, T> forward;
  View<const T, 4> out, dout;
  View<const Compute<T>, 3> lse, dlse;
  View<T, 4> dq, dk, dv;
  std::span<const Compute<T>> sinks;
  std::span<Compute<T>> dsinks;

  /// kv heads of all batch entries.
  SSMAX_INLINE index_t heads() const { return forward.q.extent(0) * forward.kv_heads(); }
  SSMAX_INLINE index_t keys() const { return dk.extent(2); }
};

}  // namespace shared
}  // namespace SSMAX_DATA_NAMESPACE
}  // namespace ssmax
