// Defines the interface to the peers that the library is compared with. Each peer is a separate module, loaded when the
// benchmarks start, outside of the global symbol scope. There are two reasons. PyTorch contains a oneDNN and an Eigen,
// which must stay separate from the versions of other peers. Code compiled with -march=native must not share an inline
// function with other code.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "attention.hpp"
#include "data.hpp"
#include "paged.hpp"

namespace ssmax_bench {

// One prepared call. The preparation covers everything that a user would keep between calls. A Run is empty if the peer
// does not support the work. A peer that cannot write to the given memory sets `fetch`, which copies the result of the
// last call there, outside of the timing.
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

// Arguments of y = softmax(x) for each row.
struct RowsArguments {
  RowsShape shape;
  const float* x;
  float* y;
};

// Arguments of dz = y (dy - sum(y dy)) for each row.
struct RowsBackwardArguments {
  RowsShape shape;
  const float* y;
  const float* dy;
  float* dz;
};

enum class RopePairing { half_split, interleaved };

// Arguments of the rotary embedding. x and y are [head, position, channel]; cosine and sine are [position, channel / 2].
// A pair (first, second) becomes (first cos - second sin, second cos + first sin).
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

// A peer. Each function returns an empty Run unless the peer supports the work.
class Peer {
 public:
  virtual ~Peer() = default;
  virtual std::string version() const = 0;
  virtual Run rows(const RowsArguments&) const { return {}; }
  virtual Run rows_backward(const RowsBackwardArguments&) const { return {}; }
  virtual Run rope(const RopeArguments&) const { return {}; }
  virtual Run attention(const AttentionArguments&) const { return {}; }
  // Returns the largest error that is accepted, or 0 for the bound of the type.
  virtual double attention_error(const AttentionArguments&) const { return 0; }
  // Returns the name of the method that the peer uses for the arguments.
  virtual std::string attention_label(const AttentionArguments&) const { return {}; }
  virtual Run paged(const PagedArguments&) const { return {}; }
  virtual std::string paged_label(const PagedArguments&) const { return {}; }
  virtual Run attention_backward(const AttentionBackwardArguments&) const { return {}; }
  virtual std::string attention_backward_label(const AttentionBackwardArguments&) const { return {}; }
};

struct LoadedPeer {
  std::string name;
  const Peer* peer = nullptr;  // null if missing
  std::string missing;         // if null: reason, and how to get the peer
};

// Returns all known peers, loaded once. Missing peers are in the list, too.
const std::vector<LoadedPeer>& peers();

}  // namespace ssmax_bench

// The function that each module exports.
extern "C" __attribute__((visibility("default"))) const ssmax_bench::Peer* ssmax_bench_peer();
