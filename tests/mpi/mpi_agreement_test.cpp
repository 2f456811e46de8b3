// Every rank throws the same error for policies that differ between ranks or throw on one rank.

#include <memory>
#include <new>
#include <ssmax/mpi.hpp>

#include "../test.hpp"
#include "mpi_call.hpp"

namespace mpi_problem::mpi_call::mpi_agreement_test {

constexpr index_t n = 40;

/// Checks that forward and backward, by keys and by heads, throw an error with the word.
template <class S, class M, class C = Identity>
void check_compared(const S& scaling, const M& mask, const C& score, const char* word) {
  for (const bool by_heads : {false, true}) {
    Call call{.batch = 2};
    if (by_heads) call.layout = call.layout.by_heads();
    check_refused_alike(call, refusal([&] { call.attention(scaling, mask, score); }),
                        {"mpi::attention", word, "differs"});
    check_refused_alike(call, refusal([&] { call.attention_backward(scaling, mask, score); }),
                        {"mpi::attention_backward", word, "differs"});
  }
}

TEST_CASE("ranks compare policies for every batch entry, head and query", "[mpi][errors]") {
  if (world().ranks() == 1) return;
  SECTION("lengths of keys in batch entry 1") {
    const std::array<index_t, 2> lengths{n, is_last() ? index_t{20} : index_t{21}};
    check_compared(Softmax{}, KeyLengths{lengths}, Identity{}, "mask");
  }
  SECTION("one row of Lengths") {
    std::vector<index_t> visible(2 * 2 * n, n);
    if (is_last()) visible[2 * n + 17] = 5;
    check_compared(Softmax{}, Lengths{visible}, Identity{}, "mask");
  }
  SECTION("one multiplier of PerQuery") {
    std::vector<double> c(2 * 2 * n, 1.5);
    if (is_last()) c[3 * n + 22] = 1.25;
    check_compared(PerQuery(View<const double, 3>(c.data(), {2, 2, n})), Full{}, Identity{}, "scaling");
  }
  SECTION("one element of a matrix") {
    const auto visible = std::make_unique<bool[]>(2 * 2 * n * n);
    std::fill_n(visible.get(), 2 * 2 * n * n, true);
    // The last query belongs to the last rank, so two ranks compare its row.
    visible[static_cast<std::size_t>((4 * n - 1) * n + (is_last() ? 7 : 8))] = false;
    check_compared(Softmax{}, MatrixMask(View<const bool, 4>(visible.get(), {2, 2, n, n})), Identity{},
                   "mask");
  }
  SECTION("a function") {
    const index_t masked = is_last() ? 3 : 4;
    check_compared(Softmax{}, Causal{} & Where([=](const Query& query, index_t key) {
                                return query.batch == 0 || query.head == 0 || key != masked;
                              }),
                   Identity{}, "mask");
  }
  SECTION("the positions of keys") {
    struct Shifted {
      index_t shift;
      ssmax::KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
      index_t key_position(const Query& query, index_t key) const {
        return query.batch == 1 && key == 13 ? key + shift : key;
      }
    };
    check_compared(Softmax{}, Shifted{is_last() ? 0 : 1}, Identity{}, "mask");
  }
  SECTION("a Bias at the last key of one query") {
    std::vector<double> bias(2 * 2 * n * n);
    if (is_last()) bias[(2 * n + 9) * n + n - 1] = 1;
    check_compared(Softmax{}, Full{}, Bias(View<const double, 4>(bias.data(), {2, 2, n, n})), "score");
  }
}

/// One cache for each rank, and one new query.
struct Decoding {
  Layout layout = Layout::contiguous(n, world().ranks(), 1);
  KvCache<float> cache{{.batch = 2, .width = 4, .capacity = n}};
  std::vector<float> rows = std::vector<float>(2 * n * 4, 1.0f);
  std::array<float, 16> out{};
  AttentionArguments<float> arguments{
      .q = {rows.data(), {2, 2, 1, 4}}, .keys = cache, .out = {out.data(), {2, 2, 1, 4}}};

  Decoding() {
    const View<const float, 4> keys{rows.data(), {2, 1, n, 4}};
    ssmax::mpi::append(cache, layout, world().rank(), 0, keys, keys);
  }
  template <class S = Softmax, class M = Causal, class C = Identity>
  void decode(const S& scaling = {}, const M& mask = {}, const C& score = {},
              const AttentionOptions<float>& options = {}) {
    ssmax::mpi::attention(world(), layout, n, with(arguments, options), scaling, mask, score);
  }
};

TEST_CASE("mpi::attention over a cache compares policies for every batch entry and key",
          "[mpi][decode][errors]") {
  if (world().ranks() == 1) return;
  Decoding decoding;
  const std::array<index_t, 2> lengths{n, is_last() ? index_t{20} : index_t{21}};
  CHECK(everywhere(mentions(refusal([&] { decoding.decode(Softmax{}, KeyLengths{lengths}); }), "mask")));
  const index_t masked = is_last() ? 3 : 4;
  const Where all_but_one([=](const Query& query, index_t key) { return query.batch == 0 || key != masked; });
  CHECK(everywhere(mentions(refusal([&] { decoding.decode(Softmax{}, all_but_one); }), "mask")));
  const std::vector<float> c{1, 1, 1, is_last() ? 2.0f : 3.0f};
  const PerQuery scaling(View<const float, 3>(c.data(), {2, 2, 1}));
  CHECK(everywhere(mentions(refusal([&] { decoding.decode(scaling); }), "scaling")));
}

bool begins_with(const std::string& message, const std::string& prefix) {
  INFO(message);
  const bool begins = message.compare(0, prefix.size(), prefix) == 0;
  CHECK(begins);
  return begins;
}

TEST_CASE("errors begin with the function's name exactly once", "[mpi][errors]") {
  SECTION("an invalid argument") {
    Call call;
    call.layout = Layout::contiguous(n, world().ranks() + 1, 1);
    CHECK(everywhere(begins_with(call.refused(), "ssmax::mpi::attention: layout")));
    CHECK(everywhere(begins_with(call.refused_backward(), "ssmax::mpi::attention_backward: layout")));
    Decoding decoding;
    decoding.layout = call.layout;
    const std::string message = refusal([&] { decoding.decode(); });
    CHECK(everywhere(begins_with(message, "ssmax::mpi::attention: layout")));
    const View<const float, 4> keys{decoding.rows.data(), {2, 1, n, 4}};
    const std::string append =
        refusal([&] { ssmax::mpi::append(decoding.cache, decoding.layout, world().rank(), 1, keys, keys); });
    CHECK(everywhere(begins_with(append, "ssmax::mpi::append: first")));
  }
  SECTION("an option that differs") {
    if (world().ranks() == 1) return;
    const AttentionOptions<double> options{.scaled_sinks = is_last()};
    Call call;
    CHECK(everywhere(
        begins_with(call.refused(Full{}, Identity{}, options), "ssmax::mpi::attention: scaled_sinks")));
    CHECK(everywhere(
        begins_with(call.refused_backward(options), "ssmax::mpi::attention_backward: scaled_sinks")));
    Decoding decoding;
    const std::string message =
        refusal([&] { decoding.decode(Softmax{}, Causal{}, Identity{}, {.scaled_sinks = is_last()}); });
    CHECK(everywhere(begins_with(message, "ssmax::mpi::attention: scaled_sinks")));
  }
}

/// The text of the std::runtime_error that a call throws.
template <class F>
std::string runtime_error_of(const F& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}

/// A mask that throws on the last rank, for one query.
template <class Error>
struct ThrowingMask {
  Error error;
  ssmax::KeyRange keys(const Query& query) const {
    if (is_last() && query.batch == 1 && query.index == query.shape.queries - 1) throw error;
    return {0, query.shape.keys};
  }
};

/// A score that throws on the last rank after some calls.
struct ThrowingScore {
  int* calls_left;
  template <class A>
  A operator()(A z, const ssmax::Key&) const {
    if (is_last() && (*calls_left)-- <= 0) throw std::runtime_error("the score's error");
    return z;
  }
  template <class A>
  A derivative(A, const ssmax::Key&) const {
    return 1;
  }
};

TEST_CASE("a policy that throws on one rank throws on all ranks", "[mpi][errors]") {
  if (world().ranks() == 1) return;  // A call of attention.hpp, whose error is the policy's own.
  const std::string rank = "(on rank " + std::to_string(world().ranks() - 1) + ")";
  const auto check_thrown = [&](const auto& call, const std::string& function, const std::string& text) {
    const std::string message = runtime_error_of(call);
    INFO(message);
    CHECK(everywhere(message == "ssmax::mpi::" + function + ": " + text + " " + rank));
  };
  const ThrowingMask<std::runtime_error> mask{std::runtime_error("the mask's error")};
  const ThrowingMask<std::bad_alloc> out_of_memory{};
  for (const bool by_heads : {false, true}) {
    Call call{.batch = 2};
    if (by_heads) call.layout = call.layout.by_heads();
    check_thrown([&] { call.attention(Softmax{}, mask); }, "attention", "the mask's error");
    check_thrown([&] { call.attention(Softmax{}, out_of_memory); }, "attention", std::bad_alloc().what());
    check_thrown([&] { call.attention_backward(Softmax{}, mask); }, "attention_backward", "the mask's error");
  }
  Decoding decoding;
  check_thrown([&] { decoding.decode(Softmax{}, mask); }, "attention", "the mask's error");
  int calls = 12;  // The comparison of policies makes twelve: the first logit of the rank's keys throws.
  check_thrown([&] { decoding.decode(Softmax{}, Causal{}, ThrowingScore{&calls}); }, "attention",
               "the score's error");
  decoding.decode();
  CHECK(everywhere(std::abs(decoding.out[0] - 1) < 1e-6f));
}

}  // namespace mpi_problem::mpi_call::mpi_agreement_test
