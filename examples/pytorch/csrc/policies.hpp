// The scaling, the mask and the score that an operator was called with.
#pragma once

#include <ssmax/mask.hpp>
#include <ssmax/scaling.hpp>
#include <ssmax/score.hpp>
#include <vector>

#include "one_of.hpp"
#include "rope.hpp"
#include "tensors.hpp"

namespace ssmax_torch {

/// As in ssmax_torch/scaling.py.
enum class ScalingKind : std::int64_t {
  softmax,
  log_n,
  ssmax,
  size_table,
  qwen,
  llama4,
  ministral,
  constant
};

/// The arguments that all operators share, in their order: see the schema in library.cpp.
struct Arguments {
  ScalingKind scaling;
  MaybeTensor s, b, p;
  std::vector<double> numbers;  // of the scaling, where there is no tensor
  bool causal;
  std::vector<std::int64_t> window;  // left and right, or empty
  MaybeTensor prefix, lengths, cu_queries, cu_keys, visible;
  double softcap;  // 0: none
  MaybeTensor slopes, bias;
  bool bias_hides;  // where it is -inf, a key is not counted
  MaybeTensor sinks;
  std::vector<double> rope;
  std::optional<double> scale;
};

/// The numbers behind the spans of scalings and scores, in double whatever they came in. s and b have one
/// number per head, also where the call has one for all.
struct Parameters {
  Parameters(const Arguments& a, index_t heads);

  std::vector<double> s, b, p, slopes;
};

using AnyScaling =
    OneScaling<ssmax::Softmax, ssmax::LogN, ssmax::SSMax<double>, ssmax::SizeTable<double>, ssmax::QwenLogN,
               ssmax::Llama4Temperature, ssmax::MinistralTemperature, ssmax::Constant>;
using LearningScaling = OneScaling<ssmax::SSMaxGradient<double>, ssmax::SizeTableGradient<double>>;

/// Where gradients of the scaling's and the score's parameters go; those that nobody wants are empty.
struct ParameterGradients {
  std::span<double> ds, db, dp, dslopes;
};

AnyScaling make_scaling(const Arguments& a, const Parameters& parameters);
LearningScaling make_scaling(const Arguments& a, const Parameters& parameters,
                             const ParameterGradients& gradients);

/// Masks that are ranges of keys, any of them together.
struct Ranges {
  bool causal = false;
  std::optional<ssmax::SlidingWindow> window;
  std::optional<ssmax::PrefixLM> prefix;
  std::optional<ssmax::KeyLengths> lengths;

  ssmax::KeyRange keys(const ssmax::Query& query) const {
    ssmax::KeyRange all{0, query.shape.keys};
    const auto meet = [&](const auto& mask) {
      const ssmax::KeyRange range = mask.keys(query);
      all = {std::max(all.begin, range.begin), std::min(all.end, range.end)};
    };
    if (causal) meet(ssmax::Causal{});
    if (window) meet(*window);
    if (prefix) meet(*prefix);
    if (lengths) meet(*lengths);
    return {all.begin, std::max(all.begin, all.end)};
  }
  void check(const ssmax::QueryShape& shape) const {
    if (window) window->check(shape);
    if (prefix) prefix->check(shape);
    if (lengths) lengths->check(shape);
  }
};

/// Every key, or those that are no padding: short rows go several at a time.
struct SameKeys {
  std::optional<ssmax::KeyLengths> lengths;

  ssmax::KeyRange keys(const ssmax::Query& query) const {
    return lengths ? lengths->keys(query) : ssmax::KeyRange{0, query.shape.keys};
  }
  void check(const ssmax::QueryShape& shape) const {
    if (lengths) lengths->check(shape);
  }
};

/// Keys that a matrix shows: one of bool, and one of numbers that hides where it is -inf.
template <class A>
struct Matrices {
  std::optional<ssmax::MaskMatrix> visible;
  std::optional<ssmax::Finite<A>> finite;

  ssmax::KeyRange keys(const ssmax::Query& query) const { return {0, query.shape.keys}; }
  bool sees(const ssmax::Query& query, index_t key) const {
    return (!visible || visible->sees(query, key)) && (!finite || finite->sees(query, key));
  }
  void check(const ssmax::QueryShape& shape) const {
    if (visible) visible->check(shape);
    if (finite) finite->check(shape);
  }
};

/// Softcap, or nothing: what may stand before another score.
struct MaybeSoftcap {
  std::optional<ssmax::Softcap> cap;

  template <std::floating_point T>
  T operator()(T z, const ssmax::Key& key) const {
    return cap ? (*cap)(z, key) : z;
  }
  template <std::floating_point T>
  T derivative(T z, const ssmax::Key& key) const {
    return cap ? cap->derivative(z, key) : T{1};
  }
  template <std::floating_point T>
  void apply(T* z, index_t n) const {
    if (cap) cap->apply(z, n);
  }
  template <std::floating_point T>
  void differentiate(const T* capped, index_t n, T* d) const {
    if (cap) cap->differentiate(capped, n, d);
  }
  void check(const ssmax::QueryShape& shape) const {
    if (cap) cap->check(shape);
  }
};

}  // namespace ssmax_torch

template <>
inline constexpr ssmax::FastPath ssmax::fast_path<ssmax_torch::SameKeys> = ssmax::FastPath::same_keys;
template <>
inline constexpr ssmax::FastPath ssmax::fast_path<ssmax_torch::MaybeSoftcap> = ssmax::FastPath::elementwise;

namespace ssmax_torch {

Ranges make_ranges(const Arguments& a);
std::optional<ssmax::Documents> make_documents(const Arguments& a);
MaybeSoftcap make_softcap(const Arguments& a);

/// The bias as a view of [batch, heads, queries, keys].
template <class A>
ssmax::View<const A, 4> bias_view(const Arguments& a, const std::array<index_t, 4>& extents) {
  return broadcast_view<const A>("bias", *a.bias, extents);
}

/// Calls f with the mask. There are five types of them, so that ranges are not asked key by key and
/// positions are not asked where they are the keys' own.
template <class A, class F>
void with_mask(const Arguments& a, const std::array<index_t, 4>& extents, const F& f) {
  const Ranges ranges = make_ranges(a);
  const std::optional<ssmax::Documents> documents = make_documents(a);
  Matrices<A> matrices;
  if (a.visible) matrices.visible.emplace(broadcast_view<const bool>("mask", *a.visible, extents));
  if (a.bias && a.bias_hides) matrices.finite.emplace(bias_view<A>(a, extents));
  const bool looks_up = matrices.visible || matrices.finite;
  if (looks_up && documents) return f(ranges & *documents & matrices);
  if (looks_up) return f(ssmax::Both(ranges, matrices));
  if (documents) return f(ranges & *documents);
  if (ranges.causal || ranges.window || ranges.prefix) return f(ranges);
  f(SameKeys{ranges.lengths});
}

/// Calls f with the score: softcap, then slopes, then the bias.
template <class A, class F>
void with_score(const Arguments& a, const Parameters& parameters, const std::array<index_t, 4>& extents,
                const F& f) {
  const MaybeSoftcap softcap = make_softcap(a);
  const ssmax::Alibi alibi(parameters.slopes);
  if (a.bias) {
    const ssmax::Bias<A> bias(bias_view<A>(a, extents));
    return a.slopes ? f(softcap | alibi | bias) : f(softcap | bias);
  }
  if (a.slopes) return f(softcap | alibi);
  softcap.cap ? f(*softcap.cap) : f(ssmax::Identity{});
}

}  // namespace ssmax_torch
