// What the live page asks of the library, compiled to WebAssembly: both softmaxes of one row.
#include <cstddef>
#include <span>
#include <ssmax/softmax.hpp>

namespace {

constexpr std::size_t kLongestRow = 100'000;  // live.js knows it too

// One after the other, as the page finds them: the logits, which it writes, and the probabilities of each.
float rows[3][kLongestRow];

std::span<float> row(int which, std::size_t n) { return {rows[which], n}; }

}  // namespace

extern "C" {

float* live_rows() { return rows[0]; }

void live_softmax(std::size_t n) { ssmax::softmax(row(0, n), row(1, n)); }

void live_ssmax(std::size_t n, double s, double b) {
  ssmax::softmax(row(0, n), row(2, n), ssmax::SSMax<double>{s, b});
}

}  // extern "C"
