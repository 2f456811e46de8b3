// The operators, as library.cpp registers them.
#pragma once

#include <array>
#include <utility>

#include "policies.hpp"

namespace ssmax_torch {

/// out [batch, heads, queries, value width], laid out as query, and lse [batch, heads, queries].
std::pair<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const Arguments& a);

/// What attention_backward returns. Those that were not asked for have no elements.
enum class Gradient { query, key, value, s, b, p, slopes, bias, sinks, count };
using Gradients = std::array<Tensor, static_cast<std::size_t>(Gradient::count)>;

/// Gradients of sums over the parameters' own dimensions; ds, db, dp and dslopes are float64. `learn` says which
/// of s, b, p, slopes, bias, sinks want one.
Gradients attention_backward(const Tensor& grad_out, const MaybeTensor& grad_lse, const Tensor& query,
                             const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                             const std::vector<bool>& learn, const Arguments& a);

}  // namespace ssmax_torch
