// Embeds words without a trained model. Every word has a random direction. A passage is the mean of its
// words' directions, weighted by rarity (idf). Passages that share rare words have similar directions;
// other passages differ by noise. A retrieval head of a transformer has this input in its simplest form.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "text.hpp"

namespace examples {

class Embedding {
 public:
  // The weights come from `text`. A word outside of `text` has the largest weight.
  Embedding(const Vocabulary& vocabulary, std::span<const Token> text, std::size_t width, std::uint64_t seed)
      : width_(width), vectors_(vocabulary.size() * width), ends_sentence_(vocabulary.size()) {
    std::vector<double> count(vocabulary.size());
    for (const Token token : text) count[static_cast<std::size_t>(token)] += 1;
    for (std::size_t token = 0; token < vocabulary.size(); ++token) {
      const std::string& word = vocabulary.word(static_cast<Token>(token));
      const double weight = std::log((static_cast<double>(text.size()) + 1) / (count[token] + 1));
      write_direction(word, seed, static_cast<float>(weight),
                      std::span(vectors_).subspan(token * width, width));
      ends_sentence_[token] = word.front() == '.' || word.front() == '!' || word.front() == '?';
    }
  }

  // Writes the direction of a passage, of length 1.
  void passage(std::span<const Token> tokens, std::span<float> out) const {
    for (float& x : out) x = 0;
    for (const Token token : tokens) {
      const auto vector = std::span(vectors_).subspan(static_cast<std::size_t>(token) * width_, width_);
      for (std::size_t i = 0; i < width_; ++i) out[i] += vector[i];
    }
    float square = 0;
    for (const float x : out) square += x * x;
    const float inverse = square > 0 ? 1 / std::sqrt(square) : 0;
    for (float& x : out) x *= inverse;
  }

  // Writes one vector per token: the passage that ends with the token, within its sentence, of at most
  // `window` tokens. The vector depends on past tokens only, as in a causal language model.
  void tokens_in_context(std::span<const Token> tokens, std::size_t window, std::span<float> out) const {
    std::size_t sentence = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const std::size_t begin = i + 1 - sentence > window ? i + 1 - window : sentence;
      passage(tokens.subspan(begin, i + 1 - begin), out.subspan(i * width_, width_));
      if (ends_sentence_[static_cast<std::size_t>(tokens[i])]) sentence = i + 1;
    }
  }

 private:
  // Takes the signs from a hash. The distributions of <random> differ between standard libraries.
  static void write_direction(const std::string& word, std::uint64_t seed, float weight,
                              std::span<float> out) {
    std::uint64_t state = 0xcbf29ce484222325 ^ seed;  // FNV-1a
    for (const char c : word) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    const float size = weight / std::sqrt(static_cast<float>(out.size()));
    for (float& x : out) {
      state += 0x9e3779b97f4a7c15;  // SplitMix64
      std::uint64_t mixed = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
      mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
      x = (mixed >> 63) != 0 ? size : -size;
    }
  }

  std::size_t width_;
  std::vector<float> vectors_;  // [word, width]: direction · weight
  std::vector<bool> ends_sentence_;
};

}  // namespace examples
