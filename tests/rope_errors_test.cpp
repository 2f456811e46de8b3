// What a rope and its calls refuse: std::invalid_argument that names the argument, and nothing written.

#include "refusal.hpp"
#include "test.hpp"

namespace rope_errors_test {

using namespace ssmax;

TEST_CASE("options that make no rotation are refused", "[rope]") {
  const auto refused = [](const RopeOptions& options, index_t positions,
                          std::initializer_list<std::string_view> words) {
    check_refused(words, [&] { Rope<float>(options, positions); });
  };
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(),
                   inf = std::numeric_limits<double>::infinity();
  refused({.width = 65}, 4, {"width", "65", "even"});
  refused({.width = 0}, 4, {"width", "0"});
  for (const index_t width :
       {(index_t{1} << 24) + 2, index_t{1} << 30, std::numeric_limits<index_t>::max() - 1}) {
    refused({.width = width}, 1, {"Rope", "width", std::to_string(width), "16777216"});
  }
  refused({.width = 8}, 0, {"positions", "0"});
  refused({.width = 8, .first_position = -3}, 4, {"first_position", "-3"});
  for (const double theta : {1.0, inf, nan}) refused({.width = 8, .theta = theta}, 4, {"theta"});
  for (const double factor : {0.0, -2.0, inf, nan}) {
    refused({.width = 8, .scaling = RopeScaling::linear(factor)}, 4, {"factor"});
  }
  refused({.width = 2, .scaling = RopeScaling::ntk(2)}, 4, {"ntk", "width"});
  refused({.width = 8, .scaling = RopeScaling::yarn(2, 0)}, 4, {"original_positions"});
  refused({.width = 8, .scaling = RopeScaling::yarn(2, 4096, 32, 1)}, 4, {"low", "high"});
  refused({.width = 8, .scaling = RopeScaling::llama3(2, -1)}, 4, {"original_positions"});
  refused({.width = 8, .scaling = RopeScaling::llama3(2, 4096, 0, 4)}, 4, {"low", "high"});
  refused({.width = 8, .scaling = RopeScaling::dynamic_ntk(2, 0, 4096)}, 4, {"factor"});
  refused({.width = 8, .first_channel = -1}, 4, {"first_channel", "-1"});
  refused({.width = 8, .first_channel = std::numeric_limits<index_t>::max()}, 4,
          {"first_channel", "16777216"});
  for (const double factor : {0.0, -1.0, inf, nan}) {
    refused({.width = 8, .attention_factor = factor}, 4, {"attention_factor"});
  }
  check_refused({"width", "7"}, [] { rope_frequencies({.width = 7}); });
  check_refused({"theta"}, [] { rope_frequencies({.width = 8, .theta = 1}); });
}

TEST_CASE("frequencies that do not fit the options are refused", "[rope]") {
  const auto refused = [](RopeOptions options, const std::vector<double>& frequencies,
                          std::initializer_list<std::string_view> words) {
    options.frequencies = frequencies;
    check_refused(words, [&] { Rope<float>(options, 4); });
    check_refused(words, [&] { rope_frequencies(options); });
  };
  refused({.width = 6}, {1, 2}, {"frequencies", "2", "3"});
  refused({.width = 6}, {1, 2, 3, 4}, {"frequencies", "4", "3"});
  for (const double omega :
       {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
    refused({.width = 4}, {1, omega}, {"frequencies", "finite"});
  }
  refused({.width = 4, .theta = 1e6}, {1, 2}, {"frequencies", "theta"});
  refused({.width = 4, .scaling = RopeScaling::linear(2)}, {1, 2}, {"frequencies", "scaling"});
  refused({.width = 3}, {1}, {"width", "3"});
}

TEST_CASE("axes that do not fit the positions are refused", "[rope]") {
  const std::vector<index_t> values(12);
  const auto refused = [&](const RopeOptions& options, index_t tokens, index_t stride,
                           const std::vector<index_t>& axes, std::initializer_list<std::string_view> words) {
    check_refused(words, [&] {
      Rope<float>(options, View<const index_t, 2>(values.data(), {2, tokens}, {6, stride}), axes);
    });
  };
  refused({.width = 6}, 3, 1, {0, 1}, {"axes", "2", "3"});
  refused({.width = 6}, 3, 1, {0, 1, 2}, {"axes", "2", "positions"});
  refused({.width = 6}, 3, 1, {0, -1, 1}, {"axes", "-1", "0"});
  refused({.width = 6}, 0, 1, {0, 1, 1}, {"positions", "0", "1"});
  refused({.width = 6}, 3, 2, {0, 1, 1}, {"positions", "stride", "2"});
  refused({.width = 5}, 3, 1, {0, 1}, {"width", "5"});
}

TEST_CASE("calls outside of the tables or with views that do not fit throw before the first write",
          "[rope]") {
  constexpr float sentinel = -1234;
  const Rope<float> rope({.width = 8, .first_position = 5}, 10);  // positions 5 to 14
  const std::vector<float> in(256, 1.f);
  std::vector<float> storage(256, sentinel);
  const auto extents = std::array<index_t, 2>{4, 10};
  const View<const float, 2> x(in.data(), extents);
  const View<float, 2> y(storage.data(), extents);
  const auto refused = [&](View<const float, 2> from, View<float, 2> to, auto positions,
                           std::initializer_list<std::string_view> words) {
    check_refused(words, [&] { ssmax::rope<float>(from, to, rope, positions); });
    check_refused(words, [&] { ssmax::rope_backward<float>(from, to, rope, positions); });
  };
  constexpr index_t furthest = std::numeric_limits<index_t>::max();
  const std::string furthest_name = std::to_string(furthest);
  SECTION("start") {
    refused(x, y, index_t{12}, {"15", "14"});
    refused(x, y, index_t{4}, {"4", "5"});
    refused(x, y, index_t{-1}, {"-1", "5"});
    refused(x, y, furthest - 1, {"position", "14"});
  }
  SECTION("positions: the last one is wrong") {
    const std::vector<index_t> past{5, 6, 7, 15}, negative{5, 6, 7, -1}, far{5, 6, 7, furthest};
    const std::vector<index_t> few{5, 6, 7}, many{5, 6, 7, 8, 9};
    refused(x, y, std::span<const index_t>(past), {"positions", "15", "14"});
    refused(x, y, std::span<const index_t>(negative), {"positions", "-1", "5"});
    refused(x, y, std::span<const index_t>(far), {"positions", furthest_name, "14"});
    refused(x, y, std::span<const index_t>(few), {"positions", "3", "4"});
    refused(x, y, std::span<const index_t>(many), {"positions", "5", "4"});
  }
  SECTION("views") {
    refused({in.data(), {4, 7}}, {storage.data(), {4, 7}}, index_t{5}, {"channels", "7", "8"});
    check_refused({"channels", "10", "11"}, [&] {
      ssmax::rope<float>(x, y, Rope<float>({.width = 8, .first_position = 5, .first_channel = 3}, 10), 5);
    });
    refused(x, {storage.data(), {4, 9}}, index_t{5}, {"out", "9", "10"});
    refused(x, {storage.data(), {5, 10}}, index_t{5}, {"out", "5", "4"});
    refused({nullptr, extents}, y, index_t{5}, {"in", "null"});
    refused(x, {nullptr, extents}, index_t{5}, {"out", "null"});
    refused({in.data(), extents, {20, 2}}, y, index_t{5}, {"in", "stride", "2"});
    refused(x, {storage.data(), extents, {20, 2}}, index_t{5}, {"out", "stride", "2"});
    refused(x, {storage.data(), extents, {9, 1}}, index_t{5}, {"out", "stride", "9"});
    refused({storage.data() + 1, extents}, y, index_t{5}, {"out", "overlaps"});
    refused({storage.data(), extents, {12, 1}}, y, index_t{5}, {"out", "overlaps"});
  }
  CHECK(std::ranges::all_of(storage, [](float value) { return value == sentinel; }));
}

TEST_CASE(
    "position -1 and positions beyond the table: microsoft/onnxruntime#28277, microsoft/onnxruntime#27597",
    "[rope][errors][reports]") {
  const Rope<float> rope({.width = 4}, 8);
  std::vector<float> x(8, 1), out(8, -77);
  const View<const float, 2> in(x.data(), {2, 4});
  const View<float, 2> to(out.data(), {2, 4});
  for (const index_t position : {index_t{-1}, index_t{8}, index_t{1} << 31}) {
    const std::vector<index_t> positions{7, position};
    check_refused({"ssmax::rope", std::to_string(position)},
                  [&] { ssmax::rope<float>(in, to, rope, std::span<const index_t>(positions)); });
    // The first of two rows, or the second one, is outside.
    const index_t start = position == 8 ? 7 : position;
    check_refused({"ssmax::rope"}, [&] { ssmax::rope<float>(in, to, rope, start); });
    check_refused({"ssmax::attention", "rope"}, [&] {
      const View<const float, 4> rows(x.data(), {1, 1, 2, 4});
      attention({.q = rows,
                 .k = rows,
                 .v = rows,
                 .out = {out.data(), {1, 1, 2, 4}},
                 .rope = &rope,
                 .key_position = start});
    });
  }
  CHECK(out == std::vector<float>(8, -77));
}

}  // namespace rope_errors_test
