// attention_partial, merge and finish throw std::invalid_argument that names the argument, before they write.

#include "call.hpp"
#include "test.hpp"
#include "untouched_memory.hpp"

namespace attention_state_errors_test {

using namespace ssmax;
using untouched_memory::Memory;
using untouched_memory::refuses;
using untouched_memory::untouched;

// ---- attention_partial ------------------------------------------------------------------------------------

/// A valid call on keys 3 … 9 of 20.
struct PartialCall : Memory {
  View<const float, 4> q{in, {2, 4, 5, 8}}, k{in + 512, {2, 2, 7, 8}}, v{in + 1024, {2, 2, 7, 6}};
  index_t first_key = 3, keys = 20;
  AttentionState<float> state{{to + 512, {2, 4, 5}}, {to + 1024, {2, 4, 5}}, {to, {2, 4, 5, 6}}};

  template <class M = Full>
  void run(const M& mask = {}, const AttentionOptions<float>& options = {}) {
    ssmax::attention(
        with({.q = q, .k = k, .v = v, .state = state, .first_key = first_key, .all_keys = keys}, options),
        mask);
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
  refuses<PartialCall>({"first_key", "-1", "0"}, [](auto& c) { c.first_key = -1; });
  refuses<PartialCall>({"first_key", "14", "20"}, [](auto& c) { c.first_key = 14; });
  refuses<PartialCall>({"first_key", "6"}, [](auto& c) {
    c.first_key = 0;
    c.keys = 6;
  });
  refuses<PartialCall>({"first_key", "-20"}, [](auto& c) { c.keys = -20; });
  refuses<PartialCall>({"first_key"}, [](auto& c) { c.keys = std::numeric_limits<index_t>::min(); });
  PartialCall last;
  last.first_key = 13;
  CHECK_NOTHROW(last.run());
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
  refuses<PartialCall>({"out has extent 0", "q has 2"}, [](auto& c) { c.state = {}; });
  refuses<PartialCall>({"state", "null"}, [](auto& c) { c.state.sum = {nullptr, {2, 4, 5}}; });
  refuses<PartialCall>({"state", "null"}, [](auto& c) { c.state.shift = {nullptr, {2, 4, 5}}; });
  refuses<PartialCall>({"state", "null"}, [](auto& c) { c.state.o = {nullptr, {2, 4, 5, 6}}; });
  for (std::size_t i = 0; i < 3; ++i) {
    std::array<index_t, 3> smaller{2, 4, 5}, larger = smaller;
    --smaller[i], ++larger[i];
    const std::string dimension = "dimension " + std::to_string(i);
    refuses<PartialCall>({"shift", dimension}, [&](auto& c) { c.state.shift = {c.to + 512, smaller}; });
    refuses<PartialCall>({"sum", dimension}, [&](auto& c) { c.state.sum = {c.to + 1024, larger}; });
  }
  refuses<PartialCall>({"o has extent 7", "6"}, [](auto& c) { c.state.o = {c.to, {2, 4, 5, 7}}; });
  refuses<PartialCall>({"state", "is an output with stride 5", "6"}, [](auto& c) {
    c.state.o = {c.to, {2, 4, 5, 6}, {120, 30, 5, 1}};
  });
  refuses<PartialCall>({"state.o", "overlaps k"}, [](auto& c) { c.k = {c.to + 200, {2, 2, 7, 8}}; });
  refuses<PartialCall>({"state.sum", "overlaps q", "4 bytes"}, [](auto& c) {
    c.q = {c.to + 1024 - 319, {2, 4, 5, 8}};
  });
  refuses<PartialCall>({"state.shift", "overlaps v"}, [](auto& c) { c.v = {c.to + 540, {2, 2, 7, 6}}; });
  refuses<PartialCall>({"overlaps"}, [](auto& c) { c.state.sum = {c.to + 512, {2, 4, 5}}; });
  refuses<PartialCall>({"overlaps", "4 bytes"}, [](auto& c) { c.state.sum = {c.to + 239, {2, 4, 5}}; });
}

TEST_CASE("attention_partial throws for mismatched inputs", "[attention][errors]") {
  refuses<PartialCall>({"q has heads 3", "2"}, [](auto& c) { c.q = {c.in, {2, 3, 5, 8}}; });
  refuses<PartialCall>({"v has extent 6 in dimension 2", "k has 7"}, [](auto& c) {
    c.v = {c.in, {2, 2, 6, 6}};
  });
  refuses<PartialCall>({"k is null"}, [](auto& c) { c.k = {nullptr, {2, 2, 7, 8}}; });
  refuses<PartialCall>({"v", "stride 2"}, [](auto& c) { c.v = {c.in, {2, 2, 7, 6}, {84, 42, 12, 2}}; });
}

// ---- merge and finish -------------------------------------------------------------------------------------

AttentionState<float> state_at(float* memory) {
  return {{memory, {2, 4, 5}}, {memory + 40, {2, 4, 5}}, {memory + 80, {2, 4, 5, 6}}};
}

struct MergeCall : Memory {
  AttentionState<float> into = state_at(to), other = state_at(in);

  void refuses(std::initializer_list<std::string_view> words) const {
    refused(words, [&] { ssmax::merge<float>(into, other); });
  }
};

TEST_CASE("merge throws for mismatched states", "[attention][errors]") {
  refuses<MergeCall>({"other.o has extent 7", "6"}, [](auto& c) { c.other.o = {c.in, {2, 4, 5, 7}}; });
  refuses<MergeCall>({"other.o has extent 6 in dimension 2", "5"}, [](auto& c) {
    c.other = {{c.in, {2, 4, 6}}, {c.in, {2, 4, 6}}, {c.in, {2, 4, 6, 6}}};
  });
  refuses<MergeCall>({"sum", "3", "4"}, [](auto& c) { c.other.sum = {c.in, {2, 3, 5}}; });
  refuses<MergeCall>({"other", "null"}, [](auto& c) { c.other.shift = {nullptr, {2, 4, 5}}; });
  refuses<MergeCall>({"into.o", "overlaps other.o"}, [](auto& c) { c.other = c.into; });
  refuses<MergeCall>({"overlaps"}, [](auto& c) { c.other.sum = c.into.sum; });
  refuses<MergeCall>({"overlaps"}, [](auto& c) { c.other.shift = c.into.shift; });
}

struct FinishCall : Memory {
  AttentionState<float> state = state_at(in);
  View<float, 4> out{to, {2, 4, 5, 6}};
  View<float, 3> lse{to + 512, {2, 4, 5}};
  std::vector<float> sinks = std::vector<float>(4);

  void refuses(std::initializer_list<std::string_view> words) const {
    refused(words, [&] { ssmax::finish<float>(state, out, lse, sinks); });
  }
};

TEST_CASE("finish throws for arguments that do not match the state", "[attention][errors]") {
  for (std::size_t i = 0; i < 4; ++i) {
    std::array<index_t, 4> extents{2, 4, 5, 6};
    ++extents[i];
    refuses<FinishCall>({"out has extent", "dimension " + std::to_string(i)}, [&](auto& c) {
      c.out = {c.to, extents};
    });
  }
  for (std::size_t i = 0; i < 3; ++i) {
    std::array<index_t, 3> extents{2, 4, 5};
    --extents[i];
    refuses<FinishCall>({"lse has extent", "dimension " + std::to_string(i)}, [&](auto& c) {
      c.lse = {c.to + 512, extents};
    });
  }
  refuses<FinishCall>({"out is null"}, [](auto& c) { c.out = {nullptr, {2, 4, 5, 6}}; });
  refuses<FinishCall>({"out", "stride 5"}, [](auto& c) { c.out = {c.to, {2, 4, 5, 6}, {120, 30, 5, 1}}; });
  refuses<FinishCall>({"sinks", "3", "4"}, [](auto& c) { c.sinks.resize(3); });
  // At an offset of one element.
  refuses<FinishCall>({"out", "overlaps state.o"}, [](auto& c) { c.out = {c.in + 81, {2, 4, 5, 6}}; });
  refuses<FinishCall>({"overlaps"}, [](auto& c) {  // the sums
    c.state = state_at(c.to);
    c.out = {c.to + 40, {2, 4, 5, 6}};
    c.state.o = {c.in, {2, 4, 5, 6}};
  });
  refuses<FinishCall>({"lse", "overlaps out", "4 bytes"}, [](auto& c) { c.lse = {c.to + 239, {2, 4, 5}}; });
  refuses<FinishCall>({"lse", "overlaps"}, [](auto& c) {  // o
    c.state = state_at(c.to + 1024);
    c.lse = {c.to + 1024 + 80 + 239, {2, 4, 5}};
  });
}

}  // namespace attention_state_errors_test
