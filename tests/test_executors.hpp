// Executors that make the calls in other ways than the library's own.
#pragma once

#include <ssmax/execution.hpp>
#include <thread>
#include <vector>

namespace test_executors {

using ssmax::index_t;

/// One thread that claims to be many, and makes the calls from the last to the first.
struct Reverse {
  index_t threads;
  index_t* runs = nullptr;

  index_t concurrency() const { return threads; }
  template <class F>
  void run(index_t n, const F& f) const {
    if (runs != nullptr) ++*runs;
    for (index_t i = n; i-- > 0;) f(i);
  }
};

/// A thread for every call.
struct Threads {
  index_t threads;

  index_t concurrency() const { return threads; }
  template <class F>
  void run(index_t n, const F& f) const {
    std::vector<std::thread> running;
    for (index_t i = 0; i < n; ++i) running.emplace_back([&f, i] { f(i); });
    for (std::thread& thread : running) thread.join();
  }
};

}  // namespace test_executors
