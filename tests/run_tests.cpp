// Runs the tests on the target that SSMAX_TARGET names. A target which this build or this CPU lacks is skipped (exit
// status 77, as ctest is told); a name that no target has is left to the library, which rejects it. A part of the
// filter that matches no test is an error, and so is a ~ within a name. Tests with the tag [products] are left out
// where no target has products of bfloat16.

#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include "run_tests.hpp"

#include "catch.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ssmax/detail/dispatch/bf16.hpp>
#include <ssmax/target.hpp>
#include <string>
#include <string_view>
#include <vector>

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

bool has_products(ssmax::Target target) { return ssmax::detail::bf16_capabilities(target).has_products; }

/// Returns true if an alternative of the test spec has a ~ within a name: Catch2 then takes the rest as a part of it. (A
/// name in quotes ends with them.)
bool has_exclusion_within_name(std::string_view spec) {
  bool in_name = false, in_quotes = false, in_tag = false;
  for (const char c : spec) {
    if (in_quotes || in_tag) {
      if (c == (in_quotes ? '"' : ']')) in_quotes = in_tag = false;
    } else if (c == '~' && in_name) {
      return true;
    } else if (c == ',' || c == '[' || c == '"') {
      in_name = false;
      in_tag = c == '[';
      in_quotes = c == '"';
    } else {
      in_name = c != '~';
    }
  }
  return false;
}

/// Puts ~[products] in front of each alternative of the test specs. (Catch2 takes a tag after a name as a part of it.)
void leave_out_products(std::vector<std::string>& specs) {
  std::printf(
      "No target of this machine has products of bfloat16: tests with the tag [products] are left out.\n");
  if (specs.empty()) specs.emplace_back();
  for (std::string& spec : specs) {
    spec.insert(0, "~[products]");
    for (auto i = spec.find(','); i != std::string::npos; i = spec.find(',', i + 1)) {
      spec.insert(i + 1, "~[products]");
    }
  }
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
  if (const int status = session.applyCommandLine(argc, argv)) return status;
  if (std::ranges::any_of(session.configData().testsOrTags, has_exclusion_within_name)) {
    std::printf("A test spec has a ~ within a name: put the name in quotes.\n");
    return EXIT_FAILURE;
  }
  if (!std::ranges::any_of(ssmax::available_targets(), has_products)) {
    leave_out_products(session.configData().testsOrTags);
  }
  return session.run();
}
