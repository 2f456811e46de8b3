#include "backward_run.hpp"

namespace fuzz {

template void run_backward<float>(const AttentionCase&);

}  // namespace fuzz
