// Attention is bit-identical for [batch, position, head, channel], columns of a packed qkv and shared keys.

#include <algorithm>
#include <array>
#include <ssmax/ssmax.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_problem.hpp"
#include "catch.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"

namespace attention_problem::attention_packed_test {

/// A tensor [batch, head, position, channel] with any strides. `between` fills the gaps.
template <class T>
struct Tensor {
  using Extents = std::array<index_t, 4>;

  Extents extents{}, strides{};
  index_t offset = 0;
  std::vector<T> storage;

  Tensor(const Extents& e, const Extents& s, index_t before, T between)
      : extents(e), strides(s), offset(before) {
    index_t last = 0;
    for (std::size_t i = 0; i < 4; ++i) last += std::max<index_t>(extents[i] - 1, 0) * strides[i];
    storage.assign(static_cast<std::size_t>(offset + last + 9), between);
  }
  explicit Tensor(const Extents& e) : Tensor(e, View<T, 4>(nullptr, e).empty() ? e : packed(e), 0, T{0}) {}

  static Extents packed(const Extents& e) { return {e[1] * e[2] * e[3], e[2] * e[3], e[3], 1}; }
  View<T, 4> view() { return {storage.data() + offset, extents, strides}; }

  template <class Visit>
  void for_each(Visit visit) {
    const View<T, 4> all = view();
    for (index_t b = 0; b < extents[0]; ++b) {
      for (index_t h = 0; h < extents[1]; ++h) {
        for (index_t p = 0; p < extents[2]; ++p) {
          for (index_t c = 0; c < extents[3]; ++c) visit(all(b, h, p, c));
        }
      }
    }
  }
  void fill(const std::vector<T>& values) {
    auto next = values.begin();
    for_each([&](T& element) { element = *next++; });
  }
  std::vector<T> values() {
    std::vector<T> result;
    for_each([&](T& element) { result.push_back(element); });
    return result;
  }
  bool only_elements_differ_from(T value) {
    Tensor copy = *this;
    copy.for_each([&](T& element) { element = value; });
    return std::ranges::all_of(copy.storage, [&](T element) { return element == value; });
  }
};

/// Checks that other layouts of the tensors give bit-identical results and leave the gaps unchanged.
template <class T>
void check_layout(const Problem<T>& problem, Tensor<T> q, Tensor<T> k, Tensor<T> v, Tensor<T> out) {
  const Shape& s = problem.shape;
  q.fill(problem.q);
  k.fill(problem.k);
  v.fill(problem.v);
  const T sentinel = out.storage.front();
  std::vector<T> lse(static_cast<std::size_t>(s.batch * s.queries * s.heads));
  const std::array<index_t, 3> lse_extents{s.batch, s.heads, s.queries};
  const View<T, 3> by_query(lse.data(), lse_extents, {s.queries * s.heads, 1, s.heads});
  const View<T, 3> transposed(lse.data(), lse_extents);
  const Output<T> expected = run(problem, SSMax<T>{T(0.4)}, Causal{});
  ssmax::attention<T>({.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = transposed},
                      SSMax<T>{T(0.4)}, Causal{});
  CHECK(same_bits(out.values(), expected.out));
  CHECK(out.only_elements_differ_from(sentinel));
  CHECK(same_bits(lse, expected.lse));

  // The last stride of lse must be 1 as well; without lse the result is the same.
  CHECK_THROWS_AS(
      ssmax::attention<T>({.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = by_query}),
      std::invalid_argument);
  out.for_each([](T& element) { element = T{0}; });
  ssmax::attention<T>({.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view()}, SSMax<T>{T(0.4)},
                      Causal{});
  CHECK(same_bits(out.values(), expected.out));
}

template <class T>
void check_layouts() {
  constexpr T gap = nan<T>, sentinel = T{-1234};
  const auto by_position = [](index_t batch, index_t heads, index_t positions, index_t channels, index_t pad,
                              T between) {
    const index_t pitch = heads * channels + pad;
    return Tensor<T>({batch, heads, positions, channels}, {positions * pitch, channels, pitch, 1}, 3,
                     between);
  };
  const Shape s{2, 4, 2, 37, 290, 6, 5};
  const Problem<T> problem(s);
  check_layout(problem, by_position(s.batch, s.heads, s.queries, s.d, 0, gap),
               by_position(s.batch, s.kv_heads, s.keys, s.d, 0, gap),
               by_position(s.batch, s.kv_heads, s.keys, s.dv, 0, gap),
               by_position(s.batch, s.heads, s.queries, s.dv, 0, sentinel));
  check_layout(problem, by_position(s.batch, s.heads, s.queries, s.d, 5, gap),
               by_position(s.batch, s.kv_heads, s.keys, s.d, 1, gap),
               by_position(s.batch, s.kv_heads, s.keys, s.dv, 7, gap),
               by_position(s.batch, s.heads, s.queries, s.dv, 2, sentinel));
}

TEST_CASE("[batch, position, head, channel] with gaps is bit-identical", "[attention]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    check_layouts<float>();
    check_layouts<double>();
  });
}

TEST_CASE("columns of a packed qkv are bit-identical", "[attention]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    const Shape s{2, 4, 2, 270, 270, 6, 5};
    const Problem<float> problem(s);
    const index_t q_width = s.heads * s.d, k_width = s.kv_heads * s.d;
    const index_t pitch = q_width + k_width + s.kv_heads * s.dv;
    Tensor<float> q({s.batch, s.heads, s.queries, s.d}, {s.queries * pitch, s.d, pitch, 1}, 0, 0);
    q.storage.resize(static_cast<std::size_t>(s.batch * s.queries * pitch));
    Tensor<float> k = q, v = q;
    k.extents = {s.batch, s.kv_heads, s.keys, s.d};
    k.offset = q_width;
    k.fill(problem.k);
    v.extents = {s.batch, s.kv_heads, s.keys, s.dv};
    v.strides[1] = s.dv;
    v.offset = q_width + k_width;
    v.storage = k.storage;
    v.fill(problem.v);
    q.storage = v.storage;
    q.fill(problem.q);
    const float* const packed = q.storage.data();
    std::vector<float> out(static_cast<std::size_t>(problem.rows() * s.dv));
    ssmax::attention<float>({.q = q.view(),
                             .k = {packed + k.offset, k.extents, k.strides},
                             .v = {packed + v.offset, v.extents, v.strides},
                             .out = {out.data(), {s.batch, s.heads, s.queries, s.dv}}},
                            Softmax{}, Causal{});
    CHECK(same_bits(out, run(problem, Softmax{}, Causal{}).out));
  });
}

TEST_CASE("a batch stride of 0 shares the keys", "[attention]") {
  const Problem<float> problem({3, 2, 1, 5, 40, 8, 4});
  Problem<float> copied = problem;
  for (index_t batch = 1; batch < 3; ++batch) {
    std::copy_n(problem.k.begin(), 40 * 8, copied.k.begin() + batch * 40 * 8);
    std::copy_n(problem.v.begin(), 40 * 4, copied.v.begin() + batch * 40 * 4);
  }
  std::vector<float> out(3 * 2 * 5 * 4);
  ssmax::attention<float>({.q = problem.q_view(),
                           .k = {problem.k.data(), {3, 1, 40, 8}, {0, 0, 8, 1}},
                           .v = {problem.v.data(), {3, 1, 40, 4}, {0, 0, 4, 1}},
                           .out = {out.data(), {3, 2, 5, 4}}});
  CHECK(same_bits(out, run(copied, Softmax{}, Full{}).out));
}

}  // namespace attention_problem::attention_packed_test
