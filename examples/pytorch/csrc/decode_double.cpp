// Decode computed in double, from a cache of it.
#include "decode.inl"

namespace ssmax_torch {

template <>
Results decode_of<double>(const CacheInputs& in, const Arguments& a, Wanted wanted) {
  return decode_of<double, double>(in, a, wanted);
}

}  // namespace ssmax_torch
