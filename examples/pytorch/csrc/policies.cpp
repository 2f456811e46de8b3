#include "policies.hpp"

#include <cmath>
#include <string>

namespace ssmax_torch {

namespace {

double number(const Arguments& a, std::size_t i) {
  if (i >= a.numbers.size()) fail("scaling lacks a number");
  return a.numbers[i];
}

index_t length(const Arguments& a, std::size_t i) {
  const double value = number(a, i);
  if (!(std::abs(value) < 0x1p62)) fail("scaling has " + std::to_string(value) + " for a length");
  return static_cast<index_t>(value);
}

std::vector<double> per_head(const char* name, const MaybeTensor& tensor, double otherwise, index_t heads) {
  const auto count = static_cast<std::size_t>(heads);
  if (!tensor) return std::vector<double>(count, otherwise);
  std::vector<double> values = doubles(name, *tensor);
  if (tensor->dim() == 0) return std::vector<double>(count, values.front());
  if (values.size() != count) {
    fail(std::string(name) + " has shape " + shape_of(*tensor) + ", heads are " + std::to_string(heads));
  }
  return values;
}

ssmax::SSMax<double> make_ssmax(const Parameters& parameters) {
  return ssmax::SSMax<double>(std::span<const double>(parameters.s), std::span<const double>(parameters.b));
}

ssmax::SizeTable<double> make_size_table(const Parameters& parameters) {
  return {std::span<const double>(parameters.p), std::span<const double>(parameters.s),
          std::span<const double>(parameters.b)};
}

}  // namespace

Parameters::Parameters(const Arguments& a, index_t heads) {
  if (a.scaling == ScalingKind::ssmax || a.scaling == ScalingKind::size_table) {
    s = per_head("s", a.s, number(a, 0), heads);
    b = per_head("b", a.b, number(a, 1), heads);
  }
  if (a.scaling == ScalingKind::size_table) {
    if (!a.p) fail("p is left out, the scaling is SizeTable");
    p = doubles("p", *a.p);
  }
  if (a.slopes) slopes = per_head("slopes", a.slopes, 0, heads);
}

AnyScaling make_scaling(const Arguments& a, const Parameters& parameters) {
  switch (a.scaling) {
    case ScalingKind::softmax:
      return ssmax::Softmax{};
    case ScalingKind::log_n:
      return ssmax::LogN{};
    case ScalingKind::ssmax:
      return make_ssmax(parameters);
    case ScalingKind::size_table:
      return make_size_table(parameters);
    case ScalingKind::qwen:
      return ssmax::QwenLogN(length(a, 0));
    case ScalingKind::llama4:
      return ssmax::Llama4Temperature(number(a, 0), length(a, 1));
    case ScalingKind::ministral:
      return ssmax::MinistralTemperature(number(a, 0), length(a, 1));
    case ScalingKind::constant:
      return ssmax::Constant(number(a, 0));
  }
  fail("scaling is of unknown kind " + std::to_string(static_cast<std::int64_t>(a.scaling)));
}

LearningScaling make_scaling(const Arguments& a, const Parameters& parameters,
                             const ParameterGradients& gradients) {
  if (a.scaling == ScalingKind::size_table) {
    return make_size_table(parameters).gradient(gradients.dp, gradients.ds, gradients.db);
  }
  if (a.scaling == ScalingKind::ssmax) return make_ssmax(parameters).gradient(gradients.ds, gradients.db);
  fail("scaling has nothing to learn");
}

Ranges make_ranges(const Arguments& a) {
  Ranges result;
  result.causal = a.causal;
  if (!a.window.empty()) {
    if (a.window.size() != 2) fail("window has " + std::to_string(a.window.size()) + " numbers, must have 2");
    result.window.emplace(a.window[0], a.window[1]);
  }
  if (a.prefix) result.prefix.emplace(integers("prefix", a.prefix));
  if (a.lengths) result.lengths.emplace(integers("lengths", a.lengths));
  return result;
}

std::optional<ssmax::Documents> make_documents(const Arguments& a) {
  if (!a.cu_queries && !a.cu_keys) return {};
  if (!a.cu_queries || !a.cu_keys) fail("cu_seqlens of queries and of keys are given together");
  // What a query of a document sees besides is the affair of the other masks.
  return ssmax::Documents(integers("cu_seqlens", a.cu_queries), integers("cu_seqlens_keys", a.cu_keys),
                          false);
}

MaybeSoftcap make_softcap(const Arguments& a) {
  MaybeSoftcap result;
  if (a.softcap != 0) result.cap.emplace(a.softcap);
  return result;
}

}  // namespace ssmax_torch
