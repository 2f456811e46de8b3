// Registers the benchmarks of attention's forward.
#include "prefill.hpp"

#include <array>
#include <memory>
#include <ssmax/attention.hpp>
#include <ssmax/execution.hpp>
#include <ssmax/target.hpp>
#include <utility>

#include "attention_data.hpp"
#include "measure.hpp"
#include "reference_attention.hpp"
#include "scalings.hpp"
#include "short_shapes.hpp"

namespace ssmax_bench {
namespace {

using Implementations = std::vector<Implementation<AttentionArguments>>;

template <class T>
ssmax::AttentionArguments<float> our_arguments(const AttentionArguments& a) {
  const auto& [heads, kv_heads, width, n, queries, batch] = a.shape;
  const std::array<index_t, 4> rows{batch, heads, queries, width};
  const std::array<index_t, 4> keys{batch, kv_heads, n, width};
  return {.q = {static_cast<const T*>(a.q), rows},
          .k = {static_cast<const T*>(a.k), keys},
          .v = {static_cast<const T*>(a.v), keys},
          .out = {static_cast<T*>(a.out), rows}};
}

template <class T, class Scaling, class Mask>
Run attend(const AttentionArguments& a, const Scaling& scaling, const Mask& mask,
           const std::shared_ptr<const ssmax::Rope<float>>& rope, bool rounds_rotation) {
  ssmax::AttentionArguments<float> arguments = our_arguments<T>(a);
  arguments.rope = rope.get();
  arguments.rounded_rotation = rounds_rotation;
  if (a.threads == 1) return [=, keeps = rope] { ssmax::attention(arguments, scaling, mask); };
  const auto pool = std::make_shared<ssmax::ThreadPool>(a.threads);
  return [=, keeps = rope] { ssmax::attention(arguments, scaling, mask, *pool); };
}

template <class T, class Scaling>
Run attend(const AttentionArguments& a, const Scaling& scaling, const AttentionFormula& formula) {
  const bool rounds = formula.rounds_rotation;
  std::shared_ptr<const ssmax::Rope<float>> rope;
  if (formula.rope) {
    rope = std::make_shared<const ssmax::Rope<float>>(ssmax::RopeOptions{.width = a.shape.width}, a.shape.n);
  }
  if (a.visibility.window > 0) {
    return attend<T>(a, scaling, ssmax::SlidingWindow{a.visibility.window - 1}, rope, rounds);
  }
  if (a.visibility.causal) return attend<T>(a, scaling, ssmax::Causal{}, rope, rounds);
  return attend<T>(a, scaling, ssmax::Full{}, rope, rounds);
}

template <class Scaling>
Implementation<AttentionArguments> ours(const std::string& name, const Scaling& scaling,
                                        AttentionFormula formula) {
  return {name,
          [=](const AttentionArguments& a) -> Run {
            if (a.type == ElementType::bf16) return attend<ssmax::bfloat16>(a, scaling, formula);
            return attend<float>(a, scaling, formula);
          },
          [formula](const AttentionArguments& a) { return compare_attention(a, formula); },
          [](const AttentionArguments&) { return std::string(ssmax::target_name(ssmax::active_target())); }};
}

Implementation<AttentionArguments> plain() {
  return ours("softmax", ssmax::Softmax{}, {softmax_multiplier, false});
}

Implementations variants(ElementType type) {
  const ssmax::SSMax<float> ssmax{s};
  Implementations all{ours("ssmax", ssmax, {ssmax_multiplier, false}),
                      ours("ssmax_bias", ssmax::SSMax<float>{s, b}, {ssmax_bias_multiplier, false}),
                      ours("ssmax_rope", ssmax, {ssmax_multiplier, true}),
                      ours("softmax_rope", ssmax::Softmax{}, {softmax_multiplier, true})};
  if (type == ElementType::bf16)
    all.push_back(ours("ssmax_rope_rounded", ssmax, {ssmax_multiplier, true, true}));
  return all;
}

// Returns true if the peer is fast enough for the shape. Peers that store all logits would need minutes and gigabytes for
// large n. Only the fastest peers run with two threads.
bool takes_part(const std::string& peer, const AttentionArguments& a) {
  const bool is_fast = peer == "onednn_tile" || peer == "torch";
  const index_t longest = is_fast ? 8192 : peer == "onednn" ? 4096 : 2048;
  return a.shape.n <= longest && (a.threads == 1 || is_fast);
}

Implementations peers_for(const AttentionArguments& a) {
  Implementations all;
  for (const LoadedPeer& peer : peers()) {
    if (peer.peer == nullptr || !takes_part(peer.name, a)) continue;
    AttentionArguments probe = a;
    probe.shape.n = probe.shape.queries = 1;
    if (!peer.peer->attention(probe)) continue;
    all.push_back({peer.name, [p = peer.peer](const AttentionArguments& work) { return p->attention(work); },
                   [](const AttentionArguments& work) {
                     return compare_attention(work, {softmax_multiplier, false});
                   },
                   [p = peer.peer](const AttentionArguments& work) { return p->attention_label(work); }});
  }
  return all;
}

void register_shape(const AttentionShape& shape, Visibility visibility, ElementType type, int threads) {
  const std::string name =
      shape.name() + "_" + visibility.name() + "_" + ssmax_bench::name(type) + "_t" + std::to_string(threads);
  Implementations all{plain()};
  const bool has_all = shape.n == 2048 || shape.n == 4096;
  // The README's picture has a point for every n.
  const bool is_pictured = visibility.causal && shape.width == 64 && type == ElementType::f32;
  if (threads == 1 && visibility.window == 0 && (has_all || is_pictured)) {
    for (auto& variant : variants(type)) {
      if (has_all || variant.name == "ssmax_rope") all.push_back(std::move(variant));
    }
  }
  const AttentionArguments probe{
      .shape = shape, .visibility = visibility, .type = type, .threads = threads, .fold = true};
  for (auto& peer : peers_for(probe)) all.push_back(std::move(peer));
  // Each of two products has one multiplication and one addition per channel of each logit.
  const double operations = 4 * visibility.logits(shape.n) * static_cast<double>(shape.width * shape.heads);
  for (const auto& implementation : all) {
    add_benchmark<AttentionArguments>(
        "prefill", name, implementation,
        [=] { return AttentionData::of(shape, type).arguments(visibility, threads); }, gflops(operations));
  }
}

}  // namespace

void register_prefill() {
  struct Heads {
    index_t heads;
    index_t width;
  };
  for (const auto [heads, width] : {Heads{12, 64}, Heads{8, 128}}) {
    for (const index_t n : {512, 1024, 2048, 4096, 8192}) {
      const AttentionShape shape{heads, heads, width, n, n};
      for (const int threads : {1, 2}) {
        if (threads > 1 && n < 2048) continue;
        for (const ElementType type : {ElementType::f32, ElementType::bf16}) {
          register_shape(shape, Visibility{}, type, threads);
          register_shape(shape, Visibility{.causal = true}, type, threads);
        }
      }
      if (n == 8192) register_shape(shape, Visibility{.causal = true, .window = 512}, ElementType::f32, 1);
    }
  }
}

void register_short() {
  for (const AttentionShape& shape : short_shapes) {
    const AttentionArguments probe{
        .shape = shape, .visibility = {}, .type = ElementType::f32, .threads = 1, .fold = true};
    Implementations all{plain(), variants(ElementType::f32).front()};
    for (auto& peer : peers_for(probe)) {
      if (peer.name == "torch") all.push_back(std::move(peer));
    }
    for (const auto& implementation : all) {
      add_benchmark<AttentionArguments>(
          "short", short_name(shape), implementation,
          [=] { return AttentionData::of(shape, ElementType::f32).arguments({}, 1); },
          gflops(short_operations(shape)));
    }
  }
}

}  // namespace ssmax_bench
