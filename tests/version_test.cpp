// The version: one number, one text and a namespace, all made of the same three macros.

#include <ssmax/config.hpp>
#include <string>

#include "catch.hpp"

#define TEXT_EXPANDED(a) #a
#define TEXT(a) TEXT_EXPANDED(a)

#if SSMAX_VERSION < 100
#error "SSMAX_VERSION cannot be compared by the preprocessor, or counts otherwise"
#endif

TEST_CASE("the version is the package's, in one number and in three", "[version]") {
  const std::string major = std::to_string(SSMAX_VERSION_MAJOR), minor = std::to_string(SSMAX_VERSION_MINOR);
  CHECK(major + "." + minor + "." + std::to_string(SSMAX_VERSION_PATCH) == SSMAX_TEST_PACKAGE_VERSION);
  CHECK(SSMAX_VERSION / 10000 == SSMAX_VERSION_MAJOR);
  CHECK(SSMAX_VERSION / 100 % 100 == SSMAX_VERSION_MINOR);
  CHECK(SSMAX_VERSION % 100 == SSMAX_VERSION_PATCH);
  CHECK(TEXT(SSMAX_DATA_NAMESPACE) == "v" + major + "_" + minor);
#if defined(SSMAX_COMPILED)
  CHECK(TEXT(SSMAX_COMPILED_NAMESPACE) == "v" + major + "_" + minor + "_library_" + TEXT(SSMAX_LAYOUT));
#endif
}
