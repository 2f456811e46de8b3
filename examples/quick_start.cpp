// One large logit among n - 1 small ones: Softmax loses it as n grows, SSMax holds it.
#include <cstdio>
#include <ssmax/ssmax.hpp>
#include <vector>

int main() {
  std::vector<float> logits(1000, -2.0f);
  logits.back() = 3.0f;

  const auto fading = ssmax::Softmax{}(logits);
  const auto focused = ssmax::SSMax<float>{0.43f}(logits);

  std::printf("Softmax %.3f, SSMax %.3f\n", fading.back(), focused.back());  // Softmax 0.129, SSMax 1.000
  return fading.back() < 0.13f && focused.back() > 0.999f ? 0 : 1;
}
