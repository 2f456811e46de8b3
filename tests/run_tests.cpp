// Runs the tests on the target that SSMAX_TARGET names. A target which this build or this CPU lacks is
// skipped (exit status 77, as ctest is told); a name that no target has is left to the library, which rejects
// it. A part of the filter that matches no test is an error.

#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include "run_tests.hpp"

#include "catch.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ssmax/target.hpp>
#include <string_view>

namespace {

constexpr int skipped = 77;

#if CATCH_VERSION_MAJOR < 3
constexpr auto no_match = Catch::WarnAbout::NoTests;
#else
constexpr auto no_match = Catch::WarnAbout::UnmatchedTestSpec;
#endif

bool is_known_but_unavailable(std::string_view name) {
  using ssmax::Target;
  const auto has_this_name = [name](Target target) { return ssmax::target_name(target) == name; };
  const auto& all = ssmax::detail::all_targets;
  return std::ranges::any_of(all, has_this_name) &&
         !std::ranges::any_of(ssmax::available_targets(), has_this_name);
}

}  // namespace

int run_tests(int argc, char** argv) {
  const char* const target = std::getenv("SSMAX_TARGET");
  if (target != nullptr && is_known_but_unavailable(target)) {
    std::printf("Skipped: target %s is not available on this machine.\n", target);
    return skipped;
  }
  Catch::Session session;
  auto& warnings = session.configData().warnings;
  warnings = static_cast<Catch::WarnAbout::What>(warnings | no_match);
  return session.run(argc, argv);
}
