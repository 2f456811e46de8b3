// Saves a training run as a file: its settings, its progress, and all data that the next step needs.
//
//   8 bytes of signature; then three numbers of 8 bytes: the size of all bytes that follow them, a checksum of these
//   bytes, the size of the header; then the header, JSON; then weights and the optimizer's averages, floats as in
//   memory.
#pragma once

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../text.hpp"
#include "files.hpp"
#include "optimizer.hpp"

namespace longcontext {

// The curve of a training has kCurvePoints points. A point ends at every step at which kCurvePoints · step
// / steps reaches the next integer.
inline constexpr index_t kCurvePoints = 50;
inline index_t points_until(index_t step, index_t steps) { return step * kCurvePoints / steps; }

// Mean losses of text and of the answers to needles, since the previous point.
struct CurvePoint {
  index_t step;
  double text, answer;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CurvePoint, step, text, answer)

struct Checkpoint {
  std::string configuration;
  Shape shape;
  Training training;
  std::uint64_t text = 0;  // checksum of the text
  index_t step = 0;
  std::vector<CurvePoint> curve{};
  Values weights{};
  Averages averages{};
};

namespace detail {

// Increase the number with every change after which a saved training would continue differently.
inline constexpr std::string_view kSignature = "SSMAXLC3";

template <class T>
std::string_view bytes_of(const T& values) {
  return {reinterpret_cast<const char*>(std::data(values)), std::size(values) * sizeof(*std::data(values))};
}

inline std::uint64_t read_number(std::string_view file, std::size_t at) {
  std::uint64_t number = 0;
  std::memcpy(&number, file.data() + at, sizeof number);
  return number;
}

}  // namespace detail

inline void save(const std::filesystem::path& path, const Checkpoint& c) {
  const nlohmann::json header{{"configuration", c.configuration},
                              {"shape", c.shape},
                              {"training", c.training},
                              {"text", c.text},
                              {"step", c.step},
                              {"curve", c.curve},
                              {"weights", c.weights.size()}};
  std::string body = header.dump();
  const std::uint64_t header_size = body.size();
  for (const auto* values : {&c.weights, &c.averages.mean, &c.averages.square}) {
    body += detail::bytes_of(*values);
  }
  const std::uint64_t numbers[] = {body.size(), checksum(body), header_size};
  write_file(path, std::string(detail::kSignature) + std::string(detail::bytes_of(numbers)) + body);
}

inline Checkpoint load(const std::filesystem::path& path) {
  const auto fail = [&](const char* what) { throw std::runtime_error(path.string() + " " + what); };
  if (!std::filesystem::is_regular_file(path)) fail("does not exist, or is no file");
  const std::string file = examples::read_file(path);
  constexpr std::size_t kFirst = 32;
  if (!file.starts_with(detail::kSignature)) fail("is not a checkpoint of longcontext");
  if (file.size() < kFirst) fail("is truncated");
  const std::uint64_t size = detail::read_number(file, 8), header_size = detail::read_number(file, 24);
  const std::string_view body = std::string_view(file).substr(kFirst);
  if (body.size() < size) fail("is truncated");
  if (body.size() > size || header_size > size || checksum(body) != detail::read_number(file, 16)) {
    fail("is damaged: it is not what was written");
  }

  Checkpoint c;
  std::size_t count = 0;
  try {
    const auto header = nlohmann::json::parse(body.substr(0, header_size));
    header.at("configuration").get_to(c.configuration);
    header.at("shape").get_to(c.shape);
    header.at("training").get_to(c.training);
    header.at("text").get_to(c.text);
    header.at("step").get_to(c.step);
    header.at("curve").get_to(c.curve);
    header.at("weights").get_to(count);
    check(c.shape), check(c.training);
  } catch (const std::exception&) {
    fail("is damaged: its header is not that of a checkpoint");
  }
  if (count > size || header_size + 3 * count * sizeof(float) != size) {
    fail("is damaged: its weights are not as many as it says");
  }
  const char* from = body.data() + header_size;
  for (auto* values : {&c.weights, &c.averages.mean, &c.averages.square}) {
    values->resize(count);
    std::memcpy(values->data(), from, count * sizeof(float));
    from += count * sizeof(float);
  }
  return c;
}

}  // namespace longcontext
