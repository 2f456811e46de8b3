// Registers the benchmarks of attention's backward.
#include "backward.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <ssmax/attention.hpp>
#include <ssmax/attention_backward.hpp>
#include <ssmax/execution.hpp>
#include <ssmax/target.hpp>
#include <tuple>
#include <utility>

#include "attention_data.hpp"
#include "measure.hpp"
#include "reference_backward.hpp"
#include "scalings.hpp"
#include "short_shapes.hpp"

namespace ssmax_bench {
namespace {

// A differentiated function: a scaling with parameters s and b, with or without the rotary embedding.
struct Variant {
  const char* name;
  AttentionFormula formula;
  bool s;
  bool b;
};

constexpr Variant plain{"softmax", {softmax_multiplier, false}, false, false};
constexpr Variant ssmax_plain{"ssmax", {ssmax_multiplier, false}, true, false};
constexpr Variant ssmax_bias{"ssmax_bias", {ssmax_bias_multiplier, false}, true, true};
constexpr Variant ssmax_rope{"ssmax_rope", {ssmax_multiplier, true}, true, false};

using Table = std::shared_ptr<const ssmax::Rope<float>>;

// Returns null for a formula without the rotary embedding.
Table rope_of(const AttentionFormula& formula, const AttentionShape& shape) {
  if (!formula.rope) return nullptr;
  return std::make_shared<const ssmax::Rope<float>>(ssmax::RopeOptions{.width = shape.width}, shape.n);
}

struct Extents {
  std::array<index_t, 4> rows, keys;
  std::array<index_t, 3> lse;

  explicit Extents(const AttentionShape& shape)
      : rows{shape.batch, shape.heads, shape.queries, shape.width},
        keys{shape.batch, shape.kv_heads, shape.n, shape.width},
        lse{shape.batch, shape.heads, shape.queries} {}
};

// The results of the forward. They are computed once per shape, mask and formula, outside of the timing.
struct Forward {
  Forward(const AttentionArguments& a, const AttentionFormula& formula)
      : out(a.shape.query_size(), 4), lse(a.shape.rows(), 5) {
    if (a.type == ElementType::bf16) {
      attend<ssmax::bfloat16>(a, formula);
    } else {
      attend<float>(a, formula);
    }
  }

  template <class T>
  void attend(const AttentionArguments& a, const AttentionFormula& formula) {
    const Extents extents(a.shape);
    const Table rope = rope_of(formula, a.shape);
    const ssmax::AttentionArguments<float> arguments{.q = {static_cast<const T*>(a.q), extents.rows},
                                                     .k = {static_cast<const T*>(a.k), extents.keys},
                                                     .v = {static_cast<const T*>(a.v), extents.keys},
                                                     .out = {reinterpret_cast<T*>(out.data()), extents.rows},
                                                     .lse = {lse.data(), extents.lse},
                                                     .rope = rope.get()};
    const auto scaling = [&formula](const ssmax::Row& row) { return formula.multiplier(row.n); };
    if (a.visibility.causal) {
      ssmax::attention(arguments, scaling, ssmax::Causal{});
    } else {
      ssmax::attention(arguments, scaling);
    }
  }

  Buffer out;
  Buffer lse;
};

// The arrays of one shape, shared by all implementations.
class BackwardData {
 public:
  static BackwardData& of(const AttentionShape& shape, ElementType type) {
    static std::map<DataKey, BackwardData> all;
    return all.try_emplace(data_key(shape, type), shape, type).first->second;
  }

  BackwardData(const AttentionShape& shape, ElementType type)
      : shape_(shape),
        type_(type),
        dout_(normal(type, shape.query_size(), 6, 4)),
        dq_(shape.query_size(), 7),
        dk_(shape.key_size(), 8),
        dv_(shape.key_size(), 9),
        s_(shape.heads),
        ds_(shape.heads),
        db_(shape.heads) {
    std::fill_n(s_.data(), shape.heads, s);
  }

  AttentionBackwardArguments arguments(const Variant& variant, Visibility visibility, int threads) {
    AttentionBackwardArguments a{AttentionData::of(shape_, type_).arguments(visibility, threads)};
    const AttentionFormula& formula = variant.formula;
    const Forward& forward =
        forwards_.try_emplace({visibility.causal, formula.multiplier, formula.rope}, a, formula)
            .first->second;
    a.out = forward.out.data();
    a.lse = forward.lse.data();
    a.dout = dout_.data();
    a.dq = forget(dq_);
    a.dk = forget(dk_);
    a.dv = forget(dv_);
    if (variant.s) a.s = s_.data();
    if (variant.s) a.ds = forget(ds_);
    if (variant.b) a.db = forget(db_);
    return a;
  }

 private:
  // Fills a result with NaN, so that an implementation cannot pass with the result of another one.
  static float* forget(const Buffer& buffer) {
    std::fill_n(buffer.data(), buffer.size(), std::numeric_limits<float>::quiet_NaN());
    return buffer.data();
  }

  AttentionShape shape_;
  ElementType type_;
  Buffer dout_;
  Buffer dq_;
  Buffer dk_;
  Buffer dv_;
  Buffer s_;
  Buffer ds_;
  Buffer db_;
  std::map<std::tuple<bool, double (*)(index_t), bool>, Forward> forwards_;
};

using Implementations = std::vector<Implementation<AttentionBackwardArguments>>;

template <class T, class Scaling, class Mask>
Run differentiate(const AttentionBackwardArguments& a, const Scaling& scaling, const Mask& mask,
                  const Table& rope) {
  const Extents extents(a.shape);
  const ssmax::BackwardArguments<float> arguments{.q = {static_cast<const T*>(a.q), extents.rows},
                                                  .k = {static_cast<const T*>(a.k), extents.keys},
                                                  .v = {static_cast<const T*>(a.v), extents.keys},
                                                  .out = {static_cast<const T*>(a.out), extents.rows},
                                                  .lse = {a.lse, extents.lse},
                                                  .rope = rope.get()};
  const ssmax::AttentionGradients<float> gradients{.dout = {static_cast<const T*>(a.dout), extents.rows},
                                                   .dq = {static_cast<T*>(a.dq), extents.rows},
                                                   .dk = {static_cast<T*>(a.dk), extents.keys},
                                                   .dv = {static_cast<T*>(a.dv), extents.keys}};
  // attention_backward adds to the gradients of a scaling: set them to zero before each call.
  const auto clear = [a] {
    if (a.ds != nullptr) std::fill_n(a.ds, a.shape.heads, 0.0F);
    if (a.db != nullptr) std::fill_n(a.db, a.shape.heads, 0.0F);
  };
  if (a.threads == 1) {
    return [=, keeps = rope] {
      clear();
      ssmax::attention_backward(arguments, gradients, scaling, mask);
    };
  }
  const auto pool = std::make_shared<ssmax::ThreadPool>(a.threads);
  return [=, keeps = rope] {
    clear();
    ssmax::attention_backward(arguments, gradients, scaling, mask, *pool);
  };
}

template <class T, class Scaling>
Run differentiate_in(const AttentionBackwardArguments& a, const Scaling& scaling, const Table& rope) {
  if (a.visibility.causal) return differentiate<T>(a, scaling, ssmax::Causal{}, rope);
  return differentiate<T>(a, scaling, ssmax::Full{}, rope);
}

template <class Scaling>
Run differentiate(const AttentionBackwardArguments& a, const Scaling& scaling, const Table& rope) {
  if (a.type == ElementType::bf16) return differentiate_in<ssmax::bfloat16>(a, scaling, rope);
  return differentiate_in<float>(a, scaling, rope);
}

Implementation<AttentionBackwardArguments> ours(const Variant& variant) {
  return {
      variant.name,
      [variant](const AttentionBackwardArguments& a) -> Run {
        const Table rope = rope_of(variant.formula, a.shape);
        if (!variant.s) return differentiate(a, ssmax::Softmax{}, rope);
        const auto heads = static_cast<std::size_t>(a.shape.heads);
        const std::span<float> db = variant.b ? std::span(a.db, heads) : std::span<float>{};
        return differentiate(a, ssmax::SSMax<float>{s, variant.b ? b : 0}.gradient({a.ds, heads}, db), rope);
      },
      [variant](const AttentionBackwardArguments& a) {
        return compare_attention_backward(a, variant.formula);
      },
      [](const AttentionBackwardArguments&) {
        return std::string(ssmax::target_name(ssmax::active_target()));
      }};
}

// Returns the peers that support the variant. For SSMax the name is the peer's name and the variant's.
Implementations peers_for(const Variant& variant, const AttentionShape& shape, ElementType type,
                          int threads) {
  AttentionShape one = shape;
  one.n = one.queries = 1;
  const AttentionBackwardArguments probe =
      BackwardData::of(one, type).arguments(variant, Visibility{}, threads);
  Implementations all;
  for (const LoadedPeer& peer : peers()) {
    if (peer.peer == nullptr || !peer.peer->attention_backward(probe)) continue;
    all.push_back(
        {variant.s ? peer.name + "_" + variant.name : peer.name,
         [p = peer.peer](const AttentionBackwardArguments& a) { return p->attention_backward(a); },
         [variant](const AttentionBackwardArguments& a) {
           return compare_attention_backward(a, variant.formula);
         },
         [p = peer.peer](const AttentionBackwardArguments& a) { return p->attention_backward_label(a); }});
  }
  return all;
}

void register_shape(const AttentionShape& shape, Visibility visibility, ElementType type, int threads) {
  const std::string name =
      shape.name() + "_" + visibility.name() + "_" + ssmax_bench::name(type) + "_t" + std::to_string(threads);
  // Each of five products has one multiplication and one addition per channel of each logit.
  const double operations = 10 * visibility.logits(shape.n) * static_cast<double>(shape.width * shape.heads);
  const auto add = [&](const Variant& variant, const Implementations& implementations) {
    for (const auto& implementation : implementations) {
      add_benchmark<AttentionBackwardArguments>(
          "backward", name, implementation,
          [=] { return BackwardData::of(shape, type).arguments(variant, visibility, threads); },
          gflops(operations));
    }
  };
  add(plain, {ours(plain)});
  add(plain, peers_for(plain, shape, type, threads));
  if (threads > 1 || (shape.n != 2048 && shape.n != 4096)) return;
  for (const Variant& variant : {ssmax_plain, ssmax_bias, ssmax_rope}) add(variant, {ours(variant)});
  add(ssmax_plain, peers_for(ssmax_plain, shape, type, threads));
}

}  // namespace

void register_backward() {
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
    }
  }
}

void register_short_backward() {
  for (const AttentionShape& shape : short_shapes) {
    const double operations = 2.5 * short_operations(shape);
    Implementations all{ours(plain)};
    for (auto& peer : peers_for(plain, shape, ElementType::f32, 1)) {
      if (peer.name == "torch") all.push_back(std::move(peer));
    }
    for (const auto& implementation : all) {
      add_benchmark<AttentionBackwardArguments>(
          "short_backward", short_name(shape), implementation,
          [=] { return BackwardData::of(shape, ElementType::f32).arguments(plain, Visibility{}, 1); },
          gflops(operations));
    }
  }
}

}  // namespace ssmax_bench
