// Checks of the examples, which are also tests: compare numbers, print differences, return an exit code.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace examples {

class Check {
 public:
  // The condition states the valid range, so NaN on either side fails.
  void near(const std::string& what, double value, double expected, double relative_error) {
    if (std::abs(value - expected) <= relative_error * std::abs(expected)) return;
    failed_ = true;
    std::fprintf(stderr, "MISMATCH %s: %.9g, expected %.9g within %.1e\n", what.c_str(), value, expected,
                 relative_error);
  }

  void holds(const std::string& what, bool condition) {
    if (condition) return;
    failed_ = true;
    std::fprintf(stderr, "MISMATCH %s\n", what.c_str());
  }

  int exit_code() const { return failed_ ? EXIT_FAILURE : EXIT_SUCCESS; }

 private:
  bool failed_ = false;
};

}  // namespace examples
