// operator new and delete by malloc. The platform's program needs nothing else of a compiled C++ library,
// which zig would take ten times as long to compile.

#include <cstdlib>
#include <new>

void* operator new(std::size_t size) { return std::malloc(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

#if defined(_WIN32)
void* operator new(std::size_t size, std::align_val_t alignment) {
  return _aligned_malloc(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory, std::align_val_t) noexcept { _aligned_free(memory); }
#else
void* operator new(std::size_t size, std::align_val_t alignment) {
  const auto step = static_cast<std::size_t>(alignment);
  return std::aligned_alloc(step, (size + step - 1) / step * step);
}
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
#endif
