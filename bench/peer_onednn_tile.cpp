// The fastest peer: PyTorch 2's scheme over oneDNN's products. Tiles have 128 queries and 256 keys, with an online softmax
// between the two products of a tile. Tiles without a visible key are skipped. The backward has five products per tile.
// Vectors are the compiler's vector type of 64 bytes: -march=native selects the instructions.
#include <dnnl.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <numbers>
#include <vector>

#include "peers.hpp"
#include "team.hpp"

namespace ssmax_bench {
namespace {

constexpr index_t query_tile = 128;
constexpr index_t key_tile = 256;

using Vector = float __attribute__((vector_size(64)));
using Integers = std::int32_t __attribute__((vector_size(64)));
constexpr index_t lanes = 16;

Vector load(const float* data) {
  Vector value;
  __builtin_memcpy(&value, data, sizeof(value));
  return value;
}
void store(float* data, Vector value) { __builtin_memcpy(data, &value, sizeof(value)); }
Vector all(float value) { return Vector{} + value; }
Vector larger(Vector a, Vector b) { return a > b ? a : b; }

float largest(Vector value) {
  float max = value[0];
  for (int i = 1; i < lanes; ++i) max = std::max(max, value[i]);
  return max;
}

float sum(Vector value) {
  float total = 0;
  for (int i = 0; i < lanes; ++i) total += value[i];
  return total;
}

// Returns 2^x for x <= 0, with a relative error of at most 1e-7. Results below 2^-126 become 2^-126.
Vector exp2(Vector x) {
  x = larger(x, all(-126));
  const Vector shifted = x + all(0x1.8p23F);  // the last bits hold the integer nearest to x
  const Vector f = x - (shifted - all(0x1.8p23F));
  Vector y = f * all(0.00132764686F) + all(0.00967554135F);
  y = y * f + all(0.0555071329F);
  y = y * f + all(0.240221197F);
  y = y * f + all(0.693146967F);
  y = y * f + all(1.00000007F);
  return std::bit_cast<Vector>(std::bit_cast<Integers>(y) + (std::bit_cast<Integers>(shifted) << 23));
}

struct Row {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0;
};

// Replaces logits, in powers of two, by weights relative to the new maximum of the row. Rescales the sum and `out` to this
// maximum.
void online_softmax(float* logits, index_t count, Row& row, float* out, index_t width) {
  Vector max[4] = {all(row.max), all(row.max), all(row.max), all(row.max)};
  for (index_t i = 0; i < count; i += lanes) {
    max[i / lanes % 4] = larger(max[i / lanes % 4], load(logits + i));
  }
  const float new_max = largest(larger(larger(max[0], max[1]), larger(max[2], max[3])));
  Vector total[2] = {};
  for (index_t i = 0; i < count; i += lanes) {
    const Vector weight = exp2(load(logits + i) - all(new_max));
    total[i / lanes % 2] += weight;
    store(logits + i, weight);
  }
  if (new_max != row.max) {
    const float factor = std::exp2(row.max - new_max);
    row.sum *= factor;
    for (index_t i = 0; i < width; ++i) out[i] *= factor;
    row.max = new_max;
  }
  row.sum += sum(total[0] + total[1]);
}

struct Scratch {
  explicit Scratch(index_t width) : logits(query_tile * key_tile), out(query_tile * width, 1) {}

  Buffer logits;
  Buffer out;
  Row rows[query_tile];
};

class Attention {
 public:
  explicit Attention(const AttentionArguments& a)
      : a_(a),
        blocks_((a.shape.queries + query_tile - 1) / query_tile),
        team_(a.threads, [this](int member) { work(scratch_[static_cast<std::size_t>(member)]); }) {
    for (int member = 0; member < a.threads; ++member) scratch_.emplace_back(a.shape.width);
  }

  void run() {
    next_.store(0, std::memory_order_relaxed);
    team_.run();
  }

 private:
  void work(Scratch& scratch) {
    const index_t tasks = a_.shape.heads * blocks_;
    for (index_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      // The longest block of a head is the first task.
      attend(task / blocks_, (blocks_ - 1 - task % blocks_) * query_tile, scratch);
    }
  }

  void attend(index_t head, index_t query, Scratch& scratch) const {
    const auto& [heads, kv_heads, width, n, queries, batch] = a_.shape;
    const index_t count = std::min(query_tile, queries - query);
    const index_t position = query + n - queries;
    const index_t kv = head / a_.shape.group() * n * width;
    const float* q = static_cast<const float*>(a_.q) + (head * queries + query) * width;
    const float* k = static_cast<const float*>(a_.k) + kv;
    const float* v = static_cast<const float*>(a_.v) + kv;
    const float scale = std::numbers::log2e_v<float> / std::sqrt(static_cast<float>(width));
    float* logits = scratch.logits.data();
    float* sums = scratch.out.data();
    std::fill_n(scratch.rows, count, Row{});
    std::fill_n(sums, count * width, 0.0F);

    const index_t end = a_.visibility.end(position + count - 1, n);
    for (index_t key = a_.visibility.first(position) / key_tile * key_tile; key < end; key += key_tile) {
      const index_t keys = std::min(key_tile, end - key);
      dnnl_sgemm('N', 'T', count, keys, width, scale, q, width, k + key * width, width, 0, logits, key_tile);
      for (index_t row = 0; row < count; ++row) {
        hide(logits + row * key_tile, keys, a_.visibility.first(position + row) - key,
             a_.visibility.end(position + row, n) - key);
        online_softmax(logits + row * key_tile, keys, scratch.rows[row], sums + row * width, width);
      }
      dnnl_sgemm('N', 'N', count, width, keys, 1, logits, key_tile, v + key * width, width, 1, sums, width);
    }

    float* out = static_cast<float*>(a_.out) + (head * queries + query) * width;
    for (index_t row = 0; row < count; ++row) {
      const float reciprocal = 1 / scratch.rows[row].sum;
      for (index_t i = 0; i < width; ++i) out[row * width + i] = sums[row * width + i] * reciprocal;
    }
  }

  // Masks the keys before `first`, the keys from `end` on, and the padding of the last vector.
  static void hide(float* logits, index_t keys, index_t first, index_t end) {
    // The value is far below any logit, and finite: a row with all keys of a tile masked must not subtract infinities.
    constexpr float hidden = -1e30F;
    const index_t padded = (keys + lanes - 1) / lanes * lanes;
    if (first > 0) std::fill_n(logits, std::min(first, padded), hidden);
    if (end < padded) std::fill(logits + std::clamp<index_t>(end, 0, padded), logits + padded, hidden);
  }

  AttentionArguments a_;
  index_t blocks_;
  std::vector<Scratch> scratch_;
  std::atomic<index_t> next_{0};
  Team team_;  // last member: its threads use the others
};

// The backward. The outer loop runs over tiles of keys, so that dk and dv of a tile stay in the cache. The weights are
// computed again from lse. A kv head is one task, so that two threads never add to the same rows.
class AttentionBackward {
 public:
  explicit AttentionBackward(const AttentionBackwardArguments& a)
      : a_(a), team_(a.threads, [this](int member) { work(scratch_[static_cast<std::size_t>(member)]); }) {
    for (int member = 0; member < a.threads; ++member) scratch_.emplace_back(a.shape);
  }

  void run() {
    next_.store(0, std::memory_order_relaxed);
    team_.run();
  }

 private:
  static constexpr index_t key_tile = 512;
  static constexpr index_t diagonal_query_tile = 32;

  struct Scratch {
    explicit Scratch(const AttentionShape& shape)
        : weights(query_tile * key_tile),
          dlogits(query_tile * key_tile, 1),
          dk(shape.width * key_tile, 2),
          dv(shape.width * key_tile, 3),
          lse(shape.group() * shape.queries, 4),
          dots(shape.group() * shape.queries, 5) {}

    Buffer weights;
    Buffer dlogits;
    Buffer dk;    // of a tile of keys, one column per key
    Buffer dv;    // of a tile of keys, one column per key
    Buffer lse;   // in powers of two
    Buffer dots;  // <out, dout>
  };

  void work(Scratch& scratch) {
    for (index_t head; (head = next_.fetch_add(1, std::memory_order_relaxed)) < a_.shape.kv_heads;) {
      differentiate(head, scratch);
    }
  }

  // Returns true if dk and dv are summed as columns, one per key. All vectors of these products are full at any head
  // width. The transposition afterwards is worth its cost for narrow heads and many queries.
  bool by_columns() const { return a_.shape.width < 128 && a_.shape.queries > 1024; }

  void differentiate(index_t kv_head, Scratch& scratch) const {
    const auto& [heads, kv_heads, width, n, queries, batch] = a_.shape;
    const index_t rows = a_.shape.group() * queries;  // of all query heads of this kv head, in order
    prepare_rows(kv_head * rows, rows, scratch);
    std::fill_n(static_cast<float*>(a_.dq) + kv_head * rows * width, rows * width, 0.0F);
    for (index_t key = 0; key < n; key += key_tile) {
      const index_t keys = std::min(key_tile, n - key);
      float* dk = static_cast<float*>(a_.dk) + (kv_head * n + key) * width;
      float* dv = static_cast<float*>(a_.dv) + (kv_head * n + key) * width;
      const index_t size = (by_columns() ? key_tile : keys) * width;
      std::fill_n(by_columns() ? scratch.dk.data() : dk, size, 0.0F);
      std::fill_n(by_columns() ? scratch.dv.data() : dv, size, 0.0F);
      for (index_t row = 0; row < rows; row += queries) add_queries(kv_head, key, row, scratch);
      if (!by_columns()) continue;
      transpose(scratch.dk.data(), keys, width, dk);
      transpose(scratch.dv.data(), keys, width, dv);
    }
  }

  void prepare_rows(index_t first_row, index_t rows, Scratch& scratch) const {
    const index_t width = a_.shape.width;
    const float* out = static_cast<const float*>(a_.out) + first_row * width;
    const float* dout = static_cast<const float*>(a_.dout) + first_row * width;
    for (index_t row = 0; row < rows; ++row) {
      scratch.lse.data()[row] = std::numbers::log2e_v<float> * a_.lse[first_row + row];
      float dot = 0;
      for (index_t i = row * width; i < (row + 1) * width; ++i) dot += out[i] * dout[i];
      scratch.dots.data()[row] = dot;
    }
  }

  // Adds all queries to which keys of this tile are visible. Queries with masked keys in the tile use narrower tiles, with
  // fewer masked logits.
  void add_queries(index_t kv_head, index_t key, index_t row, Scratch& scratch) const {
    const bool causal = a_.visibility.causal;
    const index_t queries = a_.shape.queries;
    for (index_t query = causal ? key : 0; query < queries;) {
      const index_t tile = causal && query < key + key_tile ? diagonal_query_tile : query_tile;
      const index_t count = std::min(tile, queries - query);
      add_tile(kv_head, key, row, query, count, scratch);
      query += count;
    }
  }

  // Adds the tile of keys from `key` on and of `count` queries. `row` is the first row of the query head within the rows of
  // the kv head.
  void add_tile(index_t kv_head, index_t key, index_t row, index_t query, index_t count,
                Scratch& scratch) const {
    const auto& [heads, kv_heads, width, n, queries, batch] = a_.shape;
    const index_t keys = std::min(key_tile, a_.visibility.end(query + count - 1, n) - key);
    const index_t q_at = (kv_head * a_.shape.group() * queries + row + query) * width;
    const index_t k_at = (kv_head * n + key) * width;
    const float* q = static_cast<const float*>(a_.q) + q_at;
    const float* k = static_cast<const float*>(a_.k) + k_at;
    const float* v = static_cast<const float*>(a_.v) + k_at;
    const float* dout = static_cast<const float*>(a_.dout) + q_at;
    const float scale = 1 / std::sqrt(static_cast<float>(width));
    float* weights = scratch.weights.data();
    float* dlogits = scratch.dlogits.data();

    dnnl_sgemm('N', 'T', count, keys, width, scale * std::numbers::log2e_v<float>, q, width, k, width, 0,
               weights, key_tile);
    dnnl_sgemm('N', 'T', count, keys, width, 1, dout, width, v, width, 0, dlogits, key_tile);
    for (index_t i = 0; i < count; ++i) {
      const index_t visible = std::min(keys, a_.visibility.end(query + i, n) - key);
      const index_t at = row + query + i;
      softmax_backward(weights + i * key_tile, dlogits + i * key_tile, visible, keys, scratch.lse.data()[at],
                       scratch.dots.data()[at]);
    }
    dnnl_sgemm('N', 'N', count, width, keys, scale, dlogits, key_tile, k, width, 1,
               static_cast<float*>(a_.dq) + q_at, width);
    if (by_columns()) {
      dnnl_sgemm('T', 'N', width, keys, count, scale, q, width, dlogits, key_tile, 1, scratch.dk.data(),
                 key_tile);
      dnnl_sgemm('T', 'N', width, keys, count, 1, dout, width, weights, key_tile, 1, scratch.dv.data(),
                 key_tile);
    } else {
      dnnl_sgemm('T', 'N', keys, width, count, scale, dlogits, key_tile, q, width, 1,
                 static_cast<float*>(a_.dk) + k_at, width);
      dnnl_sgemm('T', 'N', keys, width, count, 1, weights, key_tile, dout, width, 1,
                 static_cast<float*>(a_.dv) + k_at, width);
    }
  }

  // Replaces logits, in powers of two, by weights, and gradients of weights by gradients of logits.
  static void softmax_backward(float* logits, float* dweights, index_t visible, index_t keys, float lse,
                               float dot) {
    for (index_t i = 0; i < visible; i += lanes) {
      const Vector weight = exp2(load(logits + i) - all(lse));
      store(logits + i, weight);
      store(dweights + i, weight * (load(dweights + i) - all(dot)));
    }
    std::fill(logits + visible, logits + keys, 0.0F);
    std::fill(dweights + visible, dweights + keys, 0.0F);
  }

  static void transpose(const float* columns, index_t keys, index_t width, float* rows) {
    for (index_t key = 0; key < keys; ++key) {
      for (index_t i = 0; i < width; ++i) rows[key * width + i] = columns[i * key_tile + key];
    }
  }

  AttentionBackwardArguments a_;
  std::vector<Scratch> scratch_;
  std::atomic<index_t> next_{0};
  Team team_;  // last member: its threads use the others
};

class OneDnnTile final : public Peer {
 public:
  std::string version() const override {
    const dnnl_version_t* v = dnnl_version();
    return std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch) +
           ", softmax with -march=native";
  }

  Run attention(const AttentionArguments& a) const override {
    if (a.type != ElementType::f32 || a.shape.queries != a.shape.n) return {};
    return [attention = std::make_shared<Attention>(a)] { attention->run(); };
  }

  std::string attention_label(const AttentionArguments&) const override { return "tiles of 128 x 256"; }

  Run attention_backward(const AttentionBackwardArguments& a) const override {
    if (a.type != ElementType::f32 || a.shape.queries != a.shape.n || a.visibility.window > 0 ||
        a.s != nullptr) {
      return {};
    }
    return [backward = std::make_shared<AttentionBackward>(a)] { backward->run(); };
  }

  std::string attention_backward_label(const AttentionBackwardArguments&) const override {
    return "tiles of 128 x 512";
  }
};

}  // namespace
}  // namespace ssmax_bench

const ssmax_bench::Peer* ssmax_bench_peer() {
  static const ssmax_bench::OneDnnTile peer;
  return &peer;
}
