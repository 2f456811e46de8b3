// The interface to what the library is compared with. Each peer is a module of its own, loaded when the
// benchmarks start and kept out of the global symbol scope: PyTorch brings a oneDNN and an Eigen that must
// not meet ours, and code that is compiled with -march=native must not share an inline function with code
// that is not.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "attention.hpp"
#include "data.hpp"

namespace ssmax_bench {

// One prepared call, ready to be timed: everything that a user would keep between calls is done. Empty where
// a peer does not offer the work. A peer that cannot write to where it is told makes `fetch` bring the result
// of the last call there, which is not timed.
struct Run : std::function<void()> {
  using function::function;

  std::function<void()> fetch;
};

struct RowsShape {
  index_t rows;
  index_t n;

  index_t size() const { return rows * n; }
  std::string name() const { return std::to_string(rows) + "x" + std::to_string(n); }
};

// y = softmax(x) for each row.
struct RowsArguments {
  RowsShape shape;
  const float* x;
  float* y;
};

// dz = y (dy - sum(y dy)) for each row.
struct RowsBackwardArguments {
  RowsShape shape;
  const float* y;
  const float* dy;
  float* dz;
};

enum class RopePairing { half_split, interleaved };

// [head, position, channel]; cosine and sine are [position, channel / 2]. The pairs (first, second) turn into
// (first cos - second sin, second cos + first sin).
struct RopeArguments {
  index_t heads;
  index_t width;
  index_t positions;
  const float* x;
  const float* cosine;
  const float* sine;
  float* y;
  RopePairing pairing;

  index_t size() const { return heads * positions * width; }
};

class Peer {
 public:
  virtual ~Peer() = default;
  virtual std::string version() const = 0;
  virtual Run rows(const RowsArguments&) const { return {}; }
  virtual Run rows_backward(const RowsBackwardArguments&) const { return {}; }
  virtual Run rope(const RopeArguments&) const { return {}; }
  virtual Run attention(const AttentionArguments&) const { return {}; }
  // Which of its ways a peer takes.
  virtual std::string attention_label(const AttentionArguments&) const { return {}; }
  virtual Run attention_backward(const AttentionBackwardArguments&) const { return {}; }
  virtual std::string attention_backward_label(const AttentionBackwardArguments&) const { return {}; }
};

struct LoadedPeer {
  std::string name;
  const Peer* peer = nullptr;  // null if missing
  std::string missing;         // then: why, and how to get it
};

// Every peer that the benchmarks know, loaded once; a missing one is listed too.
const std::vector<LoadedPeer>& peers();

}  // namespace ssmax_bench

// What a module exports.
extern "C" __attribute__((visibility("default"))) const ssmax_bench::Peer* ssmax_bench_peer();
