// Reads the text of a folder as tokens: nine tenths for training, one tenth for tests.
#pragma once

#include <algorithm>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "../random.hpp"
#include "../text.hpp"
#include "files.hpp"
#include "tokenizer.hpp"

namespace longcontext {

struct Corpus {
  Tokenizer tokenizer;
  Tokens train, test;
  std::size_t files = 0, bytes = 0;
  std::uint64_t identity = 0;  // checksum of the text
};

// Reads the files in a shuffled order, because files with similar names are similar. The order depends only
// on the names.
inline Corpus read_corpus(const std::filesystem::path& path, index_t vocabulary) {
  std::vector<std::string> documents;
  for (const auto& file : examples::files_at(path)) {
    std::string content = examples::read_file(file);
    if (content.empty() || content.find(kBoundary) != std::string::npos) continue;
    documents.push_back(std::move(content));
  }
  examples::Random random(0);
  examples::shuffle(documents, random);

  std::string text;
  for (const auto& document : documents) text += document + kBoundary;
  if (text.empty()) throw std::runtime_error(path.string() + " holds no readable text");
  const std::size_t cut = text.size() - text.size() / 10;
  const std::string_view train = std::string_view(text).substr(0, cut);
  Tokenizer tokenizer = Tokenizer::learn(train, vocabulary);
  Tokens train_tokens = tokenizer.encode(train);
  Tokens test_tokens = tokenizer.encode(std::string_view(text).substr(cut));
  return {std::move(tokenizer), std::move(train_tokens), std::move(test_tokens), documents.size(),
          text.size(),          checksum(text)};
}

// Returns `count` tokens that start at a random place.
inline std::span<const index_t> draw_text(const Tokens& text, index_t count, examples::Random& random) {
  const auto size = static_cast<index_t>(text.size());
  if (size < count) {
    throw std::runtime_error("the text has only " + std::to_string(size) + " tokens of the " +
                             std::to_string(count) + " that one sequence takes; use more text");
  }
  return std::span(text).subspan(static_cast<std::size_t>(random.below(size - count + 1)),
                                 static_cast<std::size_t>(count));
}

}  // namespace longcontext
