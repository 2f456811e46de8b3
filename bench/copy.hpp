// Declares copies of arrays: the time of a kernel that only reads and writes.
#pragma once

#include "data.hpp"

namespace ssmax_bench {

// Copies with streaming stores, in the widest vectors of the processor. Exception: without such stores it calls memcpy.
void streaming_copy(const float* from, float* to, index_t size);

// Copies by the faster method: memcpy below 32 MiB, where arrays may stay in a cache, and streaming_copy from 32 MiB on.
void copy(const float* from, float* to, index_t size);
const char* copy_kind(index_t size);  // name of the method

}  // namespace ssmax_bench
