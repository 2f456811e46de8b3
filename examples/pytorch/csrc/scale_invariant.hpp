// The score of scale-invariant attention, whose table is kept from call to call.
#pragma once

#include <memory>
#include <ssmax/score.hpp>

namespace ssmax_torch {

/// With a table of at least so many distances.
std::shared_ptr<const ssmax::ScaleInvariant> scale_invariant(double tau, ssmax::index_t positions);

}  // namespace ssmax_torch
