// Declares the benchmarks of attention's backward.
#pragma once

namespace ssmax_bench {

void register_backward();
void register_short_backward();

}  // namespace ssmax_bench
