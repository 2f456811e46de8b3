// What the machine can do at most: the figures that every other benchmark is held against.
#pragma once

namespace ssmax_bench {

void register_limits();

}  // namespace ssmax_bench
