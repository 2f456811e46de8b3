// Declares the benchmarks of decode: attention of one new query over a cache of keys and values.
#pragma once

namespace ssmax_bench {

void register_decode();

}  // namespace ssmax_bench
