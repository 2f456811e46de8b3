// The bits of some results on a target: by a unit with -Ofast that holds the kernels, and by the compiled library.
#pragma once

#include <cstdint>
#include <vector>

std::vector<std::uint64_t> results_fast_math(const char* target);
std::vector<std::uint64_t> results_compiled(const char* target);
