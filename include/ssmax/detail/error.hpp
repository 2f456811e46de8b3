// Errors: one function that throws std::invalid_argument, or prints and aborts where exceptions are off.
#pragma once

#include <string>

#include "../config.hpp"

#if defined(__cpp_exceptions)
#include <stdexcept>
#else
#include <cstdio>
#include <cstdlib>
#endif

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

[[noreturn]] SSMAX_COLD inline void fail(const std::string& message) {
#if defined(__cpp_exceptions)
  throw std::invalid_argument(message);
#else
  std::fprintf(stderr, "%s\n", message.c_str());
  std::abort();
#endif
}

[[noreturn]] SSMAX_COLD inline void fail_extent(const char* function, const char* argument, int dimension,
                                                index_t extent, const char* other, index_t expected) {
  fail(std::string("ssmax::") + function + ": " + argument + " has extent " + std::to_string(extent) +
       " in dimension " + std::to_string(dimension) + ", " + other + " has " + std::to_string(expected));
}

[[noreturn]] SSMAX_COLD inline void fail_value(const char* function, const char* argument, const char* what,
                                               index_t value, const char* requirement, index_t bound) {
  fail(std::string("ssmax::") + function + ": " + argument + ' ' + what + ' ' + std::to_string(value) + ", " +
       requirement + ' ' + std::to_string(bound));
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
