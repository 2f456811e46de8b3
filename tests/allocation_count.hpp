// How often this program has called operator new so far, in all threads, and for how many bytes.
#pragma once

long allocation_count();
long long allocated_bytes();

/// How often a call calls it.
template <class Call>
long allocations(const Call& call) {
  const long before = allocation_count();
  call();
  return allocation_count() - before;
}
