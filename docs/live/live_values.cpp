// Compares what the live page saved with the library on this machine: live_values <s> <b> < ssmax.csv
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ssmax/softmax.hpp>
#include <vector>

namespace {

double largest_difference(const std::vector<float>& page, const std::vector<float>& library) {
  double largest = 0;
  for (std::size_t i = 0; i < page.size(); ++i) {
    const double difference = std::abs(static_cast<double>(page[i]) - static_cast<double>(library[i]));
    if (!(difference <= largest)) largest = difference;  // also if it is not a number
  }
  return largest;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "live_values <s> <b> < ssmax.csv\n");
    return 2;
  }
  std::vector<float> logits, softmax, ssmax;
  std::scanf("%*[^\n]");  // the names of the columns
  for (float z, p, q; std::scanf("%f,%f,%f", &z, &p, &q) == 3;) {
    logits.push_back(z), softmax.push_back(p), ssmax.push_back(q);
  }
  const ssmax::SSMax<double> scaling(std::strtod(argv[1], nullptr), std::strtod(argv[2], nullptr));
  const double differences[] = {largest_difference(softmax, ssmax::Softmax{}(logits)),
                                largest_difference(ssmax, scaling(logits))};
  std::printf("n = %zu: Softmax differs by at most %.1e, SSMax by %.1e\n", logits.size(), differences[0],
              differences[1]);
  return !logits.empty() && differences[0] <= 1e-6 && differences[1] <= 1e-6 ? 0 : 1;
}
