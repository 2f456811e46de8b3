// Registers the benchmarks of a server's batch over pages [page, kv head, key, channel].
#include "paged.hpp"

#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <ssmax/attention.hpp>
#include <ssmax/detail/memory/pages.hpp>
#include <ssmax/eight_bit.hpp>
#include <ssmax/execution.hpp>
#include <ssmax/paged_keys.hpp>
#include <ssmax/target.hpp>
#include <utility>

#include "attention_data.hpp"
#include "measure.hpp"

namespace ssmax_bench {
namespace {

using ssmax::bfloat16;
using ssmax::Fp8E4M3;
using ssmax::View;

// The tensors of a batch, made once and shared by all implementations. Pages are in random order.
class PagedData {
 public:
  static std::shared_ptr<PagedData> of(const PagedShape& shape, ElementType type) {
    static std::map<std::string, std::shared_ptr<PagedData>> all;
    std::shared_ptr<PagedData>& data = all[shape.name() + name(type)];
    if (data == nullptr) data = std::make_shared<PagedData>(shape, type);
    return data;
  }

  PagedData(const PagedShape& shape, ElementType type)
      : shape_(shape),
        type_(type),
        q_(normal(type, shape.tokens() * shape.heads * shape.width, 1, 1)),
        k_(normal(type, shape.keys() * shape.kv_heads * shape.width, 2, 2)),
        v_(normal(type, shape.keys() * shape.kv_heads * shape.width, 3, 3)),
        out_(shape.tokens() * shape.heads * shape.width, 4) {
    shape.for_each_sequence([&](index_t queries, index_t keys) {
      lengths_.push_back(static_cast<std::int32_t>(keys));
      cumulative_.push_back(cumulative_.back() + static_cast<std::int32_t>(queries));
      pages_ += pages_of(keys);
    });
    std::vector<std::int32_t> pages(static_cast<std::size_t>(pages_));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
    table_.resize(lengths_.size() * static_cast<std::size_t>(table_width()));
    auto next = pages.begin();
    for (std::size_t b = 0; b < lengths_.size(); ++b) {
      const index_t count = pages_of(lengths_[b]);
      std::copy_n(next, count, table_.begin() + static_cast<index_t>(b) * table_width());
      next += count;
    }
  }

  PagedArguments arguments(bool fp8, int threads) const {
    return {shape_,      type_,  fp8,           threads,       q_.data(),       k_.data(),         v_.data(),
            out_.data(), pages_, table_width(), table_.data(), lengths_.data(), cumulative_.data()};
  }

 private:
  static index_t pages_of(index_t keys) {
    return (keys + PagedArguments::page_size - 1) / PagedArguments::page_size;
  }
  index_t table_width() const { return pages_of(shape_.most_keys()); }

  PagedShape shape_;
  ElementType type_;
  Buffer q_, k_, v_, out_;
  std::vector<std::int32_t> table_, lengths_, cumulative_{0};
  index_t pages_ = 0;
};

// Returns a number of a tensor of the arguments.
double number(const PagedArguments& a, const void* data, index_t i) {
  return a.type == ElementType::f32 ? static_cast<double>(static_cast<const float*>(data)[i])
                                    : static_cast<double>(static_cast<const bfloat16*>(data)[i]);
}

// Returns the largest absolute error, for the first and the last query of the first and of the last sequence. K and V in 8
// bits count as exact.
Accuracy compare(const PagedArguments& a) {
  const index_t heads = a.shape.heads, kv_heads = a.shape.kv_heads, width = a.shape.width;
  const auto stored = [&](const void* data, index_t i) {
    const double x = number(a, data, i);
    return a.fp8 ? static_cast<double>(Fp8E4M3(static_cast<float>(x))) : x;
  };
  double error = 0;
  index_t first_token = 0, first_key = 0, sequence = 0;
  std::vector<double> weights, exact(static_cast<std::size_t>(width));
  const auto compare_query = [&](index_t query, index_t queries, index_t keys) {
    const index_t visible = keys - queries + query + 1;
    weights.resize(static_cast<std::size_t>(visible));
    for (index_t h = 0; h < heads; ++h) {
      const index_t kv_head = h / (heads / kv_heads), row = ((first_token + query) * heads + h) * width;
      const auto row_of = [&](index_t key) { return ((first_key + key) * kv_heads + kv_head) * width; };
      double largest = -1e300, sum = 0;
      for (index_t key = 0; key < visible; ++key) {
        double z = 0;
        for (index_t c = 0; c < width; ++c) z += number(a, a.q, row + c) * stored(a.k, row_of(key) + c);
        z /= std::sqrt(static_cast<double>(width));
        weights[static_cast<std::size_t>(key)] = z;
        largest = std::max(largest, z);
      }
      std::fill(exact.begin(), exact.end(), 0.0);
      for (index_t key = 0; key < visible; ++key) {
        const double w = std::exp(weights[static_cast<std::size_t>(key)] - largest);
        sum += w;
        for (index_t c = 0; c < width; ++c)
          exact[static_cast<std::size_t>(c)] += w * stored(a.v, row_of(key) + c);
      }
      for (index_t c = 0; c < width; ++c)
        error = worse(error, std::abs(number(a, a.out, row + c) - exact[static_cast<std::size_t>(c)] / sum));
    }
  };
  a.shape.for_each_sequence([&](index_t queries, index_t keys) {
    if (sequence == 0 || sequence == a.shape.sequences() - 1) {
      compare_query(0, queries, keys);
      if (queries > 1) compare_query(queries - 1, queries, keys);
    }
    ++sequence;
    first_token += queries;
    first_key += keys;
  });
  return {error, error <= (a.type == ElementType::f32 ? 2e-5 : 0.02)};
}

// Pages of storage type K, in the kind of memory that a cache uses.
template <class T, class K>
struct Pages {
  using Pool = std::vector<K, ssmax::detail::HugePages<K>>;

  explicit Pages(const PagedArguments& arguments)
      : a(arguments),
        k(static_cast<std::size_t>(a.pages * a.page_size * a.shape.kv_heads * a.shape.width)),
        v(k.size()) {
    fill(static_cast<const T*>(a.k), k);
    fill(static_cast<const T*>(a.v), v);
  }

  void fill(const T* from, Pool& pool) const {
    const index_t kv_heads = a.shape.kv_heads, width = a.shape.width;
    for (index_t b = 0; b < a.shape.sequences(); ++b) {
      for (index_t key = 0; key < a.lengths[b]; ++key) {
        const index_t page = a.table[b * a.table_width + key / a.page_size];
        for (index_t h = 0; h < kv_heads; ++h, from += width) {
          K* to = pool.data() + ((page * kv_heads + h) * a.page_size + key % a.page_size) * width;
          for (index_t c = 0; c < width; ++c) to[c] = K(from[c]);
        }
      }
    }
  }

  // Makes the arguments that a server makes for each call.
  ssmax::AttentionArguments<float> call() {
    const index_t heads = a.shape.heads, kv_heads = a.shape.kv_heads, width = a.shape.width;
    const index_t tokens = a.shape.tokens(), sequences = a.shape.sequences();
    const std::array<index_t, 4> rows{1, heads, tokens, width},
        row_strides{tokens * heads * width, width, heads * width, 1},
        pool{a.pages, a.page_size, kv_heads, width},
        pool_strides{kv_heads * a.page_size * width, width, a.page_size * width, 1};
    const auto count = static_cast<std::size_t>(sequences);
    const ssmax::PageTable<std::int32_t> table(
        View<const std::int32_t, 2>(a.table, {sequences, a.table_width}), std::span(a.lengths, count));
    const View<const K, 4> keys(k.data(), pool, pool_strides), values(v.data(), pool, pool_strides);
    static constexpr float one = 1;  // vLLM's factors of a tensor
    const float* factor = a.fp8 ? &one : nullptr;
    return {.q = {static_cast<const T*>(a.q), rows, row_strides},
            .keys = ssmax::PagedKeys(keys, values, table,
                                     ssmax::KeyScales::per_tensor(keys, factor, values, factor)),
            .out = {static_cast<T*>(a.out), rows, row_strides},
            .workspace = &workspace,
            .lengths = ssmax::SequenceLengths::packed_queries(std::span(a.cumulative, count + 1))};
  }

  const PagedArguments a;
  Pool k, v;
  ssmax::Workspace workspace;
};

template <class T, class K>
Run attend(const PagedArguments& a) {
  const auto pages = std::make_shared<Pages<T, K>>(a);
  if (a.threads == 1) return [=] { ssmax::attention(pages->call(), ssmax::Causal{}); };
  const auto pool = std::make_shared<ssmax::ThreadPool>(a.threads);
  return [=] { ssmax::attention(pages->call(), ssmax::Causal{}, *pool); };
}

Run attend(const PagedArguments& a) {
  if (a.fp8) return attend<bfloat16, Fp8E4M3>(a);
  return a.type == ElementType::f32 ? attend<float, float>(a) : attend<bfloat16, bfloat16>(a);
}

void register_batch(const PagedShape& shape, ElementType type, bool fp8) {
  using Implementations = std::vector<Implementation<PagedArguments>>;
  Implementations all{
      {"softmax", [](const PagedArguments& a) { return attend(a); }, compare,
       [](const PagedArguments&) { return std::string(ssmax::target_name(ssmax::active_target())); }}};
  const PagedData probe({shape.heads, shape.kv_heads, shape.width, {{1, 1, 2}}}, type);
  for (const LoadedPeer& peer : peers()) {
    if (peer.peer == nullptr || !peer.peer->paged(probe.arguments(fp8, 1))) continue;
    all.push_back({peer.name, [peer = peer.peer](const PagedArguments& a) { return peer->paged(a); }, compare,
                   [peer = peer.peer](const PagedArguments& a) { return peer->paged_label(a); }});
  }
  for (int threads : {1, 2}) {
    for (const auto& implementation : all) {
      add_benchmark<PagedArguments>(
          "paged", shape.name() + "_" + (fp8 ? "fp8" : name(type)) + "_t" + std::to_string(threads),
          implementation, [=] { return PagedData::of(shape, type)->arguments(fp8, threads); },
          gflops(4 * shape.logits() * static_cast<double>(shape.width)));
    }
  }
}

}  // namespace

void register_paged() {
  const PagedShape prefill{32, 8, 128, {{1, 2048, 2048}}}, mixed{8, 2, 64, {{2, 1024, 1024}, {30, 1, 2048}}},
      others[] = {{32, 8, 128, {{1, 1, 4096}}}, {32, 8, 128, {{32, 1, 2048}}},  {12, 12, 64, {{1, 1, 16384}}},
                  {16, 2, 64, {{1, 1, 32768}}}, {32, 8, 128, {{1, 256, 4096}}}, {8, 2, 64, {{1, 8, 8192}}}};
  for (ElementType type : {ElementType::f32, ElementType::bf16}) {
    for (const PagedShape& shape : others) register_batch(shape, type, false);
    register_batch(prefill, type, false);
    register_batch(mixed, type, false);
  }
  for (const PagedShape& shape : others) register_batch(shape, ElementType::bf16, true);
}

}  // namespace ssmax_bench
