// A differential fuzzer: draws calls from a seed, and compares what comes out with the references, on every target.
//
//   ssmax_fuzz --seconds 3600 --seed 1            for an hour
//   ssmax_fuzz --seed 1 --case 4711               one case again, in words
//   ssmax_fuzz --kind decode --plain-names        of one kind, no user's types with names of fast paths
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "kinds.hpp"

namespace {

using fuzz::index_t;

struct Arguments {
  double seconds = 60;
  unsigned long long seed = 1, first = 0;
  bool single = false, goes_on = false;
  const char* kind = nullptr;
  fuzz::Options options;
};

[[noreturn]] void usage(const char* wrong) {
  std::fprintf(
      stderr,
      "%s\nusage: ssmax_fuzz [--seconds N] [--seed N] [--case N] [--from N] [--kind NAME] [--plain-names] "
      "[--keep-going]\n",
      wrong);
  std::exit(2);
}

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i < argc; ++i) {
    const auto is = [&](const char* name) { return std::strcmp(argv[i], name) == 0; };
    const auto value = [&] {
      if (i + 1 >= argc) usage(argv[i]);
      return argv[++i];
    };
    if (is("--seconds")) {
      a.seconds = std::atof(value());
    } else if (is("--seed")) {
      a.seed = std::strtoull(value(), nullptr, 10);
    } else if (is("--case")) {
      a.first = std::strtoull(value(), nullptr, 10);
      a.single = true;
    } else if (is("--from")) {
      a.first = std::strtoull(value(), nullptr, 10);
    } else if (is("--kind")) {
      a.kind = value();
    } else if (is("--plain-names")) {
      a.options.odd_names = false;
    } else if (is("--keep-going")) {
      a.goes_on = true;
    } else {
      usage(argv[i]);
    }
  }
  return a;
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments a = parse(argc, argv);
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  std::map<std::string, long> done;
  long cases = 0, findings = 0;
  double told = 0;
  const auto tell = [&] {
    std::printf("%7.0f s %9ld cases (%.0f a second), %ld findings:", elapsed(), cases,
                static_cast<double>(cases) / elapsed(), findings);
    for (const auto& [kind, count] : done) std::printf(" %s %ld", kind.c_str(), count);
    std::printf("; closest to its bound %.2f\n", fuzz::closest());
    std::fflush(stdout);
  };
  for (unsigned long long number = a.first;; ++number) {
    if (!a.single && elapsed() > a.seconds) break;
    fuzz::Random random(a.seed, number);
    const fuzz::Kind& kind = fuzz::draw_kind(random);
    if (a.kind != nullptr && !a.single && std::strcmp(a.kind, kind.name) != 0) continue;
    std::string words;
    if (a.single) std::printf("seed %llu case %llu: %s\n", a.seed, number, kind.name);
    try {
      kind.run(random, a.options, words);
      if (a.single) std::printf("%s\n", words.c_str());
    } catch (const std::exception& error) {
      ++findings;
      std::printf("FINDING in %s\n  %s\n  again: ssmax_fuzz --seed %llu --case %llu%s\n", words.c_str(),
                  error.what(), a.seed, number, a.options.odd_names ? "" : " --plain-names");
      std::fflush(stdout);
      if (!a.goes_on) break;
    }
    ++done[kind.name];
    ++cases;
    if (a.single) break;
    if (elapsed() > told + 5) {
      told = elapsed();
      tell();
    }
  }
  tell();
  return findings == 0 ? 0 : 1;
}
