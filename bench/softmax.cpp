// Registers the benchmarks of rows, forward and backward.
#include "softmax.hpp"

#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <ssmax/softmax.hpp>
#include <utility>

#include "copy.hpp"
#include "measure.hpp"
#include "scalings.hpp"

namespace ssmax_bench {
namespace {

// The roles of the arrays of a shape. Each array is made once and shared by all implementations.
enum class Role { logits, out, probabilities, dout, dlogits, copy_probabilities, copy_dout, copy_dlogits };

const Buffer& array(RowsShape shape, Role role) {
  static std::map<std::array<index_t, 3>, Buffer> arrays;
  const std::array<index_t, 3> key{shape.rows, shape.n, static_cast<index_t>(role)};
  const auto found = arrays.find(key);
  if (found != arrays.end()) return found->second;

  Buffer buffer(shape.size(), static_cast<int>(role));
  if (role == Role::logits) fill_normal(buffer, 1);
  if (role == Role::dout) fill_normal(buffer, 2);
  if (role == Role::probabilities) {
    const float* x = array(shape, Role::logits).data();
    for (index_t row = 0; row < shape.rows; ++row) {
      float* y = buffer.data() + row * shape.n;
      double sum = 0;
      for (index_t i = 0; i < shape.n; ++i) sum += std::exp(static_cast<double>(x[row * shape.n + i]));
      for (index_t i = 0; i < shape.n; ++i) {
        y[i] = static_cast<float>(std::exp(static_cast<double>(x[row * shape.n + i])) / sum);
      }
    }
  }
  return arrays.emplace(key, std::move(buffer)).first->second;
}

RowsArguments rows_arguments(RowsShape shape) {
  return {shape, array(shape, Role::logits).data(), array(shape, Role::out).data()};
}

RowsBackwardArguments backward_arguments(RowsShape shape) {
  return {shape, array(shape, Role::probabilities).data(), array(shape, Role::dout).data(),
          array(shape, Role::dlogits).data()};
}

ssmax::View<float, 2> view(float* data, RowsShape shape) { return {data, {shape.rows, shape.n}}; }
ssmax::View<const float, 2> view(const float* data, RowsShape shape) { return {data, {shape.rows, shape.n}}; }

template <class Scaling>
Implementation<RowsArguments> our_rows(const std::string& name, Scaling scaling,
                                       double (*multiplier)(index_t)) {
  return {name,
          [scaling](const RowsArguments& a) -> Run {
            return
                [x = view(a.x, a.shape), y = view(a.y, a.shape), scaling] { ssmax::softmax(x, y, scaling); };
          },
          [multiplier](const RowsArguments& a) { return compare_rows(a, multiplier(a.shape.n)); }};
}

Implementation<RowsBackwardArguments> our_softmax_backward() {
  return {
      "softmax",
      [](const RowsBackwardArguments& a) -> Run {
        return [a] {
          ssmax::softmax_backward<float, 2>({.out = view(a.y, a.shape),
                                             .dout = view(a.dy, a.shape),
                                             .logits = {},
                                             .dlogits = view(a.dz, a.shape)},
                                            ssmax::Softmax{});
        };
      },
      [](const RowsBackwardArguments& a) { return compare_rows_backward(a, softmax_multiplier(a.shape.n)); }};
}

// Returns the error of ds = ln n sum(x dx) over all rows, where dx is the gradient of x = multiplier z. The error is
// relative to the sum of the absolute terms: rows may cancel.
Accuracy compare_ds(const RowsBackwardArguments& a, const float* logits, float ds) {
  long double exact = 0;
  long double size = 0;
  for (index_t row = 0; row < a.shape.rows; ++row) {
    const index_t at = row * a.shape.n;
    long double dot = 0;
    for (index_t i = at; i < at + a.shape.n; ++i) dot += static_cast<long double>(a.y[i]) * a.dy[i];
    for (index_t i = at; i < at + a.shape.n; ++i) {
      const long double term = a.y[i] * (a.dy[i] - dot) * logits[i];
      exact += term;
      size += std::abs(term);
    }
  }
  const long double log_n = std::log(static_cast<long double>(a.shape.n));
  return judge(static_cast<double>(std::abs(ds - log_n * exact) / (log_n * size)), a.shape.n);
}

// Returns the backward with the gradient of s, which reads the logits as a fourth array.
Implementation<RowsBackwardArguments> our_ssmax_backward() {
  const auto ds = std::make_shared<std::array<float, 1>>();
  return {"ssmax",
          [ds](const RowsBackwardArguments& a) -> Run {
            const ssmax::View<const float, 2> logits = view(array(a.shape, Role::logits).data(), a.shape);
            return [a, logits, ds] {
              (*ds)[0] = 0.0F;
              const ssmax::SSMax<float> scaling{s};
              ssmax::softmax_backward<float, 2>({.out = view(a.y, a.shape),
                                                 .dout = view(a.dy, a.shape),
                                                 .logits = logits,
                                                 .dlogits = view(a.dz, a.shape)},
                                                scaling.gradient(*ds));
            };
          },
          [ds](const RowsBackwardArguments& a) {
            const Accuracy of_ds = compare_ds(a, array(a.shape, Role::logits).data(), (*ds)[0]);
            if (!of_ds.acceptable) return of_ds;
            return compare_rows_backward(a, ssmax_multiplier(a.shape.n));
          }};
}

std::vector<Implementation<RowsArguments>> rows_implementations() {
  std::vector<Implementation<RowsArguments>> all{
      our_rows("softmax", ssmax::Softmax{}, softmax_multiplier),
      our_rows("ssmax", ssmax::SSMax<float>{s}, ssmax_multiplier),
      our_rows("ssmax_bias", ssmax::SSMax<float>{s, b}, ssmax_bias_multiplier),
      {"copy", [](const RowsArguments& a) -> Run { return [a] { copy(a.x, a.y, a.shape.size()); }; },
       [](const RowsArguments&) { return Accuracy{}; },
       [](const RowsArguments& a) { return copy_kind(a.shape.size()); }}};
  for (const LoadedPeer& peer : peers()) {
    if (peer.peer == nullptr || !peer.peer->rows(rows_arguments({1, 1}))) continue;
    all.push_back({peer.name, [p = peer.peer](const RowsArguments& a) { return p->rows(a); },
                   [](const RowsArguments& a) { return compare_rows(a, softmax_multiplier(a.shape.n)); }});
  }
  return all;
}

std::vector<Implementation<RowsBackwardArguments>> backward_implementations() {
  std::vector<Implementation<RowsBackwardArguments>> all{
      our_softmax_backward(),
      our_ssmax_backward(),
      // Copies the three arrays of the backward: the memory traffic of a call that reads and writes all of them.
      {"copy",
       [](const RowsBackwardArguments& a) -> Run {
         return
             [a, y = array(a.shape, Role::copy_probabilities).data(),
              dy = array(a.shape, Role::copy_dout).data(), dz = array(a.shape, Role::copy_dlogits).data()] {
               copy(a.y, y, a.shape.size());
               copy(a.dy, dy, a.shape.size());
               copy(a.dz, dz, a.shape.size());
             };
       },
       [](const RowsBackwardArguments&) { return Accuracy{}; },
       [](const RowsBackwardArguments& a) { return copy_kind(a.shape.size()); }}};
  for (const LoadedPeer& peer : peers()) {
    if (peer.peer == nullptr || !peer.peer->rows_backward(backward_arguments({1, 1}))) continue;
    all.push_back({peer.name, [p = peer.peer](const RowsBackwardArguments& a) { return p->rows_backward(a); },
                   [](const RowsBackwardArguments& a) {
                     return compare_rows_backward(a, softmax_multiplier(a.shape.n));
                   }});
  }
  return all;
}

}  // namespace

void register_rows() {
  for (const RowsShape shape : {RowsShape{4096, 16},
                                {1024, 64},
                                {256, 256},
                                {64, 1024},
                                {16, 4096},
                                {1, 65536},
                                {1, 1048576},
                                {16384, 1024},
                                {16, 1048576}}) {
    for (const auto& implementation : rows_implementations()) {
      add_benchmark<RowsArguments>(
          "rows", shape.name(), implementation, [shape] { return rows_arguments(shape); },
          nanoseconds_per_element(shape.size()));
    }
  }
}

void register_rows_backward() {
  for (const RowsShape shape :
       {RowsShape{4096, 16}, {1024, 64}, {256, 256}, {64, 1024}, {16, 4096}, {16384, 1024}}) {
    for (const auto& implementation : backward_implementations()) {
      add_benchmark<RowsBackwardArguments>(
          "rows_backward", shape.name(), implementation, [shape] { return backward_arguments(shape); },
          nanoseconds_per_element(shape.size()));
    }
  }
}

}  // namespace ssmax_bench
