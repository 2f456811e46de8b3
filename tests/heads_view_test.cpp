// Views by heads of packed tensors: every element in its place, the gradient written through them, and refusals.
#include <numeric>

#include "reference.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace heads_view_test {

using namespace ssmax;

std::vector<float> numbered(index_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 0.0F);
  return values;
}

/// The view holds what `packed(batch, token, head, channel)` has at each place.
template <class T, class F>
bool holds(const View<T, 4>& view, const std::array<index_t, 4>& extents, const F& packed) {
  bool same = true;
  for (int i = 0; i < 4; ++i) same = same && view.extent(i) == extents[static_cast<std::size_t>(i)];
  if (!same) return false;
  reference::for_each_index(extents, [&](index_t b, index_t h, index_t t, index_t c) {
    same = same && view(b, h, t, c) == packed(b, t, h, c);
  });
  return same && view.stride(3) == 1;
}

TEST_CASE("heads_view has the heads of a packed tensor in front of its tokens", "[view]") {
  constexpr index_t batch = 2, tokens = 3, heads = 4, d = 5;
  const std::vector<float> x = numbered(batch * tokens * heads * d);
  const auto packed = [&](index_t b, index_t t, index_t h, index_t c) {
    return static_cast<float>(((b * tokens + t) * heads + h) * d + c);
  };
  CHECK(holds(heads_view(View<const float, 4>(x.data(), {batch, tokens, heads, d})),
              {batch, heads, tokens, d}, packed));
  CHECK(holds(heads_view(View<const float, 3>(x.data(), {batch, tokens, heads * d}), heads),
              {batch, heads, tokens, d}, packed));
  CHECK(holds(heads_view(View<const float, 2>(x.data(), {tokens, heads * d}), heads), {1, heads, tokens, d},
              packed));
  // Rows that lie apart, and one head.
  const View<const float, 2> wide(x.data(), {tokens, d}, {heads * d, 1});
  CHECK(holds(heads_view(wide, 1), {1, 1, tokens, d}, packed));
}

TEST_CASE("qkv_views has q, k and v of one packed tensor", "[view]") {
  constexpr index_t batch = 2, tokens = 3, d = 5;
  for (const auto& pair : {std::pair<index_t, index_t>{4, 4}, {4, 2}, {6, 1}, {1, 1}}) {
    const index_t heads = pair.first, kv_heads = pair.second;
    CAPTURE(heads, kv_heads);
    const index_t channels = (heads + 2 * kv_heads) * d;
    std::vector<float> x = numbered(batch * tokens * channels);
    const auto from = [&](index_t first) {
      return [&, first](index_t b, index_t t, index_t h, index_t c) {
        return static_cast<float>((b * tokens + t) * channels + (first + h) * d + c);
      };
    };
    const auto check = [&](const auto& views, index_t entries) {
      CHECK(holds(views.q, {entries, heads, tokens, d}, from(0)));
      CHECK(holds(views.k, {entries, kv_heads, tokens, d}, from(heads)));
      CHECK(holds(views.v, {entries, kv_heads, tokens, d}, from(heads + kv_heads)));
    };
    check(qkv_views(View<const float, 3>(x.data(), {batch, tokens, channels}), heads, kv_heads), batch);
    check(qkv_views(View<float, 2>(x.data(), {tokens, channels}), heads, kv_heads), 1);
    if (heads == kv_heads) {
      check(qkv_views(View<float, 3>(x.data(), {batch, tokens, channels}), heads), batch);
      check(qkv_views(View<const float, 2>(x.data(), {tokens, channels}), heads), 1);
    }
  }
}

TEST_CASE("attention of packed views is bit-identical to attention of copied tensors", "[view][attention]") {
  constexpr index_t batch = 2, tokens = 7, heads = 4, kv_heads = 2, d = 8,
                    channels = (heads + 2 * kv_heads) * d;
  std::vector<float> qkv = numbered(batch * tokens * channels);
  for (float& value : qkv) value = std::sin(value);
  const auto views = qkv_views(View<const float, 3>(qkv.data(), {batch, tokens, channels}), heads, kv_heads);
  const auto copied = [](const View<const float, 4>& x) {
    std::vector<float> copy;
    for (index_t b = 0; b < x.extent(0); ++b)
      for (index_t h = 0; h < x.extent(1); ++h)
        for (index_t t = 0; t < x.extent(2); ++t) copy.insert(copy.end(), &x(b, h, t, 0), &x(b, h, t, 0) + d);
    return copy;
  };
  const std::vector<float> q = copied(views.q), k = copied(views.k), v = copied(views.v);
  std::vector<float> packed_out(q.size()), out(q.size());
  const ssmax::SSMax<float> scaling{0.43F};
  const View<float, 4> result =
      heads_view(View<float, 3>(packed_out.data(), {batch, tokens, heads * d}), heads);
  ssmax::attention({.q = views.q, .k = views.k, .v = views.v, .out = result}, scaling, ssmax::Causal{});
  ssmax::attention({.q = {q.data(), {batch, heads, tokens, d}},
                    .k = {k.data(), {batch, kv_heads, tokens, d}},
                    .v = {v.data(), {batch, kv_heads, tokens, d}},
                    .out = {out.data(), {batch, heads, tokens, d}}},
                   scaling, ssmax::Causal{});
  CHECK(copied(result) == out);
}

TEST_CASE("views of no tokens are null where the tensor is null", "[view]") {
  const auto [q, k, v] = qkv_views(View<float, 2>(nullptr, {0, 24}), 2, 1);
  for (const View<float, 4>& view : {q, k, v}) {
    CHECK(view.data_handle() == nullptr);
    CHECK(view.extent(2) == 0);
  }
}

TEST_CASE("heads_view and qkv_views name the argument and both extents", "[view][errors]") {
  std::vector<float> x(96);
  const View<float, 2> rows(x.data(), {4, 24});
  const View<float, 3> entries(x.data(), {2, 2, 24});
  check_refused({"ssmax::heads_view: heads are 0, must be at least 1"}, [&] { (void)heads_view(rows, 0); });
  check_refused({"ssmax::heads_view: x has 24 channels", "multiple of heads, 5"},
                [&] { (void)heads_view(rows, 5); });
  check_refused({"x has 24 channels", "heads, 48"}, [&] { (void)heads_view(entries, 48); });
  check_refused({"x has 0 channels", "heads, 2"}, [&] {
    (void)heads_view(View<float, 2>(x.data(), {4, 0}), 2);
  });
  check_refused({"ssmax::heads_view: x has a last stride of 4, must be 1"}, [&] {
    (void)heads_view(View<float, 2>(x.data(), {4, 8}, {1, 4}), 2);
  });
  check_refused({"x has a last stride of 2, must be 1"}, [&] {
    (void)heads_view(View<float, 4>(x.data(), {2, 2, 2, 8}, {48, 24, 12, 2}));
  });
  check_refused({"ssmax::qkv_views: kv_heads are 0, must be at least 1"},
                [&] { (void)qkv_views(rows, 4, 0); });
  check_refused({"ssmax::qkv_views: heads are 0, must be at least 1"}, [&] { (void)qkv_views(rows, 0, 1); });
  check_refused({"heads are 4, must be a multiple of kv_heads, 3"}, [&] { (void)qkv_views(rows, 4, 3); });
  check_refused({"qkv has 24 channels", "heads + 2·kv_heads, 15"}, [&] { (void)qkv_views(rows, 5); });
  check_refused({"qkv has 24 channels", "heads + 2·kv_heads, 5"}, [&] { (void)qkv_views(entries, 3, 1); });
  constexpr index_t most = std::numeric_limits<index_t>::max();
  check_refused({"qkv has 24 channels", "heads, " + std::to_string(most)},
                [&] { (void)qkv_views(rows, most); });
}

}  // namespace heads_view_test
