// One benchmark: check, then time.
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

// Something that can do the work which `Arguments` describe, and what its result should be held against.
template <class Arguments>
struct Implementation {
  std::string name;
  std::function<Run(const Arguments&)> prepare;
  std::function<Accuracy(const Arguments&)> compare;
  std::function<std::string(const Arguments&)> label = [](const Arguments&) { return std::string(); };
};

// Registers `family`/name/`shape`. `arguments` is asked for when the benchmark runs, so that a filtered run
// allocates only what it needs. The result is compared once, before the first timing; a wrong one is refused.
template <class Arguments>
void add_benchmark(const std::string& family, const std::string& shape,
                   const Implementation<Arguments>& implementation,
                   const std::function<Arguments()>& arguments, index_t elements) {
  struct Known {
    Accuracy accuracy;
    std::uintptr_t stack_offset;
  };
  const auto known = std::make_shared<std::optional<Known>>();
  const auto body = [=](benchmark::State& state) {
    const Arguments work = arguments();
    const Run run = implementation.prepare(work);
    run();
    if (!known->has_value()) {
      const Accuracy accuracy = implementation.compare(work);
      *known = Known{accuracy, best_stack_offset(run)};
    }
    const auto [accuracy, stack_offset] = **known;
    if (!accuracy.acceptable) {
      state.SkipWithError(("wrong result, error " + std::to_string(accuracy.error)).c_str());
      return;
    }
    // By our own clock: as a rate, the library would print it with a unit of its own.
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    for (auto _ : state) {
      call_at(stack_offset, run);
      benchmark::ClobberMemory();
    }
    const std::chrono::duration<double, std::nano> elapsed = Clock::now() - start;
    state.counters["ns_per_element"] =
        elapsed.count() / (static_cast<double>(state.iterations()) * static_cast<double>(elements));
    state.counters["error"] = accuracy.error;
    state.SetLabel(implementation.label(work));
  };
  benchmark::RegisterBenchmark((family + "/" + implementation.name + "/" + shape).c_str(), body)
      ->UseRealTime();
}

}  // namespace ssmax_bench
