// Attention computed in double.
#include "attention.inl"

namespace ssmax_torch {

template std::pair<Tensor, MaybeTensor> attention_of<double>(const Tensor&, const Tensor&, const Tensor&,
                                                             const Arguments&, bool);

}  // namespace ssmax_torch
