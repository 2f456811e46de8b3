// case PREDICATE: a mask that picks single keys is for attention
#include <ssmax/softmax.hpp>
#include <vector>

int main() {
  std::vector<float> z(6);
  const ssmax::View<float, 2> rows(z.data(), {2, 3});
  ssmax::softmax(rows, rows, ssmax::Softmax{}, ssmax::Causal{});
#if defined(PREDICATE)
  const ssmax::Where odd([](const ssmax::Query&, ssmax::index_t key) { return key % 2 == 1; });
  ssmax::softmax(rows, rows, ssmax::Softmax{}, odd);
#endif
}
