// Declares the benchmarks of rows, forward and backward.
#pragma once

namespace ssmax_bench {

void register_rows();
void register_rows_backward();

}  // namespace ssmax_bench
