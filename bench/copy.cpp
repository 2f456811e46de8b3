// Copies arrays of floats, through the caches or past them.
#include "copy.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ssmax_bench {

#if defined(__x86_64__)

namespace {

// Both kernels write a whole cache line per step, so that each write-combining buffer is full when it is flushed.
__attribute__((target("avx512f"))) void streaming_copy_avx512(const float* from, float* to, index_t size) {
  for (index_t i = 0; i < size; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
  _mm_sfence();
}

__attribute__((target("avx"))) void streaming_copy_avx(const float* from, float* to, index_t size) {
  for (index_t i = 0; i < size; i += 16) {
    _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
    _mm256_stream_ps(to + i + 8, _mm256_loadu_ps(from + i + 8));
  }
  _mm_sfence();
}

void streaming_copy_sse2(const float* from, float* to, index_t size) {
  for (index_t i = 0; i < size; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
  _mm_sfence();
}

}  // namespace

void streaming_copy(const float* from, float* to, index_t size) {
  while (size > 0 && reinterpret_cast<std::uintptr_t>(to) % 64 != 0) {
    *to++ = *from++;
    --size;
  }
  const index_t lines = size / 16 * 16;
  if (__builtin_cpu_supports("avx512f")) {
    streaming_copy_avx512(from, to, lines);
  } else if (__builtin_cpu_supports("avx")) {
    streaming_copy_avx(from, to, lines);
  } else {
    streaming_copy_sse2(from, to, lines);
  }
  for (index_t i = lines; i < size; ++i) to[i] = from[i];
}

#else

void streaming_copy(const float* from, float* to, index_t size) {
  std::memcpy(to, from, static_cast<std::size_t>(size) * sizeof(float));
}

#endif

namespace {

bool leaves_caches(index_t size) { return size * static_cast<index_t>(sizeof(float)) >= index_t{32} << 20; }

}  // namespace

void copy(const float* from, float* to, index_t size) {
  if (leaves_caches(size)) {
    streaming_copy(from, to, size);
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(size) * sizeof(float));
  }
}

const char* copy_kind(index_t size) { return leaves_caches(size) ? "streaming stores" : "memcpy"; }

}  // namespace ssmax_bench
