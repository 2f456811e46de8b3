// Decode computed in float, from a cache of any type that widens to it.
#include "decode.inl"

namespace ssmax_torch {

namespace {

template <class T>
std::pair<Tensor, Tensor> decode_from_any(const CacheInputs& in, const Arguments& a) {
  switch (in.keys.scalar_type()) {
    case ScalarType::Half:
      return decode_of<T, ssmax::half>(in, a);
    case ScalarType::BFloat16:
      return decode_of<T, ssmax::bfloat16>(in, a);
    default:
      return decode_of<T, float>(in, a);
  }
}

}  // namespace

template <>
std::pair<Tensor, Tensor> decode_of<float>(const CacheInputs& in, const Arguments& a) {
  return decode_from_any<float>(in, a);
}
template <>
std::pair<Tensor, Tensor> decode_of<ssmax::half>(const CacheInputs& in, const Arguments& a) {
  return decode_from_any<ssmax::half>(in, a);
}
template <>
std::pair<Tensor, Tensor> decode_of<ssmax::bfloat16>(const CacheInputs& in, const Arguments& a) {
  return decode_from_any<ssmax::bfloat16>(in, a);
}

}  // namespace ssmax_torch
