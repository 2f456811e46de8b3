// Scores that are several of the library's, one after the other: softcap, slopes, bias.
#pragma once

#include <ssmax/score.hpp>

#include "masks.hpp"
#include "scale_invariant.hpp"
#include "scalings.hpp"

namespace ssmax_torch {

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
  void apply(const ssmax::Lanes<T>& lanes) const {
    if (cap) cap->apply(lanes);
  }
  template <std::floating_point T>
  void differentiate(const ssmax::Lanes<const T>& capped, T* d) const {
    if (cap) cap->differentiate(capped, d);
  }
  void check(const ssmax::QueryShape& shape) const {
    if (cap) cap->check(shape);
  }
};

}  // namespace ssmax_torch

template <>
inline constexpr bool ssmax::by_lanes<ssmax_torch::MaybeSoftcap> = true;

namespace ssmax_torch {

inline MaybeSoftcap make_softcap(const Arguments& a) {
  MaybeSoftcap result;
  if (a.softcap != 0) result.cap.emplace(a.softcap);
  return result;
}

inline ssmax::Alibi make_alibi(const Arguments& a, const Parameters& parameters) {
  const bool absolute = a.slopes_multiply == SlopesMultiply::absolute_distance;
  return ssmax::Alibi(parameters.slopes,
                      absolute ? ssmax::AlibiDistance::absolute : ssmax::AlibiDistance::relative);
}

template <class A>
ssmax::Bias<A> make_bias(const Arguments& a, const Extents& extents) {
  return ssmax::Bias<A>(matrix_view<const A>("bias", *a.bias, extents, a.bias_modulo),
                        heads_of_matrix(a.bias_modulo));
}

/// Calls f with the score.
template <class A, class F>
void with_score(const Arguments& a, const Parameters& parameters, const Extents& extents, const F& f) {
  if (a.scale_invariant != 0) {
    if (a.softcap != 0 || a.slopes || a.bias) fail("score has ScaleInvariant and another, it stands alone");
    return f(*scale_invariant(a.scale_invariant, extents[3]));
  }
  const MaybeSoftcap softcap = make_softcap(a);
  if (a.slopes_multiply == SlopesMultiply::bias) {
    if (!a.slopes || !a.bias || a.bias_hides) fail("score has SlopedBias without slopes and matrix");
    return f(softcap | ssmax::SlopedBias<A>(matrix_view<const A>("bias", *a.bias, extents, a.bias_modulo),
                                            parameters.slopes, heads_of_matrix(a.bias_modulo)));
  }
  const ssmax::Alibi alibi = make_alibi(a, parameters);
  if (a.bias) {
    const ssmax::Bias<A> bias = make_bias<A>(a, extents);
    return a.slopes ? f(softcap | alibi | bias) : f(softcap | bias);
  }
  if (a.slopes) return f(softcap | alibi);
  softcap.cap ? f(*softcap.cap) : f(ssmax::Identity{});
}

/// Calls f with the score, which learns what `gradients` have room for.
template <class A, class F>
void with_learning_score(const Arguments& a, const Parameters& parameters, const Extents& extents,
                         const ParameterGradients<A>& gradients, const F& f) {
  const bool slopes_learn = !gradients.dslopes.empty();
  if ((!gradients.dbias && !slopes_learn) || a.scale_invariant != 0)
    return with_score<A>(a, parameters, extents, f);
  if (a.slopes_multiply == SlopesMultiply::bias) fail("score has SlopedBias, which has no gradients");
  const MaybeSoftcap softcap = make_softcap(a);
  const ssmax::Alibi alibi = make_alibi(a, parameters);
  if (!a.bias) return f(softcap | alibi.gradient(gradients.dslopes));
  const ssmax::Bias<A> bias = make_bias<A>(a, extents);
  if (!a.slopes) return f(softcap | bias.gradient(*gradients.dbias));
  // Rare: both learn, and what nobody wants is dropped.
  std::vector<double> dropped_slopes(slopes_learn ? 0 : parameters.slopes.size());
  const auto dslopes = slopes_learn ? gradients.dslopes : std::span<double>(dropped_slopes);
  const auto [batch, matrices, queries, keys] =
      matrix_view<const A>("bias", *a.bias, extents, a.bias_modulo).extents();
  std::vector<A> dropped_bias;
  if (!gradients.dbias) dropped_bias.resize(static_cast<std::size_t>(batch * matrices * queries * keys));
  const auto dbias =
      gradients.dbias.value_or(ssmax::View<A, 4>(dropped_bias.data(), {batch, matrices, queries, keys}));
  f(softcap | alibi.gradient(dslopes) | bias.gradient(dbias));
}

}  // namespace ssmax_torch
