// One call of every kind that crosses from a program to ssmax::compiled, and its exceptions.

#include <cmath>
#include <cstdio>
#include <ssmax/ssmax.hpp>
#include <stdexcept>
#include <vector>

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
  ssmax::attention<T>(
      {.q = q, .k = q, .v = ssmax::View<const T, 4>(v.data(), shape), .out = {out.data(), shape}},
      ssmax::SSMax<ssmax::detail::Compute<T>>{0.4F}, ssmax::Causal{}, {}, pool);
  bool good = true;
  for (const T value : out) good = good && std::abs(static_cast<double>(value) - 0.5) < 1e-2;
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
    ssmax::attention<float>({.q = view, .k = view, .v = view, .out = {out.data(), shape}}, ssmax::Softmax{},
                            Failing{}, {}, pool);
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
                    attends<ssmax::bfloat16>(pool) && passes_exceptions(pool) && normalizes();
  for (const ssmax::Target target : ssmax::available_targets())
    std::printf("%s ", ssmax::target_name(target));
  std::printf("%s\n", good ? "good" : "wrong");
  return good ? 0 : 1;
}
