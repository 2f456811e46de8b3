// Rotary embedding of rows, as keys get it on their way into a cache.
#include "operators.hpp"
#include "rope.hpp"

namespace ssmax_torch {

namespace {

template <class T>
Tensor rotated(const Tensor& rows, const RopeInputs& inputs, index_t start) {
  const auto in = view<const T, 4>("rows", rows);
  if (start < 0) fail("start is " + std::to_string(start) + ", must be at least 0");
  if (start > (index_t{1} << 60)) fail("start is " + std::to_string(start) + ", must be at most 2^60");
  const Tensor out = new_tensor_like(rows, {in.extent(0), in.extent(1), in.extent(2), in.extent(3)});
  if (inputs.positions && in.extent(2) > 0) {
    // Each call has other positions: kept tables would displace those of attention.
    ssmax::rope(in, view<T, 4>("out", out), rope_of_tokens<T>(inputs, start, in.extent(2)), start);
    return out;
  }
  const auto tables = rope_tables<T>(inputs, start, in.extent(2));
  if (tables) {
    ssmax::rope(in, view<T, 4>("out", out), *tables, start);
  } else if (!inputs.positions) {
    fail("rope is left out");
  }
  return out;
}

}  // namespace

Tensor rotate(const Tensor& rows, const RopeInputs& inputs, index_t start) {
  if (rows.scalar_type() == ScalarType::Double) return rotated<double>(rows, inputs, start);
  return rotated<float>(rows, inputs, start);
}

}  // namespace ssmax_torch
