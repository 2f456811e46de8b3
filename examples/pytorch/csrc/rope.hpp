// Tables of rotary embeddings, kept from call to call.
#pragma once

#include <memory>
#include <ssmax/rope.hpp>
#include <vector>

namespace ssmax_torch {

/// The numbers in their order: position of the first key, width, theta, pairing, scaling's method, factor, original
/// positions, low, high, truncate, first channel, attention factor. Frequencies of your own may follow. Empty: no rope.
ssmax::index_t rope_key_position(const std::vector<double>& numbers);

/// Tables for at least so many positions, counted from 0; null without a rope. The last eight that were asked
/// for are kept. T is float or double.
template <class T>
std::shared_ptr<const ssmax::Rope<T>> rope_tables(const std::vector<double>& numbers,
                                                  ssmax::index_t positions);

}  // namespace ssmax_torch
