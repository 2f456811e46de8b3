// A language whose rule stands in the text. Every text has a cycle of words. The text names its words in the order of the
// cycle, and after one full turn it sometimes jumps to another word of the cycle. So the word before and the text so far
// determine the next word, except after a jump.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "model.hpp"

namespace examples {

inline constexpr index_t kWords = 64, kShortestCycle = 8, kLongestCycle = 32;
inline constexpr index_t kTokensPerJump = 16;  // on average

// The words of a cycle, in their order.
struct Cycle {
  std::vector<index_t> words;

  index_t size() const { return std::ssize(words); }

  // Returns true if `word` follows `previous` in the cycle.
  bool follows(index_t word, index_t previous) const {
    const auto at = std::ranges::find(words, previous);
    if (at == words.end()) return false;
    return word == (at + 1 == words.end() ? words.front() : at[1]);
  }
};

inline Cycle draw_cycle(index_t size, Random& random) {
  Cycle cycle{std::vector<index_t>(static_cast<std::size_t>(kWords))};
  std::iota(cycle.words.begin(), cycle.words.end(), index_t{0});
  shuffle(cycle.words, random);
  cycle.words.resize(static_cast<std::size_t>(size));
  return cycle;
}

// Draws a cycle that a text of `length` words names at least twice, if it has at least 2 · kShortestCycle words.
inline Cycle draw_cycle_for(index_t length, Random& random) {
  const index_t longest = std::clamp(length / 2, kShortestCycle, kLongestCycle);
  return draw_cycle(kShortestCycle + random.below(longest - kShortestCycle + 1), random);
}

inline std::vector<index_t> draw_text(const Cycle& cycle, index_t length, Random& random) {
  std::vector<index_t> text;
  for (index_t i = 0, at = 0; i < length; ++i) {
    const bool jumps = i > cycle.size() && random.below(kTokensPerJump) == 0;
    text.push_back(cycle.words[static_cast<std::size_t>(at)]);
    at = (jumps ? random.below(cycle.size()) : at + 1) % cycle.size();
  }
  return text;
}

// The targets are the words that the rule determines: every word after the first turn, except after a jump.
inline Batch draw_batch(index_t sequences, index_t length, Random& random) {
  Batch batch{sequences, length, {}, {}};
  for (index_t sequence = 0; sequence < sequences; ++sequence) {
    const Cycle cycle = draw_cycle_for(length, random);
    const std::vector<index_t> text = draw_text(cycle, length + 1, random);
    for (index_t i = 0; i < length; ++i) {
      const index_t word = text[static_cast<std::size_t>(i)], next = text[static_cast<std::size_t>(i) + 1];
      batch.words.push_back(word);
      batch.targets.push_back(i >= cycle.size() && cycle.follows(next, word) ? next : kIgnored);
    }
  }
  return batch;
}

}  // namespace examples
