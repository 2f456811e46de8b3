// The kinds of cases, and how often each is drawn.
#pragma once

#include <string>

#include "attention.hpp"

namespace fuzz {

struct Kind {
  const char* name;
  int share;
  /// Draws a case, says it in words, and runs it; throws where something is wrong.
  void (*run)(Random& random, const Options& options, std::string& words);
};

const Kind& draw_kind(Random& random);

void run_rows(Random& random, const Options& options, std::string& words);
void run_cross_entropy(Random& random, const Options& options, std::string& words);
void run_errors(Random& random, const Options& options, std::string& words);
void run_sequences(Random& random, const Options& options, std::string& words);
void run_runs(Random& random, const Options& options, std::string& words);

}  // namespace fuzz
