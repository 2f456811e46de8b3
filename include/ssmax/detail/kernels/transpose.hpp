// Rows into lanes, and lanes into rows.
#pragma once

#include "lanes.hpp"

#define SSMAX_KERNELS "../kernels/transpose.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
