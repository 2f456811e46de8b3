// Units with the library in one file, beside one with its headers: the same numbers, to the last bit.

#include <cstdio>

#include "unit.hpp"

int main() {
  const std::vector<float> expected = numbers_headers();
  const bool one = numbers_one() == expected;
  const bool two = numbers_two() == expected;
  std::printf("%zu numbers; one: %s, two: %s\n", expected.size(), one ? "the same" : "others",
              two ? "the same" : "others");
  return one && two ? 0 : 1;
}
