// Wrong arguments: std::invalid_argument that names the argument and both extents, and nothing written.

#include "call.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "untouched_memory.hpp"

namespace errors_test {

using namespace ssmax;

constexpr float sentinel = -1234.5f;

/// Memory that no refused call may touch.
struct Buffer {
  std::vector<float> storage = std::vector<float>(1 << 12, sentinel);

  template <int Rank>
  View<float, Rank> view(std::array<index_t, Rank> extents) {
    return {storage.data(), extents};
  }
  template <int Rank>
  View<float, Rank> view(std::array<index_t, Rank> extents, std::array<index_t, Rank> strides) {
    return {storage.data(), extents, strides};
  }
  bool untouched() const {
    return std::all_of(storage.begin(), storage.end(), [](float value) { return value == sentinel; });
  }
};

// ---- Rows -------------------------------------------------------------------------------------------------

struct RowBuffers {
  Buffer logits, out, dout, dlogits;

  void check_untouched() const {
    CHECK((logits.untouched() && out.untouched() && dout.untouched() && dlogits.untouched()));
  }
};

TEST_CASE("softmax and log_softmax refuse shapes that do not fit", "[errors]") {
  RowBuffers m;
  const auto refused = [&](View<const float, 3> logits, View<float, 3> out,
                           std::initializer_list<std::string_view> words) {
    check_refused_with_words(words, [&] { ssmax::softmax(logits, out); });
    check_refused_with_words(words, [&] { ssmax::log_softmax(logits, out); });
  };
  refused(m.logits.view<3>({2, 5, 8}), m.out.view<3>({2, 5, 7}), {"out", "7", "8"});
  refused(m.logits.view<3>({2, 5, 8}), m.out.view<3>({2, 6, 8}), {"out", "5", "6"});
  refused(m.logits.view<3>({2, 5, 8}), m.out.view<3>({3, 5, 8}), {"out", "2", "3"});
  refused(m.logits.view<3>({2, 5, 8}), m.out.view<3>({2, 5, 8}, {40, 8, 0}), {"out", "stride", "0", "1"});
  m.check_untouched();
}

TEST_CASE("softmax refuses memory that overlaps other than as a whole", "[errors]") {
  RowBuffers m;
  float* const data = m.logits.storage.data();
  const View<const float, 2> logits(data, {4, 8});
  const auto refused = [&](const View<float, 2>& out) {
    check_refused_with_words({"out"}, [&] { ssmax::softmax(logits, out); });
  };
  refused({data + 1, {4, 8}});
  refused({data + 8, {4, 8}});
  refused({data, {4, 8}, {16, 1}});
  // Rows of the output on top of each other.
  refused(m.out.view<2>({4, 8}, {0, 1}));
  refused(m.out.view<2>({4, 8}, {7, 1}));
  m.check_untouched();
}

TEST_CASE("logsumexp refuses another number of rows", "[errors]") {
  RowBuffers m;
  check_refused_with_words({"out", "4", "5"}, [&] {
    ssmax::logsumexp(View<const float, 2>(m.logits.view<2>({5, 8})), m.out.view<1>({4}));
  });
  m.check_untouched();
}

TEST_CASE("masks and scalings that do not fit the rows are refused", "[errors]") {
  RowBuffers m;
  const View<const float, 3> logits = m.logits.view<3>({3, 5, 8});
  const View<float, 3> out = m.out.view<3>({3, 5, 8});
  const std::vector<index_t> lengths(14, 8);
  const std::vector<float> two(2, 1.f), three(3, 1.f), table(7, 1.f);
  const auto refused = [&](const auto& scaling, const auto& mask,
                           std::initializer_list<std::string_view> words) {
    check_refused_with_words(words, [&] { ssmax::softmax(logits, out, scaling, mask); });
    check_refused_with_words(words, [&] { ssmax::log_softmax(logits, out, scaling, mask); });
    check_refused_with_words(words, [&] { ssmax::logsumexp(logits, m.out.view<2>({3, 5}), scaling, mask); });
  };
  refused(Softmax{}, Lengths{lengths}, {"visible", "14", "15"});
  refused(SSMax<float>{two}, Full{}, {"s", "2", "3"});
  refused(SSMax<float>{three, two}, Full{}, {"b", "2", "3"});
  refused(ssmax::SizeTable<float>{table}, Full{}, {"p", "7", "8"});
  m.check_untouched();
}

TEST_CASE("backward refuses shapes that do not fit", "[errors]") {
  RowBuffers m;
  const auto refused = [&](const ssmax::RowsBackward<float, 2>& arguments, const auto& scaling,
                           std::initializer_list<std::string_view> words) {
    check_refused_with_words(words, [&] { ssmax::softmax_backward<float, 2>(arguments, scaling); });
    check_refused_with_words(words, [&] { ssmax::log_softmax_backward<float, 2>(arguments, scaling); });
  };
  const View<float, 2> good_logits = m.logits.view<2>({4, 8}), good_out = m.out.view<2>({4, 8}),
                       good_dout = m.dout.view<2>({4, 8}), good_dlogits = m.dlogits.view<2>({4, 8});
  std::vector<float> ds(1), none;
  const auto learnt = SSMax<float>{1.f}.gradient(ds);

  refused({.out = m.out.view<2>({4, 7}), .dout = good_dout, .dlogits = good_dlogits}, Softmax{},
          {"out", "7", "8"});
  refused({.out = good_out, .dout = m.dout.view<2>({3, 8}), .dlogits = good_dlogits}, Softmax{},
          {"dout", "3", "4"});
  refused({.out = good_out, .dout = good_dout, .dlogits = m.dlogits.view<2>({4, 9})}, Softmax{},
          {"dlogits", "9", "8"});
  refused({.out = good_out, .dout = good_dout, .logits = m.logits.view<2>({6, 8}), .dlogits = good_dlogits},
          learnt, {"logits", "6", "4"});
  refused({.out = good_out, .dout = good_dout, .dlogits = good_dlogits}, learnt, {"logits"});
  refused({.out = good_out, .dout = good_dout, .dlogits = m.dlogits.view<2>({4, 8}, {8, 0})}, Softmax{},
          {"dlogits", "stride", "0"});
  refused({.out = good_out,
           .dout = good_dout,
           .logits = good_logits,
           .dlogits = View<float, 2>(m.logits.storage.data() + 3, {4, 8})},
          learnt, {"dlogits"});
  CHECK(ds[0] == 0);
  m.check_untouched();
}

// ---- RoPE -------------------------------------------------------------------------------------------------

TEST_CASE("Rope refuses widths and numbers that make no rotation", "[errors]") {
  check_refused_with_words({"width", "7"}, [] { Rope<float>({.width = 7}, 10); });
  check_refused_with_words({"width", "-2"}, [] { Rope<float>({.width = -2}, 10); });
  check_refused_with_words({"positions", "-1"}, [] { Rope<float>({.width = 8}, -1); });
  check_refused_with_words({"theta"}, [] { Rope<float>({.width = 8, .theta = 0}, 10); });
  check_refused_with_words({"theta"}, [] { Rope<float>({.width = 8, .theta = -10'000}, 10); });
}

TEST_CASE("rope refuses shapes and positions outside of its table", "[errors]") {
  Buffer in, out;
  const Rope<float> table{{.width = 8, .first_position = 5}, 10};  // positions 5 ... 14
  const View<const float, 3> x = in.view<3>({2, 4, 10});
  const View<float, 3> y = out.view<3>({2, 4, 10});
  const auto refused = [](auto x_view, auto y_view, const Rope<float>& rope, auto positions,
                          std::initializer_list<std::string_view> words) {
    check_refused_with_words(words, [&] { ssmax::rope<float>(x_view, y_view, rope, positions); });
    check_refused_with_words(words, [&] { ssmax::rope_backward<float>(x_view, y_view, rope, positions); });
  };
  refused(x, out.view<3>({2, 4, 9}), table, index_t{5}, {"out", "9", "10"});
  refused(x, out.view<3>({2, 3, 10}), table, index_t{5}, {"out", "3", "4"});
  refused(View<const float, 3>(in.view<3>({2, 4, 6})), out.view<3>({2, 4, 6}), table, index_t{5},
          {"width", "8", "6"});
  refused(x, y, table, index_t{4}, {"4", "5"});
  refused(x, y, table, index_t{12}, {"15"});

  const std::vector<index_t> too_few{5, 6, 7};
  refused(x, y, table, std::span<const index_t>(too_few), {"positions", "3", "4"});
  const std::vector<index_t> too_low{5, 6, 4, 8}, too_high{5, 15, 6, 7};
  refused(x, y, table, std::span<const index_t>(too_low), {"positions", "4"});
  refused(x, y, table, std::span<const index_t>(too_high), {"positions", "15"});
  CHECK((in.untouched() && out.untouched()));
}

// ---- Attention --------------------------------------------------------------------------------------------

struct AttentionBuffers {
  Buffer q, k, v, out, lse;
  View<float, 4> q_view = q.view<4>({2, 4, 5, 8}), k_view = k.view<4>({2, 2, 7, 8}),
                 v_view = v.view<4>({2, 2, 7, 6});
  View<float, 4> out_view = out.view<4>({2, 4, 5, 6});
  View<float, 3> lse_view{};

  template <class Scaling = Softmax, class Mask = Full>
  void refuses(std::initializer_list<std::string_view> words, const Scaling& scaling = {},
               const Mask& mask = {}, const ssmax::AttentionOptions<float>& options = {}) {
    check_refused_with_words(words, [&] {
      ssmax::attention(
          with({.q = q_view, .k = k_view, .v = v_view, .out = out_view, .lse = lse_view}, options), scaling,
          mask);
    });
    CHECK((q.untouched() && k.untouched() && v.untouched() && out.untouched() && lse.untouched()));
  }
};

constexpr auto refuses = untouched_memory::refuses<AttentionBuffers>;

TEST_CASE("attention refuses shapes that do not fit", "[errors]") {
  using Buffers = AttentionBuffers;
  refuses({"k", "9", "8"}, [](Buffers& c) { c.k_view = c.k.view<4>({2, 2, 7, 9}); });
  refuses({"v", "11", "7"}, [](Buffers& c) { c.v_view = c.v.view<4>({2, 2, 11, 6}); });
  refuses({"k", "3", "2"}, [](Buffers& c) { c.k_view = c.k.view<4>({3, 2, 7, 8}); });
  refuses({"v", "1", "2"}, [](Buffers& c) { c.v_view = c.v.view<4>({2, 1, 7, 6}); });
  refuses({"q", "4", "3"}, [](Buffers& c) {
    c.k_view = c.k.view<4>({2, 3, 7, 8});
    c.v_view = c.v.view<4>({2, 3, 7, 6});
  });
  refuses({"k", "0", "4"}, [](Buffers& c) {
    c.k_view = c.k.view<4>({2, 0, 7, 8});
    c.v_view = c.v.view<4>({2, 0, 7, 6});
  });
  refuses({"out", "8", "6"}, [](Buffers& c) { c.out_view = c.out.view<4>({2, 4, 5, 8}); });
  refuses({"out", "9", "5"}, [](Buffers& c) { c.out_view = c.out.view<4>({2, 4, 9, 6}); });
  refuses({"lse", "11", "5"}, [](Buffers& c) { c.lse_view = c.lse.view<3>({2, 4, 11}); });
  refuses({"v", "stride", "3"}, [](Buffers& c) { c.v_view = c.v.view<4>({2, 2, 7, 6}, {252, 126, 18, 3}); });
  refuses({"out"}, [](Buffers& c) { c.out_view = View<float, 4>(c.q.storage.data() + 2, {2, 4, 5, 6}); });
  const std::vector<float> s(3, 1.f);
  Buffers().refuses({"ssmax::attention: s", "3", "4"}, SSMax<float>{s});
  const std::vector<index_t> lengths(39, 7);
  Buffers().refuses({"visible", "39", "40"}, Softmax{}, Lengths{lengths});
}

TEST_CASE("attention refuses a RoPE table that does not reach", "[errors]") {
  AttentionBuffers m;
  const Rope<float> wide{{.width = 10}, 20}, short_table{{.width = 8}, 6},
      late{{.width = 8, .first_position = 1}, 20};
  m.refuses({"width", "10", "8"}, Softmax{}, Causal{}, {.rope = &wide});
  m.refuses({"6"}, Softmax{}, Causal{}, {.rope = &short_table});
  m.refuses({"1", "0"}, Softmax{}, Causal{}, {.rope = &late});
  m.refuses({"20"}, Softmax{}, Causal{}, {.rope = &late, .key_position = 15});
  constexpr ssmax::index_t furthest = std::numeric_limits<ssmax::index_t>::max();
  m.refuses({"key_position"}, Softmax{}, Causal{}, {.rope = &late, .key_position = furthest});
  m.refuses({"key_position"}, Softmax{}, Causal{}, {.rope = &late, .key_position = -furthest - 1});
}

// ---- Targets ----------------------------------------------------------------------------------------------

TEST_CASE("a target that this machine lacks is refused by name", "[errors]") {
  const std::vector<ssmax::Target> available = ssmax::available_targets();
  const ssmax::Target before = ssmax::active_target();
  for (const auto target : ssmax::detail::all_targets) {
    if (std::find(available.begin(), available.end(), target) != available.end()) continue;
    check_refused_with_words({ssmax::target_name(target), "scalar"},
                             [&] { ssmax::set_active_target(target); });
    CHECK(ssmax::active_target() == before);
  }
  // No machine has both NEON and AVX, so something was refused above.
  REQUIRE(available.size() < std::size(ssmax::detail::all_targets));
}

}  // namespace errors_test
