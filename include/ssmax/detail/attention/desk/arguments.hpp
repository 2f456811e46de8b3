// Declares the structs that the public functions take, so that call/ can check their members and build problems from
// them.
#pragma once

#include "../../../config.hpp"

SSMAX_BEGIN_CODE

template <class T>
struct AttentionArguments;
template <class T>
struct PartialArguments;
template <class T>
struct DecodeArguments;
template <class T>
struct BackwardArguments;
template <class T>
struct AttentionGradients;
template <class T>
struct AttentionOptions;

SSMAX_END
