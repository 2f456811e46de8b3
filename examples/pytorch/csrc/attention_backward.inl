// Attention, backward, for queries of type T: the text of attention_backward_float.cpp and _double.cpp.
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

/// Zeros of the parameter's shape, to be added to; empty where nobody wants them.
Tensor sums_like(const MaybeTensor& parameter, bool wanted, ScalarType type) {
  if (!wanted) return new_zeros(std::array<index_t, 1>{0}, type);
  return new_zeros({parameter->sizes().data(), static_cast<std::size_t>(parameter->dim())}, type);
}

/// One zero per head.
Tensor sums_of_heads(bool wanted, index_t heads, ScalarType type) {
  return new_zeros(std::array{wanted ? heads : 0}, type);
}

}  // namespace

template <class T>
Gradients attention_backward_of(const BackwardInputs& in, const Arguments& a) {
  using A = Compute<T>;
  const Extents extents = check_inputs(in.query, in.key, in.value);
  const auto [batch, heads, queries, keys] = extents;
  const std::array rows{batch, heads, queries, in.value.size(3)};
  check_shape("grad_out", in.grad_out, rows);
  check_shape("out", in.out, rows);
  check_shape("lse", in.lse, std::span(rows).first(3));
  if (in.grad_lse) check_shape("grad_lse", *in.grad_lse, std::span(rows).first(3));
  if (in.learn.size() != at(Gradient::count) - at(Gradient::s)) fail("learn has the wrong number of flags");
  const auto wants = [&](Gradient gradient, bool given) {
    return given && in.learn[at(gradient) - at(Gradient::s)];
  };
  const Parameters parameters(a, heads);
  const Options<A> options(a, extents);

  const auto like = [](const Tensor& tensor) {
    return new_tensor_like(tensor, {tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)});
  };
  const bool per_head = !parameters.s.empty() || heads == 0;
  constexpr ScalarType computed = scalar_type<A>, exact = ScalarType::Double;
  const Gradients result{
      like(in.query),
      like(in.key),
      like(in.value),
      sums_of_heads(wants(Gradient::s, per_head), heads, exact),
      sums_of_heads(wants(Gradient::b, per_head), heads, exact),
      sums_like(a.p, wants(Gradient::p, !parameters.p.empty()), exact),
      sums_like(a.c, wants(Gradient::c, a.scaling == ScalingKind::per_query && a.c), computed),
      sums_of_heads(wants(Gradient::slopes, a.slopes.has_value()), heads, exact),
      sums_like(a.bias, wants(Gradient::bias, a.bias.has_value()), computed),
      sums_of_heads(wants(Gradient::sinks, a.sinks.has_value()), heads, computed)};
  const auto tensor = [&](Gradient gradient) -> const Tensor& { return result[at(gradient)]; };

  ssmax::BackwardArguments<A> arguments{.q = view<const T, 4>("query", in.query),
                                        .k = view<const T, 4>("key", in.key),
                                        .v = view<const T, 4>("value", in.value),
                                        .out = view<const T, 4>("out", in.out),
                                        .lse = view<const A, 3>("lse", in.lse)};
  options.write_to(arguments);
  const Tensor& dsinks = tensor(Gradient::sinks);
  ssmax::AttentionGradients<A> outputs{
      .dout = view<const T, 4>("grad_out", in.grad_out),
      .dq = view<T, 4>("dq", tensor(Gradient::query)),
      .dk = view<T, 4>("dk", tensor(Gradient::key)),
      .dv = view<T, 4>("dv", tensor(Gradient::value)),
      .dsinks = {static_cast<A*>(dsinks.data_ptr()), static_cast<std::size_t>(dsinks.numel())}};
  if (in.grad_lse) outputs.dlse = view<const A, 3>("grad_lse", *in.grad_lse);
  ParameterGradients<A> gradients{.ds = numbers_of(tensor(Gradient::s)),
                                  .db = numbers_of(tensor(Gradient::b)),
                                  .dp = numbers_of(tensor(Gradient::p)),
                                  .dslopes = numbers_of(tensor(Gradient::slopes))};
  if (wants(Gradient::c, a.scaling == ScalingKind::per_query && a.c)) {
    gradients.dc = broadcast_view<A>("c", tensor(Gradient::c), std::array{batch, heads, queries});
  }
  if (wants(Gradient::bias, a.bias.has_value())) {
    gradients.dbias = matrix_view<A>("bias", tensor(Gradient::bias), extents, a.bias_modulo);
  }
  with_learning_policies<A>(
      a, parameters, extents, gradients, [&](const auto& scaling, const auto& mask, const auto& score) {
        ssmax::attention_backward<A>(arguments, outputs, scaling, mask, score, TorchThreads{});
      });
  return result;
}

}  // namespace ssmax_torch
