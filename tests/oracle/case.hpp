// The calls that the oracle compares. Both sides include this file of today, so it has no type of ssmax.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace oracle {

using index_t = std::ptrdiff_t;

// SplitMix64: the same numbers from every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  // Returns a number from `low` to `high`.
  index_t between(index_t low, index_t high) {
    return low + static_cast<index_t>(next() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return between(1, 100) <= percent; }

 private:
  std::uint64_t state_;
};

enum class Lengths { none, padded, packed };

// A call. A side ignores the members that the kind does not have.
struct Case {
  std::string kind;
  std::uint64_t seed = 1;  // of the elements
  int type = 0;            // float, double, half, bfloat16
  int stored = 0;          // storage type of a cache, or of the result of rows
  int policy = 0;          // scaling, mask and score
  int special = 0;         // of 1024 elements: infinities, NaN and the like
  int threads = 1;
  index_t batch = 1, heads = 1, kv_heads = 1, queries = 1, keys = 1, d = 64, dv = 64;
  Lengths lengths = Lengths::none;
  std::vector<index_t> queries_of{}, keys_of{};  // numbers of each sequence
  index_t gap = 0;                               // elements between rows
  bool by_position = false;                      // layout [batch, position, head, channel]
  index_t cut = 0, page = 16, window = 40;
  bool rope = false, sinks = false, scaled_sinks = false, float_products = false, rounded_rotation = false,
       batch_invariant = false, workspace = false, accumulate = false;
};

struct Output {
  const char* name;
  const void* data;
  std::size_t bytes, element;
};

// A call with its tensors, which `run` owns. The results lie in the outputs after `run`.
struct Call {
  std::function<void()> run;
  std::vector<Output> outputs;
};

// What a commit's calls.cpp exports.
struct Side {
  std::vector<std::string> (*targets)();
  void (*set_target)(const std::string& name);
  Call (*prepare)(
      const Case& c);  // throws for a call that the library refuses, returns no `run` for an unknown kind
};
extern const Side older, today;

}  // namespace oracle
