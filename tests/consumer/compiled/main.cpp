// One call of every kind that crosses from a program to ssmax::compiled, and its exceptions.

#include <cmath>
#include <cstdio>
#include <ssmax/ssmax.hpp>
#include <stdexcept>
#include <vector>

namespace {

/// Multiples of 1/8.
struct Eighths {
  signed char value = 0;
  Eighths() = default;
  explicit Eighths(float x) : value(static_cast<signed char>(std::lrint(x * 8))) {}
  explicit operator double() const { return value / 8.0; }
};

}  // namespace

template <>
struct ssmax::StorageTraits<Eighths> {
  using Compute = float;
  static void load(const Eighths* in, index_t n, float* out) {
    for (index_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<double>(in[i]));
  }
  static void store(const float* in, index_t n, Eighths* out) {
    for (index_t i = 0; i < n; ++i) out[i] = Eighths(in[i]);
  }
};

namespace {

constexpr ssmax::index_t keys = 40, width = 16;
constexpr std::array<ssmax::index_t, 4> shape{1, 2, keys, width};

template <class T>
std::vector<T> numbers() {
  std::vector<T> values;
  for (int i = 0; i < 2 * keys * width; ++i) values.push_back(T(std::sin(static_cast<float>(i))));
  return values;
}

/// Every row of `values`, all the same, comes out of attention as it went in.
template <class T>
bool attends(ssmax::ThreadPool& pool) {
  const std::vector<T> qk = numbers<T>(), v(qk.size(), T(0.5F));
  std::vector<T> out(qk.size());
  const ssmax::View<const T, 4> q(qk.data(), shape);
  ssmax::attention<ssmax::ComputeType<T>>(
      {.q = q, .k = q, .v = ssmax::View<const T, 4>(v.data(), shape), .out = {out.data(), shape}},
      ssmax::SSMax<ssmax::ComputeType<T>>{0.4F}, ssmax::Causal{}, pool);
  bool good = true;
  for (const T value : out) good = good && std::abs(static_cast<double>(value) - 0.5) < 1e-2;
  return good;
}

/// A cache of the program's own storage type, whose rows the drivers of the library convert.
bool decodes_own_storage() {
  ssmax::KvCache<Eighths> cache({.kv_heads = 2, .width = width, .capacity = keys});
  const std::vector<float> qk = numbers<float>(), v(qk.size(), 0.5F);
  const ssmax::View<const float, 4> q(qk.data(), shape), values(v.data(), shape);
  cache.append(q, values);
  std::vector<float> out(2 * width);
  const std::array<ssmax::index_t, 4> of_one{1, 2, 1, width};
  ssmax::attention({.q = {qk.data(), of_one}, .keys = cache, .out = {out.data(), of_one}}, ssmax::Causal{});
  bool good = true;
  for (const float value : out) good = good && std::abs(value - 0.5F) < 1e-5F;
  return good;
}

/// A mask of the program's own, whose exception crosses the library.
struct Failing {
  ssmax::KeyRange keys(const ssmax::Query&) const { throw std::runtime_error("the mask failed"); }
};

bool passes_exceptions(ssmax::ThreadPool& pool) {
  const std::vector<float> q = numbers<float>();
  std::vector<float> out(q.size());
  const ssmax::View<const float, 4> view(q.data(), shape);
  try {
    ssmax::attention({.q = view, .k = view, .v = view, .out = {out.data(), shape}}, Failing{}, pool);
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

bool normalizes() {
  const std::vector<float> logits{1, 2, 3};
  std::vector<float> out(3);
  ssmax::softmax(logits, out);
  return std::abs(out[0] + out[1] + out[2] - 1) < 1e-6F;
}

}  // namespace

int main() {
  ssmax::ThreadPool pool(2);
  const bool good = attends<float>(pool) && attends<double>(pool) && attends<ssmax::half>(pool) &&
                    attends<ssmax::bfloat16>(pool) && attends<Eighths>(pool) && decodes_own_storage() &&
                    passes_exceptions(pool) && normalizes();
  for (const ssmax::Target target : ssmax::available_targets())
    std::printf("%s ", ssmax::target_name(target));
  std::printf("%s\n", good ? "good" : "wrong");
  return good ? 0 : 1;
}
