// Declares the benchmarks of the forward: attention of n queries over their own n keys, and of short sequences.
#pragma once

namespace ssmax_bench {

void register_prefill();
void register_short();

}  // namespace ssmax_bench
