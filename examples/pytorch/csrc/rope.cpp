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

/// Views tokens [first, first + count) of the positions.
ssmax::View<const index_t, 3> positions_of(const RopeInputs& inputs, index_t first, index_t count) {
  const auto all = view<const index_t, 3>("rope_positions", *inputs.positions);
  if (count > all.extent(2) - first) {
    fail("rope has positions of " + std::to_string(all.extent(2)) + " tokens, the call has tokens up to " +
         std::to_string(first + (count - 1)));
  }
  return {all.data_handle() + first, {all.extent(0), all.extent(1), count}, all.strides()};
}

std::vector<index_t> axes_of(const RopeInputs& inputs) {
  if (!inputs.axes.empty()) return {inputs.axes.begin(), inputs.axes.end()};
  const index_t width = whole(inputs.numbers, 1, "width");
  if (width < 0 || width > ssmax::detail::max_rope_width) fail("rope has width " + std::to_string(width));
  return std::vector<index_t>(static_cast<std::size_t>(width / 2), 0);
}

/// All that tables with positions of your own depend on.
struct OwnPositions {
  OwnPositions(const RopeInputs& inputs, index_t first, index_t count)
      : numbers(inputs.numbers.begin() + 1, inputs.numbers.end()), axes(inputs.axes) {
    const auto positions = positions_of(inputs, first, count);
    extents = {first, positions.extent(0), positions.extent(1), count};
    for (index_t b = 0; b < positions.extent(0); ++b) {
      for (index_t axis = 0; axis < positions.extent(1); ++axis) {
        const index_t* row = &positions(b, axis, 0);
        values.insert(values.end(), row, row + count);
      }
    }
  }
  bool operator==(const OwnPositions&) const = default;

  std::vector<double> numbers;
  std::vector<std::int64_t> axes;
  std::array<index_t, 4> extents;
  std::vector<index_t> values;
};

}  // namespace

index_t rope_key_position(const RopeInputs& inputs) {
  if (inputs.numbers.empty()) return 0;
  check_count(inputs.numbers);
  return whole(inputs.numbers, 0, "position of the first key");
}

template <class T>
ssmax::Rope<T> rope_of_tokens(const RopeInputs& inputs, index_t first, index_t count) {
  check_count(inputs.numbers);
  ssmax::RopeOptions options = options_of(inputs.numbers);
  options.first_position = first;
  return {options, positions_of(inputs, first, count), axes_of(inputs)};
}

template <class T>
std::shared_ptr<const ssmax::Rope<T>> rope_tables(const RopeInputs& inputs, index_t first, index_t count) {
  const std::vector<double>& numbers = inputs.numbers;
  if (numbers.empty()) {
    if (inputs.positions || !inputs.axes.empty()) fail("rope is left out, its positions and axes are given");
    return nullptr;
  }
  check_count(numbers);
  if (inputs.positions) {
    if (count == 0) return nullptr;
    static Kept<OwnPositions, ssmax::Rope<T>> kept(2);
    return kept.get(OwnPositions(inputs, first, count), count,
                    [&](index_t) { return rope_of_tokens<T>(inputs, first, count); });
  }
  if (!inputs.axes.empty()) fail("rope has axes, must have positions");
  static Kept<std::vector<double>, ssmax::Rope<T>> kept(8);
  const std::vector<double> key(numbers.begin() + 1, numbers.end());
  return kept.get(key, first + count,
                  [&](index_t positions) { return ssmax::Rope<T>(options_of(numbers), positions); });
}

template std::shared_ptr<const ssmax::Rope<float>> rope_tables(const RopeInputs&, index_t, index_t);
template std::shared_ptr<const ssmax::Rope<double>> rope_tables(const RopeInputs&, index_t, index_t);
template ssmax::Rope<float> rope_of_tokens(const RopeInputs&, index_t, index_t);
template ssmax::Rope<double> rope_of_tokens(const RopeInputs&, index_t, index_t);

}  // namespace ssmax_torch
