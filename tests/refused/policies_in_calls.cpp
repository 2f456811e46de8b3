// The same where a policy is used: the first lines still name the member.
//
// case ROWS: the member 'sees' of a mask must be
// case ATTENTION_MASK: the member 'sees' of a mask must be
// case ATTENTION_SCORE: a_score_needs_the_member_derivative|a score with .derivative.
// case BACKWARD_SCALING: the member 'accumulate' of a scaling must be
#include <ssmax/ssmax.hpp>

using namespace ssmax;

struct Mask1 : Causal {
  bool sees(const Query&, index_t) { return true; }
};
struct Score1 {
  double operator()(double z, const Key&) const { return z; }
};
struct Scaling1 : Softmax {
  void accumulate(const Row&, double) {}
};

int main() {
  const View<const float, 4> in;
  const View<float, 4> out;
  softmax(in, out, Softmax{}, Causal{});
#if defined(ROWS)
  softmax(in, out, Softmax{}, Mask1{});
#elif defined(ATTENTION_MASK)
  attention({.q = in, .k = in, .v = in, .out = out}, Mask1{});
#elif defined(ATTENTION_SCORE)
  attention({.q = in, .k = in, .v = in, .out = out}, Causal{}, Score1{});
#elif defined(BACKWARD_SCALING)
  attention_backward({.q = in, .k = in, .v = in, .out = in}, {.dout = in}, Scaling1{}, Causal{});
#endif
}
