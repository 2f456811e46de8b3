/// @defgroup explain Explanations (explain.hpp)
/// Explains how a call of attention, attention_partial, decode or attention_backward is computed, and why no faster
/// path takes it.
///
///     Explanation explanation;
///     attention<bfloat16>({.q = q, .k = k, .v = v, .out = out}, scaling, Causal{}, {.explanation = &explanation});
///     std::puts(to_string(explanation).c_str());
///
/// The environment variable `SSMAX_TRACE` prints the same line to stderr for every call: set it to 1. The library reads
/// the variable at its first call. Empty and 0 are off.
///
/// A call writes its explanation after its arguments are checked, before it computes. Over MPI, the explanation is that
/// of the last part that this rank computed; SSMAX_TRACE prints every part.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>

#include "config.hpp"
#include "target.hpp"

/// @addtogroup explain
/// @{
SSMAX_BEGIN_DATA

/// The loops that compute a call, with the operands of their products. bf16: bfloat16, summed in float.
enum class Path {
  none,           ///< The call has no query, or no head.
  short_keys,     ///< At most 128 keys.
  prefill,        ///< Many queries.
  prefill_bf16,   ///< Many queries, by pair dots or AMX tiles.
  decode,         ///< Few queries.
  decode_bf16,    ///< Few queries, by pair dots.
  backward,       ///< Gradients.
  backward_bf16,  ///< Gradients, by pair dots or AMX tiles.
};

/// How a call is computed. All texts are string literals.
struct Explanation {
  /// Explains no call.
  SSMAX_INLINE Explanation() = default;

  const char* function = "";        ///< "attention", "attention_partial", "decode", "mpi::attention", …
  Path path = Path::none;           ///< If it is none, only `function` and `target` are set.
  Target target = Target::scalar;   ///< The instruction set.
  const char* operands = "";        ///< What is multiplied: "float", "double" or "bfloat16".
  index_t rows = 0;                 ///< Queries per kv head: queries · heads / kv_heads.
  index_t query_block = 0;          ///< Most rows that are computed at once.
  index_t key_block = 0;            ///< Most keys that are computed at once.
  index_t tile_lanes = 0;           ///< Rows of a tile; 0 on the decode paths, which have keys in lanes.
  index_t tasks = 0;                ///< What the executor distributes, without the split of keys.
  index_t key_chunks = 1;           ///< Parts that the keys of a task are split into; 1: not split.
  index_t threads = 0;              ///< Threads that have memory.
  std::size_t workspace_bytes = 0;  ///< Memory of the call; what a Workspace must hold.
  const char* reason = "";          ///< Why no faster path takes the call; "" if none is faster.
};

SSMAX_END

SSMAX_BEGIN_CODE

/// "none", "short_keys", "prefill", "prefill_bf16", "decode", "decode_bf16", "backward", "backward_bf16".
[[nodiscard]] inline const char* path_name(Path path) {
  constexpr const char* names[] = {"none",   "short_keys",  "prefill",  "prefill_bf16",
                                   "decode", "decode_bf16", "backward", "backward_bf16"};
  return names[static_cast<int>(path)];
}

namespace detail {

/// Enough characters for every explanation.
inline constexpr std::size_t most_of_a_line = 640;

/// Writes the explanation as one line without a newline.
SSMAX_COLD inline void write_line(const Explanation& e, char (&line)[most_of_a_line]) {
  const int length =
      std::snprintf(line, sizeof(line), "ssmax::%.99s: path=%s", e.function, path_name(e.path));
  if (e.path == Path::none) return;
  std::snprintf(line + length, sizeof(line) - static_cast<std::size_t>(length),
                " target=%s operands=%s rows=%td query_block=%td key_block=%td tile_lanes=%td tasks=%td "
                "key_chunks=%td threads=%td workspace_bytes=%zu reason=\"%s\"",
                target_name(e.target), e.operands, e.rows, e.query_block, e.key_block, e.tile_lanes, e.tasks,
                e.key_chunks, e.threads, e.workspace_bytes, e.reason);
}

}  // namespace detail

/// Returns the explanation as one line: `ssmax::decode: path=decode target=avx2 … reason=""`.
[[nodiscard]] inline std::string to_string(const Explanation& explanation) {
  char line[detail::most_of_a_line];
  detail::write_line(explanation, line);
  return line;
}

SSMAX_END
/// @}
