/// @defgroup explain Explanations (explain.hpp)
/// Explains how a call of attention or attention_backward is computed, and why no faster path takes it.
///
///     Explanation explanation;
///     attention({.q = q, .k = k, .v = v, .out = out, .explanation = &explanation}, scaling, Causal{});
///     std::puts(to_string(explanation).c_str());
///
/// Set the environment variable `SSMAX_TRACE` to 1 to print this line to stderr for each path of a call. The library
/// reads the variable at its first call. An empty value and 0 switch it off.
///
/// A call writes its explanation after it has checked its arguments and before it computes. Over MPI, the explanation
/// describes the last range of keys that this rank computed. SSMAX_TRACE prints every range.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>

#include "config.hpp"
#include "target.hpp"

/// @addtogroup explain
/// @{
SSMAX_BEGIN_DATA

/// The loops that compute a call, with the operands of their products. bf16: bfloat16 operands, summed in float.
enum class Path {
  none,           ///< The call has 0 queries or 0 heads.
  short_keys,     ///< At most 128 keys.
  prefill,        ///< Many queries.
  prefill_bf16,   ///< Many queries, by pair dots or AMX tiles.
  decode,         ///< Few queries.
  decode_bf16,    ///< Few queries, by pair dots.
  backward,       ///< Gradients.
  backward_bf16,  ///< Gradients, by pair dots or AMX tiles.
};

/// A description of how a call is computed. All texts are string literals.
struct Explanation {
  /// Makes an empty explanation.
  SSMAX_INLINE Explanation() = default;

  const char* function = "";        ///< "attention", "attention_backward", "mpi::attention", …
  Path path = Path::none;           ///< `Path::none`: only function, target and workspace_bytes are set.
  Target target = Target::scalar;   ///< The instruction set.
  const char* operands = "";        ///< Operands of the products: "float", "double" or "bfloat16".
  index_t rows = 0;                 ///< Rows of a kv head: queries · heads / kv_heads.
  index_t query_block = 0;          ///< Maximum number of rows that are computed together.
  index_t key_block = 0;            ///< Maximum number of keys that are computed together.
  index_t tile_lanes = 0;           ///< Rows of a tile; 0 on the decode path.
  index_t tasks = 0;                ///< Tasks of the executor before the keys are split.
  index_t key_chunks = 1;           ///< Chunks that the keys of a task are split into; 1: not split.
  index_t heads_together = 1;       ///< kv heads that a thread computes together; a plan over views: 1.
  index_t threads = 0;              ///< Number of threads that have memory.
  index_t shared_sequences = 0;     ///< Sequences whose first keys are computed once for several sequences.
  std::size_t workspace_bytes = 0;  ///< Memory of the call, in bytes; the size a Workspace needs.
  const char* reason = "";  ///< Why a faster path does not take the call; "" if this path is the fastest.
};

SSMAX_END

SSMAX_BEGIN_CODE

/// Returns the name of a path, spelled as the enumerator: "prefill_bf16".
[[nodiscard]] inline const char* path_name(Path path) {
  constexpr const char* names[] = {"none",   "short_keys",  "prefill",  "prefill_bf16",
                                   "decode", "decode_bf16", "backward", "backward_bf16"};
  return names[static_cast<int>(path)];
}

namespace detail {

/// Upper bound of the characters of a line.
inline constexpr std::size_t max_of_a_line = 640;

/// Writes the explanation as one line without a newline.
SSMAX_COLD inline void write_line(const Explanation& e, char (&line)[max_of_a_line]) {
  const int length =
      std::snprintf(line, sizeof(line), "ssmax::%.99s: path=%s", e.function, path_name(e.path));
  if (e.path == Path::none) return;
  std::snprintf(
      line + length, sizeof(line) - static_cast<std::size_t>(length),
      " target=%s operands=%s rows=%td query_block=%td key_block=%td tile_lanes=%td tasks=%td "
      "key_chunks=%td heads_together=%td threads=%td shared_sequences=%td workspace_bytes=%zu reason=\"%s\"",
      target_name(e.target), e.operands, e.rows, e.query_block, e.key_block, e.tile_lanes, e.tasks,
      e.key_chunks, e.heads_together, e.threads, e.shared_sequences, e.workspace_bytes, e.reason);
}

}  // namespace detail

/// Returns the explanation as one line: `ssmax::attention: path=decode target=avx2 … reason=""`.
[[nodiscard]] inline std::string to_string(const Explanation& explanation) {
  char line[detail::max_of_a_line];
  detail::write_line(explanation, line);
  return line;
}

SSMAX_END
/// @}
