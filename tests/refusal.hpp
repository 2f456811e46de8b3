// What a call that must be refused says.
#pragma once

#include <cctype>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>

#include "catch.hpp"

/// The message of its std::invalid_argument.
template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}

/// Whether a message has a word or number as a whole: 8 is not found in 128, nor out in dout.
inline bool mentions(std::string_view message, std::string_view word) {
  const auto part_of_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  };
  for (std::size_t at = message.find(word); at != std::string_view::npos; at = message.find(word, at + 1)) {
    const bool starts = at == 0 || !part_of_word(message[at - 1]);
    const bool ends = at + word.size() == message.size() || !part_of_word(message[at + word.size()]);
    if (starts && ends) return true;
  }
  return false;
}

/// The call must be refused with a message that holds all the parts.
template <class Call>
void check_refused(std::initializer_list<std::string_view> parts, const Call& call) {
  const std::string message = refusal(call);
  for (const std::string_view part : parts) {
    INFO('"' << message << "\" should mention " << part);
    CHECK(message.find(part) != std::string::npos);
  }
}

/// The same, where parts are words as a whole.
template <class Call>
void check_refused_with_words(std::initializer_list<std::string_view> words, const Call& call) {
  const std::string message = refusal(call);
  for (const std::string_view word : words) {
    INFO('"' << message << "\" should mention " << word);
    CHECK(mentions(message, word));
  }
}
