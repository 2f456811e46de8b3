// Calls as servers and sparse models make them: block-sparse masks, attention sinks, batches of sequences of different
// lengths.
#pragma once

namespace ssmax_bench {

void register_serving();

}  // namespace ssmax_bench
