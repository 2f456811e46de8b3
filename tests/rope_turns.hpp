// What the tables of a rope hold.
#pragma once

#include <array>
#include <ssmax/rope.hpp>
#include <vector>

namespace rope_turns {

using namespace ssmax;

/// The two channels of pair i.
inline std::array<std::size_t, 2> channels_of(Pairing pairing, index_t width, index_t i) {
  const bool neighbours = pairing == Pairing::interleaved;
  return {static_cast<std::size_t>(neighbours ? 2 * i : i),
          static_cast<std::size_t>(neighbours ? 2 * i + 1 : i + width / 2)};
}

/// cos and sin of every pair at a position: what (1, 0) turns to. The kernels add only a product by one and a
/// difference with zero, so this is what the tables hold.
template <class T>
struct Turns {
  std::vector<T> cosine, sine;

  Turns(const Rope<T>& rope, index_t position) {
    const index_t width = rope.width(), begin = rope.options().first_channel;
    const Pairing pairing = rope.options().pairing;
    std::vector<T> row(static_cast<std::size_t>(begin + width), T{0});
    T* const pairs = row.data() + begin;
    for (index_t i = 0; i < width / 2; ++i) pairs[channels_of(pairing, width, i)[0]] = T{1};
    const View<T, 2> view(row.data(), {1, begin + width});
    ssmax::rope<T>(view, view, rope, position);
    for (index_t i = 0; i < width / 2; ++i) {
      const auto [a, b] = channels_of(pairing, width, i);
      cosine.push_back(pairs[a]);
      sine.push_back(pairs[b]);
    }
  }
};

}  // namespace rope_turns
