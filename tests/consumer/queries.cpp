// A call over a cache of bfloat16, for queries of the type QUERY: bf16_drivers.cmake reads which drivers it has or
// needs.

#include <ssmax/attention.hpp>
#include <ssmax/kv_cache.hpp>

using ssmax::half, ssmax::bfloat16;

void attend(const ssmax::KvCache<bfloat16>& cache, const ssmax::View<const QUERY, 4>& q,
            const ssmax::View<float, 4>& out) {
  ssmax::attention({.q = q, .keys = cache, .out = out}, ssmax::Causal{});
}
