#include "sequences_run.hpp"

namespace fuzz {

using ssmax::bfloat16;

template void run_sequences<ssmax::half, ssmax::Q8_0>(const SequencesCase&);
template void run_sequences<bfloat16, bfloat16>(const SequencesCase&);
template void run_sequences<bfloat16, ssmax::Fp8E4M3, ssmax::Fp8E4M3, float>(const SequencesCase&);
template void run_sequences<bfloat16, ssmax::Q8_0, bfloat16>(const SequencesCase&);

}  // namespace fuzz
