// A run of training as a file: what it is, how far it came, and everything that the next step needs.
//
//   8 bytes of signature, 8 of the header's size, 8 of a checksum of all that follows (FNV-1a, 64 bits);
//   the header, JSON; then weights and the optimizer's averages, floats as they lie in memory.
//
// It is written beside its place and moved there when it is whole, so that a kill leaves the one before.
#pragma once

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../text.hpp"
#include "optimizer.hpp"
#include "tokenizer.hpp"

namespace longcontext {

// Losses of text, and of the answers to needles, averaged since the point before.
// A point ends where the number of points that a training has, times its part that is done, is whole.
inline constexpr index_t kCurvePoints = 50;
inline index_t points_until(index_t step, index_t steps) { return step * kCurvePoints / steps; }

struct CurvePoint {
  index_t step;
  double text, answer;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CurvePoint, step, text, answer)

struct Checkpoint {
  std::string configuration;
  Shape shape;
  Training training;
  std::vector<Merge> merges;  // of the tokenizer
  index_t step = 0;
  std::vector<CurvePoint> curve{};
  Values weights{};
  Averages averages{};
};

namespace detail {

inline constexpr std::string_view kSignature = "SSMAXLC1";

inline std::uint64_t checksum(std::string_view bytes) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return hash;
}

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

// The file appears whole or not at all.
inline void write_file(const std::filesystem::path& path, std::string_view content) {
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path());
  std::filesystem::path unfinished = path;
  unfinished += ".unfinished";
  std::ofstream file(unfinished, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + unfinished.string());
  std::filesystem::rename(unfinished, path);
}

inline void save(const std::filesystem::path& path, const Checkpoint& c) {
  const nlohmann::json header{{"configuration", c.configuration},
                              {"shape", c.shape},
                              {"training", c.training},
                              {"merges", c.merges},
                              {"step", c.step},
                              {"curve", c.curve},
                              {"weights", c.weights.size()}};
  std::string body = header.dump();
  const std::uint64_t header_size = body.size();
  for (const auto* values : {&c.weights, &c.averages.mean, &c.averages.square})
    body += detail::bytes_of(*values);
  const std::uint64_t numbers[] = {header_size, detail::checksum(body)};
  write_file(path, std::string(detail::kSignature) + std::string(detail::bytes_of(numbers)) + body);
}

inline Checkpoint load(const std::filesystem::path& path) {
  const auto fail = [&](const char* what) { throw std::runtime_error(path.string() + " " + what); };
  if (!std::filesystem::is_regular_file(path)) fail("does not exist");
  const std::string file = examples::read_file(path);
  constexpr std::size_t kFirst = 24;
  if (!file.starts_with(detail::kSignature)) fail("is not a checkpoint of longcontext");
  if (file.size() < kFirst) fail("is truncated");
  const std::uint64_t header_size = detail::read_number(file, 8);
  const std::string_view body = std::string_view(file).substr(kFirst);
  if (header_size > body.size()) fail("is truncated");
  const auto header = nlohmann::json::parse(body.substr(0, header_size), nullptr, false);
  if (header.is_discarded()) fail("is damaged: its header is not what was written");

  const auto count = header.at("weights").get<std::size_t>();
  const std::size_t all = header_size + 3 * count * sizeof(float);
  if (body.size() < all) fail("is truncated");
  if (body.size() > all || detail::checksum(body) != detail::read_number(file, 16)) {
    fail("is damaged: its checksum is not what was written");
  }
  Checkpoint c;
  header.at("configuration").get_to(c.configuration);
  header.at("shape").get_to(c.shape);
  header.at("training").get_to(c.training);
  header.at("merges").get_to(c.merges);
  header.at("step").get_to(c.step);
  header.at("curve").get_to(c.curve);
  const char* from = body.data() + header_size;
  for (auto* values : {&c.weights, &c.averages.mean, &c.averages.square}) {
    values->resize(count);
    std::memcpy(values->data(), from, count * sizeof(float));
    from += count * sizeof(float);
  }
  return c;
}

}  // namespace longcontext
