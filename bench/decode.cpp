// Registers the benchmarks of decode.
#include "decode.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <ssmax/attention.hpp>
#include <ssmax/detail/memory/pages.hpp>
#include <ssmax/eight_bit.hpp>
#include <ssmax/execution.hpp>
#include <ssmax/kv_cache.hpp>
#include <ssmax/paged_keys.hpp>
#include <ssmax/target.hpp>
#include <string>
#include <utility>
#include <vector>

#include "attention_data.hpp"
#include "measure.hpp"
#include "reference_attention.hpp"
#include "scalings.hpp"

namespace ssmax_bench {
namespace {

using Implementations = std::vector<Implementation<AttentionArguments>>;

// The cache and the table of the rotary embedding: they outlive a call.
template <class T>
struct FilledCache {
  FilledCache(const AttentionArguments& a, bool with_rope)
      : cache({.kv_heads = a.shape.kv_heads, .width = a.shape.width, .capacity = a.shape.n}) {
    const std::array<index_t, 4> keys{1, a.shape.kv_heads, a.shape.n, a.shape.width};
    if (with_rope) {
      rope = std::make_unique<ssmax::Rope<float>>(ssmax::RopeOptions{.width = a.shape.width}, a.shape.n);
    }
    cache.append({static_cast<const T*>(a.k), keys}, {static_cast<const T*>(a.v), keys}, rope.get());
  }

  ssmax::KvCache<T> cache;
  std::unique_ptr<const ssmax::Rope<float>> rope;
};

// All keys are visible to all queries.
template <class T, class Scaling>
Run decode(const AttentionArguments& a, const Scaling& scaling, bool rope) {
  const std::array<index_t, 4> rows{1, a.shape.heads, a.shape.queries, a.shape.width};
  const auto filled = std::make_shared<FilledCache<T>>(a, rope);
  const ssmax::AttentionArguments<float> arguments{.q = {static_cast<const T*>(a.q), rows},
                                                   .keys = filled->cache,
                                                   .out = {static_cast<T*>(a.out), rows},
                                                   .rope = filled->rope.get()};
  if (a.threads == 1) return [=, keeps = filled] { ssmax::attention(arguments, scaling, ssmax::Full{}); };
  const auto pool = std::make_shared<ssmax::ThreadPool>(a.threads);
  return [=, keeps = filled] { ssmax::attention(arguments, scaling, ssmax::Full{}, *pool); };
}

// Keys and values in pages of 16 keys [page][key][kv head][channel], in random order, in the kind of memory that a cache
// uses.
template <class T>
struct FilledPages {
  static constexpr index_t page_size = 16;
  using Pool = std::vector<T, ssmax::detail::HugePages<T>>;

  explicit FilledPages(const AttentionArguments& a)
      : shape(a.shape),
        table(static_cast<std::size_t>((a.shape.n + page_size - 1) / page_size)),
        lengths{static_cast<std::int32_t>(a.shape.n)},
        k(table.size() * static_cast<std::size_t>(page_size * a.shape.kv_heads * a.shape.width)),
        v(k.size()) {
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    fill(static_cast<const T*>(a.k), k);
    fill(static_cast<const T*>(a.v), v);
  }

  void fill(const T* from, Pool& pool) const {
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      for (index_t key = 0; key < shape.n; ++key, from += shape.width) {
        const index_t page = table[static_cast<std::size_t>(key / page_size)],
                      row = (page * page_size + key % page_size) * shape.kv_heads + h;
        std::copy_n(from, shape.width, pool.data() + row * shape.width);
      }
    }
  }
  ssmax::PagedKeys<T, T, ssmax::PageTable<std::int32_t>> keys() const {
    const auto pages = static_cast<index_t>(table.size());
    const std::array<index_t, 4> extents{pages, page_size, shape.kv_heads, shape.width};
    return {
        {k.data(), extents},
        {v.data(), extents},
        ssmax::PageTable(ssmax::View<const std::int32_t, 2>(table.data(), {1, pages}), std::span(lengths))};
  }

  AttentionShape shape;
  std::vector<std::int32_t> table, lengths;
  Pool k, v;
};

template <class T>
Run decode_pages(const AttentionArguments& a) {
  const std::array<index_t, 4> rows{1, a.shape.heads, a.shape.queries, a.shape.width};
  const auto filled = std::make_shared<FilledPages<T>>(a);
  return [=] {
    ssmax::attention({.q = {static_cast<const T*>(a.q), rows},
                      .keys = filled->keys(),
                      .out = {static_cast<T*>(a.out), rows}},
                     ssmax::Causal{});
  };
}

// Softmax over pages, on one thread.
Implementation<AttentionArguments> paged() {
  return {"ssmax_paged",
          [](const AttentionArguments& a) -> Run {
            if (a.type == ElementType::bf16) return decode_pages<ssmax::bfloat16>(a);
            return decode_pages<float>(a);
          },
          [](const AttentionArguments& a) {
            return compare_attention(a, {softmax_multiplier, false});
          },
          [](const AttentionArguments&) { return std::string(ssmax::target_name(ssmax::active_target())); }};
}

// Softmax of bfloat16 queries over a cache of X. All keys are visible.
template <class X>
Run attend_stored(const AttentionArguments& a) {
  using ssmax::bfloat16;
  const std::array<index_t, 4> rows{1, a.shape.heads, a.shape.queries, a.shape.width},
      keys{1, a.shape.kv_heads, a.shape.n, a.shape.width};
  const auto widened = [&](const void* in) {
    const auto* numbers = static_cast<const bfloat16*>(in);
    return std::vector<float>(numbers, numbers + a.shape.key_size());
  };
  const std::vector<float> k = widened(a.k), v = widened(a.v);
  const auto cache = std::make_shared<ssmax::KvCache<X>>(
      ssmax::KvCacheOptions{.kv_heads = a.shape.kv_heads, .width = a.shape.width, .capacity = a.shape.n});
  cache->append({k.data(), keys}, {v.data(), keys});
  const auto pool = std::make_shared<ssmax::ThreadPool>(a.threads);
  return [=] {
    ssmax::attention({.q = {static_cast<const bfloat16*>(a.q), rows},
                      .keys = *cache,
                      .out = {static_cast<bfloat16*>(a.out), rows}},
                     ssmax::Full{}, *pool);
  };
}

// The error is that of the storage.
template <class X>
Implementation<AttentionArguments> stored_as(double bound) {
  return {"softmax", [](const AttentionArguments& a) { return attend_stored<X>(a); },
          [bound](const AttentionArguments& a) -> Accuracy {
            const double error = compare_attention(a, {softmax_multiplier, false}).error;
            return {error, error <= bound};
          },
          [](const AttentionArguments&) { return std::string(ssmax::target_name(ssmax::active_target())); }};
}

template <class Scaling>
Implementation<AttentionArguments> ours(const std::string& name, const Scaling& scaling,
                                        AttentionFormula formula) {
  return {name,
          [=](const AttentionArguments& a) -> Run {
            if (a.type == ElementType::bf16) return decode<ssmax::bfloat16>(a, scaling, formula.rope);
            if (a.type == ElementType::f16) return decode<ssmax::half>(a, scaling, formula.rope);
            return decode<float>(a, scaling, formula.rope);
          },
          [formula](const AttentionArguments& a) { return compare_attention(a, formula); },
          [](const AttentionArguments&) { return std::string(ssmax::target_name(ssmax::active_target())); }};
}

// Returns Softmax and, on one thread, pages and other scalings: SSMax for bfloat16, and all variants for float. The cost of a scaling
// does not depend on the number of threads.
Implementations all_of_ours(ElementType type, int threads) {
  Implementations all{ours("softmax", ssmax::Softmax{}, {softmax_multiplier, false})};
  if (type == ElementType::f16 || threads > 1) return all;
  const ssmax::SSMax<float> ssmax{s};
  all.push_back(ours("ssmax", ssmax, {ssmax_multiplier, false}));
  all.push_back(paged());
  if (type != ElementType::f32) return all;
  all.push_back(ours("ssmax_bias", ssmax::SSMax<float>{s, b}, {ssmax_bias_multiplier, false}));
  all.push_back(ours("ssmax_rope", ssmax, {ssmax_multiplier, true}));
  all.push_back(ours("softmax_rope", ssmax::Softmax{}, {softmax_multiplier, true}));
  return all;
}

Implementation<AttentionArguments> peer_as(const std::string& name, const Peer* peer, bool fold) {
  const auto as_asked = [fold](AttentionArguments a) {
    a.fold = fold;
    return a;
  };
  return {name, [=](const AttentionArguments& a) { return peer->attention(as_asked(a)); },
          [=](const AttentionArguments& a) -> Accuracy {
            const Accuracy result = compare_attention(a, {softmax_multiplier, false});
            const double accepted = peer->attention_error(a);
            return accepted == 0 ? result : Accuracy{result.error, result.error <= accepted};
          },
          [=](const AttentionArguments& a) { return peer->attention_label(as_asked(a)); }};
}

Implementations all_peers(AttentionArguments probe) {
  probe.shape.n = 2;  // more keys than queries, as in decode
  Implementations all;
  for (const LoadedPeer& peer : peers()) {
    if (peer.peer == nullptr || !peer.peer->attention(probe)) continue;
    all.push_back(peer_as(peer.name, peer.peer, true));
    // Adds the call that PyTorch documents. The folded call above is faster.
    if (peer.name == "torch" && probe.shape.group() > 1) {
      all.push_back(peer_as("torch_gqa", peer.peer, false));
    }
  }
  return all;
}

// Returns the shape in the name of a row.
std::string row_name(const AttentionShape& shape) {
  return shape.name() + (shape.queries == 1 ? "" : "_q" + std::to_string(shape.queries));
}

void register_shape(const AttentionShape& shape, ElementType type, int threads) {
  const std::string benchmark = row_name(shape) + "_" + name(type) + "_t" + std::to_string(threads);
  Implementations all = all_of_ours(type, threads);
  for (auto& peer :
       all_peers({.shape = shape, .visibility = {}, .type = type, .threads = threads, .fold = true})) {
    all.push_back(std::move(peer));
  }
  for (const auto& implementation : all) {
    add_benchmark<AttentionArguments>(
        "decode", benchmark, implementation,
        [=] { return AttentionData::of(shape, type).arguments({}, threads); },
        bytes_per_second(2 * shape.key_size() * bytes(type)));
  }
}

template <class X>
void register_stored(const AttentionShape& shape, const char* type, double bound, int threads) {
  add_benchmark<AttentionArguments>(
      "decode", row_name(shape) + "_" + type + "_t" + std::to_string(threads), stored_as<X>(bound),
      [=] { return AttentionData::of(shape, ElementType::bf16).arguments({}, threads); },
      bytes_per_second(2 * shape.key_size()));
}

// Registers caches of 8 bits and, for prompts, the cache of bfloat16 to compare with.
void register_stored(const AttentionShape& shape, int threads) {
  if (shape.queries > 1) register_stored<ssmax::bfloat16>(shape, "bf16", 0.01, threads);
  register_stored<ssmax::Int8>(shape, "int8", 0.01, threads);
  register_stored<ssmax::Fp8E4M3>(shape, "fp8", 0.03, threads);
  register_stored<ssmax::Q8_0>(shape, "q8_0", 0.01, threads);
}

}  // namespace

void register_decode() {
  struct Heads {
    index_t heads;
    index_t kv_heads;
    index_t width;
  };
  for (const auto [heads, kv_heads, width] :
       {Heads{12, 12, 64}, Heads{16, 2, 64}, Heads{16, 2, 128}, Heads{32, 8, 128}}) {
    for (const index_t n : {1024, 8192, 32768, 131072}) {
      if (n == 131072 && (heads == kv_heads || width > 64)) continue;  // 134 MB of keys and values in float
      for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
        for (const int threads : {1, 2}) {
          register_shape({heads, kv_heads, width, n, 1}, type, threads);
        }
      }
      for (const int threads : {1, 2}) {
        register_stored({heads, kv_heads, width, n, 1}, threads);
      }
    }
  }
  for (const index_t n : {4096, 16384}) register_stored({16, 2, 64, n, 512}, 1);
  for (const index_t queries : {2, 8, 32, 63}) register_shape({8, 2, 64, 8192, queries}, ElementType::f16, 1);
}

}  // namespace ssmax_bench
