// A user of threads, who links nothing but the library: ssmax::ssmax brings what std::thread needs.

#include <atomic>
#include <cstdio>
#include <exception>
#include <ssmax/execution.hpp>

int main() try {
  ssmax::ThreadPool pool(2);
  std::atomic<ssmax::index_t> sum{0};
  pool.run(100, [&](ssmax::index_t i) { sum += i; });
  std::printf("ssmax %d: sum %td\n", SSMAX_VERSION, sum.load());
  return sum == 4950 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
