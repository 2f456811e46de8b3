// Attention of n queries over their own n keys.
#pragma once

namespace ssmax_bench {

void register_prefill();
void register_short();

}  // namespace ssmax_bench
