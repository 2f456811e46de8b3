// Attention computed in float.
#include "attention.inl"

namespace ssmax_torch {

template Results attention_of<float>(const Tensor&, const Tensor&, const Tensor&, const Arguments&, Wanted);
template Results attention_of<ssmax::half>(const Tensor&, const Tensor&, const Tensor&, const Arguments&,
                                           Wanted);
template Results attention_of<ssmax::bfloat16>(const Tensor&, const Tensor&, const Tensor&, const Arguments&,
                                               Wanted);

}  // namespace ssmax_torch
