// Registers the benchmarks of sparse masks, trees of candidates and batches of sequences.
#include "serving.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <ssmax/attention_backward.hpp>
#include <ssmax/decode.hpp>
#include <ssmax/execution.hpp>
#include <ssmax/kv_cache.hpp>
#include <ssmax/mask_runs.hpp>
#include <ssmax/tree_mask.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "measure.hpp"

namespace ssmax_bench {
namespace {

using namespace ssmax;

// q, k, v and results, of shape [batch, heads, tokens, width].
template <class T>
struct Tensors {
  std::array<index_t, 4> extents;
  std::vector<T> q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse;

  explicit Tensors(const std::array<index_t, 4>& shape) : extents(shape) {
    const index_t rows = extents[0] * extents[1] * extents[2];
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (std::vector<T>* tensor : {&q, &k, &v, &out, &dout, &dq, &dk, &dv}) {
      tensor->resize(static_cast<std::size_t>(rows * extents[3]));
      std::generate(tensor->begin(), tensor->end(), [&] { return static_cast<T>(normal(random)); });
    }
    lse.resize(static_cast<std::size_t>(rows));
  }
  View<const T, 4> in(const std::vector<T>& x) const { return {x.data(), extents}; }
  View<T, 4> to(std::vector<T>& x) const { return {x.data(), extents}; }
  std::array<index_t, 3> rows() const { return {extents[0], extents[1], extents[2]}; }

  ssmax::AttentionArguments<T> forward() {
    return {.q = in(q), .k = in(k), .v = in(v), .out = to(out), .lse = {lse.data(), rows()}};
  }
  ssmax::BackwardArguments<T> backward() {
    return {.q = in(q), .k = in(k), .v = in(v), .out = in(out), .lse = {lse.data(), rows()}};
  }
  ssmax::AttentionGradients<T> gradients() {
    return {.dout = in(dout), .dq = to(dq), .dk = to(dk), .dv = to(dv)};
  }
};

// ---- Masks with runs ----------------------------------------------------------------------------------------

// A bitmap of blocks. One of eight key blocks of 64 is visible to a query block of 64, chosen at random per head.
struct SparseHeads {
  SparseBlocks blocks;
  std::vector<std::uint64_t> bitmap;

  SparseHeads(index_t heads, index_t n)
      : blocks{.query_blocks = n / 64, .key_blocks = n / 64, .bitmaps = heads},
        bitmap(static_cast<std::size_t>(blocks.words())) {
    std::mt19937 random(1);
    std::vector<index_t> order(static_cast<std::size_t>(blocks.key_blocks));
    std::iota(order.begin(), order.end(), index_t{0});
    for (index_t row = 0; row < heads * blocks.query_blocks; ++row) {
      std::shuffle(order.begin(), order.end(), random);
      for (index_t i = 0; i < blocks.key_blocks / 8; ++i) {
        const index_t block = order[static_cast<std::size_t>(i)];
        bitmap[static_cast<std::size_t>(row * blocks.row_words() + block / 64)] |= std::uint64_t{1}
                                                                                   << (block % 64);
      }
    }
  }
};

// A mask with the same visible keys, without the member `run`.
template <class M>
struct WithoutRuns {
  M mask;

  KeyRange keys(const Query& query) const { return mask.keys(query); }
  bool sees(const Query& query, index_t key) const { return mask.sees(query, key); }
};

// Returns the largest absolute error of `out` against the result of another call. The largest number is about 1.
template <class T>
Accuracy compare(const std::vector<T>& out, const std::vector<T>& expected) {
  double error = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double difference = std::abs(static_cast<double>(out[i]) - static_cast<double>(expected[i]));
    error = difference <= error ? error : difference;
  }
  return {error, error <= (sizeof(T) == 2 ? 0.02 : 2e-5)};
}

template <class T, class M>
void add_masked(const std::string& name, const std::string& shape, const M& mask, double logits,
                const std::shared_ptr<Tensors<T>>& tensors) {
  using Work = std::shared_ptr<Tensors<T>>;
  const double width = static_cast<double>(tensors->extents[3]);
  const Implementation<Work> forward{
      name,
      [mask](const Work& t) -> Run {
        return [mask, t] { ssmax::attention<T>(t->forward(), Softmax{}, mask); };
      },
      [mask](const Work& t) {
        Tensors<T> expected(t->extents);
        if constexpr (requires { mask.sees(Query{}, index_t{}); }) {
          ssmax::attention<T>(expected.forward(), Softmax{}, WithoutRuns<M>{mask});
        } else {
          ssmax::attention<T>(expected.forward(), Softmax{}, mask);
        }
        return compare(t->out, expected.out);
      }};
  add_benchmark<Work>(
      "blocksparse", shape, forward, [tensors] { return tensors; }, gflops(4 * logits * width));
  const Implementation<Work> backward{
      name + "_backward",
      [mask](const Work& t) -> Run {
        ssmax::attention<T>(t->forward(), Softmax{}, mask);
        return [mask, t] { ssmax::attention_backward<T>(t->backward(), t->gradients(), Softmax{}, mask); };
      },
      [](const Work&) { return Accuracy{}; }};
  add_benchmark<Work>(
      "blocksparse", shape, backward, [tensors] { return tensors; }, gflops(10 * logits * width));
}

template <class T>
void register_masks(const std::string& type) {
  const index_t heads = 2, n = 8192, width = 64;
  const auto tensors = std::make_shared<Tensors<T>>(std::array<index_t, 4>{1, heads, n, width});
  const std::string shape = "h2_kv2_d64_n8192_" + type + "_t1";
  const auto sparse = std::make_shared<SparseHeads>(heads, n);
  const double all = static_cast<double>(heads * n) * static_cast<double>(n);
  const double window = static_cast<double>(heads) * (512.0 * static_cast<double>(n) - 512.0 * 511 / 2);
  add_masked<T>("full", shape, Full{}, all, tensors);
  add_masked<T>("ssmax", shape, BlockSparse(sparse->blocks, sparse->bitmap), all / 8, tensors);
  add_masked<T>("window512", shape, SlidingWindow{511}, window, tensors);
  add_masked<T>("sinks4_window512", shape, SinkWindow{4, 512}, window, tensors);
}

// ---- Trees of candidates ------------------------------------------------------------------------------------

// 64 candidates after 8192 keys in a cache.
template <class T>
struct TreeCall {
  static constexpr index_t heads = 8, kv_heads = 2, candidates = 64, keys = 8192 + candidates, width = 64;
  Tensors<T> tensors{{1, heads, candidates, width}};
  KvCache<T> cache{{.kv_heads = kv_heads, .width = width, .capacity = keys}};

  TreeCall() {
    const Tensors<T> stored({1, kv_heads, keys, width});
    cache.append(stored.in(stored.k), stored.in(stored.v));
  }
  template <class M>
  void decode(const M& mask) {
    ssmax::decode<T>({.q = tensors.in(tensors.q), .out = tensors.to(tensors.out)}, cache, Softmax{}, mask);
  }
};

// Returns a tree in which each candidate follows a random earlier candidate, or the last key.
Tree random_tree(index_t candidates) {
  std::mt19937 random(1);
  std::vector<index_t> parents;
  for (index_t i = 0; i < candidates; ++i)
    parents.push_back(std::uniform_int_distribution<index_t>(-1, i - 1)(random));
  return Tree(parents);
}

template <class T, class M>
void add_tree(const std::string& name, const std::string& type, const M& mask) {
  using Call = TreeCall<T>;
  using Work = std::shared_ptr<Call>;
  const Implementation<Work> implementation{
      name, [mask](const Work& call) -> Run { return [mask, call] { call->decode(mask); }; },
      [mask](const Work& call) {
        const std::vector<T> out = call->tensors.out;
        if constexpr (requires { mask.sees(Query{}, index_t{}); }) {
          call->decode(WithoutRuns<M>{mask});
        } else {
          call->decode(mask);
        }
        return compare(out, call->tensors.out);
      }};
  add_benchmark<Work>(
      "tree", "h8_kv2_d64_n8192_q64_" + type + "_t1", implementation, [] { return std::make_shared<Call>(); },
      gflops(4.0 * Call::heads * Call::candidates * Call::keys * Call::width));
}

template <class T>
void register_trees(const std::string& type) {
  add_tree<T>("causal", type, Causal{});
  add_tree<T>("ssmax", type, random_tree(TreeCall<T>::candidates));
}

// ---- Batches of sequences of different lengths --------------------------------------------------------------

// Packed sequences of `count` random lengths from `shortest` to `longest`, and their first positions.
struct Batch {
  std::vector<index_t> cumulative{0};
  Tensors<float> tensors;

  Batch(index_t count, index_t shortest, index_t longest)
      : tensors({1, 8, lengths(count, shortest, longest), 64}) {}

  double logits() const {  // causal
    double sum = 0;
    for (std::size_t i = 0; i + 1 < cumulative.size(); ++i) {
      const auto n = static_cast<double>(cumulative[i + 1] - cumulative[i]);
      sum += n * (n + 1) / 2;
    }
    return sum * static_cast<double>(tensors.extents[1]);
  }

 private:
  index_t lengths(index_t count, index_t shortest, index_t longest) {
    std::mt19937 random(3);
    std::uniform_int_distribution<index_t> length(shortest, longest);
    for (index_t i = 0; i < count; ++i) cumulative.push_back(cumulative.back() + length(random));
    return cumulative.back();
  }
};

// Makes one call per sequence.
template <class E>
void attend_each(Batch& batch, E& executor) {
  ssmax::AttentionArguments<float> all = batch.tensors.forward();
  const auto rows_of = [](auto view, index_t first, index_t count) {
    using T = std::remove_pointer_t<decltype(view.data_handle())>;
    return View<T, 4>(view.data_handle() + first * view.stride(2), {1, view.extent(1), count, view.extent(3)},
                      {view.stride(0), view.stride(1), view.stride(2), 1});
  };
  for (std::size_t i = 0; i + 1 < batch.cumulative.size(); ++i) {
    const index_t first = batch.cumulative[i], count = batch.cumulative[i + 1] - first;
    ssmax::attention<float>({.q = rows_of(all.q, first, count),
                             .k = rows_of(all.k, first, count),
                             .v = rows_of(all.v, first, count),
                             .out = rows_of(all.out, first, count)},
                            Softmax{}, Causal{}, {}, executor);
  }
}

void attend_packed(Batch& batch, ThreadPool& pool) {
  ssmax::attention<float>(batch.tensors.forward(), Softmax{}, Causal{},
                          {.lengths = SequenceLengths::packed(batch.cumulative)}, pool);
}

void register_batch(index_t count, index_t shortest, index_t longest) {
  using Work = std::shared_ptr<Batch>;
  // GCC 12 warns of "s" + std::to_string(…).
  const std::string shape = std::string("s") + std::to_string(count) + "_h8_d64_n" +
                            std::to_string(shortest) + "-" + std::to_string(longest) + "_causal_f32_t2";
  const auto batch = std::make_shared<std::shared_ptr<Batch>>();
  const auto work = [=] {
    if (*batch == nullptr) *batch = std::make_shared<Batch>(count, shortest, longest);
    return *batch;
  };
  const double operations = 4 * 64 * Batch(count, shortest, longest).logits();
  const auto same = [](const Work& b) {
    const std::vector<float> out = b->tensors.out;
    Serial serial;
    attend_each(*b, serial);
    return compare(b->tensors.out, out);
  };
  const auto run = [](auto attend) {
    return [attend](const Work& b) -> Run {
      const auto pool = std::make_shared<ThreadPool>(2);
      return [=] { attend(*b, *pool); };
    };
  };
  const Implementation<Work> packed{"packed", run(attend_packed), same};
  const Implementation<Work> each{"each", run(attend_each<ThreadPool>), same};
  for (const Implementation<Work>& implementation : {packed, each}) {
    add_benchmark<Work>("mixed", shape, implementation, work, gflops(operations));
  }
}

}  // namespace

void register_serving() {
  register_batch(512, 16, 128);
  register_batch(64, 16, 2048);
  register_masks<float>("f32");
  register_masks<bfloat16>("bf16");
  register_trees<float>("f32");
  register_trees<bfloat16>("bf16");
}

}  // namespace ssmax_bench
