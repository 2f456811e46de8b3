// Messages of errors with the names that the Python package uses.
#pragma once

#include <string>
#include <string_view>

namespace ssmax_torch {

/// Returns a message of the C++ library with the names of the Python package: ssmax::Documents becomes
/// ssmax_torch.mask.Documents, and q becomes query. `attention` is the operator's Python name, which replaces
/// ssmax::attention. Other messages do not change.
std::string python_message(std::string message, std::string_view attention);

}  // namespace ssmax_torch
