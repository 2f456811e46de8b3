// Declares the benchmarks of the rotary embedding.
#pragma once

namespace ssmax_bench {

void register_rope();

}  // namespace ssmax_bench
