// Declares the benchmarks of the machine's limits: other benchmarks are compared with these rates.
#pragma once

namespace ssmax_bench {

void register_limits();

}  // namespace ssmax_bench
