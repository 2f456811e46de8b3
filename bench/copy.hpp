// Copies: what a kernel that did nothing but read and write would take.
#pragma once

#include "data.hpp"

namespace ssmax_bench {

// Stores that go around the caches, in the widest vectors of the machine; plain memcpy where there are none.
void streaming_copy(const float* from, float* to, index_t size);

// The faster one: memcpy where the arrays may stay in a cache, the streaming copy for arrays of 32 MiB and
// more.
void copy(const float* from, float* to, index_t size);
const char* copy_kind(index_t size);

}  // namespace ssmax_bench
