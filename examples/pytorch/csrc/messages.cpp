#include "messages.hpp"

#include <array>

namespace ssmax_torch {

namespace {

struct Rename {
  std::string_view from, to;
};

constexpr std::string_view library = "ssmax::";

/// Classes and functions: the text between `library` and the colon.
constexpr std::array names{
    Rename{"attention_backward", "attention"},
    Rename{"rope", "KVCache.append"},
    Rename{"Rope", "Rope"},
    Rename{"SlidingWindow", "mask.SlidingWindow"},
    Rename{"Chunks", "mask.Chunks"},
    Rename{"PrefixLM", "mask.PrefixLM"},
    Rename{"KeyLengths", "mask.KeyLengths"},
    Rename{"LeftPadding", "mask.LeftPadding"},
    Rename{"Documents", "mask.Documents"},
    Rename{"MatrixMask", "mask.MatrixMask"},
    Rename{"SSMax", "scaling.SSMax"},
    Rename{"SizeTable", "scaling.SizeTable"},
    Rename{"QwenLogN", "scaling.QwenLogN"},
    Rename{"Llama4Temperature", "scaling.Llama4Temperature"},
    Rename{"MinistralTemperature", "scaling.MinistralTemperature"},
    Rename{"InklingTemperature", "scaling.InklingTemperature"},
    Rename{"PerQuery", "scaling.PerQuery"},
    Rename{"AdjustedSize", "scaling.AdjustedSize"},
    Rename{"Softcap", "score.Softcap"},
    Rename{"Alibi", "score.Alibi"},
    Rename{"Bias", "score.Bias"},
    Rename{"SlopedBias", "score.SlopedBias"},
    Rename{"ScaleInvariant", "score.ScaleInvariant"},
};

/// Arguments: whole words of the text after the colon.
constexpr std::array words{
    Rename{"q", "query"},
    Rename{"k", "key"},
    Rename{"v", "value"},
    Rename{"targets", "target"},
    Rename{"weights", "weight"},
    Rename{"cumulative_queries", "cu_seqlens"},
    Rename{"cumulative_keys", "cu_seqlens_keys"},
};

bool in_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '\'';
}

std::string renamed_words(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    std::size_t length = 0;
    while (length < text.size() && in_word(text[length])) ++length;
    std::string_view word = text.substr(0, length);
    for (const Rename& rename : words) {
      if (word == rename.from) word = rename.to;
    }
    result += word;
    if (length < text.size()) result += text[length++];
    text.remove_prefix(length);
  }
  return result;
}

}  // namespace

std::string python_message(std::string message, std::string_view attention) {
  const std::string_view text = message;
  const std::size_t colon = text.find(": ");
  if (!text.starts_with(library) || colon == text.npos) return message;
  const std::string_view from = text.substr(library.size(), colon - library.size());
  std::string_view what = text.substr(colon);
  std::string result = "ssmax_torch.";
  std::string_view to = from == "attention" || from == "RaggedRows" ? attention : from;
  for (const Rename& rename : names) {
    if (from == rename.from) to = rename.to;
  }
  result += to;
  // The library's function of rotations calls its input "in".
  if (constexpr std::string_view in = ": in "; from == "rope" && what.starts_with(in)) {
    result += ": key ";
    what.remove_prefix(in.size());
  }
  return result + renamed_words(what);
}

}  // namespace ssmax_torch
