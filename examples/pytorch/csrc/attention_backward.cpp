// Attention, backward.
#include <ssmax/attention_backward.hpp>

#include "call.hpp"
#include "executor.hpp"
#include "operators.hpp"

namespace ssmax_torch {

namespace {

constexpr std::size_t at(Gradient gradient) { return static_cast<std::size_t>(gradient); }

std::span<double> numbers_of(const Tensor& tensor) {
  return {static_cast<double*>(tensor.data_ptr()), static_cast<std::size_t>(tensor.numel())};
}

/// Zeros to be added to, if wanted.
Tensor sums(bool wanted, index_t count, ScalarType type = ScalarType::Double) {
  return new_zeros(std::array{wanted ? count : index_t{0}}, type);
}

/// Calls f with the score, which learns what `gradients` and dbias have room for.
template <class A, class F>
void with_learning_score(const Arguments& a, const Parameters& parameters,
                         const std::array<index_t, 4>& extents, const ParameterGradients& gradients,
                         const std::optional<ssmax::View<A, 4>>& dbias, const F& f) {
  const MaybeSoftcap softcap = make_softcap(a);
  const ssmax::Alibi alibi(parameters.slopes);
  if (a.bias && a.slopes) {
    // Rare: both learn, and what nobody wants is dropped.
    std::vector<double> dropped_slopes(parameters.slopes.size());
    const auto dslopes = gradients.dslopes.empty() ? std::span<double>(dropped_slopes) : gradients.dslopes;
    const ssmax::Bias<A> bias(bias_view<A>(a, extents));
    if (dbias) return f(softcap | alibi.gradient(dslopes) | bias.gradient(*dbias));
    return f(softcap | alibi.gradient(dslopes) | bias);
  }
  if (dbias) return f(softcap | ssmax::Bias<A>(bias_view<A>(a, extents)).gradient(*dbias));
  if (!gradients.dslopes.empty()) return f(softcap | alibi.gradient(gradients.dslopes));
  with_score<A>(a, parameters, extents, f);
}

template <class T>
Gradients backward_of(const Tensor& grad_out, const MaybeTensor& grad_lse, const Tensor& query,
                      const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                      const std::vector<bool>& learn, const Arguments& a) {
  using A = Compute<T>;
  const auto extents = check_inputs(query, key, value);
  const auto [batch, heads, queries, keys] = extents;
  const std::array rows{batch, heads, queries, value.size(3)};
  check_shape("grad_out", grad_out, rows);
  check_shape("out", out, rows);
  check_shape("lse", lse, std::span(rows).first(3));
  if (grad_lse) check_shape("grad_lse", *grad_lse, std::span(rows).first(3));
  const auto wants = [&](Gradient gradient) { return learn[at(gradient) - at(Gradient::s)]; };

  const Parameters parameters(a, heads);
  const Options<T> options(a, heads, keys);
  const auto like = [](const Tensor& tensor) {
    return new_tensor_like(tensor, {tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)});
  };
  const bool learns_bias = a.bias && wants(Gradient::bias);
  std::vector<index_t> bias_extents{0};
  if (learns_bias) bias_extents.assign(a.bias->sizes().begin(), a.bias->sizes().end());
  Gradients result{like(query),
                   like(key),
                   like(value),
                   sums(wants(Gradient::s), heads),
                   sums(wants(Gradient::b), heads),
                   sums(wants(Gradient::p), std::ssize(parameters.p)),
                   sums(wants(Gradient::slopes) && a.slopes, heads),
                   new_zeros(bias_extents, scalar_type<A>),
                   sums(wants(Gradient::sinks) && a.sinks, heads, scalar_type<A>)};
  const auto tensor = [&](Gradient gradient) -> const Tensor& { return result[at(gradient)]; };

  const ssmax::BackwardArguments<T> arguments{.q = view<const T, 4>("query", query),
                                              .k = view<const T, 4>("key", key),
                                              .v = view<const T, 4>("value", value),
                                              .out = view<const T, 4>("out", out),
                                              .lse = view<const A, 3>("lse", lse)};
  const Tensor& dsinks = tensor(Gradient::sinks);
  ssmax::AttentionGradients<T> outputs{
      .dout = view<const T, 4>("grad_out", grad_out),
      .dq = view<T, 4>("dq", tensor(Gradient::query)),
      .dk = view<T, 4>("dk", tensor(Gradient::key)),
      .dv = view<T, 4>("dv", tensor(Gradient::value)),
      .dsinks = {static_cast<A*>(dsinks.data_ptr()), static_cast<std::size_t>(dsinks.numel())}};
  if (grad_lse) outputs.dlse = view<const A, 3>("grad_lse", *grad_lse);
  const ParameterGradients gradients{.ds = numbers_of(tensor(Gradient::s)),
                                     .db = numbers_of(tensor(Gradient::b)),
                                     .dp = numbers_of(tensor(Gradient::p)),
                                     .dslopes = numbers_of(tensor(Gradient::slopes))};
  std::optional<ssmax::View<A, 4>> dbias;
  if (learns_bias) dbias = broadcast_view<A>("bias", tensor(Gradient::bias), extents);

  const auto run = [&](const auto& scaling) {
    with_mask<A>(a, extents, [&](const auto& mask) {
      with_learning_score<A>(a, parameters, extents, gradients, dbias, [&](const auto& score) {
        ssmax::attention_backward<T>(arguments, outputs, scaling, mask, score, options.options,
                                     TorchThreads{});
      });
    });
  };
  const bool scaling_learns = wants(Gradient::s) || wants(Gradient::b) || wants(Gradient::p);
  scaling_learns ? run(make_scaling(a, parameters, gradients)) : run(make_scaling(a, parameters));
  return result;
}

}  // namespace

Gradients attention_backward(const Tensor& grad_out, const MaybeTensor& grad_lse, const Tensor& query,
                             const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                             const std::vector<bool>& learn, const Arguments& a) {
  if (learn.size() != at(Gradient::count) - at(Gradient::s)) fail("learn has the wrong number of flags");
  return with_type(query, [&]<class T>(std::type_identity<T>) {
    return backward_of<T>(grad_out, grad_lse, query, key, value, out, lse, learn, a);
  });
}

}  // namespace ssmax_torch
