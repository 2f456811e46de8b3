// What the units of this binary offer each other. A view and a scaling cross from unit to unit by way of an
// ordinary function, so their names must be the same under any flags.
#pragma once

#include <ssmax/ssmax.hpp>

struct UnitInterface {
  const char* name;
  // Where this unit's copy of a library function lies: other flags, another copy.
  const void* library_code;
};

#define SSMAX_TEST_UNIT(unit)                                                                          \
  UnitInterface describe_##unit();                                                                     \
  void normalize_##unit(ssmax::View<const float, 2> logits, ssmax::View<float, 2> out,                 \
                        const ssmax::SSMax<float>& scaling);                                           \
  void attend_##unit(ssmax::View<const float, 4> q, ssmax::View<const float, 4> kv,                    \
                     ssmax::View<float, 4> out, ssmax::ThreadPool& pool, ssmax::Workspace& workspace); \
  void attend_cache_##unit(ssmax::View<const float, 4> q, ssmax::View<const float, 4> kv,              \
                           ssmax::View<float, 4> out)

SSMAX_TEST_UNIT(plain);
SSMAX_TEST_UNIT(no_exceptions);
SSMAX_TEST_UNIT(avx2);
SSMAX_TEST_UNIT(avx512);
SSMAX_TEST_UNIT(compiled);
SSMAX_TEST_UNIT(compiled_no_exceptions);
SSMAX_TEST_UNIT(compiled_avx512);
