// Attention computed in float.
#include "attention.inl"

namespace ssmax_torch {

template std::pair<Tensor, Tensor> attention_of<float>(const Tensor&, const Tensor&, const Tensor&,
                                                       const Arguments&);
template std::pair<Tensor, Tensor> attention_of<ssmax::half>(const Tensor&, const Tensor&, const Tensor&,
                                                             const Arguments&);
template std::pair<Tensor, Tensor> attention_of<ssmax::bfloat16>(const Tensor&, const Tensor&, const Tensor&,
                                                                 const Arguments&);

}  // namespace ssmax_torch
