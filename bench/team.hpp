// Defines a group of threads that start together: the caller and `size - 1` workers. Between two calls the workers spin, so
// that a start needs no system call. After a while they yield, so that on a busy machine the awaited thread gets the core.
// The workers end with their benchmark.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace ssmax_bench {

class Team {
 public:
  Team(int size, std::function<void(int)> work) : work_(std::move(work)) {
    for (int member = 1; member < size; ++member) {
      workers_.emplace_back([this, member] { follow(member); });
    }
  }

  ~Team() {
    stop_.store(true, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    for (std::thread& worker : workers_) worker.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  void run() {
    done_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    work_(0);
    for (int spins = 0; done_.load(std::memory_order_acquire) != static_cast<int>(workers_.size()); ++spins) {
      pause(spins);
    }
  }

 private:
  static void pause(int spins) {
    if (spins > 10'000) {
      std::this_thread::yield();
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void follow(int member) {
    for (unsigned seen = 0;;) {
      unsigned round = round_.load(std::memory_order_acquire);
      for (int spins = 0; round == seen; round = round_.load(std::memory_order_acquire)) pause(spins++);
      seen = round;
      if (stop_.load(std::memory_order_relaxed)) return;
      work_(member);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  std::function<void(int)> work_;
  std::vector<std::thread> workers_;
  std::atomic<unsigned> round_{0};
  std::atomic<int> done_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace ssmax_bench
