// Rotary embedding of rows, as keys get it on their way into a cache.
#include "operators.hpp"
#include "rope.hpp"

namespace ssmax_torch {

namespace {

template <class T>
Tensor rotated(const Tensor& rows, const std::vector<double>& numbers, index_t start) {
  const auto in = view<const T, 4>("rows", rows);
  if (start < 0) fail("start is " + std::to_string(start) + ", must be at least 0");
  if (start > (index_t{1} << 60)) fail("start is " + std::to_string(start) + ", must be at most 2^60");
  const auto tables = rope_tables<T>(numbers, start + in.extent(2));
  if (!tables) fail("rope is left out");
  const Tensor out = new_tensor_like(rows, {in.extent(0), in.extent(1), in.extent(2), in.extent(3)});
  ssmax::rope(in, view<T, 4>("out", out), *tables, start);
  return out;
}

}  // namespace

Tensor rotate(const Tensor& rows, const std::vector<double>& numbers, index_t start) {
  if (rows.scalar_type() == ScalarType::Double) return rotated<double>(rows, numbers, start);
  return rotated<float>(rows, numbers, start);
}

}  // namespace ssmax_torch
