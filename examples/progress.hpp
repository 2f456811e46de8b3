// Shows a progress bar on stderr. Shows no bar if stderr is not a terminal or the work is short.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

namespace examples {

class Progress {
 public:
  explicit Progress(double total) : total_(total) {}
  ~Progress() {
    if (drawn_) std::fprintf(stderr, "\r%60s\r", "");
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(double work) {
    done_ += work;
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - start_).count();
    const bool due = seconds > 0.5 && now - last_ > std::chrono::milliseconds(100);
    if (!on_terminal() || !due) return;
    last_ = now;
    drawn_ = true;
    const double part = done_ / total_;
    const auto filled = static_cast<std::size_t>(30 * part);
    const std::string bar = std::string(filled, '#') + std::string(30 - filled, '.');
    std::fprintf(stderr, "\r[%s] %3.0f %%, %.0f s left ", bar.c_str(), 100 * part, seconds * (1 / part - 1));
    std::fflush(stderr);
  }

 private:
  using Clock = std::chrono::steady_clock;

  static bool on_terminal() {
#if __has_include(<unistd.h>)
    return isatty(STDERR_FILENO) != 0;
#else
    return false;
#endif
  }

  double total_, done_ = 0;
  Clock::time_point start_ = Clock::now(), last_{};
  bool drawn_ = false;
};

}  // namespace examples
