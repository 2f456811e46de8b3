// Runs the benchmarks of ssmax. `ssmax_bench --help` lists the options. For a comparison, interleave the repetitions:
//   ssmax_bench --benchmark_enable_random_interleaving=true --benchmark_repetitions=9
//               --benchmark_report_aggregates_only=false --benchmark_out=run.json
// `table.py run.json` prints the medians.
//
// Attention takes most of the time. --benchmark_min_time=0.1 shortens its short calls. A long call runs once per
// repetition. A short run, of a minute or two with repetitions:
//   --benchmark_min_time=0.05
//   "--benchmark_filter=^limit/(fma|read)|^prefill/.*_n1024_.*_t1|^decode/.*_d64_n(1024|32768)_f32_t1"
#include <benchmark/benchmark.h>

#include <fstream>
#include <ssmax/target.hpp>
#include <string>

#include "backward.hpp"
#include "decode.hpp"
#include "limit.hpp"
#include "paged.hpp"
#include "peers.hpp"
#include "prefill.hpp"
#include "rope.hpp"
#include "serving.hpp"
#include "softmax.hpp"

namespace {

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

// Adds the processor, the target and the peers to the context, which appears above the results and in the JSON.
void describe_run() {
  benchmark::AddCustomContext("cpu", cpu_name());
  benchmark::AddCustomContext("ssmax target", ssmax::target_name(ssmax::active_target()));
  for (const ssmax_bench::LoadedPeer& peer : ssmax_bench::peers()) {
    benchmark::AddCustomContext("peer " + peer.name,
                                peer.peer != nullptr ? peer.peer->version() : "missing: " + peer.missing);
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  describe_run();
  ssmax_bench::register_limits();
  ssmax_bench::register_rows();
  ssmax_bench::register_rows_backward();
  ssmax_bench::register_rope();
  ssmax_bench::register_prefill();
  ssmax_bench::register_backward();
  ssmax_bench::register_decode();
  ssmax_bench::register_short();
  ssmax_bench::register_short_backward();
  ssmax_bench::register_serving();
  ssmax_bench::register_paged();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
