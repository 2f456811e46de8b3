// A scaling that is one of several, chosen at run time: the library asks it once for a query.
#pragma once

#include <ssmax/scaling.hpp>
#include <variant>

#include "arguments.hpp"

namespace ssmax_torch {

/// A scaling that is one of S, asked by a Row or, if one of them has to know the query, a PlacedRow.
template <class AskedBy, class... S>
class OneScaling {
 public:
  template <class Choice>
  OneScaling(const Choice& choice) : choice_(choice) {}

  double operator()(const AskedBy& row) const {
    return std::visit([&](const auto& scaling) { return static_cast<double>(scaling(row)); }, choice_);
  }
  void check(index_t heads, index_t largest_n) const {
    std::visit(
        [&](const auto& scaling) {
          if constexpr (requires { scaling.check(heads, largest_n); }) scaling.check(heads, largest_n);
        },
        choice_);
  }
  void check_shape(const ssmax::QueryShape& shape) const {
    std::visit(
        [&](const auto& scaling) {
          if constexpr (requires { scaling.check_shape(shape); }) scaling.check_shape(shape);
        },
        choice_);
  }
  void accumulate(const AskedBy& row, double dc) const requires(ssmax::LearnableScaling<S>&&...) {
    std::visit([&](const auto& scaling) { scaling.accumulate(row, dc); }, choice_);
  }

 private:
  std::variant<S...> choice_;
};

/// Scalings by size, and with them those of a position or a query: all queries that see the same keys share the
/// former.
using RowScaling = OneScaling<ssmax::Row, ssmax::Softmax, ssmax::LogN, ssmax::SSMax<double>,
                              ssmax::SizeTable<double>, ssmax::Constant>;
template <class A>
using QueryScaling =
    OneScaling<ssmax::PlacedRow, ssmax::Softmax, ssmax::LogN, ssmax::SSMax<double>, ssmax::SizeTable<double>,
               ssmax::QwenLogN, ssmax::Llama4Temperature, ssmax::MinistralTemperature,
               ssmax::InklingTemperature, ssmax::Constant, ssmax::PerQuery<A>>;

/// The same for those that learn.
using LearningRowScaling =
    OneScaling<ssmax::Row, ssmax::SSMaxGradient<double>, ssmax::SizeTableGradient<double>>;
template <class A>
using LearningQueryScaling = OneScaling<ssmax::PlacedRow, ssmax::SSMaxGradient<double>,
                                        ssmax::SizeTableGradient<double>, ssmax::PerQueryGradient<A, A>>;

inline ssmax::SSMax<double> make_ssmax(const Parameters& parameters) {
  return ssmax::SSMax<double>(std::span<const double>(parameters.s), std::span<const double>(parameters.b));
}

inline ssmax::SizeTable<double> make_size_table(const Parameters& parameters) {
  return {std::span<const double>(parameters.p), std::span<const double>(parameters.s),
          std::span<const double>(parameters.b)};
}

template <class A>
ssmax::PerQuery<A> make_per_query(const Arguments& a, const Extents& extents) {
  if (!a.c) fail("c is left out, the scaling is PerQuery");
  const auto [batch, heads, queries, keys] = extents;
  return ssmax::PerQuery<A>(broadcast_view<const A>("c", *a.c, std::array{batch, heads, queries}));
}

/// The scaling, asked about max(floor, n + offset) in place of n.
template <class S>
ssmax::AdjustedSize<S> adjusted(const Arguments& a, const S& scaling) {
  if (a.size.empty()) return ssmax::AdjustedSize<S>(scaling);
  if (a.size.size() != 2) fail("size has " + std::to_string(a.size.size()) + " numbers, must have 2");
  return ssmax::AdjustedSize<S>(scaling, a.size[0], a.size[1]);
}

/// Any is RowScaling or QueryScaling.
template <class Any, class A>
Any make_scaling(const Arguments& a, const Parameters& parameters, const Extents& extents) {
  switch (a.scaling) {
    case ScalingKind::softmax:
      return ssmax::Softmax{};
    case ScalingKind::log_n:
      return ssmax::LogN{};
    case ScalingKind::ssmax:
      return make_ssmax(parameters);
    case ScalingKind::size_table:
      return make_size_table(parameters);
    case ScalingKind::constant:
      return ssmax::Constant(scaling_number(a, 0));
    default:
      break;
  }
  if constexpr (std::is_same_v<Any, QueryScaling<A>>) {
    switch (a.scaling) {
      case ScalingKind::qwen:
        return ssmax::QwenLogN(scaling_length(a, 0));
      case ScalingKind::llama4:
        return ssmax::Llama4Temperature(scaling_number(a, 0), scaling_length(a, 1));
      case ScalingKind::ministral:
        return ssmax::MinistralTemperature(scaling_number(a, 0), scaling_length(a, 1));
      case ScalingKind::inkling:
        return ssmax::InklingTemperature(scaling_number(a, 0), scaling_length(a, 1));
      case ScalingKind::per_query:
        return make_per_query<A>(a, extents);
      default:
        break;
    }
  }
  fail("scaling is of unknown kind " + std::to_string(static_cast<std::int64_t>(a.scaling)));
}

/// Where gradients of the parameters go; those that nobody wants are empty.
template <class A>
struct ParameterGradients {
  std::span<double> ds, db, dp, dslopes;
  std::optional<ssmax::View<A, 3>> dc{};
  std::optional<ssmax::View<A, 4>> dbias{};

  bool scaling_learns() const { return !ds.empty() || !db.empty() || !dp.empty() || dc; }
};

/// Any is LearningRowScaling or LearningQueryScaling.
template <class Any, class A>
Any make_learning_scaling(const Arguments& a, const Parameters& parameters, const Extents& extents,
                          const ParameterGradients<A>& gradients) {
  if constexpr (std::is_same_v<Any, LearningQueryScaling<A>>) {
    if (gradients.dc) return make_per_query<A>(a, extents).gradient(*gradients.dc);
  }
  if (a.scaling == ScalingKind::size_table) {
    return make_size_table(parameters).gradient(gradients.dp, gradients.ds, gradients.db);
  }
  return make_ssmax(parameters).gradient(gradients.ds, gradients.db);
}

}  // namespace ssmax_torch

template <>
inline constexpr bool ssmax::by_size<ssmax_torch::RowScaling> = true;
template <>
inline constexpr bool ssmax::by_size<ssmax_torch::LearningRowScaling> = true;
