// What decode refuses: std::invalid_argument that names the argument, before anything is written.

#include <algorithm>
#include <initializer_list>
#include <ssmax/ssmax.hpp>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "decode_problem.hpp"
#include "reference.hpp"
#include "refusal.hpp"
#include "same_bits.hpp"

namespace decode_problem::decode_errors_test {

/// A call that fits; refused() says what is wrong with a changed one, and that nothing was written.
struct Call {
  std::vector<float> inputs = reference::normals<float>(2000, 3);
  std::vector<float> outputs = std::vector<float>(600, -77.F);
  KvCache<float> cache{
      KvCacheOptions{.batch = 2, .kv_heads = 2, .width = 8, .value_width = 6, .capacity = 12}};
  View<const float, 4> q{inputs.data(), {2, 4, 3, 8}};
  View<float, 4> out{outputs.data(), {2, 4, 3, 6}};
  View<float, 3> lse{outputs.data() + 300, {2, 4, 3}};

  explicit Call(std::vector<index_t> lengths = {7, 4}) {
    cache.append({inputs.data() + 400, {2, 2, 10, 8}}, {inputs.data() + 800, {2, 2, 10, 6}}, nullptr,
                 lengths);
  }

  template <class S = Softmax, class M = Causal, class C = Identity>
  void run(const S& scaling = {}, const M& mask = {}, const C& score = {},
           const AttentionOptions<float>& options = {}) {
    decode<float>({.q = q, .out = out, .lse = lse}, cache, scaling, mask, score, options);
  }
  template <class S = Softmax, class M = Causal, class C = Identity>
  void refused(std::initializer_list<std::string_view> parts, const S& scaling = {}, const M& mask = {},
               const C& score = {}, const AttentionOptions<float>& options = {}) {
    check_refused([&] { run(scaling, mask, score, options); }, parts);
    CHECK(std::ranges::all_of(outputs, [](float x) { return x == -77.F; }));
  }
};

TEST_CASE("decode refuses queries whose positions the cache does not have", "[decode]") {
  Call({7, 2}).refused({"ssmax::decode: q has positions 3", "2"});
  Call({2, 7}).refused({"q has positions 3", "2"});
  Call({0, 7}).refused({"q has positions 3", "0"});
  Call({0, 0}).refused({"q has positions 3", "0"});
  Call({0, 0}).refused({"q has positions 3", "0"}, Softmax{}, ssmax::Full{});
  CHECK_NOTHROW(Call({3, 3}).run());
  Call cleared({7, 4});
  cleared.cache.clear();
  cleared.refused({"q has positions 3", "0"});
}

TEST_CASE("decode throws for shapes that do not fit, before the first write", "[decode]") {
  Call call;
  SECTION("it is a call that fits") {
    CHECK_NOTHROW(call.run());
    CHECK(std::ranges::count(call.outputs, -77.F) == 600 - 144 - 24);
  }
  SECTION("batch") {
    call.q = {call.inputs.data(), {1, 4, 3, 8}};
    call.refused({"decode: k has extent 2 in dimension 0", "q has 1"});
  }
  SECTION("heads") {
    call.q = {call.inputs.data(), {2, 3, 3, 8}};
    call.refused({"q has heads 3", "multiple", "2"});
  }
  SECTION("width") {
    call.q = {call.inputs.data(), {2, 4, 3, 7}};
    call.refused({"k has extent 8 in dimension 3", "q has 7"});
  }
  SECTION("value width") {
    call.out = {call.outputs.data(), {2, 4, 3, 8}};
    call.refused({"out has extent 8 in dimension 3", "v has 6"});
  }
  SECTION("queries of out") {
    call.out = {call.outputs.data(), {2, 4, 2, 6}};
    call.refused({"out has extent 2 in dimension 2", "q has 3"});
  }
  SECTION("heads of lse") {
    call.lse = {call.outputs.data() + 300, {2, 2, 3}};
    call.refused({"lse has extent 2 in dimension 1", "q has 4"});
  }
  SECTION("null q") {
    call.q = {nullptr, {2, 4, 3, 8}};
    call.refused({"q is null", "192"});
  }
  SECTION("null out") {
    call.out = {nullptr, {2, 4, 3, 6}};
    call.refused({"out is null", "144"});
  }
  SECTION("strides of channels") {
    call.q = {call.inputs.data(), {2, 4, 3, 8}, {192, 48, 16, 2}};
    call.refused({"q has last stride 2"});
  }
  SECTION("rows of out on each other") {
    call.out = {call.outputs.data(), {2, 4, 3, 6}, {72, 18, 5, 1}};
    call.refused({"out", "stride 5", "6"});
  }
  SECTION("lse on out") {
    call.lse = {call.outputs.data() + 143, {2, 4, 3}};
    call.refused({"lse", "overlaps out", "4 bytes"});
  }
  SECTION("out on q") {
    call.q = {call.outputs.data() + 100, {2, 4, 3, 8}};
    call.refused({"out", "overlaps q"});
  }
  SECTION("out in the cache") {
    const auto values = call.cache.memory().second;
    const std::vector<float> before(values.begin(), values.end());
    call.out = {const_cast<float*>(values.data()), {2, 4, 3, 6}};
    call.refused({"out", "overlaps v"});
    CHECK(same_bits(before, {values.begin(), values.end()}));
  }
}

TEST_CASE("decode throws for policies and options that do not fit, before the first write", "[decode]") {
  Call call;  // lengths 7 and 4, three queries
  SECTION("sinks") {
    const std::vector<float> sinks(3, 1.F);
    call.refused({"sinks has extent 3", "heads are 4"}, Softmax{}, Causal{}, Identity{}, {.sinks = sinks});
  }
  SECTION("key_position") {
    call.refused({"key_position is 2", "0"}, Softmax{}, Causal{}, Identity{}, {.key_position = 2});
  }
  SECTION("a rope that is too short for the longest sequence, wide, or late") {
    const Rope<float> brief({.width = 8}, 6), enough({.width = 8}, 7), wide({.width = 10}, 9),
        late({.width = 8, .first_position = 2}, 9);
    call.refused({"q has position 6", "last is 5"}, Softmax{}, Causal{}, Identity{}, {.rope = &brief});
    call.refused({"q has channels 8", "width is 10"}, Softmax{}, Causal{}, Identity{}, {.rope = &wide});
    call.refused({"q has position 1", "first is 2"}, Softmax{}, Causal{}, Identity{}, {.rope = &late});
    CHECK_NOTHROW(call.run(Softmax{}, Causal{}, Identity{}, {.rope = &enough}));
  }
  SECTION("s of too few heads") {
    const std::vector<float> s(3, 1.F);
    call.refused({"s has extent 3", "4"}, SSMax<float>{s});
  }
  SECTION("a table that is too short for the longest sequence") {
    const std::vector<float> p(6, 1.F);
    call.refused({"p has extent 6", "7"}, ssmax::SizeTable<float>{p});
  }
  SECTION("lengths of too many sequences") {
    const std::vector<index_t> lengths(3, 1);
    call.refused({"lengths has extent 3", "2"}, Softmax{}, KeyLengths{lengths});
  }
  SECTION("a window that ends before it begins") {
    call.refused({"SlidingWindow: left is -1"}, Softmax{}, SlidingWindow{-1});
  }
  SECTION("slopes of too few heads") {
    const std::vector<double> slopes(3, 1);
    call.refused({"slopes have extent 3", "4"}, Softmax{}, Causal{}, ssmax::Alibi{slopes});
  }
  SECTION("a matrix that does not fit the second sequence") {
    const std::vector<float> bias(2 * 4 * 3 * 7);
    call.refused({"bias has extent 7 in dimension 3", "4"}, Softmax{}, Causal{},
                 ssmax::Bias<float>(View<const float, 4>(bias.data(), {2, 4, 3, 7})));
  }
}

}  // namespace decode_problem::decode_errors_test
