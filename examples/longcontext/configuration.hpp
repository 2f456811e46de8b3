// The paper's six configurations, and the table of sizes that its Figure 2 was trained with. Each
// configuration is a scaling of the same model, with the scaling's parameters.
#pragma once

#include <array>
#include <span>
#include <ssmax/scaling.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>

namespace longcontext {

enum class Form { softmax, ssmax, log_n, ssmax_bias, size_table };

// The start of training: random weights, or weights trained with Softmax.
enum class Origin { scratch, replaced, switched };

struct Configuration {
  std::string_view name;  // part of file names
  std::string_view title;
  Form form;
  Origin origin;
};

inline constexpr std::array kConfigurations{
    Configuration{"a", "(a) Softmax", Form::softmax, Origin::scratch},
    Configuration{"b", "(b) SSMax", Form::ssmax, Origin::scratch},
    Configuration{"c", "(c) SSMax without s", Form::log_n, Origin::scratch},
    Configuration{"d", "(d) SSMax with b", Form::ssmax_bias, Origin::scratch},
    Configuration{"e", "(e) replaced after training", Form::ssmax, Origin::replaced},
    Configuration{"f", "(f) switched in training", Form::ssmax, Origin::switched},
    Configuration{"table", "trained p_n", Form::size_table, Origin::scratch}};

inline const Configuration& configuration(std::string_view name) {
  for (const auto& each : kConfigurations) {
    if (each.name == name) return each;
  }
  throw std::invalid_argument("there is no configuration '" + std::string(name) +
                              "'; there are a, b, c, d, e, f and table");
}

// The parameters of a layer's scaling, or their gradients. The form determines which exist: s and b per
// head, p per size n (shared by all layers).
template <class T>
struct ScalingParameters {
  std::span<T> s, b, p;
};

using Scaling = std::variant<ssmax::Softmax, ssmax::SSMax<float>, ssmax::LogN, ssmax::SizeTable<float>>;
using ScalingGradient =
    std::variant<ssmax::Softmax, ssmax::SSMaxGradient<float>, ssmax::LogN, ssmax::SizeTableGradient<float>>;

inline Scaling make_scaling(Form form, const ScalingParameters<const float>& learnt) {
  switch (form) {
    case Form::softmax:
      return ssmax::Softmax{};
    case Form::ssmax:
      return ssmax::SSMax<float>{learnt.s};
    case Form::log_n:
      return ssmax::LogN{};
    case Form::ssmax_bias:
      return ssmax::SSMax<float>{learnt.s, learnt.b};
    case Form::size_table:
      return ssmax::SizeTable<float>{learnt.p, learnt.s, learnt.b};
  }
  throw std::logic_error("no such form");
}

inline ScalingGradient make_scaling_gradient(Form form, const ScalingParameters<const float>& learnt,
                                             const ScalingParameters<float>& gradient) {
  switch (form) {
    case Form::softmax:
      return ssmax::Softmax{};
    case Form::ssmax:
      return ssmax::SSMax<float>{learnt.s}.gradient(gradient.s);
    case Form::log_n:
      return ssmax::LogN{};
    case Form::ssmax_bias:
      return ssmax::SSMax<float>{learnt.s, learnt.b}.gradient(gradient.s, gradient.b);
    case Form::size_table:
      return ssmax::SizeTable<float>{learnt.p, learnt.s, learnt.b}.gradient(gradient.p, gradient.s,
                                                                            gradient.b);
  }
  throw std::logic_error("no such form");
}

}  // namespace longcontext
