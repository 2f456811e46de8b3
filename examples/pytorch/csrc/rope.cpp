#include "rope.hpp"

#include <cmath>
#include <string>

#include "kept.hpp"

namespace ssmax_torch {

namespace {

constexpr std::size_t rope_numbers = 12;

index_t whole(const std::vector<double>& numbers, std::size_t i, const char* name) {
  const double value = numbers[i];
  if (!(std::abs(value) < 0x1p53)) fail("rope has " + std::to_string(value) + " for its " + name);
  return static_cast<index_t>(value);
}

void check_count(const std::vector<double>& numbers) {
  if (numbers.size() >= rope_numbers) return;
  fail("rope has " + std::to_string(numbers.size()) + " numbers, must have at least " +
       std::to_string(rope_numbers));
}

ssmax::RopeOptions options_of(const std::vector<double>& numbers) {
  const index_t pairing = whole(numbers, 3, "pairing"), method = whole(numbers, 4, "method");
  if (pairing < 0 || pairing > 1) fail("rope has pairing " + std::to_string(pairing) + ", must be 0 or 1");
  if (method < 0 || method > 4)
    fail("rope has method " + std::to_string(method) + ", must be within 0 and 4");
  return {.width = whole(numbers, 1, "width"),
          .theta = numbers[2],
          .pairing = static_cast<ssmax::Pairing>(pairing),
          .scaling = {static_cast<ssmax::RopeScaling::Method>(method), numbers[5], numbers[6], numbers[7],
                      numbers[8], numbers[9] != 0},
          .first_channel = whole(numbers, 10, "first channel"),
          .attention_factor = numbers[11],
          .frequencies = std::span(numbers).subspan(rope_numbers)};
}

}  // namespace

index_t rope_key_position(const std::vector<double>& numbers) {
  if (numbers.empty()) return 0;
  check_count(numbers);
  return whole(numbers, 0, "position of the first key");
}

template <class T>
std::shared_ptr<const ssmax::Rope<T>> rope_tables(const std::vector<double>& numbers, index_t positions) {
  if (numbers.empty()) return nullptr;
  check_count(numbers);
  static Kept<std::vector<double>, ssmax::Rope<T>> kept;
  const std::vector<double> key(numbers.begin() + 1, numbers.end());
  return kept.get(key, positions, [&](index_t count) { return ssmax::Rope<T>(options_of(numbers), count); });
}

template std::shared_ptr<const ssmax::Rope<float>> rope_tables(const std::vector<double>&, index_t);
template std::shared_ptr<const ssmax::Rope<double>> rope_tables(const std::vector<double>&, index_t);

}  // namespace ssmax_torch
