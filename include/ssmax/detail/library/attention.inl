// A unit of ssmax::compiled: holds the drivers of attention for one operand type, SSMAX_LIBRARY_OPERANDS.

#include <type_traits>

#include "../attention/backward/driver.hpp"
#include "../attention/work/driver.hpp"

SSMAX_BEGIN_COMPILED

using namespace shared;

#define SSMAX_INSTANTIATE(linkage, E)                                                                       \
  linkage template void run_attention<E>(const Problem<ComputeType<E>>&, const Variant<ComputeType<E>>&,    \
                                         const Result<ComputeType<E>>&, Workspace*, const AnyExecutor&);    \
  linkage template std::size_t run_phase<E>(const detail::Phase<ComputeType<E>>&, const detail::PhaseStep&, \
                                            const AnyExecutor&);                                            \
  linkage template void run_backward<E>(const BackwardProblem<ComputeType<E>>&,                             \
                                        const GradientVariant<ComputeType<E>>&, Workspace*,                 \
                                        const AnyExecutor&);
#if defined(SSMAX_LIBRARY_BFLOAT16)
SSMAX_INSTANTIATE(extern, float)  // the drivers of bfloat16 call those of float
#endif
SSMAX_INSTANTIATE(, SSMAX_LIBRARY_OPERANDS)
#undef SSMAX_INSTANTIATE

SSMAX_END
