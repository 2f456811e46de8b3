// Catch2's runner, which takes ten seconds to compile, once for all test binaries.
#pragma once

/// Runs the tests that the arguments name. Returns the exit status.
int run_tests(int argc, char** argv);
