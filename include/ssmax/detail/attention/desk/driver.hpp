// Declares the functions that open calls. They are compiled once per compute type.
#pragma once

#include "call.hpp"

SSMAX_BEGIN_COMPILED

/// Checks a call and completes its problem and result. Throws std::invalid_argument for invalid arguments. Afterwards,
/// the call must not be copied or moved.
template <class Compute>
void open_call(shared::ForwardCall<Compute>& call, const shared::Variant<Compute>& variant);
/// Does the same for a call over a source. A unit compiles it for sources alone.
template <class Compute>
void open_source_call(shared::ForwardCall<Compute>& call, const shared::Variant<Compute>& variant);
template <class Compute>
void open_call(shared::BackwardCall<Compute>& call, const shared::GradientVariant<Compute>& variant);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "open.hpp"
#include "statistics.hpp"
#endif
