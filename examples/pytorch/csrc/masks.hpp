// Masks that are several of the library's, joined at run time.
#pragma once

#include <algorithm>
#include <limits>
#include <ssmax/mask.hpp>
#include <variant>

#include "arguments.hpp"

namespace ssmax_torch {

/// Masks that are ranges of keys, any of them together.
struct Ranges {
  bool causal = false;
  std::optional<ssmax::SlidingWindow<>> window;
  std::optional<ssmax::Chunks> chunks;
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
    if (chunks) meet(*chunks);
    if (prefix) meet(*prefix);
    if (lengths) meet(*lengths);
    return {all.begin, std::max(all.begin, all.end)};
  }
  void check(const ssmax::QueryShape& shape) const {
    if (window) window->check(shape);
    if (chunks) chunks->check(shape);
    if (prefix) prefix->check(shape);
    if (lengths) lengths->check(shape);
  }
};

/// A mask that defines positions.
struct Placed {
  static constexpr bool refuses_lengths = true;

  std::variant<ssmax::CausalTopLeft, ssmax::LeftPadding, ssmax::Documents> mask;

  ssmax::KeyRange keys(const ssmax::Query& query) const {
    return std::visit([&](const auto& m) { return m.keys(query); }, mask);
  }
  index_t query_position(const ssmax::Query& query) const {
    return std::visit([&](const auto& m) { return m.query_position(query); }, mask);
  }
  index_t key_position(const ssmax::Query& query, index_t key) const {
    return std::visit(
        [&](const auto& m) {
          if constexpr (requires { m.key_position(query, key); }) return m.key_position(query, key);
          return key;
        },
        mask);
  }
  ssmax::Query aligned(const ssmax::Query& query) const {
    return std::visit(
        [&](const auto& m) {
          if constexpr (requires { m.aligned(query); }) return m.aligned(query);
          return query;
        },
        mask);
  }
  void check(const ssmax::QueryShape& shape) const {
    const auto check_one = [&](const auto& m) {
      if constexpr (requires { m.check(shape); }) m.check(shape);
    };
    std::visit(check_one, mask);
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

/// A view of a matrix that broadcasts to [batch, heads, queries, keys]. With `modulo`, its number of heads stays.
template <class T>
ssmax::View<T, 4> matrix_view(const char* name, const Tensor& tensor, Extents extents, bool modulo) {
  if (modulo && tensor.dim() >= 3) extents[1] = tensor.size(tensor.dim() - 3);
  return broadcast_view<T>(name, tensor, extents);
}

inline ssmax::HeadsOfMatrix heads_of_matrix(bool modulo) {
  return modulo ? ssmax::HeadsOfMatrix::modulo : ssmax::HeadsOfMatrix::each;
}

/// Keys that a matrix shows: one of bool, and one of numbers that hides where it is -inf or the lowest number.
template <class A>
struct Matrices {
  std::optional<ssmax::MatrixMask<bool>> visible;
  std::optional<ssmax::shared::QueryMatrix<const A>> additive;

  ssmax::KeyRange keys(const ssmax::Query& query) const { return {0, query.shape.keys}; }
  bool sees(const ssmax::Query& query, index_t key) const {
    return (!visible || visible->sees(query, key)) && (!additive || !((*additive)(query, key) <= lowest));
  }
  void check(const ssmax::QueryShape& shape) const {
    if (visible) visible->check(shape);
    if (additive) additive->check("MatrixMask", "matrix", shape);
  }

  static constexpr A lowest = std::numeric_limits<A>::lowest();
};

/// Throws if a prefix is negative, or a length is negative or above the number of keys.
Ranges make_ranges(const Arguments& a, index_t keys);
/// Throws for two masks that define positions.
std::optional<Placed> make_placed(const Arguments& a);

/// Calls f with the mask. There are four types of them, so that ranges are not asked key by key and
/// positions are not asked where they are the keys' own.
template <class A, class F>
void with_mask(const Arguments& a, const Extents& extents, const F& f) {
  const Ranges ranges = make_ranges(a, extents[3]);
  const std::optional<Placed> placed = make_placed(a);
  Matrices<A> matrices;
  if (a.visible) {
    matrices.visible.emplace(matrix_view<const bool>("mask", *a.visible, extents, a.visible_modulo),
                             heads_of_matrix(a.visible_modulo));
  }
  if (a.bias && a.bias_hides) {
    matrices.additive.emplace(matrix_view<const A>("mask", *a.bias, extents, a.bias_modulo),
                              heads_of_matrix(a.bias_modulo));
  }
  if (matrices.visible || matrices.additive) {
    // Rare with documents: without them, one document has everything.
    const std::array<index_t, 2> queries{0, extents[2]}, keys{0, extents[3]};
    const Placed all = placed.value_or(Placed{ssmax::Documents(queries, keys, false)});
    return f(ssmax::Both(ssmax::Both(ranges, all), matrices));
  }
  if (placed) return f(ssmax::Both(ranges, *placed));
  // A multiplier for each query or position rules out the short way of rows that see the same keys.
  if (ranges.causal || ranges.window || ranges.chunks || ranges.prefix || !depends_on_size_only(a.scaling)) {
    return f(ranges);
  }
  f(SameKeys{ranges.lengths});
}

}  // namespace ssmax_torch

template <>
inline constexpr bool ssmax::same_keys<ssmax_torch::SameKeys> = true;
