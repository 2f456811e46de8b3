// Reports errors of MPI with MPI's text: throws std::runtime_error, or aborts where exceptions are disabled.
#pragma once

#include <mpi.h>

#include "error.hpp"

SSMAX_BEGIN_DETAIL

[[noreturn]] SSMAX_COLD inline void fail_mpi(const char* call, int code) {
  char text[MPI_MAX_ERROR_STRING + 1] = {}, message[MPI_MAX_ERROR_STRING + 128];
  int length = 0;
  MPI_Error_string(code, text, &length);
  std::snprintf(message, sizeof(message), "ssmax::mpi: %s: %s", call, text);
#if defined(__cpp_exceptions)
  throw std::runtime_error(message);
#else
  fail(message);
#endif
}

inline void check_mpi(const char* call, int code) {
  if (code != MPI_SUCCESS) fail_mpi(call, code);
}

SSMAX_END
