// Arguments that are absurd: extents, strides, counts and threads that no machine has. They are refused by name, or do what
// is documented; nothing overflows (which the undefined-behaviour sanitizer is asked about).

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <ssmax/detail/memory/arena.hpp>
#include <ssmax/ssmax.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention_backward_problem.hpp"
#include "catch.hpp"
#include "refusal.hpp"
#include "test_executors.hpp"

namespace arguments_test {

using attention_backward_problem::Output;
using attention_backward_problem::Problem;
using attention_backward_problem::Result;
using attention_backward_problem::Shape;
using attention_problem::infinity;
using attention_problem::nan;
using ssmax::AttentionState;
using ssmax::bfloat16;
using ssmax::Causal;
using ssmax::Full;
using ssmax::index_t;
using ssmax::KvCache;
using ssmax::Rope;
using ssmax::Softmax;
using ssmax::SSMax;
using ssmax::View;
using test_executors::Reverse;

constexpr index_t most = std::numeric_limits<index_t>::max(), least = std::numeric_limits<index_t>::min();
/// 2^32 (2^16): its square wraps to 0.
constexpr index_t root = index_t{1} << (4 * sizeof(index_t));

template <class F>
void refused(std::initializer_list<std::string> words, const F& call) {
  const std::string message = refusal(call);
  for (const std::string& word : words) {
    INFO('"' << message << "\" should mention " << word);
    CHECK(message.find(word) != std::string::npos);
  }
}
std::string text(index_t number) { return std::to_string(number); }

// ---- Extents and strides ---------------------------------------------------------------------------------------

TEST_CASE("a view is empty where an extent is 0, not where their product wraps", "[arguments]") {
  float x = 0;
  CHECK_FALSE(View<float, 2>(&x, {root, root}).empty());
  CHECK_FALSE(View<float, 4>(&x, {1, root, root, 4}).empty());
  CHECK(View<float, 3>(&x, {root, root, 0}).empty());
  CHECK(View<float, 1>{}.empty());
}

TEST_CASE("rows refuse extents that cannot be counted", "[arguments]") {
  std::vector<float> z(8, 1), y(8, -7);
  const View<const float, 2> square(z.data(), {root, root}), of_zeros(z.data(), {root, root}, {0, 1}),
      long_row(z.data(), {1, most});
  const View<float, 2> out(y.data(), {root, root});
  refused({"softmax: logits", text(root)}, [&] { ssmax::softmax(square, out); });
  refused({"log_softmax: logits", text(root)}, [&] { ssmax::log_softmax(of_zeros, out); });
  refused({"logsumexp: logits", text(root)},
          [&] { ssmax::logsumexp(square, View<float, 1>(y.data(), {root})); });
  refused({"cross_entropy: logits", text(root)}, [&] { ssmax::cross_entropy<float>(square, {}); });
  refused({"logits has extent " + text(most)}, [&] {
    ssmax::softmax(long_row, View<float, 2>(y.data(), {1, most}));
  });
  // With an extent of 0 there is nothing to read, but rows are counted.
  const View<const float, 4> no_keys(z.data(), {root, root, 4, 0});
  refused({"logits", text(root)}, [&] {
    ssmax::softmax(no_keys, View<float, 4>(y.data(), {root, root, 4, 0}));
  });
  CHECK(std::ranges::count(y, -7.0F) == 8);
}

TEST_CASE("rows refuse strides that reach further than bytes can be counted", "[arguments]") {
  std::vector<float> z(8, 1), y(8, -7);
  const View<float, 2> out(y.data(), {2, 4});
  for (const index_t stride : {most, least, least + 1, most / 4, -(most / 4), most / 8 * 5}) {
    const View<const float, 2> logits(z.data(), {2, 4}, {stride, 1});
    refused({"logits has extent 2 and stride " + text(stride)}, [&] { ssmax::softmax(logits, out); });
    refused({"out has extent 2 and stride " + text(stride)}, [&] {
      ssmax::softmax(View<const float, 2>(z.data(), {2, 4}), View<float, 2>(y.data(), {2, 4}, {stride, 1}));
    });
    const View<const float, 2> one(z.data(), {1, 4}, {stride, 1});
    refused({"logits has extent 1 and stride " + text(stride)}, [&] {
      ssmax::softmax(one, View<float, 2>(y.data(), {1, 4}));
    });
    const View<const float, 1> one_class(z.data(), {1}, {stride});
    refused({"logits", text(stride)}, [&] { ssmax::softmax(one_class, View<float, 1>(y.data(), {1})); });
  }
  // Each fits, the sum does not.
  const View<const float, 3> three(z.data(), {3, 3, 2}, {most / 12, -(most / 12), 1});
  refused({"logits has extent 3 and stride -"}, [&] {
    ssmax::softmax(three, View<float, 3>(y.data(), {3, 3, 2}));
  });
  CHECK(std::ranges::count(y, -7.0F) == 8);
}

TEST_CASE("negative strides and strides of 0 are taken", "[arguments]") {
  std::vector<float> z{1, 2, 3, 4}, y(4, -7), w(4);
  ssmax::softmax(View<const float, 2>(z.data() + 2, {2, 2}, {-2, 1}), View<float, 2>(y.data(), {2, 2}));
  ssmax::softmax(View<const float, 2>(z.data(), {2, 2}, {0, 1}),
                 View<float, 2>(w.data() + 2, {2, 2}, {-2, 1}));
  CHECK(std::abs(y[0] + y[1] - 1) < 1e-6F);
  CHECK(w == std::vector<float>{y[2], y[3], y[2], y[3]});
}

/// A call of attention on little memory; tests give one view other extents or strides.
struct Call {
  std::vector<float> in = std::vector<float>(64, 1), to = std::vector<float>(64, -7);
  View<const float, 4> q{in.data(), {1, 2, 2, 4}}, k{in.data(), {1, 2, 3, 4}}, v{in.data(), {1, 2, 3, 4}};
  View<float, 4> out{to.data(), {1, 2, 2, 4}};
  View<float, 3> lse{to.data() + 32, {1, 2, 2}};

  void refuses(std::initializer_list<std::string> words) const {
    refused(words, [&] { ssmax::attention<float>({.q = q, .k = k, .v = v, .out = out, .lse = lse}); });
    CHECK(std::ranges::count(to, -7.0F) == 64);
  }
};

TEST_CASE("attention refuses extents and strides that cannot be", "[attention][arguments]") {
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

TEST_CASE("masks and biases refuse strides that cannot be", "[attention][arguments]") {
  Call call;
  const View<const float, 4> bias(call.in.data(), {1, 2, 2, 3}, {0, most / 2, 3, 1});
  refused({"Bias: bias has extent 2 and stride " + text(most / 2)}, [&] {
    ssmax::attention<float>({.q = call.q, .k = call.k, .v = call.v, .out = call.out}, Softmax{}, Full{},
                            ssmax::Bias(bias));
  });
  const bool yes[12]{};
  const ssmax::MaskMatrix mask(View<const bool, 4>(yes, {1, 2, 2, 3}, {0, least, 3, 1}));
  refused({"MaskMatrix: visible", "stride " + text(least)}, [&] {
    ssmax::attention<float>({.q = call.q, .k = call.k, .v = call.v, .out = call.out}, Softmax{}, mask);
  });
}

TEST_CASE("keys that are one in memory may be many: a window sees the last", "[attention][arguments]") {
  // As many keys as can be counted, all in one place: nothing on the way to them may overflow.
  const index_t keys = most / 2 / 8;
  std::vector<float> q(8, 1), k(4, 1), v{1, 2, 3, 4}, out(8), lse(2);
  const View<const float, 4> ks(k.data(), {1, 2, keys, 4}, {0, 0, 0, 1}),
      vs(v.data(), {1, 2, keys, 4}, {0, 0, 0, 1});
  for (const index_t threads : {index_t{1}, index_t{3}, most}) {
    std::ranges::fill(out, -7.0F);
    ssmax::attention<float>({.q = {q.data(), {1, 2, 1, 4}},
                             .k = ks,
                             .v = vs,
                             .out = {out.data(), {1, 2, 1, 4}},
                             .lse = {lse.data(), {1, 2, 1}}},
                            Softmax{}, ssmax::SlidingWindow(7), {.scale = 0}, Reverse{threads});
    CHECK(out == std::vector<float>{1, 2, 3, 4, 1, 2, 3, 4});
    CHECK(std::abs(lse[0] - std::log(8.0F)) < 1e-6F);
  }
}

TEST_CASE("tensors without elements take no memory for what they claim", "[attention][arguments]") {
  // No queries and no keys of an absurd width: nothing to be done.
  const index_t width = most / 2;
  const View<float, 4> none(nullptr, {1, 1, 0, width});
  const View<float, 3> no_lse(nullptr, {1, 1, 0});
  CHECK_NOTHROW(ssmax::attention<float>({.q = none, .k = none, .v = none, .out = none, .lse = no_lse}));
  CHECK_NOTHROW(
      ssmax::attention_backward<float>({.q = none, .k = none, .v = none, .out = none, .lse = no_lse},
                                       {.dout = none, .dq = none, .dk = none, .dv = none}));
}

// ---- Sizes -----------------------------------------------------------------------------------------------------

TEST_CASE("a rope refuses tables that cannot be counted", "[arguments]") {
  for (const index_t positions :
       {most, most / 2, index_t{1} << (8 * sizeof(index_t) - 2), most / 8 / 64 + 1}) {
    refused({"Rope: positions are " + text(positions), "width is 64"},
            [&] { Rope<float>({.width = 64}, positions); });
    refused({"Rope: positions are " + text(positions), "width is 64"},
            [&] { Rope<double>({.width = 64, .pairing = ssmax::Pairing::interleaved}, positions); });
  }
  for (const volatile index_t width : {most - 1, most / 2 + 1}) {
    refused({"Rope", "width is " + text(width)}, [&] { Rope<float>({.width = width}, 1); });
  }
  refused({"Rope", "first_position"}, [&] { Rope<float>({.width = 2, .first_position = most}, 1); });
  refused({"Rope", "first_position"}, [&] { Rope<float>({.width = 2, .first_position = least}, 1); });
}

TEST_CASE("slopes and caches refuse sizes that cannot be", "[arguments]") {
  for (const volatile index_t heads : {most, most / 8 + 1, least, index_t{-1}}) {
    refused({"Alibi::slopes: heads are " + text(heads)},
            [&] { static_cast<void>(ssmax::Alibi::slopes(heads)); });
  }
  refused({"KvCache: capacity is " + text(root)},
          [] { KvCache<float>({.kv_heads = root, .width = root, .capacity = root}); });
  refused({"KvCache", text(most)}, [] { KvCache<float>({.batch = 0, .width = most, .capacity = most}); });
}

TEST_CASE("a ring's positions end where they can no longer be counted", "[arguments]") {
  KvCache<float> ring({.width = 1, .capacity = 2, .ring = true});
  float x = 1;
  const View<const float, 4> many(&x, {1, 1, most / 2, 1}, {0, 0, 0, 1}), one(&x, {1, 1, 1, 1});
  ring.append(many, many);
  CHECK(ring.length(0) == most / 2);
  refused({"length " + text(most / 2 + 1), text(most / 2)}, [&] { ring.append(one, one); });
  refused({"at most " + text(most / 2)}, [&] { ring.append(many, many); });
  CHECK(ring.length(0) == most / 2);
}

TEST_CASE("attention_partial refuses more keys than can be counted", "[attention][arguments]") {
  Call call;
  const AttentionState<float> state{
      {call.to.data(), {1, 2, 2}}, {call.to.data() + 8, {1, 2, 2}}, {call.to.data() + 16, {1, 2, 2, 4}}};
  refused({"attention_partial: keys are " + text(most), text(most / 2)}, [&] {
    ssmax::attention_partial<float>(
        {.q = call.q, .k = call.k, .v = call.v, .first_key = most - 3, .keys = most, .state = state});
  });
  CHECK_NOTHROW(ssmax::attention_partial<float>(
      {.q = call.q, .k = call.k, .v = call.v, .first_key = most / 2 - 3, .keys = most / 2, .state = state}));
}

TEST_CASE("a workspace refuses more bytes than can be counted", "[arguments]") {
  ssmax::Workspace workspace;
  refused({"more than"}, [&] { workspace.reserve(static_cast<std::size_t>(most) + 1); });
  refused({"more than"}, [&] { workspace.reserve(static_cast<std::size_t>(-1)); });
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

// ---- Executors -------------------------------------------------------------------------------------------------

TEST_CASE("any concurrency gives the same bits", "[attention][arguments]") {
  for (const Shape& shape : {Shape{1, 2, 1, 3, 2100, 5, 4}, {2, 4, 2, 70, 300, 8, 5}}) {
    const Problem<float> problem(shape);
    const SSMax<float> scaling{0.7F};
    const Output<float> expected = attention_problem::run(problem, scaling, Causal{});
    const Result<float> gradients = backward(problem, expected, scaling, Causal{}, ssmax::Identity{});
    for (const index_t threads : {least, index_t{-1}, index_t{0}, index_t{1} << 30, most / 4, most}) {
      INFO(threads);
      const Reverse executor{threads};
      CHECK(attention_problem::run(problem, scaling, Causal{}, {}, executor) == expected);
      CHECK(backward(problem, expected, scaling, Causal{}, ssmax::Identity{}, {}, executor) == gradients);
    }
  }
}

TEST_CASE("decode takes any concurrency", "[decode][arguments]") {
  const Problem<float> problem({1, 4, 2, 1, 2500, 8, 8});
  KvCache<float> cache({.kv_heads = 2, .width = 8, .capacity = 2500});
  cache.append(problem.k_view(), problem.v_view());
  std::vector<float> expected(32), out(32);
  const auto run = [&](std::vector<float>& to, const auto& executor) {
    ssmax::decode<float>({.q = problem.q_view(), .out = {to.data(), {1, 4, 1, 8}}}, cache, Softmax{},
                         Causal{}, {}, executor);
  };
  run(expected, ssmax::Serial{});
  for (const index_t threads : {least, index_t{0}, most}) {
    run(out, Reverse{threads});
    CHECK(same_bits(out, expected));
  }
}

// ---- Views that are left out -------------------------------------------------------------------------------------

TEST_CASE("null with extents is not left out", "[attention][arguments]") {
  Call call;
  for (const std::array<index_t, 3>& extents : {std::array<index_t, 3>{1, 2, 2}, {1, 0, 0}, {0, 0, 7}}) {
    call.lse = {nullptr, extents};
    call.refuses({"attention: lse"});
  }
  KvCache<float> cache({.kv_heads = 2, .width = 4, .capacity = 3});
  cache.append(call.k, call.v);
  refused({"decode: lse is null", "4"}, [&] {
    ssmax::decode<float>({.q = call.q, .out = call.out, .lse = {nullptr, {1, 2, 2}}}, cache);
  });
  const AttentionState<float> state{
      {call.in.data(), {1, 2, 2}}, {call.in.data() + 8, {1, 2, 2}}, {call.in.data() + 16, {1, 2, 2, 4}}};
  refused({"finish: lse is null"}, [&] {
    ssmax::finish<float>(state, call.out, View<float, 3>(nullptr, {1, 2, 2}));
  });
  const View<const float, 2> y(call.in.data(), {2, 4});
  const View<float, 2> dz(call.to.data(), {2, 4});
  refused({"softmax_backward: logits is null"}, [&] {
    ssmax::softmax_backward<float, 2>({.out = y, .dout = y, .logits = {nullptr, {2, 4}}, .dlogits = dz});
  });
  refused({"log_softmax_backward: logits has extent 5"}, [&] {
    ssmax::log_softmax_backward<float, 2>(
        {.out = y, .dout = y, .logits = {call.in.data(), {2, 5}}, .dlogits = dz});
  });
  const std::vector<index_t> targets{0, 1};
  refused({"cross_entropy: dlogits is null"}, [&] {
    ssmax::cross_entropy<float>(y, targets, {nullptr, {2, 4}});
  });
  refused({"attention_backward: dlse"}, [&] {
    ssmax::attention_backward<float>({.q = call.q, .k = call.k, .v = call.v, .out = call.q, .lse = state.sum},
                                     {.dout = call.q,
                                      .dlse = {nullptr, {0, 0, 2}},
                                      .dq = call.out,
                                      .dk = {call.to.data() + 16, {1, 2, 3, 4}},
                                      .dv = {call.to.data() + 40, {1, 2, 3, 4}}});
  });
  CHECK(std::ranges::count(call.to, -7.0F) == 64);
}

TEST_CASE("what is left out, and what is null because it has no elements, are taken",
          "[attention][arguments]") {
  Call call;
  call.lse = {};
  CHECK_NOTHROW(
      ssmax::attention<float>({.q = call.q, .k = call.k, .v = call.v, .out = call.out, .lse = call.lse}));
  const View<float, 4> no_queries(nullptr, {1, 2, 0, 4});
  CHECK_NOTHROW(ssmax::attention<float>(
      {.q = no_queries, .k = call.k, .v = call.v, .out = no_queries, .lse = {nullptr, {1, 2, 0}}}));
  const View<const float, 2> y(call.in.data(), {2, 4});
  CHECK_NOTHROW(
      ssmax::softmax_backward<float, 2>({.out = y, .dout = y, .dlogits = {call.to.data(), {2, 4}}}));
}

// ---- One number per head ---------------------------------------------------------------------------------------

TEST_CASE("as many numbers as heads, neither fewer nor more", "[attention][arguments]") {
  Call call;
  std::vector<float> one(1, 1), three(3, 1), two(2, 1), table(3, 1);
  const auto refuses = [&](std::initializer_list<std::string> words, const auto& scaling,
                           const ssmax::AttentionOptions<float>& options = {}) {
    refused(words, [&] {
      ssmax::attention<float>({.q = call.q, .k = call.k, .v = call.v, .out = call.out}, scaling, Full{},
                              options);
    });
  };
  for (const std::vector<float>* wrong : {&one, &three}) {
    const std::string extent = "has extent " + std::to_string(wrong->size());
    refuses({"s " + extent, "heads are 2"}, SSMax{*wrong});
    refuses({"b " + extent, "heads are 2"}, SSMax{two, *wrong});
    refuses({"s " + extent, "heads are 2"}, ssmax::SizeTable{table, *wrong});
    refuses({"b " + extent, "heads are 2"}, ssmax::SizeTable{table, two, *wrong});
    refuses({"attention: sinks " + extent, "heads are 2"}, Softmax{}, {.sinks = *wrong});
    const AttentionState<float> state{
        {call.in.data(), {1, 2, 2}}, {call.in.data() + 8, {1, 2, 2}}, {call.in.data() + 16, {1, 2, 2, 4}}};
    refused({"finish: sinks " + extent, "heads are 2"},
            [&] { ssmax::finish<float>(state, call.out, {}, *wrong); });
    std::vector<float> gradient = *wrong;
    refuses({"ds " + extent, "heads are 2"}, SSMax{two}.gradient(gradient));
    refuses({"db " + extent, "heads are 2"}, SSMax{two, two}.gradient(two, gradient));
    refuses({"ds " + extent, "heads are 2"}, ssmax::SizeTable{table, two}.gradient({}, gradient));
    refuses({"db " + extent, "heads are 2"}, ssmax::SizeTable{table, two, two}.gradient({}, {}, gradient));
  }
  refuses({"ds has extent 3", "heads are 2"}, SSMax{0.5F}.gradient(three));
  refuses({"db has extent 3", "heads are 2"}, SSMax{0.5F, 0.1F}.gradient({}, three));
  refuses({"p has extent 2", "largest n is 3"}, ssmax::SizeTable{two});
  CHECK(std::ranges::count(call.to, -7.0F) == 64);

  // Rows of rank 1 and 2 have one head.
  const View<const float, 2> z(call.in.data(), {2, 4});
  const View<float, 2> y(call.to.data(), {2, 4});
  refused({"s has extent 2", "heads are 1"}, [&] { ssmax::softmax(z, y, SSMax{two}); });
  CHECK_NOTHROW(ssmax::softmax(z, y, SSMax{one}));
  const std::vector<float> longer(9, 1);
  CHECK_NOTHROW(ssmax::softmax(z, y, ssmax::SizeTable{longer}));
}

TEST_CASE("dsinks have as many numbers as heads", "[attention][backward][arguments]") {
  const Problem<float> problem({1, 2, 2, 2, 3, 4, 4});
  std::vector<float> sinks(2), three(3), one(1);
  const Output<float> output = attention_problem::run(problem, Softmax{}, Full{}, {.sinks = sinks});
  Result<float> result(problem);
  const auto run = [&](std::span<const float> of_sinks, std::span<float> dsinks) {
    ssmax::attention_backward<float>({.q = problem.q_view(),
                                      .k = problem.k_view(),
                                      .v = problem.v_view(),
                                      .out = {output.out.data(), {1, 2, 2, 4}},
                                      .lse = {output.lse.data(), {1, 2, 2}}},
                                     {.dout = {problem.dout.data(), {1, 2, 2, 4}},
                                      .dq = {result.dq.data(), {1, 2, 2, 4}},
                                      .dk = {result.dk.data(), {1, 2, 3, 4}},
                                      .dv = {result.dv.data(), {1, 2, 3, 4}},
                                      .dsinks = dsinks},
                                     Softmax{}, Full{}, {.sinks = of_sinks});
  };
  refused({"attention_backward: sinks has extent 3", "heads are 2"}, [&] { run(three, {}); });
  refused({"attention_backward: dsinks has extent 3", "heads are 2"}, [&] { run(sinks, three); });
  refused({"attention_backward: dsinks has extent 1", "heads are 2"}, [&] { run(sinks, one); });
}

// ---- A gradient that heads share ---------------------------------------------------------------------------------

TEST_CASE("a number has one gradient, to which every head adds: attention",
          "[attention][backward][arguments]") {
  ssmax::ThreadPool pool(3);
  for (const Shape& shape : {Shape{2, 4, 2, 5, 40, 8, 5}, {1, 4, 1, 70, 300, 8, 5}}) {
    const Problem<float> problem(shape);
    const SSMax<float> scaling{0.43F, 0.1F};
    const std::vector<float> p(300, 0.75F);
    const ssmax::SizeTable<float> table{p, 0.5F, 0.25F};
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const auto check = [&](const auto& with, const auto& gradient) {
        const Output<float> output = attention_problem::run(problem, with, Causal{});
        std::vector<float> ds(1), db(1), ds_again(1), db_again(1), ds_each(4), db_each(4);
        const Result<float> together =
            backward(problem, output, gradient(ds, db), Causal{}, ssmax::Identity{});
        const Result<float> each =
            backward(problem, output, gradient(ds_each, db_each), Causal{}, ssmax::Identity{});
        backward(problem, output, gradient(ds_again, db_again), Causal{}, ssmax::Identity{}, {}, pool);
        CHECK(together == each);
        CHECK((same_bits(ds, ds_again) && same_bits(db, db_again)));
        const auto is_sum = [](float sum, const std::vector<float>& terms) {
          float expected = 0, size = 1;
          for (const float term : terms) {
            expected += term;
            size += std::abs(term);
          }
          INFO(sum << ' ' << expected);
          CHECK(std::abs(sum - expected) <= 1e-5F * size);
          CHECK(std::abs(sum) > 1e-3F);
          CHECK(std::abs(sum - terms[0]) > 1e-3F);
        };
        is_sum(ds[0], ds_each);
        is_sum(db[0], db_each);
      };
      check(scaling, [&](auto& ds, auto& db) { return scaling.gradient(ds, db); });
      check(table, [&](auto& ds, auto& db) { return table.gradient({}, ds, db); });
    });
  }
}

TEST_CASE("a number has one gradient, to which every head adds: rows", "[arguments]") {
  const std::vector<float> z = reference::normals<float>(4 * 3 * 7, 1),
                           dy = reference::normals<float>(4 * 3 * 7, 2);
  std::vector<float> y(z.size()), dz(z.size()), ds(1), db(1), ds_each(4), db_each(4);
  const View<const float, 3> logits(z.data(), {4, 3, 7}), dout(dy.data(), {4, 3, 7});
  const View<float, 3> out(y.data(), {4, 3, 7}), dlogits(dz.data(), {4, 3, 7});
  const SSMax scaling{0.43F, 0.1F};
  ssmax::softmax(logits, out, scaling, Causal{});
  const auto run = [&](const auto& gradient) {
    ssmax::softmax_backward<float, 3>({.out = out, .dout = dout, .logits = logits, .dlogits = dlogits},
                                      gradient, Causal{});
  };
  run(scaling.gradient(ds, db));
  run(scaling.gradient(ds_each, db_each));
  CHECK(std::abs(ds[0] - (ds_each[0] + ds_each[1] + ds_each[2] + ds_each[3])) < 1e-5F);
  CHECK(std::abs(db[0] - (db_each[0] + db_each[1] + db_each[2] + db_each[3])) < 1e-5F);
  CHECK(std::abs(ds[0] - ds_each[0]) > 1e-3F);
  // Either alone.
  std::vector<float> alone(1);
  run(scaling.gradient(alone));
  CHECK(same_bits(alone, ds));
  alone = {0};
  run(scaling.gradient({}, alone));
  CHECK(same_bits(alone, db));
}

TEST_CASE("a scaling deduces its type from what holds the parameters", "[arguments]") {
  std::vector<float> floats(1, 0.5F);
  const std::vector<double> doubles(1, 0.5);
  const std::array<float, 1> array{0.5F};
  SSMax of_floats{floats}, of_both{floats, floats}, of_span{std::span(floats)}, of_array{array};
  SSMax of_doubles{doubles}, of_number{0.5};
  SSMax of_numbers{0.5F, 0.25F};
  ssmax::SizeTable table{doubles, doubles};
  static_assert(std::is_same_v<decltype(of_floats), SSMax<float>>);
  static_assert(std::is_same_v<decltype(of_both), SSMax<float>>);
  static_assert(std::is_same_v<decltype(of_span), SSMax<float>>);
  static_assert(std::is_same_v<decltype(of_array), SSMax<float>>);
  static_assert(std::is_same_v<decltype(of_doubles), SSMax<double>>);
  static_assert(std::is_same_v<decltype(of_number), SSMax<double>>);
  static_assert(std::is_same_v<decltype(of_numbers), SSMax<float>>);
  static_assert(std::is_same_v<decltype(table), ssmax::SizeTable<double>>);
  static_assert(!std::is_constructible_v<SSMax<float>, std::vector<float>>);
  static_assert(!std::is_constructible_v<View<const float, 1>, std::vector<float>>);
  static_assert(std::is_constructible_v<View<const float, 1>, std::span<const float>>);
  for (const double c :
       {of_floats({0, 0, 7}), of_both({0, 0, 7}) - 0.5, of_span({0, 0, 7}), of_array({0, 0, 7}),
        of_doubles({0, 0, 7}), of_number({0, 0, 7}), of_numbers({0, 0, 7}) - 0.25}) {
    CHECK(std::abs(c - 0.5 * std::log(7.0)) < 1e-12);
  }
}

// ---- Sinks that are infinite --------------------------------------------------------------------------------------

TEST_CASE("a sink of +inf has the limit's gradient, one of -inf none, one of NaN spreads",
          "[attention][backward][arguments]") {
  const std::vector<float> sinks{infinity<float>, -infinity<float>, nan<float>, 0.5F};
  for (const Shape& shape : {Shape{2, 4, 2, 3, 40, 8, 5}, {1, 4, 4, 65, 40, 8, 5}, {1, 4, 4, 5, 0, 8, 5}}) {
    const Problem<float> problem(shape);
    const Problem<float> without_dlse(shape, 1, attention_backward_problem::Dlse::left_out);
    const SSMax<float> scaling{0.7F, 0.3F};
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      std::vector<float> ds(4), db(4);
      const Output<float> output = attention_problem::run(problem, scaling, Causal{}, {.sinks = sinks});
      const Result<float> result =
          backward(problem, output, scaling.gradient(ds, db), Causal{}, ssmax::Identity{}, {.sinks = sinks});
      // The sink's share is 1, out is 0: what is left of -share·(⟨dout, out⟩ - dlse) is dlse.
      double expected = 0;
      for (index_t row = 0; row < problem.rows(); ++row) {
        if (row / shape.queries % 4 == 0)
          expected += static_cast<double>(problem.dlse[static_cast<std::size_t>(row)]);
      }
      CHECK(std::abs(static_cast<double>(result.dsinks[0]) - expected) < 1e-5 * (1 + std::abs(expected)));
      CHECK((ds[0] == 0 && db[0] == 0));
      CHECK(result.dsinks[1] == 0);
      CHECK(std::isnan(result.dsinks[2]));
      CHECK(std::isfinite(result.dsinks[3]));
      const Result<float> no_dlse =
          backward(without_dlse, output, scaling, Causal{}, ssmax::Identity{}, {.sinks = sinks});
      CHECK(no_dlse.dsinks[0] == 0);
    });
  }
}

TEST_CASE("a sink's gradient tends to that of +inf", "[attention][backward][arguments]") {
  const Problem<double> problem({1, 2, 2, 20, 30, 6, 5});
  const auto dsinks = [&](double sink) {
    return run_backward(problem, SSMax<double>{}, Causal{}, {.sinks = std::vector<double>{sink, 0}})
        .dsinks[0];
  };
  CHECK(std::abs(dsinks(60) - dsinks(infinity<double>)) < 1e-12);
  CHECK(std::abs(dsinks(1e300) - dsinks(infinity<double>)) < 1e-12);
  CHECK(std::abs(dsinks(5) - dsinks(infinity<double>)) > 1e-3);
}

TEST_CASE("a sink of +inf gives 0 and +inf, also through finish and decode",
          "[attention][decode][arguments]") {
  const std::vector<float> sinks{infinity<float>, -infinity<float>};
  for (const index_t queries : {3, 40}) {
    const Problem<float> problem({1, 2, 2, queries, 50, 8, 5});
    const Output<float> plain = attention_problem::run(problem, Softmax{}, Causal{});
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << queries);
      const auto rows = static_cast<std::size_t>(2 * queries);
      std::vector<float> shift(rows), sum(rows), o(rows * 5), out(rows * 5, -7), lse(rows, -7);
      const View<float, 4> to(out.data(), {1, 2, queries, 5});
      const View<float, 3> to_lse(lse.data(), {1, 2, queries});
      const auto check = [&] {
        const auto half = static_cast<index_t>(rows / 2);
        CHECK(std::all_of(out.begin(), out.begin() + 5 * half, [](float x) { return x == 0; }));
        CHECK(std::all_of(lse.begin(), lse.begin() + half, [](float x) { return x == infinity<float>; }));
        for (std::size_t i = rows / 2; i < rows; ++i) CHECK(std::abs(lse[i] - plain.lse[i]) < 1e-5F);
        std::ranges::fill(out, -7.0F);
        std::ranges::fill(lse, -7.0F);
      };
      const AttentionState<float> state{
          {shift.data(), {1, 2, queries}}, {sum.data(), {1, 2, queries}}, {o.data(), {1, 2, queries, 5}}};
      ssmax::attention_partial<float>(
          {.q = problem.q_view(), .k = problem.k_view(), .v = problem.v_view(), .keys = 50, .state = state},
          Softmax{}, Causal{});
      ssmax::finish<float>(state, to, to_lse, sinks);
      check();
      KvCache<float> cache({.kv_heads = 2, .width = 8, .value_width = 5, .capacity = 50});
      cache.append(problem.k_view(), problem.v_view());
      ssmax::decode<float>({.q = problem.q_view(), .out = to, .lse = to_lse}, cache, Softmax{}, Causal{},
                           {.sinks = sinks});
      check();
    });
  }
}

}  // namespace arguments_test
