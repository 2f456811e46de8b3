// Extreme extents, strides, counts and threads. Calls throw and name the argument, or do what is documented. The
// undefined-behaviour sanitizer checks that integers do not overflow.

#include <ssmax/detail/memory/arena.hpp>

#include "attention_backward_problem.hpp"
#include "refusal.hpp"
#include "small_call.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace attention_problem::backward_problem::arguments_test {

using small_call::Call;
using test_executors::Reverse;

constexpr index_t most = std::numeric_limits<index_t>::max(), least = std::numeric_limits<index_t>::min();
/// 2^32 (2^16): its square wraps to 0.
constexpr index_t root = index_t{1} << (4 * sizeof(index_t));

std::string text(index_t number) { return std::to_string(number); }

// ---- Extents and strides ----------------------------------------------------------------------------------

TEST_CASE("a view is empty only if an extent is 0, not if the product overflows", "[arguments]") {
  float x = 0;
  CHECK_FALSE(View<float, 2>(&x, {root, root}).empty());
  CHECK_FALSE(View<float, 4>(&x, {1, root, root, 4}).empty());
  CHECK(View<float, 3>(&x, {root, root, 0}).empty());
  CHECK(View<float, 1>{}.empty());
}

TEST_CASE("row functions throw for extents whose product overflows", "[arguments]") {
  std::vector<float> z(8, 1), y(8, -7);
  const View<const float, 2> square(z.data(), {root, root}), of_zeros(z.data(), {root, root}, {0, 1}),
      long_row(z.data(), {1, most});
  const View<float, 2> out(y.data(), {root, root});
  check_refused({"softmax: logits", text(root)}, [&] { ssmax::softmax(square, out); });
  check_refused({"log_softmax: logits", text(root)}, [&] { ssmax::log_softmax(of_zeros, out); });
  check_refused({"logsumexp: logits", text(root)},
                [&] { ssmax::logsumexp(square, View<float, 1>(y.data(), {root})); });
  check_refused({"cross_entropy: logits", text(root)}, [&] { ssmax::cross_entropy<float>(square, {}); });
  check_refused({"logits has extent " + text(most)}, [&] {
    ssmax::softmax(long_row, View<float, 2>(y.data(), {1, most}));
  });
  // With an extent of 0 no element is read, but the rows are counted.
  const View<const float, 4> no_keys(z.data(), {root, root, 4, 0});
  check_refused({"logits", text(root)}, [&] {
    ssmax::softmax(no_keys, View<float, 4>(y.data(), {root, root, 4, 0}));
  });
  CHECK(std::ranges::count(y, -7.0F) == 8);
}

TEST_CASE("row functions throw for strides whose byte offsets overflow", "[arguments]") {
  std::vector<float> z(8, 1), y(8, -7);
  const View<float, 2> out(y.data(), {2, 4});
  for (const index_t stride : {most, least, least + 1, most / 4, -(most / 4), most / 8 * 5}) {
    const View<const float, 2> logits(z.data(), {2, 4}, {stride, 1});
    check_refused({"logits has extent 2 and stride " + text(stride)}, [&] { ssmax::softmax(logits, out); });
    check_refused({"out has extent 2 and stride " + text(stride)}, [&] {
      ssmax::softmax(View<const float, 2>(z.data(), {2, 4}), View<float, 2>(y.data(), {2, 4}, {stride, 1}));
    });
    const View<const float, 2> one(z.data(), {1, 4}, {stride, 1});
    check_refused({"logits has extent 1 and stride " + text(stride)}, [&] {
      ssmax::softmax(one, View<float, 2>(y.data(), {1, 4}));
    });
    const View<const float, 1> one_class(z.data(), {1}, {stride});
    check_refused({"logits", text(stride)},
                  [&] { ssmax::softmax(one_class, View<float, 1>(y.data(), {1})); });
  }
  // Each reach fits, but their sum overflows.
  const View<const float, 3> three(z.data(), {3, 3, 2}, {most / 12, -(most / 12), 1});
  check_refused({"logits has extent 3 and stride -"}, [&] {
    ssmax::softmax(three, View<float, 3>(y.data(), {3, 3, 2}));
  });
  CHECK(std::ranges::count(y, -7.0F) == 8);
}

TEST_CASE("row functions accept negative strides and strides of 0", "[arguments]") {
  std::vector<float> z{1, 2, 3, 4}, y(4, -7), w(4);
  ssmax::softmax(View<const float, 2>(z.data() + 2, {2, 2}, {-2, 1}), View<float, 2>(y.data(), {2, 2}));
  ssmax::softmax(View<const float, 2>(z.data(), {2, 2}, {0, 1}),
                 View<float, 2>(w.data() + 2, {2, 2}, {-2, 1}));
  CHECK(std::abs(y[0] + y[1] - 1) < 1e-6F);
  CHECK(w == std::vector<float>{y[2], y[3], y[2], y[3]});
}

TEST_CASE("attention throws for overflowing extents and strides", "[attention][arguments]") {
  Call call;
  for (std::size_t i = 0; i < 4; ++i) {
    Call of_q, of_k, of_v, of_out;
    std::array<index_t, 4> extents{root, root, root, root};
    of_q.q = {call.in.data(), extents};
    of_q.refuses({"attention: q has extent " + text(root)});
    of_k.k = {call.in.data(), extents, {0, 0, 0, 1}};
    of_k.refuses({"attention: k has extent " + text(root)});
    extents[i] = 0;
    of_v.v = {call.in.data(), extents};
    of_v.refuses({"attention: v has extent " + text(root)});
    if (i == 3) continue;
    for (const index_t stride : {most, least, most / 8 * 5}) {
      std::array<index_t, 4> strides{16, 8, 4, 1};
      strides[i] = stride;
      of_out.out = {of_out.to.data(), {1, 2, 2, 4}, strides};
      of_out.refuses({"out", "stride " + text(stride), "dimension " + text(static_cast<index_t>(i))});
    }
  }
  call.lse = {call.to.data(), {root, root, 1}};
  call.refuses({"lse has extent " + text(root)});
}

TEST_CASE("masks and biases throw for overflowing strides", "[attention][arguments]") {
  Call call;
  const View<const float, 4> bias(call.in.data(), {1, 2, 2, 3}, {0, most / 2, 3, 1});
  check_refused({"Bias: bias has extent 2 and stride " + text(most / 2)}, [&] {
    ssmax::attention({.q = call.q, .k = call.k, .v = call.v, .out = call.out}, ssmax::Bias(bias));
  });
  const bool yes[12]{};
  const ssmax::MatrixMask mask(View<const bool, 4>(yes, {1, 2, 2, 3}, {0, least, 3, 1}));
  check_refused({"MatrixMask: matrix", "stride " + text(least)},
                [&] { ssmax::attention({.q = call.q, .k = call.k, .v = call.v, .out = call.out}, mask); });
}

TEST_CASE("a window works on the largest possible number of keys with stride 0", "[attention][arguments]") {
  // The largest number of keys, all at one address: no offset may overflow.
  const index_t keys = most / 2 / 8;
  std::vector<float> q(8, 1), k(4, 1), v{1, 2, 3, 4}, out(8), lse(2);
  const View<const float, 4> ks(k.data(), {1, 2, keys, 4}, {0, 0, 0, 1}),
      vs(v.data(), {1, 2, keys, 4}, {0, 0, 0, 1});
  for (const index_t threads : {index_t{1}, index_t{3}, most}) {
    std::ranges::fill(out, -7.0F);
    ssmax::attention({.q = {q.data(), {1, 2, 1, 4}},
                      .k = ks,
                      .v = vs,
                      .out = {out.data(), {1, 2, 1, 4}},
                      .lse = {lse.data(), {1, 2, 1}},
                      .scale = 0},
                     ssmax::SlidingWindow(7), Reverse{threads});
    CHECK(out == std::vector<float>{1, 2, 3, 4, 1, 2, 3, 4});
    CHECK(std::abs(lse[0] - std::log(8.0F)) < 1e-6F);
  }
}

TEST_CASE("tensors without elements need no memory for their extents", "[attention][arguments]") {
  // No queries and no keys, with an extreme width.
  const index_t width = most / 2;
  const View<float, 4> none(nullptr, {1, 1, 0, width});
  const View<float, 3> no_lse(nullptr, {1, 1, 0});
  CHECK_NOTHROW(ssmax::attention({.q = none, .k = none, .v = none, .out = none, .lse = no_lse}));
  CHECK_NOTHROW(ssmax::attention_backward({.q = none, .k = none, .v = none, .out = none, .lse = no_lse},
                                          {.dout = none, .dq = none, .dk = none, .dv = none}));
}

// ---- Sizes ------------------------------------------------------------------------------------------------

TEST_CASE("Rope throws for tables whose size overflows", "[arguments]") {
  for (const index_t positions :
       {most, most / 2, index_t{1} << (8 * sizeof(index_t) - 2), most / 8 / 64 + 1}) {
    check_refused({"Rope: positions are " + text(positions), "width is 64"},
                  [&] { Rope<float>({.width = 64}, positions); });
    check_refused({"Rope: positions are " + text(positions), "width is 64"},
                  [&] { Rope<double>({.width = 64, .pairing = ssmax::Pairing::interleaved}, positions); });
  }
  for (const volatile index_t width : {most - 1, most / 2 + 1}) {
    check_refused({"Rope", "width is " + text(width)}, [&] { Rope<float>({.width = width}, 1); });
  }
  check_refused({"Rope", "first_position"}, [&] { Rope<float>({.width = 2, .first_position = most}, 1); });
  check_refused({"Rope", "first_position"}, [&] { Rope<float>({.width = 2, .first_position = least}, 1); });
}

TEST_CASE("Alibi::slopes and KvCache throw for invalid sizes", "[arguments]") {
  for (const volatile index_t heads : {most, most / 8 + 1, least, index_t{-1}}) {
    check_refused({"Alibi::slopes: heads are " + text(heads)},
                  [&] { static_cast<void>(ssmax::Alibi::slopes(heads)); });
  }
  check_refused({"KvCache: capacity is " + text(root)},
                [] { KvCache<float>({.kv_heads = root, .width = root, .capacity = root}); });
  check_refused({"KvCache", text(most)},
                [] { KvCache<float>({.batch = 0, .width = most, .capacity = most}); });
}

TEST_CASE("a ring throws before its positions overflow", "[arguments]") {
  KvCache<float> ring({.width = 1, .capacity = 2, .ring = true});
  float x = 1;
  const View<const float, 4> many(&x, {1, 1, most / 2, 1}, {0, 0, 0, 1}), one(&x, {1, 1, 1, 1});
  ring.append(many, many);
  CHECK(ring.length(0) == most / 2);
  check_refused({"length " + text(most / 2 + 1), text(most / 2)}, [&] { ring.append(one, one); });
  check_refused({"at most " + text(most / 2)}, [&] { ring.append(many, many); });
  CHECK(ring.length(0) == most / 2);
}

TEST_CASE("a state throws for an overflowing number of keys", "[attention][arguments]") {
  Call call;
  const AttentionState<float> state{
      {call.to.data(), {1, 2, 2}}, {call.to.data() + 8, {1, 2, 2}}, {call.to.data() + 16, {1, 2, 2, 4}}};
  check_refused({"attention: all_keys are " + text(most), text(most / 2)}, [&] {
    ssmax::attention(
        {.q = call.q, .k = call.k, .v = call.v, .state = state, .first_key = most - 3, .all_keys = most});
  });
  CHECK_NOTHROW(ssmax::attention({.q = call.q,
                                  .k = call.k,
                                  .v = call.v,
                                  .state = state,
                                  .first_key = most / 2 - 3,
                                  .all_keys = most / 2}));
}

TEST_CASE("Workspace throws for an overflowing number of bytes", "[arguments]") {
  ssmax::Workspace workspace;
  check_refused({"more than"}, [&] { workspace.reserve(static_cast<std::size_t>(most) + 1); });
  check_refused({"more than"}, [&] { workspace.reserve(static_cast<std::size_t>(-1)); });
  CHECK(workspace.size() == 0);
  CHECK(ssmax::detail::multiply_bytes(static_cast<std::size_t>(root), static_cast<std::size_t>(root)) ==
        static_cast<std::size_t>(-1));
  CHECK(ssmax::detail::add_bytes(static_cast<std::size_t>(-1), 1) == static_cast<std::size_t>(-1));
  CHECK(ssmax::detail::add_bytes(3, ssmax::detail::multiply_bytes(4, 5)) == 23);
  ssmax::detail::Arena arena;
  arena.take<double>(most);
  arena.take<double>(1);
  CHECK(arena.used() > static_cast<std::size_t>(most));
}

// ---- Executors --------------------------------------------------------------------------------------------

TEST_CASE("attention is bit-identical for any concurrency", "[attention][arguments]") {
  for (const Shape& shape : {Shape{1, 2, 1, 3, 2100, 5, 4}, {2, 4, 2, 70, 300, 8, 5}}) {
    const Problem<float> problem(shape);
    const SSMax<float> scaling{0.7F};
    const Output<float> expected = run(problem, scaling, Causal{});
    const Result<float> gradients = backward(problem, expected, scaling, Causal{});
    for (const index_t threads : {least, index_t{-1}, index_t{0}, index_t{1} << 30, most / 4, most}) {
      INFO(threads);
      const Reverse executor{threads};
      CHECK(run(problem, scaling, Causal{}, {}, executor) == expected);
      CHECK(backward(problem, expected, scaling, Causal{}, ssmax::Identity{}, {}, executor) == gradients);
    }
  }
}

TEST_CASE("decode accepts any concurrency", "[decode][arguments]") {
  const Problem<float> problem({1, 4, 2, 1, 2500, 8, 8});
  KvCache<float> cache({.kv_heads = 2, .width = 8, .capacity = 2500});
  cache.append(problem.k_view(), problem.v_view());
  std::vector<float> expected(32), out(32);
  const auto run = [&](std::vector<float>& to, const auto& executor) {
    ssmax::attention({.q = problem.q_view(), .keys = cache, .out = {to.data(), {1, 4, 1, 8}}}, Causal{},
                     executor);
  };
  run(expected, ssmax::Serial{});
  for (const index_t threads : {least, index_t{0}, most}) {
    run(out, Reverse{threads});
    CHECK(same_bits(out, expected));
  }
}

}  // namespace attention_problem::backward_problem::arguments_test
