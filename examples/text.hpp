// Splits text files into tokens: lower-case words, digits, and runs of one punctuation mark. Bytes outside
// of ASCII count as letters, so that UTF-8 characters are not split.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace examples {

using Token = int;  // number of a word in a Vocabulary

class Vocabulary {
 public:
  Token number_of(const std::string& word) {
    const auto [entry, is_new] = numbers_.try_emplace(word, static_cast<Token>(words_.size()));
    if (is_new) words_.push_back(word);
    return entry->second;
  }

  const std::string& word(Token token) const { return words_[static_cast<std::size_t>(token)]; }
  std::size_t size() const { return words_.size(); }

 private:
  std::unordered_map<std::string, Token> numbers_;
  std::vector<std::string> words_;
};

inline bool is_letter(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte >= 0x80 || std::isalnum(byte) != 0;
}

inline bool is_word(const std::string& token) { return is_letter(token.front()); }

inline std::vector<Token> tokenize(std::string_view text, Vocabulary& vocabulary) {
  std::vector<Token> tokens;
  std::string word;
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    const char first = text[begin];
    const auto belongs = [&](char c) { return is_letter(first) ? is_letter(c) : c == first; };
    while (end < text.size() && belongs(text[end])) ++end;
    if (!is_letter(first) && std::isgraph(static_cast<unsigned char>(first)) == 0) continue;
    word.assign(text.substr(begin, end - begin));
    for (char& c : word) {
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    tokens.push_back(vocabulary.number_of(word));
  }
  return tokens;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return content;
}

// Returns the file, or all files in a folder in the order of their names. Each file appears once, also if
// several links lead to it.
inline std::vector<std::filesystem::path> files_at(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  if (!fs::exists(path))
    throw std::runtime_error(path.string() + " does not exist; name a text file or a folder");
  if (fs::is_regular_file(path) && fs::is_empty(path)) throw std::runtime_error(path.string() + " is empty");
  if (!fs::is_directory(path)) return {path};
  std::set<fs::path> files;
  for (const auto& entry :
       fs::recursive_directory_iterator(path, fs::directory_options::skip_permission_denied)) {
    std::error_code broken_link;
    if (entry.is_regular_file(broken_link)) files.insert(fs::canonical(entry.path()));
  }
  return {files.begin(), files.end()};
}

struct Text {
  std::vector<Token> tokens;
  std::size_t files = 0;
};

// Reads until there are `most` tokens. Skips files that contain a NUL byte (pictures, archives).
inline Text read_text(const std::filesystem::path& path, std::size_t most, Vocabulary& vocabulary) {
  Text text;
  for (const auto& file : files_at(path)) {
    if (text.tokens.size() >= most) break;
    const std::string content = read_file(file);
    if (content.find('\0') != std::string::npos) continue;
    const auto tokens = tokenize(content, vocabulary);
    if (tokens.empty()) continue;
    text.tokens.insert(text.tokens.end(), tokens.begin(), tokens.end());
    ++text.files;
  }
  text.tokens.resize(std::min(text.tokens.size(), most));
  const bool any_word = std::any_of(text.tokens.begin(), text.tokens.end(),
                                    [&](Token token) { return is_word(vocabulary.word(token)); });
  if (!any_word) throw std::runtime_error(path.string() + " holds no readable words");
  return text;
}

}  // namespace examples
