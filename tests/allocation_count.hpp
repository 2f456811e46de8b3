// The number of calls of operator new in all threads of this program, and their bytes.
#pragma once

long allocation_count();
long long allocated_bytes();

/// Returns the number of allocations of a call.
template <class Call>
long allocations(const Call& call) {
  const long before = allocation_count();
  call();
  return allocation_count() - before;
}
