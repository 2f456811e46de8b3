// Makes a document that contains a number in a text and asks for it at the end, in the paper's words:
//
//   … The special magic Tokyo number is: 8106422. …  What is the special magic Tokyo number?
//   The special magic Tokyo number is: 8106422
//
// The text is cut so that the document has the requested number of tokens, including the last digit of the
// answer.
#pragma once

#include <array>
#include <cmath>
#include <string>

#include "corpus.hpp"
#include "settings.hpp"

namespace longcontext {

inline constexpr index_t kDigits = 7;

inline constexpr std::array kCities{
    "Amsterdam", "Athens",   "Bangkok",   "Barcelona", "Beijing",  "Berlin",   "Bogota",    "Boston",
    "Brussels",  "Budapest", "Cairo",     "Caracas",   "Chicago",  "Dakar",    "Delhi",     "Dublin",
    "Geneva",    "Hanoi",    "Havana",    "Helsinki",  "Istanbul", "Jakarta",  "Karachi",   "Kyoto",
    "Lagos",     "Lima",     "Lisbon",    "London",    "Madrid",   "Manila",   "Melbourne", "Miami",
    "Milan",     "Montreal", "Moscow",    "Mumbai",    "Nairobi",  "Naples",   "Osaka",     "Oslo",
    "Paris",     "Prague",   "Quito",     "Riga",      "Rome",     "Santiago", "Seoul",     "Shanghai",
    "Singapore", "Sofia",    "Stockholm", "Sydney",    "Taipei",   "Tehran",   "Tokyo",     "Toronto",
    "Tunis",     "Vienna",   "Warsaw",    "Zurich"};

struct Needle {
  Tokens sentence, question, digits;

  Needle(const Tokenizer& tokenizer, const std::string& city, const std::string& number) {
    const std::string name = "The special magic " + city + " number";
    sentence = tokenizer.encode(" " + name + " is: " + number + ".");
    question = tokenizer.encode("\nWhat is the special magic " + city + " number?\n" + name + " is: ");
    digits = tokenizer.encode(number);
  }
  // Returns the number of tokens of a document without any other text.
  index_t size() const { return static_cast<index_t>(sentence.size() + question.size() + digits.size()); }
};

struct NeedleDocument {
  Tokens tokens;
  index_t needle = 0, needle_size = 0;  // first token and size of the needle's sentence
  index_t answer = 0;                   // first digit of the answer; the other digits follow
};

inline index_t longest_needle(const Tokenizer& tokenizer) {
  index_t longest = 0;
  for (const char* city : kCities) longest = std::max(longest, Needle(tokenizer, city, "0123456").size());
  return longest;
}

// `depth` is the fraction of the text before the needle.
inline NeedleDocument hide_needle(const Needle& needle, const Tokens& text, index_t length, double depth,
                                  examples::Random& random) {
  require(depth >= 0 && depth <= 1, "depth must lie between 0 and 1");
  require(needle.size() <= length, "a needle and its question take " + std::to_string(needle.size()) +
                                       " tokens, more than the context's " + std::to_string(length));
  const index_t filler = length - needle.size();
  const auto hay = draw_text(text, filler, random);
  const auto before = static_cast<index_t>(std::lround(depth * static_cast<double>(filler)));

  NeedleDocument document;
  Tokens& tokens = document.tokens;
  tokens.assign(hay.begin(), hay.begin() + before);
  const auto append = [&](const auto& more) { tokens.insert(tokens.end(), more.begin(), more.end()); };
  document.needle = static_cast<index_t>(tokens.size());
  document.needle_size = static_cast<index_t>(needle.sentence.size());
  append(needle.sentence);
  append(hay.subspan(static_cast<std::size_t>(before)));
  append(needle.question);
  document.answer = static_cast<index_t>(tokens.size());
  append(needle.digits);
  return document;
}

inline std::string draw_city(examples::Random& random) {
  return kCities[static_cast<std::size_t>(random.below(static_cast<index_t>(kCities.size())))];
}

inline std::string draw_number(examples::Random& random) {
  std::string number;
  for (index_t i = 0; i < kDigits; ++i) number += static_cast<char>('0' + random.below(10));
  return number;
}

}  // namespace longcontext
