// Byte-pair encoding. Tokens 0–255 are bytes; every further token joins two tokens that often stand side by
// side. A vocabulary of 256 tokens encodes bytes. The text is first split into words or runs of signs, with
// the space before them, and single digits, so that numbers are read and written digit by digit.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <map>
#include <ssmax/config.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace longcontext {

using ssmax::index_t;
using Tokens = std::vector<index_t>;
using Merge = std::pair<index_t, index_t>;

// Stands between documents. No text contains this character: files that contain it are skipped as binary.
inline constexpr char kBoundary = '\0';

class Tokenizer {
 public:
  explicit Tokenizer(std::vector<Merge> merges) : merges_(std::move(merges)) {
    for (index_t byte = 0; byte < 256; ++byte) spellings_.emplace_back(1, static_cast<char>(byte));
    for (const auto& [left, right] : merges_) {
      const auto known = static_cast<index_t>(spellings_.size());
      if (left < 0 || right < 0 || left >= known || right >= known) {
        throw std::runtime_error("a tokenizer joins tokens that it does not have");
      }
      ranks_.try_emplace({left, right}, known);
      spellings_.push_back(spelling(left) + spelling(right));
    }
  }

  // Joins the most frequent pair repeatedly. If several pairs are equally frequent, joins the pair with the
  // smallest tokens.
  static Tokenizer learn(std::string_view text, index_t vocabulary) {
    std::map<std::string_view, index_t> counts;
    for_each_piece(text, [&](std::string_view piece) { ++counts[piece]; });
    std::vector<std::pair<Tokens, index_t>> words;
    for (const auto& [piece, count] : counts) words.emplace_back(bytes(piece), count);

    std::map<Merge, index_t> pairs;
    const auto count_pairs = [&](const Tokens& word, index_t count) {
      for (std::size_t i = 0; i + 1 < word.size(); ++i) pairs[{word[i], word[i + 1]}] += count;
    };
    for (const auto& [word, count] : words) count_pairs(word, count);

    std::vector<Merge> merges;
    while (256 + static_cast<index_t>(merges.size()) < vocabulary) {
      const auto best = std::max_element(pairs.begin(), pairs.end(),
                                         [](const auto& x, const auto& y) { return x.second < y.second; });
      if (best == pairs.end() || best->second < 2) break;
      const Merge pair = best->first;
      for (auto& [word, count] : words) {
        if (!has(word, pair)) continue;
        count_pairs(word, -count);
        join(word, pair, 256 + static_cast<index_t>(merges.size()));
        count_pairs(word, count);
      }
      merges.push_back(pair);
    }
    return Tokenizer(std::move(merges));
  }

  Tokens encode(std::string_view text) const {
    Tokens tokens;
    std::unordered_map<std::string_view, Tokens> seen;
    for_each_piece(text, [&](std::string_view piece) {
      auto [entry, is_new] = seen.try_emplace(piece);
      if (is_new) entry->second = encode_piece(piece);
      tokens.insert(tokens.end(), entry->second.begin(), entry->second.end());
    });
    return tokens;
  }

  std::string decode(const Tokens& tokens) const {
    std::string text;
    for (const index_t token : tokens) text += spelling(token);
    return text;
  }

  const std::string& spelling(index_t token) const { return spellings_[static_cast<std::size_t>(token)]; }
  const std::vector<Merge>& merges() const { return merges_; }
  index_t size() const { return static_cast<index_t>(spellings_.size()); }

 private:
  enum class Kind { letter, digit, space, sign };

  static Kind kind(char c) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isdigit(byte) != 0) return Kind::digit;
    if (byte >= 0x80 || std::isalpha(byte) != 0) return Kind::letter;  // keeps UTF-8 characters whole
    return std::isspace(byte) != 0 || c == kBoundary ? Kind::space : Kind::sign;
  }

  template <class F>
  static void for_each_piece(std::string_view text, const F& f) {
    for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end) {
      end = begin + 1;
      Kind first = kind(text[begin]);
      if (text[begin] == ' ' && end < text.size() && kind(text[end]) != Kind::digit) first = kind(text[end]);
      while (first != Kind::digit && first != Kind::space && end < text.size() && kind(text[end]) == first) {
        ++end;
      }
      f(text.substr(begin, end - begin));
    }
  }

  static Tokens bytes(std::string_view piece) {
    Tokens tokens;
    for (const char c : piece) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }

  static bool has(const Tokens& word, const Merge& pair) {
    for (std::size_t i = 0; i + 1 < word.size(); ++i) {
      if (word[i] == pair.first && word[i + 1] == pair.second) return true;
    }
    return false;
  }

  static void join(Tokens& word, const Merge& pair, index_t joined) {
    std::size_t size = 0;
    for (std::size_t i = 0; i < word.size(); ++i) {
      const bool here = i + 1 < word.size() && word[i] == pair.first && word[i + 1] == pair.second;
      word[size++] = here ? joined : word[i];
      if (here) ++i;
    }
    word.resize(size);
  }

  // Joins pairs in the order in which `learn` joined the pairs.
  Tokens encode_piece(std::string_view piece) const {
    Tokens word = bytes(piece);
    for (;;) {
      auto best = ranks_.end();
      for (std::size_t i = 0; i + 1 < word.size(); ++i) {
        const auto entry = ranks_.find({word[i], word[i + 1]});
        if (entry != ranks_.end() && (best == ranks_.end() || entry->second < best->second)) best = entry;
      }
      if (best == ranks_.end()) return word;
      join(word, best->first, best->second);
    }
  }

  std::vector<Merge> merges_;
  std::map<Merge, index_t> ranks_;
  std::vector<std::string> spellings_;
};

}  // namespace longcontext
