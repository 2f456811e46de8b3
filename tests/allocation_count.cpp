// Replaces operator new by one that counts. A separate file, because GCC warns if it inlines operator delete but not
// the matching operator new.

#include "allocation_count.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<long> count{0};
std::atomic<long long> bytes{0};

void* allocate(std::size_t size) noexcept {
  ++count;
  bytes += static_cast<long long>(size);
  return std::malloc(std::max<std::size_t>(size, 1));
}

/// Rounds the size up, because aligned_alloc requires a multiple of the alignment.
void* allocate(std::size_t size, std::align_val_t alignment) noexcept {
  ++count;
  bytes += static_cast<long long>(size);
  const auto step = static_cast<std::size_t>(alignment);
  return std::aligned_alloc(step, std::max<std::size_t>((size + step - 1) / step, 1) * step);
}

void* checked(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

long allocation_count() { return count; }
long long allocated_bytes() { return bytes; }

void* operator new(std::size_t size) { return checked(allocate(size)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return checked(allocate(size, alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
