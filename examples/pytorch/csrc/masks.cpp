#include "masks.hpp"

namespace ssmax_torch {

namespace {

void check_entries(const char* name, ssmax::Integers values, index_t keys, index_t most) {
  for (std::size_t b = 0; b < values.size(); ++b) {
    if (values[b] >= 0 && values[b] <= most) continue;
    fail(std::string(name) + " has " + std::to_string(values[b]) + " for batch entry " + std::to_string(b) +
         ", keys are " + std::to_string(keys));
  }
}

}  // namespace

Ranges make_ranges(const Arguments& a, index_t keys) {
  Ranges result;
  result.causal = a.causal;
  if (!a.window.empty()) {
    if (a.window.size() != 2) fail("window has " + std::to_string(a.window.size()) + " numbers, must have 2");
    result.window.emplace(a.window[0], a.window[1]);
  }
  if (a.chunk) result.chunks.emplace(*a.chunk);
  if (a.prefix) {
    result.prefix.emplace(integers("prefix", a.prefix));
    check_entries("prefix", result.prefix->prefix, keys, std::numeric_limits<index_t>::max());
  }
  if (a.lengths) {
    result.lengths.emplace(integers("lengths", a.lengths));
    check_entries("lengths", result.lengths->lengths, keys, keys);
  }
  return result;
}

std::optional<Placed> make_placed(const Arguments& a) {
  const bool has_documents = a.cu_queries || a.cu_keys;
  if (a.top_left + has_documents + a.left_padding.has_value() > 1)
    fail("mask has two of CausalTopLeft, LeftPadding and Documents, must have one of them");
  if (a.top_left) return Placed{};
  if (a.left_padding) return Placed{ssmax::LeftPadding(integers("padding", a.left_padding))};
  if (!has_documents) return std::nullopt;
  if (!a.cu_queries || !a.cu_keys) fail("cu_seqlens of queries and of keys are given together");
  // What a query of a document sees besides is the affair of the other masks.
  return Placed{
      ssmax::Documents(integers("cu_seqlens", a.cu_queries), integers("cu_seqlens_keys", a.cu_keys), false)};
}

}  // namespace ssmax_torch
