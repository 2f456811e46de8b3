// Built with -fno-exceptions -fno-rtti. Without an argument: a good call. With one: a bad call, which has to
// abort after it wrote its message to stderr.

#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ssmax/ssmax.hpp>
#include <vector>

namespace {

extern "C" void report_abort(int) {
  std::fputs("\naborted\n", stderr);
  std::_Exit(0);
}

}  // namespace

int main(int argc, char**) {
  const std::vector<float> logits{1.0F, 2.0F, 3.0F, -1.0F};
  const ssmax::View<const float, 2> in(logits.data(), {2, 2});
  std::vector<float> probabilities(logits.size());

  if (argc > 1) {
    std::signal(SIGABRT, report_abort);
    ssmax::softmax(in, ssmax::View<float, 2>(probabilities.data(), {2, 1}));
    return 1;
  }

  ssmax::softmax(in, ssmax::View<float, 2>(probabilities.data(), {2, 2}));
  const bool good = std::abs(probabilities[0] + probabilities[1] - 1.0F) < 1e-6F &&
                    std::abs(probabilities[2] + probabilities[3] - 1.0F) < 1e-6F;
  return good ? 0 : 1;
}
