// Runs the tests in emulation. A test case with the tag [bfloat16] fails the run unless it has met the pair dot on
// avx512_bf16 and the tile product on amx. Exception: with [pair_dot] or [tile_product], only that one. Exception: a
// test case of several types has a name for each, and only its bfloat16 has products of bfloat16.

#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#endif
#include "catch.hpp"

#include <cstdio>
#include <string>

#include "emulation.hpp"
#include "run_tests.hpp"

namespace {

#if __has_include(<catch2/catch_all.hpp>)
using Listener = Catch::EventListenerBase;
#else
using Listener = Catch::TestEventListenerBase;
#endif

std::string missed;

struct Units : Listener {
  using Listener::Listener;

  void testCaseStarting(const Catch::TestCaseInfo& test) override {
    name_ = test.name;
    tags_ = test.tagsAsString();
    emulation::has_to_meet = has("[bfloat16]");
    for (const char* other : {" - float", " - double", " - half", " - ssmax::half"})
      if (name_.ends_with(other)) emulation::has_to_meet = false;
    emulation::pair_dot = emulation::tile_product = false;
  }
  void testCaseEnded(const Catch::TestCaseStats&) override {
    if (!emulation::has_to_meet) return;
    if (!emulation::pair_dot && !has("[tile_product]"))
      missed += "no pair dot on avx512_bf16: " + name_ + '\n';
    if (!emulation::tile_product && !has("[pair_dot]")) missed += "no tile product on amx: " + name_ + '\n';
  }

 private:
  bool has(const char* tag) const { return tags_.find(tag) != std::string::npos; }

  std::string name_, tags_;
};

CATCH_REGISTER_LISTENER(Units)

}  // namespace

int main(int argc, char** argv) {
  emulation::is_emulated = true;
  const int status = run_tests(argc, argv);
  std::fputs(missed.c_str(), stderr);
  return status != 0 || missed.empty() ? status : 1;
}
