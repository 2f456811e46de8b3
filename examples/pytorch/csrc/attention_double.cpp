// Attention computed in double.
#include "attention.inl"

namespace ssmax_torch {

template Results attention_of<double>(const Tensor&, const Tensor&, const Tensor&, const Arguments&, Wanted);

}  // namespace ssmax_torch
