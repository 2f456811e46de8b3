// Attention computed in float.
#include "attention.inl"

namespace ssmax_torch {

template std::pair<Tensor, MaybeTensor> attention_of<float>(const Tensor&, const Tensor&, const Tensor&,
                                                            const Arguments&, bool);
template std::pair<Tensor, MaybeTensor> attention_of<ssmax::half>(const Tensor&, const Tensor&, const Tensor&,
                                                                  const Arguments&, bool);
template std::pair<Tensor, MaybeTensor> attention_of<ssmax::bfloat16>(const Tensor&, const Tensor&,
                                                                      const Tensor&, const Arguments&, bool);

}  // namespace ssmax_torch
