// Tables of rotary embeddings, kept from call to call.
#pragma once

#include <memory>
#include <ssmax/rope.hpp>
#include <vector>

#include "tensors.hpp"

namespace ssmax_torch {

/// A rope, as operators get it.
struct RopeInputs {
  /// In this order: position of the first key, width, theta, pairing, scaling's method, factor, original positions,
  /// low, high, truncate, first channel, attention factor. Frequencies of your own may follow. Empty: no rope.
  std::vector<double> numbers;
  MaybeTensor positions{};           // [sequences, axes, tokens], int64; left out: token t has the position t
  std::vector<std::int64_t> axes{};  // of each pair; empty: all pairs have axis 0
};

/// Returns the token of the first key.
index_t rope_key_position(const RopeInputs& inputs);

/// Returns tables that have tokens [first, first + count), or null without a rope or tokens. Keeps the tables of the
/// last eight ropes and of the last two ropes with positions of their own. T is float or double.
template <class T>
std::shared_ptr<const ssmax::Rope<T>> rope_tables(const RopeInputs& inputs, index_t first, index_t count);

/// Returns tables that have exactly tokens [first, first + count). Requires positions and count >= 1. Keeps no tables.
template <class T>
ssmax::Rope<T> rope_of_tokens(const RopeInputs& inputs, index_t first, index_t count);

}  // namespace ssmax_torch
