// What the operators are called with besides tensors of queries, keys and values.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "rope.hpp"

namespace ssmax_torch {

/// As in ssmax_torch/scaling.py.
enum class ScalingKind : std::int64_t {
  softmax,
  log_n,
  ssmax,
  size_table,
  qwen,
  llama4,
  ministral,
  constant,
  per_query,
  inkling
};

/// As in ssmax_torch/score.py: the factor of a slope is a distance (Alibi) or `bias` (SlopedBias).
enum class SlopesMultiply : std::int64_t { relative_distance, absolute_distance, bias };

/// Whether c depends on the head and the number of visible keys alone: by_size.
constexpr bool depends_on_size_only(ScalingKind kind) {
  switch (kind) {
    case ScalingKind::softmax:
    case ScalingKind::log_n:
    case ScalingKind::ssmax:
    case ScalingKind::size_table:
    case ScalingKind::constant:
      return true;
    default:
      return false;
  }
}

/// The arguments that all operators share, in their order: see the schema in library.cpp.
struct Arguments {
  std::optional<double> scale;
  bool causal;
  ScalingKind scaling;
  MaybeTensor s, b;
  std::vector<double> numbers;     // of the scaling, where there is no tensor; empty: all are 0
  std::vector<std::int64_t> size;  // what is added to n, and its floor, or empty
  MaybeTensor p, c;
  std::vector<std::int64_t> window;  // left and right, or empty
  std::optional<std::int64_t> chunk;
  bool top_left;
  MaybeTensor left_padding, prefix, lengths, cu_queries, cu_keys, visible;
  bool visible_modulo;     // head h reads matrix h % matrices
  double softcap;          // 0: none
  double scale_invariant;  // τ; 0: none
  MaybeTensor slopes;
  SlopesMultiply slopes_multiply;
  MaybeTensor bias;
  bool bias_modulo;
  bool bias_hides;  // where it is -inf, a key is not counted
  MaybeTensor sinks;
  bool scaled_sinks;
  RopeInputs rope;
  double dropout_p;          // 0: none
  MaybeTensor dropout_seed;  // [1], or [batch]: a seed for each batch entry
  std::int64_t dropout_offset;
};

/// The numbers behind the spans of scalings and scores, in double whatever they came in. s and b have one
/// number per head, also where the call has one for all.
struct Parameters {
  Parameters(const Arguments& a, index_t heads);

  std::vector<double> s, b, p, slopes;
};

/// [batch, heads, queries, keys].
using Extents = std::array<index_t, 4>;

/// A number of the scaling, and one that is a length.
double scaling_number(const Arguments& a, std::size_t i);
index_t scaling_length(const Arguments& a, std::size_t i);

}  // namespace ssmax_torch
