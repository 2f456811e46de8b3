#include "attention_run.hpp"

namespace fuzz {

template void run_attention<float>(const AttentionCase&, const Forward&);
template void run_partial<float>(const AttentionCase&, const Forward&);
template void run_decode<float, float>(AttentionCase);
template void run_decode<float, ssmax::half>(AttentionCase);

}  // namespace fuzz
