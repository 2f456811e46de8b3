// What a call that must be refused says.
#pragma once

#include <stdexcept>
#include <string>

/// The message of its std::invalid_argument.
template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}
