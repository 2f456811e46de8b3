// A unit of ssmax::compiled: the drivers of attention for queries of one type, SSMAX_LIBRARY_QUERY.

#include <type_traits>

#include "../attention/backward/driver.hpp"
#include "../attention/forward/driver.hpp"

SSMAX_BEGIN_COMPILED

using namespace shared;

#define SSMAX_INSTANTIATE(T, X)                                                                   \
  template void run_attention(const Problem<T, X>&, const Variant<Compute<T>>&, const Result<T>&, \
                              Workspace*, const AnyExecutor&);
#if defined(SSMAX_LIBRARY_DOUBLE)
#define SSMAX_LIBRARY_QUERY double
SSMAX_INSTANTIATE(double, double)
#else
SSMAX_INSTANTIATE(SSMAX_LIBRARY_QUERY, float)
SSMAX_INSTANTIATE(SSMAX_LIBRARY_QUERY, half)
SSMAX_INSTANTIATE(SSMAX_LIBRARY_QUERY, bfloat16)
#endif
#undef SSMAX_INSTANTIATE

template void run_backward(const BackwardProblem<SSMAX_LIBRARY_QUERY>&,
                           const GradientVariant<Compute<SSMAX_LIBRARY_QUERY>>&, Workspace*,
                           const AnyExecutor&);

SSMAX_END
