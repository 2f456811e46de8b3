// Optional views and parameters. A null view with extents is an error. Each head has its parameter.

#include "attention_backward_problem.hpp"
#include "refusal.hpp"
#include "small_call.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::arguments_optional_test {

using small_call::Call;

// ---- Optional views ---------------------------------------------------------------------------------------

TEST_CASE("throws for a null view with extents", "[attention][arguments]") {
  Call call;
  for (const std::array<index_t, 3>& extents : {std::array<index_t, 3>{1, 2, 2}, {1, 0, 0}, {0, 0, 7}}) {
    call.lse = {nullptr, extents};
    call.refuses({"attention: lse"});
  }
  KvCache<float> cache({.kv_heads = 2, .width = 4, .capacity = 3});
  cache.append(call.k, call.v);
  check_refused({"attention: lse is null", "4"}, [&] {
    ssmax::attention({.q = call.q, .keys = cache, .out = call.out, .lse = {nullptr, {1, 2, 2}}},
                     ssmax::Causal{});
  });
  const AttentionState<float> state{
      {call.in.data(), {1, 2, 2}}, {call.in.data() + 8, {1, 2, 2}}, {call.in.data() + 16, {1, 2, 2, 4}}};
  check_refused({"finish: lse is null"}, [&] {
    ssmax::finish<float>(state, call.out, View<float, 3>(nullptr, {1, 2, 2}));
  });
  const View<const float, 2> y(call.in.data(), {2, 4});
  const View<float, 2> dz(call.to.data(), {2, 4});
  check_refused({"softmax_backward: logits is null"}, [&] {
    ssmax::softmax_backward<float, 2>({.out = y, .dout = y, .logits = {nullptr, {2, 4}}, .dlogits = dz});
  });
  check_refused({"log_softmax_backward: logits has extent 5"}, [&] {
    ssmax::log_softmax_backward<float, 2>(
        {.out = y, .dout = y, .logits = {call.in.data(), {2, 5}}, .dlogits = dz});
  });
  const std::vector<index_t> targets{0, 1};
  check_refused({"cross_entropy: dlogits is null"}, [&] {
    ssmax::cross_entropy<float>(y, targets, {nullptr, {2, 4}});
  });
  check_refused({"attention_backward: dlse"}, [&] {
    ssmax::attention_backward({.q = call.q, .k = call.k, .v = call.v, .out = call.q, .lse = state.sum},
                              {.dout = call.q,
                               .dlse = {nullptr, {0, 0, 2}},
                               .dq = call.out,
                               .dk = {call.to.data() + 16, {1, 2, 3, 4}},
                               .dv = {call.to.data() + 40, {1, 2, 3, 4}}});
  });
  CHECK(std::ranges::count(call.to, -7.0F) == 64);
}

TEST_CASE("accepts omitted views and null views without elements", "[attention][arguments]") {
  CHECK_NOTHROW(ssmax::attention({}));
  CHECK_NOTHROW(ssmax::attention_backward({}, {}));
  CHECK(ssmax::Plan({}, 1).bytes() == 0);
  Call call;
  call.lse = {};
  CHECK_NOTHROW(ssmax::attention({.q = call.q, .k = call.k, .v = call.v, .out = call.out, .lse = call.lse}));
  const View<float, 4> no_queries(nullptr, {1, 2, 0, 4});
  CHECK_NOTHROW(ssmax::attention(
      {.q = no_queries, .k = call.k, .v = call.v, .out = no_queries, .lse = {nullptr, {1, 2, 0}}}));
  const View<const float, 2> y(call.in.data(), {2, 4});
  CHECK_NOTHROW(
      ssmax::softmax_backward<float, 2>({.out = y, .dout = y, .dlogits = {call.to.data(), {2, 4}}}));
}

// ---- One number per head ----------------------------------------------------------------------------------

TEST_CASE("throws unless the count of parameters equals the count of heads", "[attention][arguments]") {
  Call call;
  std::vector<float> one(1, 1), three(3, 1), two(2, 1), table(3, 1);
  const auto refuses = [&](std::initializer_list<std::string_view> words, const auto& scaling,
                           const ssmax::AttentionOptions<float>& options = {}) {
    check_refused(words, [&] {
      ssmax::attention(with({.q = call.q, .k = call.k, .v = call.v, .out = call.out}, options), scaling,
                       Full{});
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
    check_refused({"finish: sinks " + extent, "heads are 2"},
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

  // Row functions of rank 1 and 2 have one head.
  const View<const float, 2> z(call.in.data(), {2, 4});
  const View<float, 2> y(call.to.data(), {2, 4});
  check_refused({"s has extent 2", "heads are 1"}, [&] { ssmax::softmax(z, y, SSMax{two}); });
  CHECK_NOTHROW(ssmax::softmax(z, y, SSMax{one}));
  const std::vector<float> longer(9, 1);
  CHECK_NOTHROW(ssmax::softmax(z, y, ssmax::SizeTable{longer}));
}

TEST_CASE("throws unless dsinks has one element per head", "[attention][backward][arguments]") {
  const Problem<float> problem({1, 2, 2, 2, 3, 4, 4}, 1, Dlse::left_out);
  std::vector<float> sinks(2), three(3), one(1);
  const Output<float> output = run(problem, Softmax{}, Full{}, {.sinks = sinks});
  Result<float> result(problem);
  const auto run = [&](std::span<const float> of_sinks, std::span<float> dsinks) {
    AttentionGradients<float> gradients = gradients_to(problem, result);
    gradients.dsinks = dsinks;
    ssmax::attention_backward(
        backward_with(backward_arguments_of(problem, output), AttentionOptions<float>{.sinks = of_sinks}),
        gradients, Full{});
  };
  check_refused({"attention_backward: sinks has extent 3", "heads are 2"}, [&] { run(three, {}); });
  check_refused({"attention_backward: dsinks has extent 3", "heads are 2"}, [&] { run(sinks, three); });
  check_refused({"attention_backward: dsinks has extent 1", "heads are 2"}, [&] { run(sinks, one); });
}

}  // namespace attention_problem::backward_problem::arguments_optional_test
