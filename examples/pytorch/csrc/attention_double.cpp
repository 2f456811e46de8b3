// Attention computed in double.
#include "attention.inl"

namespace ssmax_torch {

template std::pair<Tensor, Tensor> attention_of<double>(const Tensor&, const Tensor&, const Tensor&,
                                                        const Arguments&);

}  // namespace ssmax_torch
