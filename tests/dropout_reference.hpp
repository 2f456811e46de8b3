// The definition of ssmax::Dropout, weight by weight.
#pragma once

#include <cmath>
#include <cstdint>
#include <ssmax/detail/kernels/dropout.hpp>
#include <ssmax/query.hpp>

namespace reference {

using ssmax::index_t;

/// Returns whether a weight is dropped, by the definition of ssmax::Dropout.
inline bool is_dropped(const ssmax::Dropout& dropout, index_t sequence, index_t head, index_t position,
                       index_t key) {
  const bool has_seeds = !dropout.seeds.empty();
  const std::uint64_t seed = has_seeds ? dropout.seeds[static_cast<std::size_t>(sequence)] : dropout.seed;
  const auto low = [](auto x) { return static_cast<std::uint32_t>(static_cast<std::uint64_t>(x)); };
  using ssmax::detail::philox;
  const auto of_sequence =
      philox({low(dropout.offset), low(dropout.offset >> 32), has_seeds ? 0 : low(sequence), 1},
             {low(seed), low(seed >> 32)});
  const auto words = philox({low(key / 8), low(position), low(head), 0}, {of_sequence[0], of_sequence[1]});
  return (words[static_cast<std::size_t>(key % 8 / 2)] >> (key % 2 * 16) & 0xFFFF) <
         std::rint(dropout.p * 65536);
}

}  // namespace reference
