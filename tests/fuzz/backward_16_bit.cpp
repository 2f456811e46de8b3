#include "backward_run.hpp"

namespace fuzz {

template void run_backward<ssmax::half>(const AttentionCase&);
template void run_backward<ssmax::bfloat16>(const AttentionCase&);

}  // namespace fuzz
