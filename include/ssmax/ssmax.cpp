// The whole of ssmax::compiled in one source. Compile it once, and the other units of your project with SSMAX_COMPILED:
// they link its kernels and drivers. Its flags may differ from those of the other units.

#define SSMAX_LIBRARY_UNIT
#define SSMAX_LIBRARY_WHOLE
#if !defined(SSMAX_COMPILED)
#define SSMAX_COMPILED
#endif

#include "detail/library/dispatch.inl"
#include "detail/library/rows.inl"

#define SSMAX_LIBRARY_OPERANDS float
#include "detail/library/attention.inl"
#undef SSMAX_LIBRARY_OPERANDS
#define SSMAX_LIBRARY_OPERANDS double
#include "detail/library/attention.inl"
#undef SSMAX_LIBRARY_OPERANDS
#define SSMAX_LIBRARY_OPERANDS bfloat16
#define SSMAX_LIBRARY_BFLOAT16
#include "detail/library/attention.inl"
