// Decode computed in float, from a cache of any type that widens to it.
#include "decode.inl"

namespace ssmax_torch {

namespace {

template <class T>
Results decode_from_any(const CacheInputs& in, const Arguments& a, Wanted wanted) {
  switch (in.keys.scalar_type()) {
    case ScalarType::Half:
      return decode_of<T, ssmax::half>(in, a, wanted);
    case ScalarType::BFloat16:
      return decode_of<T, ssmax::bfloat16>(in, a, wanted);
    default:
      return decode_of<T, float>(in, a, wanted);
  }
}

}  // namespace

template <>
Results decode_of<float>(const CacheInputs& in, const Arguments& a, Wanted wanted) {
  return decode_from_any<float>(in, a, wanted);
}
template <>
Results decode_of<ssmax::half>(const CacheInputs& in, const Arguments& a, Wanted wanted) {
  return decode_from_any<ssmax::half>(in, a, wanted);
}
template <>
Results decode_of<ssmax::bfloat16>(const CacheInputs& in, const Arguments& a, Wanted wanted) {
  return decode_from_any<ssmax::bfloat16>(in, a, wanted);
}

}  // namespace ssmax_torch
