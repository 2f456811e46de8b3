#include "backward_run.hpp"

namespace fuzz {

template void run_backward<double>(const AttentionCase&);

}  // namespace fuzz
