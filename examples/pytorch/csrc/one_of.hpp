// A policy that is one of several, chosen at run time: the library asks it once for a query.
#pragma once

#include <ssmax/scaling.hpp>
#include <type_traits>
#include <variant>

namespace ssmax_torch {

/// A scaling that is one of S.
template <ssmax::Scaling... S>
class OneScaling {
 public:
  template <class Choice>
  OneScaling(const Choice& choice) : choice_(choice) {}

  double operator()(const ssmax::Row& row) const {
    return std::visit([&](const auto& scaling) { return static_cast<double>(scaling(row)); }, choice_);
  }
  void check(ssmax::index_t heads, ssmax::index_t largest_n) const {
    std::visit(
        [&](const auto& scaling) {
          if constexpr (requires { scaling.check(heads, largest_n); }) scaling.check(heads, largest_n);
        },
        choice_);
  }
  void accumulate(const ssmax::Row& row, double dc) const requires(ssmax::LearnableScaling<S>&&...) {
    std::visit([&](const auto& scaling) { scaling.accumulate(row, dc); }, choice_);
  }

 private:
  std::variant<S...> choice_;
};

}  // namespace ssmax_torch
