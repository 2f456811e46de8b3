// operator new that counts. In a file of its own: GCC warns where it can inline operator delete but not the operator
// new that goes with it.

#include "allocation_count.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<long> count{0};

void* allocate(std::size_t size) noexcept {
  ++count;
  return std::malloc(std::max<std::size_t>(size, 1));
}

}  // namespace

long allocation_count() { return count; }

void* operator new(std::size_t size) {
  if (void* memory = allocate(size)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
