// Reports errors: throws std::invalid_argument, or prints the message and aborts where exceptions are
// disabled.
#pragma once

#include <cstdio>

#include "../../config.hpp"

#if defined(__cpp_exceptions)
#include <stdexcept>
#else
#include <cstdlib>
#endif

SSMAX_BEGIN_DETAIL

[[noreturn]] SSMAX_COLD inline void fail(const char* message) {
#if defined(__cpp_exceptions)
  throw std::invalid_argument(message);
#else
  std::fprintf(stderr, "%s\n", message);
  std::abort();
#endif
}

/// Calls `fail` with the message that printf makes of `format` and the values. printf compiles faster than
/// std::string, and every program that includes this library compiles this function.
template <class... Values>
[[noreturn]] SSMAX_COLD void fail_format(const char* format, Values... values) {
  char message[512];
  std::snprintf(message, sizeof(message), format, values...);
  fail(message);
}

[[noreturn]] SSMAX_COLD inline void fail_extent(const char* function, const char* argument, int dimension,
                                                index_t extent, const char* other, index_t expected) {
  fail_format("ssmax::%s: %s has extent %td in dimension %d, %s has %td", function, argument, extent,
              dimension, other, expected);
}

[[noreturn]] SSMAX_COLD inline void fail_value(const char* function, const char* argument, const char* what,
                                               index_t value, const char* requirement, index_t bound) {
  fail_format("ssmax::%s: %s %s %td, %s %td", function, argument, what, value, requirement, bound);
}

/// Throws unless `value` is at least `least`.
SSMAX_INLINE constexpr void check_at_least(const char* function, const char* argument, index_t value,
                                           index_t least) {
  if (value < least) fail_value(function, argument, "is", value, "must be at least", least);
}

/// Throws unless `value` is `expected`.
SSMAX_INLINE constexpr void check_equal(const char* function, const char* argument, const char* what,
                                        index_t value, const char* requirement, index_t expected) {
  if (value != expected) fail_value(function, argument, what, value, requirement, expected);
}

SSMAX_END
