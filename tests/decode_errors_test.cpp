// What decode refuses: std::invalid_argument that names the argument, before anything is written.

#include "decode_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "untouched_memory.hpp"

namespace decode_problem::decode_errors_test {

/// A call that fits; refused() says what is wrong with a changed one, and that nothing was written.
struct Call {
  std::vector<float> inputs = reference::normals<float>(2000, 3);
  std::vector<float> outputs = std::vector<float>(600, -77.F);
  float* const in = inputs.data();
  float* const to = outputs.data();
  KvCache<float> cache{
      KvCacheOptions{.batch = 2, .kv_heads = 2, .width = 8, .value_width = 6, .capacity = 12}};
  View<const float, 4> q{in, {2, 4, 3, 8}};
  View<float, 4> out{to, {2, 4, 3, 6}};
  View<float, 3> lse{to + 300, {2, 4, 3}};

  explicit Call(std::vector<index_t> lengths = {7, 4}) {
    cache.append({in + 400, {2, 2, 10, 8}}, {in + 800, {2, 2, 10, 6}}, nullptr, lengths);
  }

  template <class S = Softmax, class M = Causal, class C = Identity>
  void run(const S& scaling = {}, const M& mask = {}, const C& score = {},
           const AttentionOptions<float>& options = {}) {
    attention(with({.q = q, .keys = cache, .out = out, .lse = lse}, options), scaling, mask, score);
  }
  template <class S = Softmax, class M = Causal, class C = Identity>
  void refuses(std::initializer_list<std::string_view> parts, const S& scaling = {}, const M& mask = {},
               const C& score = {}, const AttentionOptions<float>& options = {}) {
    check_refused(parts, [&] { run(scaling, mask, score, options); });
    CHECK(std::ranges::all_of(outputs, [](float x) { return x == -77.F; }));
  }
};

constexpr auto refuses = untouched_memory::refuses<Call>;

TEST_CASE("decode refuses queries whose positions the cache does not have", "[decode]") {
  Call({7, 2}).refuses({"ssmax::attention: q has 3 positions", "2"});
  Call({2, 7}).refuses({"q has 3 positions", "2"});
  Call({0, 7}).refuses({"q has 3 positions", "0"});
  Call({0, 0}).refuses({"q has 3 positions", "0"});
  Call({0, 0}).refuses({"q has 3 positions", "0"}, Softmax{}, ssmax::Full{});
  CHECK_NOTHROW(Call({3, 3}).run());
  Call cleared({7, 4});
  cleared.cache.clear();
  cleared.refuses({"q has 3 positions", "0"});
}

TEST_CASE("decode throws for shapes that do not fit, before the first write", "[decode]") {
  Call fits;
  CHECK_NOTHROW(fits.run());
  CHECK(std::ranges::count(fits.outputs, -77.F) == 600 - 144 - 24);
  refuses({"attention: k has extent 2 in dimension 0", "q has 1"}, [](Call& c) {
    c.q = {c.in, {1, 4, 3, 8}};
  });
  refuses({"q has heads 3", "multiple", "2"}, [](Call& c) { c.q = {c.in, {2, 3, 3, 8}}; });
  refuses({"k has extent 8 in dimension 3", "q has 7"}, [](Call& c) { c.q = {c.in, {2, 4, 3, 7}}; });
  refuses({"out has extent 8 in dimension 3", "v has 6"}, [](Call& c) { c.out = {c.to, {2, 4, 3, 8}}; });
  refuses({"out has extent 2 in dimension 2", "q has 3"}, [](Call& c) { c.out = {c.to, {2, 4, 2, 6}}; });
  refuses({"lse has extent 2 in dimension 1", "q has 4"}, [](Call& c) { c.lse = {c.to + 300, {2, 2, 3}}; });
  refuses({"q is null", "192"}, [](Call& c) { c.q = {nullptr, {2, 4, 3, 8}}; });
  refuses({"out is null", "144"}, [](Call& c) { c.out = {nullptr, {2, 4, 3, 6}}; });
  refuses({"q has last stride 2"}, [](Call& c) { c.q = {c.in, {2, 4, 3, 8}, {192, 48, 16, 2}}; });
  refuses({"out", "stride 5", "6"}, [](Call& c) { c.out = {c.to, {2, 4, 3, 6}, {72, 18, 5, 1}}; });
  refuses({"lse", "overlaps out", "4 bytes"}, [](Call& c) { c.lse = {c.to + 143, {2, 4, 3}}; });
  refuses({"out", "overlaps q"}, [](Call& c) { c.q = {c.to + 100, {2, 4, 3, 8}}; });
  Call in_cache;
  const auto values = in_cache.cache.memory().second;
  const std::vector<float> before(values.begin(), values.end());
  in_cache.out = {const_cast<float*>(values.data()), {2, 4, 3, 6}};
  in_cache.refuses({"out", "overlaps v"});
  CHECK(same_bits(before, {values.begin(), values.end()}));
}

TEST_CASE("decode throws for policies and options that do not fit, before the first write", "[decode]") {
  Call call;  // lengths 7 and 4, three queries
  const std::vector<float> three(3, 1.F), p(6, 1.F), bias(2 * 4 * 3 * 7);
  const std::vector<index_t> lengths(3, 1);
  const std::vector<double> slopes(3, 1);
  const Rope<float> brief({.width = 8}, 6), enough({.width = 8}, 7), wide({.width = 10}, 9),
      late({.width = 8, .first_position = 2}, 9);
  const auto refused = [&](std::initializer_list<std::string_view> parts,
                           const AttentionOptions<float>& options) {
    call.refuses(parts, Softmax{}, Causal{}, Identity{}, options);
  };
  refused({"sinks has extent 3", "heads are 4"}, {.sinks = three});
  refused({"key_position is 2", "0"}, {.key_position = 2});
  refused({"q has position 6", "last is 5"}, {.rope = &brief});
  refused({"q has channels 8", "width is 10"}, {.rope = &wide});
  refused({"q has position 1", "first is 2"}, {.rope = &late});
  call.refuses({"s has extent 3", "4"}, SSMax<float>{three});
  call.refuses({"p has extent 6", "7"}, ssmax::SizeTable<float>{p});
  call.refuses({"lengths has extent 3", "2"}, Softmax{}, KeyLengths{lengths});
  call.refuses({"SlidingWindow: left is -1"}, Softmax{}, SlidingWindow{-1});
  call.refuses({"slopes have extent 3", "4"}, Softmax{}, Causal{}, ssmax::Alibi{slopes});
  // The matrix does not fit the second sequence.
  call.refuses({"bias has extent 7 in dimension 3", "4"}, Softmax{}, Causal{},
               ssmax::Bias<float>(View<const float, 4>(bias.data(), {2, 4, 3, 7})));
  CHECK_NOTHROW(call.run(Softmax{}, Causal{}, Identity{}, {.rope = &enough}));
}

}  // namespace decode_problem::decode_errors_test
