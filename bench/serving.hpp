// Declares the benchmarks of calls that servers and sparse models make: block-sparse masks, attention sinks, and batches of
// sequences of different lengths.
#pragma once

namespace ssmax_bench {

void register_serving();

}  // namespace ssmax_bench
