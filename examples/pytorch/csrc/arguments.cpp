#include "arguments.hpp"

#include <cmath>

namespace ssmax_torch {

namespace {

std::vector<double> per_head(const char* name, const MaybeTensor& tensor, double otherwise, index_t heads) {
  const auto count = static_cast<std::size_t>(heads);
  if (!tensor) return std::vector<double>(count, otherwise);
  std::vector<double> values = doubles(name, *tensor);
  if (tensor->dim() == 0) return std::vector<double>(count, values.front());
  if (values.size() != count) {
    fail(std::string(name) + " has shape " + shape_of(*tensor) + ", heads are " + std::to_string(heads));
  }
  return values;
}

}  // namespace

Parameters::Parameters(const Arguments& a, index_t heads) {
  if (a.scaling == ScalingKind::ssmax || a.scaling == ScalingKind::size_table) {
    s = per_head("s", a.s, scaling_number(a, 0), heads);
    b = per_head("b", a.b, scaling_number(a, 1), heads);
  }
  if (a.scaling == ScalingKind::size_table) {
    if (!a.p) fail("p is left out, the scaling is SizeTable");
    p = doubles("p", *a.p);
  }
  if (a.slopes) slopes = per_head("slopes", a.slopes, 0, heads);
}

double scaling_number(const Arguments& a, std::size_t i) {
  if (a.numbers.empty()) return 0;
  if (i >= a.numbers.size()) fail("scaling lacks a number");
  return a.numbers[i];
}

index_t scaling_length(const Arguments& a, std::size_t i) {
  const double value = scaling_number(a, i);
  if (!(std::abs(value) < 0x1p62)) fail("scaling has " + std::to_string(value) + " for a length");
  return static_cast<index_t>(value);
}

}  // namespace ssmax_torch
