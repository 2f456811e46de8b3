/// @defgroup mpi_arguments Arguments over MPI (mpi_arguments.hpp)
/// @ingroup mpi
/// The tensors and options of calls over MPI. All tensors of a call have one storage type T, which the ranks exchange.
#pragma once

#include <optional>
#include <span>

#include "attention_arguments.hpp"
#include "storage.hpp"
#include "view.hpp"

SSMAX_BEGIN_CODE
namespace mpi {
/// @addtogroup mpi_arguments
/// @{

/// The rows of a rank, for mpi::attention.
template <class T>
struct AttentionArguments {
  View<const T, 4> q{};                    ///< [batch, heads, queries, d].
  View<const T, 4> k{};                    ///< [batch, kv_heads, keys, d].
  View<const T, 4> v{};                    ///< [batch, kv_heads, keys, dv].
  View<T, 4> out{};                        ///< [batch, heads, queries, dv].
  View<detail::ComputeType<T>, 3> lse{};   ///< [batch, heads, queries], or left out.
};

/// The queries and results of mpi::decode, equal on all ranks.
template <class T>
struct DecodeArguments {
  View<const T, 4> q{};                    ///< [batch, heads, queries, width].
  View<T, 4> out{};                        ///< [batch, heads, queries, value_width].
  View<detail::ComputeType<T>, 3> lse{};   ///< [batch, heads, queries], or left out.
};

/// The rows of a rank, for mpi::attention_backward.
template <class T>
struct BackwardArguments {
  View<const T, 4> q{};                         ///< [batch, heads, queries, d].
  View<const T, 4> k{};                         ///< [batch, kv_heads, keys, d].
  View<const T, 4> v{};                         ///< [batch, kv_heads, keys, dv].
  View<const T, 4> out{};                       ///< [batch, heads, queries, dv], the result of attention.
  View<const detail::ComputeType<T>, 3> lse{};  ///< [batch, heads, queries], the result of attention.
};

/// The gradients of mpi::attention_backward.
template <class T>
struct AttentionGradients {
  View<const T, 4> dout{};                       ///< Input: the gradient of out.
  View<const detail::ComputeType<T>, 3> dlse{};  ///< Input: the gradient of lse; optional.
  View<T, 4> dq{};                               ///< Output: the gradient of q.
  View<T, 4> dk{};                               ///< Output: the gradient of k.
  View<T, 4> dv{};                               ///< Output: the gradient of v.
  std::span<detail::ComputeType<T>> dsinks{};    ///< Added to; optional.
  bool accumulate = false;                       ///< Must be false.
};

/// The options of calls over MPI: those of ssmax::AttentionArguments, equal on all ranks.
template <class T>
struct AttentionOptions {
  std::optional<double> scale{};                       ///< Factor of q·k; 1/√d by default.
  const Rope<detail::ComputeType<T>>* rope = nullptr;  ///< Rotates q, and the keys that are not in a cache.
  index_t key_position = 0;                            ///< Position of the first key, for the rope.
  KeptSpan<const detail::ComputeType<T>> sinks{};      ///< One number per head.
  Workspace* workspace = nullptr;                      ///< Memory that calls reuse.
  bool float_products = false;         ///< If true, bfloat16 is multiplied in float on every target.
  bool rounded_rotation = false;       ///< If true, the bf16 path rounds rotated q and k to bfloat16.
  bool batch_invariant = false;        ///< If true, results are bit-identical for any number of queries.
  bool scaled_sinks = false;           ///< If true, a sink is a logit: c·sink.
  bool rotate_source_keys = false;     ///< If true, the rope rotates the keys of a cache in the call.
  SequenceLengths lengths{};           ///< Must be left out.
  Explanation* explanation = nullptr;  ///< Optional output: how the call is computed.
};

/// @}
}  // namespace mpi
SSMAX_END

SSMAX_BEGIN_DETAIL

/// Copies the options of a call over MPI to arguments of a call of one process.
template <class To, class T>
void copy_options(To& to, const mpi::AttentionOptions<T>& from) {
  to.scale = from.scale;
  to.rope = from.rope;
  to.key_position = from.key_position;
  to.sinks = from.sinks;
  to.workspace = from.workspace;
  to.float_products = from.float_products;
  to.rounded_rotation = from.rounded_rotation;
  to.batch_invariant = from.batch_invariant;
  to.scaled_sinks = from.scaled_sinks;
  to.lengths = from.lengths;
  to.explanation = from.explanation;
  if constexpr (requires { to.rotate_source_keys; }) to.rotate_source_keys = from.rotate_source_keys;
}

/// Returns the arguments of the same call in one process.
template <class T>
AttentionArguments<ComputeType<T>> as_one_process(const mpi::AttentionArguments<T>& a,
                                                  const mpi::AttentionOptions<T>& options) {
  AttentionArguments<ComputeType<T>> all{.q = a.q, .k = a.k, .v = a.v, .out = a.out, .lse = a.lse};
  copy_options(all, options);
  return all;
}
template <class T>
AttentionArguments<ComputeType<T>> as_one_process(const mpi::DecodeArguments<T>& a,
                                                  const mpi::AttentionOptions<T>& options) {
  AttentionArguments<ComputeType<T>> all{.q = a.q, .out = a.out, .lse = a.lse};
  copy_options(all, options);
  return all;
}
template <class T>
BackwardArguments<ComputeType<T>> as_one_process(const mpi::BackwardArguments<T>& a,
                                                 const mpi::AttentionOptions<T>& options) {
  BackwardArguments<ComputeType<T>> all{.q = a.q, .k = a.k, .v = a.v, .out = a.out, .lse = a.lse};
  copy_options(all, options);
  return all;
}
template <class T>
AttentionGradients<ComputeType<T>> as_one_process(const mpi::AttentionGradients<T>& g) {
  return {.dout = g.dout,
          .dlse = g.dlse,
          .dq = g.dq,
          .dk = g.dk,
          .dv = g.dv,
          .dsinks = g.dsinks,
          .accumulate = g.accumulate};
}

SSMAX_END
