// Registers the benchmarks of sparse masks, trees of candidates, latent attention, batches of sequences and common
// prompts.
#include "serving.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <ssmax/attention.hpp>
#include <ssmax/attention_backward.hpp>
#include <ssmax/execution.hpp>
#include <ssmax/kv_cache.hpp>
#include <ssmax/mask_runs.hpp>
#include <ssmax/paged_kv_cache.hpp>
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

  ssmax::AttentionArguments<float> forward() {
    return {.q = in(q), .k = in(k), .v = in(v), .out = to(out), .lse = {lse.data(), rows()}};
  }
  ssmax::BackwardArguments<float> backward() {
    return {.q = in(q), .k = in(k), .v = in(v), .out = in(out), .lse = {lse.data(), rows()}};
  }
  ssmax::AttentionGradients<float> gradients() {
    return {.dout = in(dout), .dq = to(dq), .dk = to(dk), .dv = to(dv)};
  }
};

// Returns a function that calls make once, when it is called first. (A run of other benchmarks does not wait for tensors.)
template <class F>
auto made_once(F make) {
  return [make, made = std::make_shared<decltype(make())>()] {
    if (*made == nullptr) *made = make();
    return *made;
  };
}

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
void add_masked(const std::string& name, const std::string& shape, const M& mask, double products,
                const std::function<std::shared_ptr<Tensors<T>>()>& tensors) {
  using Work = std::shared_ptr<Tensors<T>>;
  const Implementation<Work> forward{
      name,
      [mask](const Work& t) -> Run { return [mask, t] { ssmax::attention(t->forward(), Softmax{}, mask); }; },
      [mask](const Work& t) {
        Tensors<T> expected(t->extents);
        if constexpr (requires { mask.sees(Query{}, index_t{}); }) {
          ssmax::attention(expected.forward(), Softmax{}, WithoutRuns<M>{mask});
        } else {
          ssmax::attention(expected.forward(), Softmax{}, mask);
        }
        return compare(t->out, expected.out);
      }};
  add_benchmark<Work>("blocksparse", shape, forward, tensors, gflops(4 * products));
  const Implementation<Work> backward{
      name + "_backward",
      [mask](const Work& t) -> Run {
        ssmax::attention(t->forward(), Softmax{}, mask);
        return [mask, t] { ssmax::attention_backward(t->backward(), t->gradients(), Softmax{}, mask); };
      },
      [](const Work&) { return Accuracy{}; }};
  add_benchmark<Work>("blocksparse", shape, backward, tensors, gflops(10 * products));
}

template <class T>
void register_masks(const std::string& type) {
  const index_t heads = 2, n = 8192, width = 64;
  const auto tensors = made_once([=] {
    return std::make_shared<Tensors<T>>(std::array<index_t, 4>{1, heads, n, width});
  });
  const std::string shape = "h2_kv2_d64_n8192_" + type + "_t1";
  const auto sparse = std::make_shared<SparseHeads>(heads, n);
  const double all = static_cast<double>(heads * width * n) * static_cast<double>(n);
  const double window =
      static_cast<double>(heads * width) * (512.0 * static_cast<double>(n) - 512.0 * 511 / 2);
  add_masked<T>("full", shape, Full{}, all, tensors);
  add_masked<T>("ssmax", shape, BlockSparse(sparse->blocks, sparse->bitmap), all / 8, tensors);
  add_masked<T>("window512", shape, SlidingWindow{511}, window, tensors);
  add_masked<T>("sinks4_window512", shape, SlidingWindow{511, 0, 4}, window, tensors);
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
    ssmax::attention({.q = tensors.in(tensors.q), .keys = cache, .out = tensors.to(tensors.out)}, Softmax{},
                     mask);
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

// ---- Latent attention -----------------------------------------------------------------------------------------

// One query for each of 128 heads. The values are the first 512 of the 576 channels of the keys.
template <class T>
struct LatentCall {
  static constexpr index_t heads = 128, keys = 8192, width = 576, value_width = 512;
  Tensors<T> q{{1, heads, 1, width}}, stored{{1, 1, keys, width}};
  std::vector<T> out = std::vector<T>(heads * value_width);

  void attend(const View<const T, 4>& values) {
    ssmax::attention({.q = q.in(q.q),
                      .k = stored.in(stored.k),
                      .v = values,
                      .out = {out.data(), {1, heads, 1, value_width}}});
  }
  View<const T, 4> values_in_keys() const {
    return {stored.k.data(), {1, 1, keys, value_width}, {keys * width, keys * width, width, 1}};
  }
};

template <class T>
void register_latent(const std::string& type) {
  using Call = LatentCall<T>;
  using Work = std::shared_ptr<Call>;
  const Implementation<Work> implementation{
      "softmax", [](const Work& call) -> Run { return [call] { call->attend(call->values_in_keys()); }; },
      [](const Work& call) {
        const std::vector<T> out = call->out;
        std::vector<T> values;
        for (index_t key = 0; key < Call::keys; ++key) {
          const auto row = call->stored.k.begin() + key * Call::width;
          values.insert(values.end(), row, row + Call::value_width);
        }
        call->attend({values.data(), {1, 1, Call::keys, Call::value_width}});
        return compare(out, call->out);
      }};
  add_benchmark<Work>(
      "latent", "h128_kv1_d576_v512_n8192_" + type + "_t1", implementation,
      [] { return std::make_shared<Call>(); },
      gflops(2.0 * Call::heads * Call::keys * (Call::width + Call::value_width)));
}

// ---- Batches of sequences of different lengths --------------------------------------------------------------

// Returns the first positions of `count` sequences of random lengths from `shortest` to `longest`, and their sum.
std::vector<index_t> random_lengths(index_t count, index_t shortest, index_t longest) {
  std::mt19937 random(3);
  std::uniform_int_distribution<index_t> length(shortest, longest);
  std::vector<index_t> cumulative{0};
  for (index_t i = 0; i < count; ++i) cumulative.push_back(cumulative.back() + length(random));
  return cumulative;
}

// Packed sequences.
struct Batch {
  static constexpr index_t heads = 8, width = 64;
  std::vector<index_t> cumulative;
  Tensors<float> tensors{{1, heads, cumulative.back(), width}};

  static double logits(const std::vector<index_t>& ends) {  // causal
    double sum = 0;
    for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
      const auto n = static_cast<double>(ends[i + 1] - ends[i]);
      sum += n * (n + 1) / 2;
    }
    return sum * static_cast<double>(heads);
  }
};

// Makes one call per sequence.
template <class E>
void attend_each(Batch& batch, E& executor) {
  Tensors<float>& all = batch.tensors;
  const auto rows_of = [](auto view, index_t first, index_t count) {
    using T = std::remove_pointer_t<decltype(view.data_handle())>;
    return View<T, 4>(view.data_handle() + first * view.stride(2), {1, view.extent(1), count, view.extent(3)},
                      {view.stride(0), view.stride(1), view.stride(2), 1});
  };
  for (std::size_t i = 0; i + 1 < batch.cumulative.size(); ++i) {
    const index_t first = batch.cumulative[i], count = batch.cumulative[i + 1] - first;
    ssmax::attention({.q = rows_of(all.in(all.q), first, count),
                      .k = rows_of(all.in(all.k), first, count),
                      .v = rows_of(all.in(all.v), first, count),
                      .out = rows_of(all.to(all.out), first, count)},
                     Softmax{}, Causal{}, executor);
  }
}

void attend_packed(Batch& batch, ThreadPool& pool) {
  ssmax::AttentionArguments<float> arguments = batch.tensors.forward();
  arguments.lengths = SequenceLengths::packed(batch.cumulative);
  ssmax::attention(arguments, Causal{}, pool);
}

void register_batch(index_t count, index_t shortest, index_t longest) {
  using Work = std::shared_ptr<Batch>;
  // GCC 12 warns of "s" + std::to_string(…).
  const std::string shape = std::string("s") + std::to_string(count) + "_h8_d64_n" +
                            std::to_string(shortest) + "-" + std::to_string(longest) + "_causal_f32_t2";
  const std::vector<index_t> cumulative = random_lengths(count, shortest, longest);
  const auto work = made_once([=] { return std::make_shared<Batch>(Batch{cumulative}); });
  const double operations = 4.0 * Batch::width * Batch::logits(cumulative);
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

// A step of a server: 4 prompts of 2048 tokens, and one token of each of 60 sequences of 4096 keys.
struct Step {
  static constexpr index_t heads = 8, kv_heads = 2, width = 64, prompt = 2048, keys = 4096, prompts = 4,
                           others = 60;
  PagedKvCache<float> cache{
      {.kv_heads = kv_heads, .width = width, .pages = (prompts * prompt + others * keys) / 64}};
  std::vector<index_t> ids, cumulative{0};
  Tensors<float> tensors{{1, heads, prompts* prompt + others, width}};

  Step() {
    const Tensors<float> stored({1, keys, kv_heads, width});
    for (index_t i = 0; i < prompts + others; ++i) {
      // Prompts stand between the other sequences.
      const index_t length = i % 16 == 0 ? prompt : keys;
      const View<const float, 3> rows(stored.k.data(), {length, kv_heads, width});
      ids.push_back(cache.add());
      cache.append(rows, rows, std::vector<index_t>(static_cast<std::size_t>(length), ids.back()));
      cumulative.push_back(cumulative.back() + (i % 16 == 0 ? prompt : 1));
    }
  }
  // Computes sequences [begin, end) in one call.
  void decode(std::size_t begin, std::size_t end, ThreadPool& pool) {
    const index_t first = cumulative[begin], count = cumulative[end] - first;
    std::vector<index_t> lengths;
    for (std::size_t i = begin; i <= end; ++i) lengths.push_back(cumulative[i] - first);
    const auto rows_of = [&](auto* data) {
      return View<std::remove_pointer_t<decltype(data)>, 4>(data + first * width, {1, heads, count, width},
                                                            {0, tensors.extents[2] * width, width, 1});
    };
    ssmax::attention({.q = rows_of(std::as_const(tensors.q).data()),
                      .keys = cache.source(std::span(ids).subspan(begin, end - begin)),
                      .out = rows_of(tensors.out.data()),
                      .lengths = SequenceLengths::packed_queries(lengths)},
                     SSMax<float>{0.43f}, Causal{}, pool);
  }
  static double logits() {
    return static_cast<double>(heads) * (prompts * 0.5 * prompt * (prompt + 1) + double{others} * keys);
  }
};

void register_step() {
  using Work = std::shared_ptr<Step>;
  const auto run = [](auto decode) {
    return [decode](const Work& step) -> Run {
      const auto pool = std::make_shared<ThreadPool>(2);
      return [=] { decode(*step, *pool); };
    };
  };
  const auto packed = [](Step& step, ThreadPool& pool) { step.decode(0, step.ids.size(), pool); };
  const auto each = [](Step& step, ThreadPool& pool) {
    for (std::size_t i = 0; i < step.ids.size(); ++i) step.decode(i, i + 1, pool);
  };
  const auto same = [each](const Work& step) {
    const std::vector<float> out = step->tensors.out;
    ThreadPool pool(2);
    each(*step, pool);
    return compare(step->tensors.out, out);
  };
  const auto work = made_once([] { return std::make_shared<Step>(); });
  const double operations = 4.0 * Step::width * Step::logits();
  for (const Implementation<Work>& implementation :
       {Implementation<Work>{"packed", run(packed), same}, Implementation<Work>{"each", run(each), same}}) {
    add_benchmark<Work>("mixed", "s64_q4x2048-60x1_h8_kv2_d64_n4096_f32_t2", implementation, work,
                        gflops(operations));
  }
}

// A source without common keys: each sequence is computed alone.
template <class K>
struct Alone {
  using Element = typename K::Element;
  const K& keys;

  KeySourceShape shape() const { return keys.shape(); }
  index_t length(index_t b) const { return keys.length(b); }
  KeyRange stored(index_t b) const { return keys.stored(b); }
  KeyRun<Element> run(index_t b, index_t h, index_t key) const { return keys.run(b, h, key); }
};

// 32 sequences with a common prompt of 8192 keys and 100 keys of their own. One new token each.
template <class T>
struct Prompted {
  static constexpr index_t width = 64, prompt = 8192, own = 100, count = 32;
  index_t heads;
  PagedKvCache<T> cache;
  std::vector<index_t> ids;
  Tensors<T> tensors;

  Prompted(index_t a_heads, index_t kv_heads)
      : heads(a_heads),
        cache({.kv_heads = kv_heads, .width = width, .pages = prompt / 64 + 2 * count}),
        tensors({count, heads, 1, width}) {
    const Tensors<T> stored({1, prompt, kv_heads, width});
    const auto append = [&](index_t id, index_t keys) {
      const View<const T, 3> rows(stored.k.data(), {keys, kv_heads, width});
      cache.append(rows, rows, std::vector<index_t>(static_cast<std::size_t>(keys), id));
    };
    const index_t root = cache.add();
    append(root, prompt);
    for (index_t i = 0; i < count; ++i) {
      ids.push_back(cache.fork(root));
      append(ids.back(), own);
    }
  }
  template <class K>
  void decode(const K& keys) {
    ssmax::attention({.q = tensors.in(tensors.q), .keys = keys, .out = tensors.to(tensors.out)},
                     SSMax<float>{0.43f}, Causal{});
  }
};

template <class T>
void register_common_prompt(index_t heads, index_t kv_heads, const std::string& type) {
  using Work = std::shared_ptr<Prompted<T>>;
  const auto once = [](const Work& work) -> Run {
    return [=] { work->decode(work->cache.source(work->ids)); };
  };
  const auto alone = [](const Work& work) -> Run {
    return [=] {
      const auto keys = work->cache.source(work->ids);
      work->decode(Alone<std::remove_const_t<decltype(keys)>>{keys});
    };
  };
  const auto same = [alone](const Work& work) {
    const std::vector<T> out = work->tensors.out;
    alone(work)();
    return compare(work->tensors.out, out);
  };
  const auto work = made_once([=] { return std::make_shared<Prompted<T>>(heads, kv_heads); });
  using P = Prompted<T>;
  const double operations =
      4.0 * P::width * static_cast<double>(heads) * double{P::count} * (double{P::prompt} + double{P::own});
  const std::string shape = "s32_p8192_own100_h" + std::to_string(heads) + "_kv" + std::to_string(kv_heads) +
                            "_d64_" + type + "_t1";
  for (const Implementation<Work>& implementation :
       {Implementation<Work>{"ssmax", once, same}, Implementation<Work>{"alone", alone, same}}) {
    add_benchmark<Work>("shared", shape, implementation, work, gflops(operations));
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
  register_latent<float>("f32");
  register_latent<bfloat16>("bf16");
  register_step();
  register_common_prompt<float>(12, 12, "f32");
  register_common_prompt<bfloat16>(12, 12, "bf16");
  register_common_prompt<bfloat16>(16, 2, "bf16");
}

}  // namespace ssmax_bench
