// attention_partial, merge and finish throw std::invalid_argument that names the argument, before they write.

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <ssmax/ssmax.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "untouched_memory.hpp"

namespace attention_state_errors_test {

using namespace ssmax;
using untouched_memory::Memory;
using untouched_memory::untouched;

// ---- attention_partial ------------------------------------------------------------------------------------

/// A valid call on keys 3 … 9 of 20.
struct PartialCall : Memory {
  View<const float, 4> q{inputs.data(), {2, 4, 5, 8}}, k{inputs.data() + 512, {2, 2, 7, 8}},
      v{inputs.data() + 1024, {2, 2, 7, 6}};
  index_t first_key = 3, keys = 20;
  AttentionState<float> state{
      {outputs.data() + 512, {2, 4, 5}}, {outputs.data() + 1024, {2, 4, 5}}, {outputs.data(), {2, 4, 5, 6}}};

  template <class M = Full>
  void run(const M& mask = {}, const AttentionOptions<float>& options = {}) {
    ssmax::attention_partial<float>(
        {.q = q, .k = k, .v = v, .first_key = first_key, .keys = keys, .state = state}, Softmax{}, mask,
        options);
  }
  template <class M = Full>
  void refuses(std::initializer_list<std::string_view> words, const M& mask = {},
               const AttentionOptions<float>& options = {}) {
    refused(words, [&] { run(mask, options); });
  }
};

TEST_CASE("attention_partial accepts a valid call", "[attention][errors]") {
  PartialCall call;
  CHECK_NOTHROW(call.run());
  CHECK(std::ranges::count(call.outputs, untouched) == 4096 - 240 - 2 * 40);
}

TEST_CASE("attention_partial throws for keys outside the range of all keys", "[attention][errors]") {
  PartialCall call;
  SECTION("before the first") {
    call.first_key = -1;
    call.refuses({"first_key", "-1", "0"});
  }
  SECTION("after the last") {
    call.first_key = 14;
    call.refuses({"first_key", "14", "20"});
  }
  SECTION("fewer keys in total than in the call") {
    call.first_key = 0;
    call.keys = 6;
    call.refuses({"first_key", "6"});
  }
  SECTION("a negative number of keys") {
    call.keys = -20;
    call.refuses({"first_key", "-20"});
    call.keys = std::numeric_limits<index_t>::min();
    call.refuses({"first_key"});
  }
  SECTION("accepts the last valid first_key") {
    call.first_key = 13;
    CHECK_NOTHROW(call.run());
  }
}

TEST_CASE("attention_partial checks masks and ropes against all keys", "[attention][errors]") {
  PartialCall call;
  const ssmax::Rope<float> enough({.width = 8}, 20), brief({.width = 8}, 19);
  const std::vector<index_t> queries{0, 5}, keys{0, 7};
  call.refuses({"cumulative_keys", "7", "20"}, ssmax::Documents(queries, keys, false));
  call.refuses({"q has position 19", "last is 18"}, Full{}, {.rope = &brief});
  CHECK_NOTHROW(call.run(Full{}, {.rope = &enough}));
}

TEST_CASE("attention_partial throws for mismatched states", "[attention][errors]") {
  PartialCall call;
  SECTION("an empty state") {
    call.state = {};
    call.refuses({"state", "has extent 0", "q has 2"});
  }
  SECTION("null sums") {
    call.state.sum = {nullptr, {2, 4, 5}};
    call.refuses({"state", "null"});
  }
  SECTION("null shifts") {
    call.state.shift = {nullptr, {2, 4, 5}};
    call.refuses({"state", "null"});
  }
  SECTION("null o") {
    call.state.o = {nullptr, {2, 4, 5, 6}};
    call.refuses({"state", "null"});
  }
  SECTION("each extent of shift") {
    for (std::size_t i = 0; i < 3; ++i) {
      std::array<index_t, 3> extents{2, 4, 5};
      --extents[i];
      call.state.shift = {call.outputs.data() + 512, extents};
      call.refuses({"shift", "dimension " + std::to_string(i)});
    }
  }
  SECTION("each extent of sum") {
    for (std::size_t i = 0; i < 3; ++i) {
      std::array<index_t, 3> extents{2, 4, 5};
      ++extents[i];
      call.state.sum = {call.outputs.data() + 1024, extents};
      call.refuses({"sum", "dimension " + std::to_string(i)});
    }
  }
  SECTION("channels of o") {
    call.state.o = {call.outputs.data(), {2, 4, 5, 7}};
    call.refuses({"o has extent 7", "6"});
  }
  SECTION("rows of o that overlap") {
    call.state.o = {call.outputs.data(), {2, 4, 5, 6}, {120, 30, 5, 1}};
    call.refuses({"state", "is an output with stride 5", "6"});
  }
  SECTION("o overlaps the keys") {
    call.k = {call.outputs.data() + 200, {2, 2, 7, 8}};
    call.refuses({"state.o", "overlaps k"});
  }
  SECTION("sums overlap the queries") {
    call.q = {call.outputs.data() + 1024 - 319, {2, 4, 5, 8}};
    call.refuses({"state.sum", "overlaps q", "4 bytes"});
  }
  SECTION("shifts overlap the values") {
    call.v = {call.outputs.data() + 540, {2, 2, 7, 6}};
    call.refuses({"state.shift", "overlaps v"});
  }
  SECTION("sums overlap shifts") {
    call.state.sum = {call.outputs.data() + 512, {2, 4, 5}};
    call.refuses({"overlaps"});
  }
  SECTION("sums overlap o") {
    call.state.sum = {call.outputs.data() + 239, {2, 4, 5}};
    call.refuses({"overlaps", "4 bytes"});
  }
}

TEST_CASE("attention_partial throws for mismatched inputs", "[attention][errors]") {
  PartialCall call;
  SECTION("heads") {
    call.q = {call.inputs.data(), {2, 3, 5, 8}};
    call.refuses({"q has heads 3", "2"});
  }
  SECTION("keys of v") {
    call.v = {call.inputs.data(), {2, 2, 6, 6}};
    call.refuses({"v has extent 6 in dimension 2", "k has 7"});
  }
  SECTION("null k") {
    call.k = {nullptr, {2, 2, 7, 8}};
    call.refuses({"k is null"});
  }
  SECTION("channels of v") {
    call.v = {call.inputs.data(), {2, 2, 7, 6}, {84, 42, 12, 2}};
    call.refuses({"v", "stride 2"});
  }
}

// ---- merge and finish -------------------------------------------------------------------------------------

AttentionState<float> state_at(float* memory) {
  return {{memory, {2, 4, 5}}, {memory + 40, {2, 4, 5}}, {memory + 80, {2, 4, 5, 6}}};
}

TEST_CASE("merge throws for mismatched states", "[attention][errors]") {
  Memory memory;
  const AttentionState<float> into = state_at(memory.outputs.data());
  AttentionState<float> other = state_at(memory.inputs.data());
  const auto refuses = [&](std::initializer_list<std::string_view> words) {
    memory.refused(words, [&] { ssmax::merge<float>(into, other); });
  };
  SECTION("channels") {
    other.o = {memory.inputs.data(), {2, 4, 5, 7}};
    refuses({"other.o has extent 7", "6"});
  }
  SECTION("queries") {
    other = {{memory.inputs.data(), {2, 4, 6}},
             {memory.inputs.data(), {2, 4, 6}},
             {memory.inputs.data(), {2, 4, 6, 6}}};
    refuses({"other.o has extent 6 in dimension 2", "5"});
  }
  SECTION("sums and o of different extents") {
    other.sum = {memory.inputs.data(), {2, 3, 5}};
    refuses({"sum", "3", "4"});
  }
  SECTION("null shifts") {
    other.shift = {nullptr, {2, 4, 5}};
    refuses({"other", "null"});
  }
  SECTION("itself") {
    other = into;
    refuses({"into.o", "overlaps other.o"});
  }
  SECTION("its own sums") {
    other.sum = into.sum;
    refuses({"overlaps"});
  }
  SECTION("its own shifts") {
    other.shift = into.shift;
    refuses({"overlaps"});
  }
}

TEST_CASE("finish throws for arguments that do not match the state", "[attention][errors]") {
  Memory memory;
  float* const outputs = memory.outputs.data();
  AttentionState<float> state = state_at(memory.inputs.data());
  View<float, 4> out{outputs, {2, 4, 5, 6}};
  View<float, 3> lse{outputs + 512, {2, 4, 5}};
  std::vector<float> sinks(4);
  const auto refuses = [&](std::initializer_list<std::string_view> words) {
    memory.refused(words, [&] { ssmax::finish<float>(state, out, lse, sinks); });
  };
  SECTION("each extent of out") {
    for (std::size_t i = 0; i < 4; ++i) {
      std::array<index_t, 4> extents{2, 4, 5, 6};
      ++extents[i];
      out = {outputs, extents};
      refuses({"out has extent", "dimension " + std::to_string(i)});
    }
  }
  SECTION("each extent of lse") {
    for (std::size_t i = 0; i < 3; ++i) {
      std::array<index_t, 3> extents{2, 4, 5};
      --extents[i];
      lse = {outputs + 512, extents};
      refuses({"lse has extent", "dimension " + std::to_string(i)});
    }
  }
  SECTION("null out") {
    out = {nullptr, {2, 4, 5, 6}};
    refuses({"out is null"});
  }
  SECTION("strides of out") {
    out = {outputs, {2, 4, 5, 6}, {120, 30, 5, 1}};
    refuses({"out", "stride 5"});
  }
  SECTION("too few sinks") {
    sinks.resize(3);
    refuses({"sinks", "3", "4"});
  }
  SECTION("out overlaps o at an offset of one element") {
    out = {memory.inputs.data() + 81, {2, 4, 5, 6}};
    refuses({"out", "overlaps state.o"});
  }
  SECTION("out overlaps the sums") {
    state = state_at(outputs);
    out = {outputs + 40, {2, 4, 5, 6}};
    state.o = {memory.inputs.data(), {2, 4, 5, 6}};
    refuses({"overlaps"});
  }
  SECTION("lse overlaps out") {
    lse = {outputs + 239, {2, 4, 5}};
    refuses({"lse", "overlaps out", "4 bytes"});
  }
  SECTION("lse overlaps o") {
    state = state_at(outputs + 1024);
    lse = {outputs + 1024 + 80 + 239, {2, 4, 5}};
    refuses({"lse", "overlaps"});
  }
}

}  // namespace attention_state_errors_test
