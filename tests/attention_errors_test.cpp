// attention throws std::invalid_argument that names the argument, before it writes.

#include "call.hpp"
#include "test.hpp"
#include "untouched_memory.hpp"

namespace attention_errors_test {

using namespace ssmax;
using untouched_memory::Memory;
using untouched_memory::refuses;
using untouched_memory::untouched;

/// A valid call: batch 2, 4 heads, 2 kv heads, 5 queries, 7 keys, widths 8 and 6. Each test changes one argument.
struct Call : Memory {
  View<const float, 4> q{in, {2, 4, 5, 8}}, k{in + 512, {2, 2, 7, 8}}, v{in + 1024, {2, 2, 7, 6}};
  View<float, 4> out{to, {2, 4, 5, 6}};
  View<float, 3> lse{to + 512, {2, 4, 5}};

  template <class S = Softmax, class M = Full, class C = Identity>
  void run(const S& scaling = {}, const M& mask = {}, const C& score = {},
           const AttentionOptions<float>& options = {}) const {
    ssmax::attention(with({.q = q, .k = k, .v = v, .out = out, .lse = lse}, options), scaling, mask, score);
  }
  template <class M = Full, class C = Identity>
  void refuses(std::initializer_list<std::string_view> words, const M& mask = {}, const C& score = {},
               const AttentionOptions<float>& options = {}) const {
    refused(words, [&] { run(Softmax{}, mask, score, options); });
  }
  template <class S>
  void refuses_scaling(std::initializer_list<std::string_view> words, const S& scaling) const {
    refused(words, [&] { run(scaling); });
  }
};

TEST_CASE("attention throws for an invalid argument and names it, before the first write", "[attention]") {
  refuses<Call>({"q has heads 4", "multiple", "3"}, [](auto& c) {
    c.k = {c.in, {2, 3, 7, 8}};
    c.v = {c.in, {2, 3, 7, 6}};
  });
  refuses<Call>({"q has heads 4", "multiple", "0"}, [](auto& c) {
    c.k = {c.in, {2, 0, 7, 8}};
    c.v = {c.in, {2, 0, 7, 6}};
  });
  refuses<Call>({"q has heads 4", "8"}, [](auto& c) {
    c.k = {c.in, {2, 8, 7, 8}};
    c.v = {c.in, {2, 8, 7, 6}};
  });
  refuses<Call>({"k has extent 1 in dimension 0", "q has 2"}, [](auto& c) { c.k = {c.in, {1, 2, 7, 8}}; });
  refuses<Call>({"v has extent 1 in dimension 0", "k has 2"}, [](auto& c) { c.v = {c.in, {1, 2, 7, 6}}; });
  refuses<Call>({"k has extent 4 in dimension 3", "q has 8"}, [](auto& c) { c.k = {c.in, {2, 2, 7, 4}}; });
  refuses<Call>({"v has extent 4 in dimension 1", "k has 2"}, [](auto& c) { c.v = {c.in, {2, 4, 7, 6}}; });
  refuses<Call>({"v has extent 6 in dimension 2", "k has 7"}, [](auto& c) { c.v = {c.in, {2, 2, 6, 6}}; });
  for (std::size_t i = 0; i < 4; ++i) {
    std::array<index_t, 4> extents{2, 4, 5, 6};
    const std::string dimension = "dimension " + std::to_string(i), expected = std::to_string(extents[i]++);
    refuses<Call>({"out has extent", dimension, std::to_string(extents[i]), expected}, [&](auto& c) {
      c.out = {c.to, extents};
    });
  }
  for (std::size_t i = 0; i < 3; ++i) {
    std::array<index_t, 3> extents{2, 4, 5};
    const std::string dimension = "dimension " + std::to_string(i), expected = std::to_string(extents[i]--);
    refuses<Call>({"lse has extent", dimension, std::to_string(extents[i]), expected}, [&](auto& c) {
      c.lse = {c.to + 512, extents};
    });
  }
  refuses<Call>({"k", "-7"}, [](auto& c) { c.k = {c.in, {2, 2, -7, 8}}; });
  refuses<Call>({"q is null", "320"}, [](auto& c) { c.q = {nullptr, {2, 4, 5, 8}}; });
  refuses<Call>({"k is null"}, [](auto& c) { c.k = {nullptr, {2, 2, 7, 8}}; });
  refuses<Call>({"v is null"}, [](auto& c) { c.v = {nullptr, {2, 2, 7, 6}}; });
  refuses<Call>({"out is null"}, [](auto& c) { c.out = {nullptr, {2, 4, 5, 6}}; });
  refuses<Call>({"q", "stride 2", "1"}, [](auto& c) { c.q = {c.in, {2, 4, 5, 8}, {320, 80, 16, 2}}; });
  refuses<Call>({"out", "stride 2", "1"}, [](auto& c) { c.out = {c.to, {2, 4, 5, 6}, {240, 60, 12, 2}}; });
  refuses<Call>({"out", "stride 5", "6"}, [](auto& c) { c.out = {c.to, {2, 4, 5, 6}, {120, 30, 5, 1}}; });
  refuses<Call>({"lse", "stride 0"}, [](auto& c) { c.lse = {c.to + 512, {2, 4, 5}, {20, 0, 1}}; });
  refuses<Call>({"lse", "stride 4", "1"}, [](auto& c) { c.lse = {c.to + 512, {2, 4, 5}, {20, 1, 4}}; });
  refuses<Call>({"lse", "overlaps out", "4 bytes"}, [](auto& c) { c.lse = {c.to + 239, {2, 4, 5}}; });
  const std::vector<index_t> lengths(41, 7);
  Call().refuses({"visible has extent 41", "40"}, Lengths{lengths});
}

TEST_CASE("attention throws for outputs that overlap inputs", "[attention]") {
  refuses<Call>({"out", "overlaps q", "4 bytes"}, [](auto& c) { c.q = {c.to + 239, {2, 4, 5, 8}}; });
  refuses<Call>({"out", "overlaps k"}, [](auto& c) { c.k = {c.to + 200, {2, 2, 7, 8}}; });
  refuses<Call>({"out", "overlaps v"}, [](auto& c) { c.v = {c.to, {2, 2, 7, 6}}; });
  refuses<Call>({"lse", "overlaps k"}, [](auto& c) { c.k = {c.to + 512, {2, 2, 7, 8}}; });
  Call adjacent;
  adjacent.q = {adjacent.to + 240, {2, 4, 5, 8}, {4, 4, 8, 1}};  // ends before lse begins
  CHECK_NOTHROW(adjacent.run());
  CHECK(std::ranges::count(adjacent.outputs, untouched) == 4096 - 240 - 40);
}

TEST_CASE("attention throws for a rope with too few positions", "[attention]") {
  Call call;
  const Rope<float> wide({.width = 10}, 20), brief({.width = 8}, 6),
      late({.width = 8, .first_position = 3}, 20);
  const Rope<float> enough({.width = 8}, 7);
  call.refuses({"width is 10", "channels 8"}, Causal{}, Identity{}, {.rope = &wide});
  call.refuses({"position 6", "last is 5"}, Causal{}, Identity{}, {.rope = &brief});
  call.refuses({"position 0", "first is 3"}, Causal{}, Identity{}, {.rope = &late});
  call.refuses({"position 23", "last is 22"}, Causal{}, Identity{}, {.rope = &late, .key_position = 17});
  call.refuses({"position -1", "first is 0"}, Causal{}, Identity{}, {.rope = &enough, .key_position = -1});
  // More queries than keys: the first queries would have positions below 0.
  call.k = {call.in + 512, {2, 2, 4, 8}};
  call.v = {call.in + 1024, {2, 2, 4, 6}};
  call.refuses({"q has position -1", "first is 0"}, Causal{}, Identity{}, {.rope = &enough});
  CHECK_NOTHROW(call.run(Softmax{}, Causal{}, Identity{}, {.rope = &enough, .key_position = 1}));
}

TEST_CASE("attention throws for invalid windows", "[attention][errors]") {
  Call call;
  call.refuses({"left", "-1"}, ssmax::SlidingWindow(-1));
  call.refuses({"right", "-2"}, ssmax::SlidingWindow(0, -2));
  call.refuses({"left", "-1"}, ssmax::Causal{} & ssmax::SlidingWindow(-1));
}

TEST_CASE("attention throws for mismatched spans of masks", "[attention][errors]") {
  Call call;
  const std::vector<index_t> three{1, 2, 3}, queries{0, 2, 5}, keys{0, 2, 7}, too_many{0, 2, 8},
      falling{0, 3, 1, 7}, late{1, 7};
  call.refuses({"prefix", "3", "2"}, ssmax::PrefixLM{three});
  call.refuses({"lengths", "3", "2"}, ssmax::KeyLengths{three});
  call.refuses({"visible", "3", "40"}, ssmax::Lengths{three});
  call.refuses({"cumulative_keys", "8", "7"}, ssmax::Documents(queries, too_many, true));
  call.refuses({"cumulative_queries", "7", "5"}, ssmax::Documents(keys, false));
  call.refuses({"cumulative_queries", "3", "4"}, ssmax::Documents(queries, falling, false));
  call.refuses({"cumulative_queries", "falls", "3", "1"}, ssmax::Documents(falling, falling, false));
  call.refuses({"cumulative_queries", "begins", "1"}, ssmax::Documents(late, late, false));
  call.refuses({"cumulative_queries", "0"}, ssmax::Documents({}, false));
}

TEST_CASE("attention throws for mismatched matrices", "[attention][errors]") {
  Call call;
  const float* const values = call.in;
  for (std::size_t i = 0; i < 4; ++i) {
    std::array<index_t, 4> extents{2, 4, 5, 7};
    ++extents[i];
    const std::string dimension = "dimension " + std::to_string(i);
    call.refuses({"matrix", dimension}, ssmax::MatrixMask(View<const float, 4>(values, extents)));
    call.refuses({"bias", dimension}, Full{}, ssmax::Bias(View<const float, 4>(values, extents)));
  }
  const std::array<index_t, 4> extents{2, 4, 5, 7};
  const View<const float, 4> none(nullptr, extents), strided(values, extents, {280, 70, 14, 2});
  call.refuses({"matrix", "null"}, ssmax::MatrixMask(none));
  call.refuses({"bias", "null"}, Full{}, ssmax::Bias(none));
  call.refuses({"matrix", "stride", "2"}, ssmax::MatrixMask(strided));
  call.refuses({"bias", "stride", "2"}, Full{}, ssmax::Bias(strided));
}

TEST_CASE("attention throws for mismatched scores and sinks", "[attention][errors]") {
  Call call;
  const std::vector<double> three_slopes(3), five_slopes(5);
  call.refuses({"slopes", "3", "4"}, Full{}, ssmax::Alibi(three_slopes));
  call.refuses({"slopes", "5", "4"}, Full{}, ssmax::Alibi(five_slopes));
  call.refuses({"cap"}, Full{}, ssmax::Softcap(0));
  call.refuses({"cap"}, Full{}, ssmax::Softcap(1) | ssmax::Softcap(-1));
  const std::vector<float> three_sinks(3);
  call.refuses({"sinks", "3", "4"}, Full{}, Identity{}, {.sinks = three_sinks});
  call.refuses({"out", "overlaps sinks"}, Full{}, Identity{}, {.sinks = {call.to + 17, 4}});
  call.refuses({"lse", "overlaps sinks"}, Full{}, Identity{}, {.sinks = {call.to + 512, 4}});
}

TEST_CASE("attention throws for mismatched scalings", "[attention][errors]") {
  Call call;
  const std::vector<float> three(3), four(4), six(6);
  call.refuses_scaling({"s has extent 3", "4"}, ssmax::SSMax<float>{three});
  call.refuses_scaling({"b has extent 3", "4"}, ssmax::SSMax<float>{four, three});
  call.refuses_scaling({"p has extent 4", "7"}, ssmax::SizeTable<float>{four});
  call.refuses_scaling({"p has extent 6", "7"}, ssmax::SizeTable<float>{six});
}

TEST_CASE("attention throws for document positions beyond the rope", "[attention][errors]") {
  Call call;
  const ssmax::Rope<float> brief({.width = 8}, 4), late({.width = 8, .first_position = 1}, 20),
      enough({.width = 8}, 5);
  const std::vector<index_t> queries{0, 1, 5}, keys{0, 2, 7}, short_keys{0, 5, 7};
  call.refuses({"position 4", "last is 3"}, ssmax::Documents(queries, keys, true), Identity{},
               {.rope = &brief});
  call.refuses({"position 0", "first is 1"}, ssmax::Documents(queries, keys, true), Identity{},
               {.rope = &late});
  // Four queries and two keys: the first two queries would precede the document.
  call.refuses({"q has position -2", "first is 0"}, ssmax::Documents(queries, short_keys, true), Identity{},
               {.rope = &enough});
  CHECK_NOTHROW(ssmax::attention(
      {.q = call.q, .k = call.k, .v = call.v, .out = call.out, .lse = call.lse, .rope = &enough},
      ssmax::Documents(queries, keys, true)));
}

}  // namespace attention_errors_test
