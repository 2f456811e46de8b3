// The loops of the reference, compiled once.
#include "reference_attention.hpp"

namespace reference {

template Attended<float> attend(const Inputs<float>&, const Definition&);
template Attended<double> attend(const Inputs<double>&, const Definition&);
template Attended<Real> attend(const Inputs<Real>&, const Definition&);
template Gradients<float> differentiate(const Inputs<float>&, const std::vector<float>&,
                                        const std::vector<float>&, const Attended<float>&, const Definition&);
template Gradients<double> differentiate(const Inputs<double>&, const std::vector<double>&,
                                         const std::vector<double>&, const Attended<double>&,
                                         const Definition&);
template Gradients<Real> differentiate(const Inputs<Real>&, const std::vector<Real>&,
                                       const std::vector<Real>&, const Attended<Real>&, const Definition&);

}  // namespace reference
