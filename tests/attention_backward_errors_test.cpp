// attention_backward throws std::invalid_argument that names the argument and both extents, before it writes.

#include "call.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "untouched_memory.hpp"

namespace attention_backward_errors_test {

using namespace ssmax;
using untouched_memory::Memory;
using untouched_memory::untouched;

/// A valid call: batch 2, 4 heads, 2 kv heads, 5 queries, 7 keys, widths 8 and 6. Each test changes one argument.
/// Inputs begin 512 elements after each other, and so do outputs.
struct Call : Memory {
  BackwardArguments<float> a{.q = {in, {2, 4, 5, 8}},
                             .k = {in + 512, {2, 2, 7, 8}},
                             .v = {in + 2 * 512, {2, 2, 7, 6}},
                             .out = {in + 3 * 512, {2, 4, 5, 6}},
                             .lse = {in + 4 * 512, {2, 4, 5}}};
  AttentionGradients<float> g{.dout = {in + 5 * 512, {2, 4, 5, 6}},
                              .dlse = {in + 6 * 512, {2, 4, 5}},
                              .dq = {to, {2, 4, 5, 8}},
                              .dk = {to + 512, {2, 2, 7, 8}},
                              .dv = {to + 2 * 512, {2, 2, 7, 6}}};
  AttentionOptions<float> options{};

  template <class S = Softmax, class M = Full, class C = Identity>
  void run(const S& scaling = {}, const M& mask = {}, const C& score = {}) {
    ssmax::attention_backward(backward_with(a, options), g, scaling, mask, score);
  }
  template <class S = Softmax, class M = Full, class C = Identity>
  void refuses(std::initializer_list<std::string_view> words, const S& scaling = {}, const M& mask = {},
               const C& score = {}) {
    const auto call = [&] { run(scaling, mask, score); };
    refused(words, call);
    const std::string message = refusal(call);
    INFO(message);
    CHECK(message.find("ssmax::") == 0);
  }
  void refuses_backward(std::initializer_list<std::string_view> words) {
    refuses(words);
    refuses({"ssmax::attention_backward: "});
  }
};

/// Checks that a valid call is refused after one change.
template <class Change>
void refuses(std::initializer_list<std::string_view> words, const Change& change) {
  Call call;
  change(call);
  call.refuses_backward(words);
}

TEST_CASE("backward accepts a valid call and writes only its gradients", "[attention][backward][errors]") {
  Call call;
  CHECK_NOTHROW(call.run());
  CHECK(std::ranges::count(call.outputs, untouched) == 4096 - 2 * (4 * 5 * 8 + 2 * 7 * 8 + 2 * 7 * 6));
  CHECK(std::ranges::all_of(call.inputs, [](float value) { return value == 1; }));
}

// ---- Extents and strides ----------------------------------------------------------------------------------

template <class Tensor>
std::array<index_t, 4> extents_of(const Tensor& tensor) {
  return {tensor.extent(0), tensor.extent(1), tensor.extent(2), tensor.extent(3)};
}

/// Checks that each extent of a tensor throws if it is one too large or one too small.
template <class A, class Tensor>
void refuses_extents(A Call::*tensors, Tensor A::*tensor, const std::string& name) {
  typename Tensor::Extents extents{};
  for (std::size_t i = 0; i < extents.size(); ++i) {
    for (const index_t by : {1, -1}) {
      Call call;
      Tensor& of_call = call.*tensors.*tensor;
      for (std::size_t j = 0; j < extents.size(); ++j) extents[j] = of_call.extent(static_cast<int>(j));
      const index_t expected = extents[i];
      extents[i] += by;
      of_call = Tensor(call.in, extents);
      call.refuses_backward({name + " has extent " + std::to_string(extents[i]),
                             "dimension " + std::to_string(i), " has " + std::to_string(expected)});
    }
  }
}

TEST_CASE("backward throws for each mismatched extent of out, lse, dout and gradients",
          "[attention][backward][errors]") {
  using Gradients = AttentionGradients<float>;
  refuses_extents(&Call::a, &BackwardArguments<float>::out, "out");
  refuses_extents(&Call::a, &BackwardArguments<float>::lse, "lse");
  refuses_extents(&Call::g, &Gradients::dout, "dout");
  refuses_extents(&Call::g, &Gradients::dlse, "dlse");
  refuses_extents(&Call::g, &Gradients::dq, "dq");
  refuses_extents(&Call::g, &Gradients::dk, "dk");
  refuses_extents(&Call::g, &Gradients::dv, "dv");
}

TEST_CASE("backward throws for mismatched inputs", "[attention][backward][errors]") {
  refuses({"q has heads 4", "multiple", "3"}, [](Call& c) {
    c.a.k = {c.in, {2, 3, 7, 8}};
    c.a.v = {c.in, {2, 3, 7, 6}};
  });
  refuses({"k has extent 1 in dimension 0", "q has 2"}, [](Call& c) { c.a.k = {c.in, {1, 2, 7, 8}}; });
  refuses({"k has extent 4 in dimension 3", "q has 8"}, [](Call& c) { c.a.k = {c.in, {2, 2, 7, 4}}; });
  refuses({"v has extent 6 in dimension 2", "k has 7"}, [](Call& c) { c.a.v = {c.in, {2, 2, 6, 6}}; });
  refuses({"k", "-7"}, [](Call& c) { c.a.k = {c.in, {2, 2, -7, 8}}; });
}

TEST_CASE("backward throws for null views", "[attention][backward][errors]") {
  refuses({"q is null", "320"}, [](Call& c) { c.a.q = {nullptr, {2, 4, 5, 8}}; });
  refuses({"k is null", "224"}, [](Call& c) { c.a.k = {nullptr, {2, 2, 7, 8}}; });
  refuses({"v is null", "168"}, [](Call& c) { c.a.v = {nullptr, {2, 2, 7, 6}}; });
  refuses({"out is null", "240"}, [](Call& c) { c.a.out = {nullptr, {2, 4, 5, 6}}; });
  refuses({"lse is null", "40"}, [](Call& c) { c.a.lse = {nullptr, {2, 4, 5}}; });
  refuses({"lse has extent 0", "dimension 0", "2"}, [](Call& c) { c.a.lse = {}; });
  refuses({"dout is null", "240"}, [](Call& c) { c.g.dout = {nullptr, {2, 4, 5, 6}}; });
  refuses({"dout has extent 0", "2"}, [](Call& c) { c.g.dout = {}; });
  refuses({"dq is null", "320"}, [](Call& c) { c.g.dq = {nullptr, {2, 4, 5, 8}}; });
  refuses({"dq has extent 0", "2"}, [](Call& c) { c.g.dq = {}; });
  refuses({"dk is null", "224"}, [](Call& c) { c.g.dk = {nullptr, {2, 2, 7, 8}}; });
  refuses({"dv is null", "168"}, [](Call& c) { c.g.dv = {nullptr, {2, 2, 7, 6}}; });
  Call without_dlse;
  without_dlse.g.dlse = {};
  CHECK_NOTHROW(without_dlse.run());
}

TEST_CASE("backward throws for unsupported strides", "[attention][backward][errors]") {
  refuses({"out", "stride 2", "1"}, [](Call& c) { c.a.out = {c.in, {2, 4, 5, 6}, {240, 60, 12, 2}}; });
  refuses({"dout", "stride 2", "1"}, [](Call& c) { c.g.dout = {c.in, {2, 4, 5, 6}, {240, 60, 12, 2}}; });
  refuses({"lse", "stride 4", "1"}, [](Call& c) { c.a.lse = {c.in, {2, 4, 5}, {20, 1, 4}}; });
  refuses({"dlse", "stride 4", "1"}, [](Call& c) { c.g.dlse = {c.in, {2, 4, 5}, {20, 1, 4}}; });
  refuses({"dq", "stride 2", "1"}, [](Call& c) { c.g.dq = {c.to, {2, 4, 5, 8}, {320, 80, 16, 2}}; });
  refuses({"dq", "stride 7", "8"}, [](Call& c) { c.g.dq = {c.to, {2, 4, 5, 8}, {140, 35, 7, 1}}; });
  refuses({"dk", "stride 0"}, [](Call& c) { c.g.dk = {c.to + 512, {2, 2, 7, 8}, {56, 0, 8, 1}}; });
  refuses({"dv", "stride 83", "84"}, [](Call& c) {
    c.g.dv = {c.to + 2 * 512, {2, 2, 7, 6}, {83, 42, 6, 1}};
  });
}

// ---- Overlaps ---------------------------------------------------------------------------------------------

TEST_CASE("backward throws for gradients that overlap inputs or each other",
          "[attention][backward][errors]") {
  struct Gradient {
    std::string name;
    ssmax::detail::OutputTensor<float> AttentionGradients<float>::*view;
  };
  for (const Gradient& gradient :
       {Gradient{"dq", &AttentionGradients<float>::dq}, Gradient{"dk", &AttentionGradients<float>::dk},
        Gradient{"dv", &AttentionGradients<float>::dv}}) {
    // Each input in turn ends with the gradient's first element.
    const auto put = [&](const std::string& input, const auto& place) {
      Call call;
      auto& tensor = call.g.*gradient.view;
      float* const at = call.to + 6 * 512;
      tensor = {at, extents_of(tensor)};
      place(call, at);
      call.refuses_backward({gradient.name + " (", "overlaps " + input + " (", "4 bytes"});
    };
    const auto ending = [](const auto& tensor, float* at) {
      const auto e = extents_of(tensor);
      return View<const float, 4>(at + 1 - e[0] * e[1] * e[2] * e[3], e);
    };
    put("q", [&](Call& call, float* at) { call.a.q = ending(call.a.q, at); });
    put("k", [&](Call& call, float* at) { call.a.k = ending(call.a.k, at); });
    put("v", [&](Call& call, float* at) { call.a.v = ending(call.a.v, at); });
    put("out", [&](Call& call, float* at) { call.a.out = ending(call.a.out, at); });
    put("dout", [&](Call& call, float* at) { call.g.dout = ending(call.g.dout, at); });
    put("lse", [&](Call& call, float* at) { call.a.lse = {at - 39, {2, 4, 5}}; });
    put("dlse", [&](Call& call, float* at) { call.g.dlse = {at - 39, {2, 4, 5}}; });
    put("sinks", [&](Call& call, float* at) { call.options.sinks = {at - 3, 4}; });
  }
  refuses({"dk", "overlaps", "dq", "4 bytes"}, [](Call& c) { c.g.dk = {c.to + 319, {2, 2, 7, 8}}; });
  refuses({"dv", "overlaps", "dq", "4 bytes"}, [](Call& c) { c.g.dv = {c.to + 319, {2, 2, 7, 6}}; });
  refuses({"dv", "overlaps", "dk", "4 bytes"}, [](Call& c) { c.g.dv = {c.to + 512 + 223, {2, 2, 7, 6}}; });
}

TEST_CASE("backward throws for gradients of sinks and of a bias that overlap",
          "[attention][backward][errors]") {
  Call call;
  SECTION("dsinks") {
    std::vector<float> sinks(4, 1.0F);
    call.options.sinks = sinks;
    call.g.dsinks = {call.to + 2 * 512 + 167, 4};
    call.refuses_backward({"dsinks", "dv", "overlaps", "4 bytes"});
    call.g.dsinks = sinks;
    call.refuses_backward({"dsinks", "sinks", "overlaps", "16 bytes"});
    call.g.dsinks = {call.in + 4 * 512 + 39, 4};
    call.refuses_backward({"dsinks", "lse", "overlaps", "4 bytes"});
    call.g.dsinks = {call.in + 6 * 512, 4};
    call.refuses_backward({"dsinks", "dlse", "overlaps"});
  }
  SECTION("the gradient of a bias overlaps the bias") {
    const std::array<index_t, 4> extents{2, 4, 5, 7}, strides{0, 0, 7, 1};
    std::vector<float> bias(70, 1.0F);
    const View<float, 4> view(bias.data(), extents, strides), shifted(bias.data() + 34, extents, strides);
    call.refuses({"Bias", "dbias", "overlaps", "bias", "140 bytes"}, Softmax{}, Full{},
                 ssmax::Bias(view).gradient(view));
    call.refuses({"Bias", "dbias", "overlaps", "bias", "by 4 bytes"}, Softmax{}, Full{},
                 ssmax::Bias(view).gradient(shifted));
  }
  SECTION("adjacent tensors do not overlap") {
    call.g.dk = {call.to + 320, {2, 2, 7, 8}};
    call.g.dv = {call.to + 320 + 224, {2, 2, 7, 6}};
    CHECK_NOTHROW(call.run());
    CHECK(std::ranges::count(call.outputs, untouched) == 4096 - 320 - 224 - 168);
  }
}

// ---- Options, scalings, masks and scores ------------------------------------------------------------------

TEST_CASE("backward throws for mismatched sinks", "[attention][backward][errors]") {
  Call call;
  std::vector<float> three(3), four(4);
  call.options.sinks = three;
  call.refuses_backward({"sinks", "3", "4"});
  call.options.sinks = four;
  call.g.dsinks = three;
  call.refuses_backward({"dsinks", "3", "4"});
  call.options.sinks = {};
  call.g.dsinks = four;
  call.refuses_backward({"dsinks", "4", "sinks", "0"});
  call.options.sinks = four;
  call.g.dsinks = {};
  CHECK_NOTHROW(call.run());
}

TEST_CASE("backward throws for a null dlse with extents", "[attention][backward][errors]") {
  Call call;
  call.g.dlse = {nullptr, {2, 4, 5}};
  call.refuses_backward({"dlse", "null", "40"});
}

TEST_CASE("backward throws for mismatched scalings and gradients of scalings",
          "[attention][backward][errors]") {
  Call call;
  std::vector<float> three(3, 1.0F), four(4, 1.0F), six(6, 1.0F), seven(7, 1.0F);
  call.refuses({"s has extent 3", "4"}, SSMax<float>{three});
  call.refuses({"ds has extent 3", "4"}, SSMax<float>{four}.gradient(three));
  call.refuses({"db has extent 3", "4"}, SSMax<float>{four}.gradient(four, three));
  call.refuses({"p has extent 6", "7"}, ssmax::SizeTable<float>{six});
  call.refuses({"dp has extent 6", "7"}, ssmax::SizeTable<float>{seven}.gradient(six));
}

TEST_CASE("backward throws for mismatched masks", "[attention][backward][errors]") {
  Call call;
  const std::vector<index_t> three{1, 2, 3}, falling{0, 3, 1, 7};
  call.refuses({"left", "-1"}, Softmax{}, ssmax::SlidingWindow(-1));
  call.refuses({"prefix", "3", "2"}, Softmax{}, ssmax::PrefixLM{three});
  call.refuses({"lengths", "3", "2"}, Softmax{}, ssmax::KeyLengths{three});
  call.refuses({"visible", "3", "40"}, Softmax{}, ssmax::Lengths{three});
  call.refuses({"cumulative_queries", "falls"}, Softmax{}, ssmax::Documents(falling, false));
}

TEST_CASE("backward throws for mismatched scores and gradients of scores", "[attention][backward][errors]") {
  Call call;
  const std::vector<double> slopes(4);
  std::vector<double> three(3), five(5);
  call.refuses({"slopes", "3", "4"}, Softmax{}, Full{}, Alibi(three));
  call.refuses({"dslopes", "3", "4"}, Softmax{}, Full{}, Alibi(slopes).gradient(three));
  call.refuses({"dslopes", "5", "4"}, Softmax{}, Full{}, ssmax::Softcap(2) | Alibi(slopes).gradient(five));
  call.refuses({"cap"}, Softmax{}, Full{}, ssmax::Softcap(0));
  const std::array<index_t, 4> extents{2, 4, 5, 7};
  const Bias bias(View<const float, 4>(call.in, extents));
  std::vector<double> dbias(2000, -5);
  for (std::size_t i = 0; i < 4; ++i) {
    for (const index_t by : {1, -1}) {
      std::array<index_t, 4> wrong = extents;
      wrong[i] += by;
      call.refuses({"dbias", "extent " + std::to_string(wrong[i]), "dimension " + std::to_string(i),
                    std::to_string(extents[i])},
                   Softmax{}, Full{}, bias.gradient(View<double, 4>(dbias.data(), wrong)));
    }
  }
  const auto refuses = [&](std::initializer_list<std::string_view> words, const View<double, 4>& gradient) {
    call.refuses(words, Softmax{}, Full{}, bias.gradient(gradient));
  };
  refuses({"dbias", "null"}, {nullptr, extents});
  refuses({"dbias", "stride", "2"}, {dbias.data(), extents, {280, 70, 14, 2}});
  refuses({"dbias", "stride 6", "7"}, {dbias.data(), extents, {120, 30, 6, 1}});
  CHECK(std::ranges::all_of(dbias, [](double value) { return value == -5; }));
  CHECK_NOTHROW(
      call.run(Softmax{}, Full{}, bias.gradient(View<double, 4>(dbias.data(), extents, {0, 0, 0, 0}))));
}

TEST_CASE("backward throws for a rope with too few positions", "[attention][backward][errors]") {
  Call call;
  const ssmax::Rope<float> wide({.width = 10}, 20), brief({.width = 8}, 6),
      late({.width = 8, .first_position = 3}, 20), enough({.width = 8}, 7);
  call.options.rope = &wide;
  call.refuses_backward({"width is 10", "channels 8"});
  call.options.rope = &brief;
  call.refuses_backward({"position 6", "last is 5"});
  call.options.rope = &late;
  call.refuses_backward({"position 0", "first is 3"});
  call.options.rope = &enough;
  call.options.key_position = -1;
  call.refuses_backward({"position -1", "first is 0"});
  call.options.key_position = 0;
  CHECK_NOTHROW(call.run());
}

}  // namespace attention_backward_errors_test
