#include "sequences_run.hpp"

namespace fuzz {

template void run_sequences<float, float>(const SequencesCase&);
template void run_sequences<float, ssmax::half, float>(const SequencesCase&);
template void run_sequences<float, ssmax::Int8>(const SequencesCase&);

}  // namespace fuzz
