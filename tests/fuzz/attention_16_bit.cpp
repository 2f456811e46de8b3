#include "attention_run.hpp"

namespace fuzz {

template void run_attention<ssmax::half>(const AttentionCase&, const Forward&);
template void run_partial<ssmax::half>(const AttentionCase&, const Forward&);
template void run_decode<ssmax::half, ssmax::half>(AttentionCase);
template void run_attention<ssmax::bfloat16>(const AttentionCase&, const Forward&);
template void run_partial<ssmax::bfloat16>(const AttentionCase&, const Forward&);
template void run_decode<ssmax::bfloat16, ssmax::bfloat16>(AttentionCase);

}  // namespace fuzz
