// Backward of attention computed in float.
#include "attention_backward.inl"

namespace ssmax_torch {

template Gradients attention_backward_of<float>(const BackwardInputs&, const Arguments&);
template Gradients attention_backward_of<ssmax::half>(const BackwardInputs&, const Arguments&);
template Gradients attention_backward_of<ssmax::bfloat16>(const BackwardInputs&, const Arguments&);

}  // namespace ssmax_torch
