// The operators, as library.cpp registers them.
#pragma once

#include <array>
#include <utility>

#include "arguments.hpp"

namespace ssmax_torch {

/// The results of attention that a call returns. Each value includes the values before it.
enum class Wanted { out, lse, statistics };

/// The results of attention.
struct Results {
  Tensor out;                        // [batch, heads, queries, value width], laid out as query
  MaybeTensor lse{};                 // [batch, heads, queries]
  std::vector<Tensor> statistics{};  // the members of ssmax::RowStatistics, each as lse; or empty
};

Results attention(const Tensor& query, const Tensor& key, const Tensor& value, const Arguments& a,
                  Wanted wanted);

/// The same for queries of type T, which is float, double, half or bfloat16.
template <class T>
Results attention_of(const Tensor& query, const Tensor& key, const Tensor& value, const Arguments& a,
                     Wanted wanted);

/// Returns each query's largest logit, [batch, heads, queries], and for each gap the number of keys within the gap,
/// [gaps, batch, heads, queries]. Scaling, sinks and dropout have no effect.
std::pair<Tensor, Tensor> count_within_gaps(const Tensor& query, const Tensor& key,
                                            const std::vector<double>& gaps, const Arguments& a);

/// What attention_backward returns. Those that were not asked for have no elements.
enum class Gradient { query, key, value, s, b, p, c, slopes, bias, sinks, count };
using Gradients = std::array<Tensor, static_cast<std::size_t>(Gradient::count)>;

/// `learn` says which of s, b, p, c, slopes, bias, sinks want a gradient. Those of s, b and slopes have one number
/// per head; they and that of p are float64.
Gradients attention_backward(const Tensor& grad_out, const MaybeTensor& grad_lse, const Tensor& query,
                             const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                             const std::vector<bool>& learn, const Arguments& a);

/// The arguments of attention_backward but for the last.
struct BackwardInputs {
  const Tensor& grad_out;
  const MaybeTensor& grad_lse;
  const Tensor &query, &key, &value, &out, &lse;
  const std::vector<bool>& learn;
};

/// T is float, double, half or bfloat16.
template <class T>
Gradients attention_backward_of(const BackwardInputs& in, const Arguments& a);

/// A cache, and queries that stand at the last positions of each sequence.
struct CacheInputs {
  const Tensor& query;          // [batch, heads, queries, width]
  const Tensor &keys, &values;  // [batch, kv_heads, capacity, width]
  const Tensor& lengths;        // [batch]: positions that each sequence has had
  bool ring;                    // lengths may exceed the capacity: older keys are forgotten
};

/// As attention, over the keys of a cache.
Results decode(const CacheInputs& in, const Arguments& a, Wanted wanted);
template <class T>
Results decode_of(const CacheInputs& in, const Arguments& a, Wanted wanted);
template <>
Results decode_of<float>(const CacheInputs& in, const Arguments& a, Wanted wanted);
template <>
Results decode_of<double>(const CacheInputs& in, const Arguments& a, Wanted wanted);
template <>
Results decode_of<ssmax::half>(const CacheInputs& in, const Arguments& a, Wanted wanted);
template <>
Results decode_of<ssmax::bfloat16>(const CacheInputs& in, const Arguments& a, Wanted wanted);

/// Rows [batch, heads, tokens, width] of float or double, rotated as tokens start, start + 1, …
Tensor rotate(const Tensor& rows, const RopeInputs& inputs, index_t start);

/// The functions of rows.
enum class RowFunction { softmax, log_softmax, sparsemax, entmax15 };

/// Returns the function of each row of logits [batch, head, query, key], laid out as the logits. Strides are free. With
/// `begins`, logits are [head, element], and row r has the elements begins[r] to begins[r + 1].
template <RowFunction function>
Tensor rows(const Tensor& logits, const MaybeTensor& begins);

/// Returns the gradient of the logits, laid out as `out`, the result of `rows`.
template <RowFunction function>
Tensor rows_backward(const Tensor& grad_out, const Tensor& out, const MaybeTensor& begins);

/// Returns out and lse over the keys of two results.
Results merge(const Tensor& out, const Tensor& lse, const Tensor& other_out, const Tensor& other_lse);

/// The arguments of cross_entropy, in the order of its schema.
struct CrossEntropyInputs {
  Tensor logits;       // [rows, classes]
  Tensor target;       // [rows], integers of any type
  MaybeTensor weight;  // [classes], float32
  index_t ignore_index;
  double label_smoothing, softcap, z_loss;
};

/// Returns the loss, a tensor without dimensions, and the losses of rows, [rows] in float64.
std::pair<Tensor, Tensor> cross_entropy(const CrossEntropyInputs& in);

/// Returns the gradient of the logits. `grad_loss` holds one number, `grad_losses` is [rows] in float64.
Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& grad_losses,
                              const CrossEntropyInputs& in);

}  // namespace ssmax_torch
