// Backward of attention computed in double.
#include "attention_backward.inl"

namespace ssmax_torch {

template Gradients attention_backward_of<double>(const BackwardInputs&, const Arguments&);

}  // namespace ssmax_torch
