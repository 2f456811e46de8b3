// Where results go: normalised to out and lse, or as a state to be merged with others.
#pragma once

#include <span>

#include "../../../attention_state.hpp"
#include "../../../storage.hpp"
#include "../../../view.hpp"

SSMAX_BEGIN_SHARED

template <class T>
struct Result {
  View<T, 4> out{};
  View<Compute<T>, 3> lse{};
  std::span<const Compute<T>> sinks{};
  bool scaled_sinks = false;           // sinks are logits, to be multiplied by c
  AttentionState<Compute<T>> state{};  // if given, the rest is not
  bool continues = false;              // the state holds what keys before these gave
};

SSMAX_END
