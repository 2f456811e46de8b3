// Registers one benchmark: checks the result of an implementation, then times it.
#pragma once

#include <benchmark/benchmark.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "peers.hpp"
#include "reference.hpp"
#include "stack.hpp"

namespace ssmax_bench {

// An implementation of the work that `Arguments` describe, and the check of its result.
template <class Arguments>
struct Implementation {
  std::string name;
  std::function<Run(const Arguments&)> prepare;
  std::function<Accuracy(const Arguments&)> compare;
  std::function<std::string(const Arguments&)> label = [](const Arguments&) { return std::string(); };
};

// A function that writes the counters for a call of `seconds`.
using Report = std::function<void(benchmark::State&, double seconds)>;

inline Report nanoseconds_per_element(index_t elements) {
  // The counter is a plain number: Google Benchmark would print a rate with its own unit.
  return [elements](benchmark::State& state, double seconds) {
    state.counters["ns_per_element"] = seconds * 1e9 / static_cast<double>(elements);
  };
}

inline Report gflops(double operations) {
  return [operations](benchmark::State& state, double seconds) {
    state.counters["GFLOPS"] = operations * 1e-9 / seconds;
  };
}

inline Report bytes_per_second(index_t bytes) {
  return [bytes](benchmark::State& state, double seconds) {
    state.counters["bytes_per_second"] = static_cast<double>(bytes) / seconds;
  };
}

// Longer calls run without a warm-up, which would change only the beginning of the call.
inline constexpr std::chrono::milliseconds long_call{300};

// Registers `family`/name/`shape`. Calls `arguments` when the benchmark runs, so that a filtered run allocates only the
// memory that it needs. Compares the result once, before the first timing. A wrong result is an error of the benchmark.
template <class Arguments>
void add_benchmark(const std::string& family, const std::string& shape,
                   const Implementation<Arguments>& implementation,
                   const std::function<Arguments()>& arguments, const Report& report) {
  using Clock = std::chrono::steady_clock;
  struct Known {
    Accuracy accuracy;
    bool is_long;
    std::uintptr_t stack_offset;
  };
  const auto known = std::make_shared<std::optional<Known>>();
  const auto body = [=](benchmark::State& state) {
    const Arguments work = arguments();
    const Run run = implementation.prepare(work);
    if (!known->has_value()) {
      const Clock::time_point start = Clock::now();
      run();
      const bool is_long = Clock::now() - start > long_call;
      if (run.fetch) run.fetch();
      const Accuracy accuracy = implementation.compare(work);
      *known = Known{accuracy, is_long, is_long ? stack_page / 2 : best_stack_offset(run)};
    } else if (!(*known)->is_long) {
      run();
    }
    const auto [accuracy, is_long, stack_offset] = **known;
    if (!accuracy.acceptable) {
      state.SkipWithError(("wrong result, error " + std::to_string(accuracy.error)).c_str());
      return;
    }
    const Clock::time_point start = Clock::now();
    for (auto _ : state) {
      call_at(stack_offset, run);
      benchmark::ClobberMemory();
    }
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    report(state, elapsed.count() / static_cast<double>(state.iterations()));
    state.counters["error"] = accuracy.error;
    state.SetLabel(implementation.label(work));
  };
  benchmark::RegisterBenchmark((family + "/" + implementation.name + "/" + shape).c_str(), body)
      ->UseRealTime();
}

}  // namespace ssmax_bench
