// Compiled several times, each time with other flags and another MIXED_FLAGS_UNIT.

#include "unit.hpp"

#define JOIN_EXPANDED(a, b) a##b
#define JOIN(a, b) JOIN_EXPANDED(a, b)
#define TEXT_EXPANDED(a) #a
#define TEXT(a) TEXT_EXPANDED(a)

UnitInterface JOIN(describe_, MIXED_FLAGS_UNIT)() {
  const char* (*code)(ssmax::Target) = &ssmax::target_name;
  return {.name = TEXT(MIXED_FLAGS_UNIT), .library_code = reinterpret_cast<const void*>(code)};
}

void JOIN(normalize_, MIXED_FLAGS_UNIT)(ssmax::View<const float, 2> logits, ssmax::View<float, 2> out,
                                        const ssmax::SSMax<float>& scaling) {
  ssmax::softmax(logits, out, scaling, ssmax::Causal{});
}

void JOIN(attend_, MIXED_FLAGS_UNIT)(ssmax::View<const float, 4> q, ssmax::View<const float, 4> kv,
                                     ssmax::View<float, 4> out, ssmax::ThreadPool& pool,
                                     ssmax::Workspace& workspace) {
  ssmax::attention({.q = q, .k = kv, .v = kv, .out = out, .workspace = &workspace},
                   ssmax::SSMax<float>{0.43F}, ssmax::Causal{}, ssmax::Softcap{20}, pool);
}

void JOIN(attend_cache_, MIXED_FLAGS_UNIT)(ssmax::View<const float, 4> q, ssmax::View<const float, 4> kv,
                                           ssmax::View<float, 4> out) {
  ssmax::KvCache<ssmax::bfloat16> cache({.width = kv.extent(3), .capacity = kv.extent(2)});
  cache.append(kv, kv);
  ssmax::attention({.q = q, .keys = cache, .out = out}, ssmax::SSMax<float>{0.43F}, ssmax::Causal{});
}
