// Decode computed in double, from a cache of it.
#include "decode.inl"

namespace ssmax_torch {

template <>
std::pair<Tensor, Tensor> decode_of<double>(const CacheInputs& in, const Arguments& a) {
  return decode_of<double, double>(in, a);
}

}  // namespace ssmax_torch
