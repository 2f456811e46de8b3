// A unit of ssmax::compiled: holds the drivers of attention for one operand type, SSMAX_LIBRARY_OPERANDS.

#include <type_traits>

#include "../attention/backward/driver.hpp"
#include "../attention/desk/driver.hpp"
#include "../attention/work/driver.hpp"

SSMAX_BEGIN_COMPILED

using namespace shared;

#define SSMAX_INSTANTIATE(linkage, E)                                                                      \
  linkage template void make_list<E>(const Problem<ComputeType<E>>&, const Variant<ComputeType<E>>&,       \
                                     const Result<ComputeType<E>>&, index_t, Workspace&,                   \
                                     WorkList<ComputeType<E>>&);                                           \
  linkage template std::span<const PathDriver<ComputeType<E>>> paths_with<E, ComputeType<E>>();            \
  linkage template void run_attention<E>(const Problem<ComputeType<E>>&, const Variant<ComputeType<E>>&,   \
                                         const Result<ComputeType<E>>&, Workspace*, const AnyExecutor&);   \
  linkage template void make_backward_list<E>(const BackwardProblem<ComputeType<E>>&,                      \
                                              const GradientVariant<ComputeType<E>>&, index_t, Workspace&, \
                                              WorkList<ComputeType<E>>&);                                  \
  linkage template void run_backward_list<E>(                                                              \
      const WorkList<ComputeType<E>>&, const BackwardProblem<ComputeType<E>>&,                             \
      const GradientVariant<ComputeType<E>>&, std::byte*, const AnyExecutor&);                             \
  linkage template void run_backward<E>(const BackwardProblem<ComputeType<E>>&,                            \
                                        const GradientVariant<ComputeType<E>>&, Workspace*,                \
                                        const AnyExecutor&);
#define SSMAX_INSTANTIATE_RUN(linkage, Compute)                                                              \
  linkage template void run_list(const WorkList<Compute>&, const Problem<Compute>&, const Variant<Compute>&, \
                                 const Result<Compute>&, std::byte*, const AnyExecutor&);                    \
  linkage template void find_shared_keys(WorkList<Compute>&, const Problem<Compute>&,                        \
                                         const Result<Compute>&, bool, std::byte*);                          \
  linkage template void open_call(ForwardCall<Compute>&, const Variant<Compute>&);                           \
  linkage template void open_source_call(ForwardCall<Compute>&, const Variant<Compute>&);                    \
  linkage template const StatisticsFunctions<Compute>& statistics_functions();                               \
  linkage template void open_call(BackwardCall<Compute>&, const GradientVariant<Compute>&);
#if !defined(SSMAX_LIBRARY_BFLOAT16)
SSMAX_INSTANTIATE_RUN(, SSMAX_LIBRARY_OPERANDS)
#elif !defined(SSMAX_LIBRARY_WHOLE)
// The drivers of bfloat16 call those of float, which are in another unit.
SSMAX_INSTANTIATE(extern, float)
SSMAX_INSTANTIATE_RUN(extern, float)
#endif
SSMAX_INSTANTIATE(, SSMAX_LIBRARY_OPERANDS)
#undef SSMAX_INSTANTIATE
#undef SSMAX_INSTANTIATE_RUN

SSMAX_END
