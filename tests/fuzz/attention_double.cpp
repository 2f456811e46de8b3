#include "attention_run.hpp"

namespace fuzz {

template void run_attention<double>(const AttentionCase&, const Forward&);
template void run_partial<double>(const AttentionCase&, const Forward&);
template void run_decode<double, double>(AttentionCase);

}  // namespace fuzz
