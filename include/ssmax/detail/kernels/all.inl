// Every kernel, in the order in which they use one another. Included once per target by detail/targets.hpp.
// clang-format off
#include "exp.inl"
#include "rows.inl"
#include "short_rows.inl"
#include "backward.inl"
#include "rotate.inl"
#include "transpose.inl"
#include "tile.inl"
#include "tile_backward.inl"
#include "scores.inl"
#include "few.inl"
#include "convert.inl"
#include "table.inl"
// clang-format on
