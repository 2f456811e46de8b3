// Attention, its backward, plans and caches, built header-only with -fno-exceptions -fno-rtti.

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <ssmax/ssmax.hpp>
#include <utility>
#include <vector>

namespace {

using namespace ssmax;

constexpr index_t heads = 4, kv_heads = 2, keys = 40, width = 16;
constexpr std::array<index_t, 4> q_shape{1, heads, keys, width}, k_shape{1, kv_heads, keys, width};

/// The alignment of a plan's memory.
struct alignas(64) Line {
  std::array<std::byte, 64> bytes;
};

/// Every value is 0.5, so each row of the result is, too.
template <class T>
struct Tensors {
  std::vector<T> q, k, v, out;

  Tensors() : v(kv_heads * keys * width, T(0.5F)), out(heads * keys * width) {
    for (std::size_t i = 0; i < out.size(); ++i) q.push_back(T(std::sin(static_cast<float>(i))));
    k.assign(q.begin(), q.begin() + kv_heads * keys * width);
  }
  View<const T, 4> q_view() const { return {q.data(), q_shape}; }
  View<const T, 4> k_view() const { return {k.data(), k_shape}; }
  View<const T, 4> v_view() const { return {v.data(), k_shape}; }
  View<T, 4> out_view() { return {out.data(), q_shape}; }
  bool is_right() {
    bool right = true;
    for (T& value : out)
      right = right && std::abs(static_cast<float>(std::exchange(value, T(9))) - 0.5F) < 1e-2F;
    return right;
  }
};

template <class T>
bool attends(ThreadPool& pool) {
  Tensors<T> t;
  const SSMax<float> scaling{0.4F};
  attention({.q = t.q_view(), .k = t.k_view(), .v = t.v_view(), .out = t.out_view()}, scaling, Causal{},
            pool);
  bool right = t.is_right();

  const Plan plan({.q = t.q_view(), .k = t.k_view(), .v = t.v_view()}, 1, Causal{});
  std::vector<Line> memory((plan.bytes() + sizeof(Line) - 1) / sizeof(Line));
  plan.bind({.q = t.q_view(), .k = t.k_view(), .v = t.v_view(), .out = t.out_view()}, scaling)
      .run(std::as_writable_bytes(std::span(memory)));
  right = right && t.is_right();

  KvCache<T> cache({.kv_heads = kv_heads, .width = width, .capacity = keys});
  cache.append(t.k_view(), t.v_view());
  attention({.q = t.q_view(), .keys = cache, .out = t.out_view()}, scaling, Causal{});
  right = right && t.is_right();

  PagedKvCache<T> pages({.kv_heads = kv_heads, .width = width, .page = 16, .pages = 4});
  const std::vector<index_t> ids{pages.add()}, tokens(keys, ids[0]);
  const std::array<index_t, 3> token_shape{keys, kv_heads, width}, strides{width, keys * width, 1};
  pages.append(View<const T, 3>(t.k.data(), token_shape, strides),
               View<const T, 3>(t.v.data(), token_shape, strides), tokens);
  attention({.q = t.q_view(), .keys = pages.source(ids), .out = t.out_view()}, scaling, Causal{});
  return right && t.is_right();
}

/// With equal values, the weights do not matter: dq is 0, and the sum of dv is that of dout.
bool has_gradients(ThreadPool& pool) {
  Tensors<float> t;
  std::vector<float> lse(heads * keys), dout(t.out.size(), 1), dq(t.q.size(), 9), dk(t.k.size()),
      dv(t.v.size());
  const View<float, 3> lse_view(lse.data(), {1, heads, keys});
  attention({.q = t.q_view(), .k = t.k_view(), .v = t.v_view(), .out = t.out_view(), .lse = lse_view});
  attention_backward(
      {.q = t.q_view(), .k = t.k_view(), .v = t.v_view(), .out = t.out_view(), .lse = lse_view},
      {.dout = {dout.data(), q_shape},
       .dq = {dq.data(), q_shape},
       .dk = {dk.data(), k_shape},
       .dv = {dv.data(), k_shape}},
      pool);
  float sum = 0;
  for (const float x : dv) sum += x;
  bool right = std::abs(sum - static_cast<float>(dout.size())) < 0.1F;
  for (const float x : dq) right = right && std::abs(x) < 1e-4F;
  return right;
}

}  // namespace

int main() {
  ThreadPool pool(2);
  return attends<float>(pool) && attends<bfloat16>(pool) && has_gradients(pool) ? 0 : 1;
}
