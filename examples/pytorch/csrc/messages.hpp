// Messages of errors with the names that the Python package uses.
#pragma once

#include <string>

namespace ssmax_torch {

/// Returns a message of the C++ library with the names of the Python package: ssmax::Documents becomes
/// ssmax_torch.mask.Documents, and q becomes query. Other messages do not change.
std::string python_message(std::string message);

}  // namespace ssmax_torch
