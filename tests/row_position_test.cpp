// Row::position: a scaling receives the query's own position, in attention, decode and rows.
#include "test.hpp"

namespace {

using namespace ssmax;

/// Positions by query; -1 for a query whose scaling is not called.
using Positions = std::vector<index_t>;

constexpr double unit = 0x1p-10;

/// c = position / 1024, so that lse of equal logits shows it: lse = c·z + ln n.
struct OfPosition {
  double operator()(const Row& row) const { return static_cast<double>(row.position) * unit; }
};

struct Sizes {
  std::vector<index_t> positions, n;
  bool operator==(const Sizes&) const = default;
};

/// Records the row of each query, by its place in the call.
struct Recorder {
  Sizes* rows;
  double operator()(const ssmax::PlacedRow& row) const {
    rows->positions[static_cast<std::size_t>(row.query)] = row.position;
    rows->n[static_cast<std::size_t>(row.query)] = row.n;
    return 1;
  }
};

Sizes unseen(index_t queries) {
  return {Positions(static_cast<std::size_t>(queries), -1), Positions(static_cast<std::size_t>(queries), -1)};
}

/// The rows that attention calls a scaling with, one head.
template <class M>
Sizes rows_of_attention(index_t queries, index_t keys, const M& mask) {
  Sizes rows = unseen(queries);
  const std::vector<float> zeros(static_cast<std::size_t>(8 * (queries + keys)));
  std::vector<float> out(static_cast<std::size_t>(8 * queries));
  ssmax::attention({.q = {zeros.data(), {1, 1, queries, 8}},
                    .k = {zeros.data(), {1, 1, keys, 8}},
                    .v = {zeros.data(), {1, 1, keys, 8}},
                    .out = {out.data(), {1, 1, queries, 8}}},
                   Recorder{&rows}, mask);
  return rows;
}

/// The rows that softmax calls a scaling with.
template <class M>
Sizes rows_of_softmax(index_t queries, index_t keys, const M& mask) {
  Sizes rows = unseen(queries);
  const std::vector<float> z(static_cast<std::size_t>(queries * keys));
  std::vector<float> y(z.size());
  ssmax::softmax(View<const float, 2>(z.data(), {queries, keys}), View<float, 2>(y.data(), {queries, keys}),
                 Recorder{&rows}, mask);
  return rows;
}

template <class M>
void check_rows(index_t queries, index_t keys, const M& mask, const Sizes& expected) {
  CAPTURE(queries, keys);
  CHECK(rows_of_attention(queries, keys, mask) == expected);
  CHECK(rows_of_softmax(queries, keys, mask) == expected);
}

TEST_CASE("a scaling receives the query's own position and the number of visible keys",
          "[attention][scaling]") {
  check_rows(3, 3, Full{}, {{0, 1, 2}, {3, 3, 3}});
  check_rows(2, 5, Full{}, {{3, 4}, {5, 5}});
  check_rows(3, 3, Causal{}, {{0, 1, 2}, {1, 2, 3}});
  check_rows(2, 5, Causal{}, {{3, 4}, {4, 5}});
  check_rows(4, 4, SlidingWindow{1, 1}, {{0, 1, 2, 3}, {2, 3, 3, 2}});
  check_rows(4, 4, SlidingWindow{0, 3}, {{0, 1, 2, 3}, {4, 3, 2, 1}});
  const std::array<index_t, 1> length{2};
  check_rows(4, 4, KeyLengths{length}, {{0, 1, 2, 3}, {2, 2, 2, 2}});
}

TEST_CASE("a query before the first key has position 0", "[attention][scaling]") {
  check_rows(4, 2, Full{}, {{0, 0, 0, 1}, {2, 2, 2, 2}});
  // Causal masks every key for such a query, so the scaling is not called.
  CHECK(rows_of_attention(3, 2, Causal{}) == Sizes{{-1, 0, 1}, {-1, 1, 2}});
}

TEST_CASE("the position of a scaling restarts in each document", "[attention][scaling][documents]") {
  const std::array<index_t, 3> cumulative{0, 3, 5};
  check_rows(5, 5, Documents(cumulative, true), {{0, 1, 2, 0, 1}, {1, 2, 3, 1, 2}});
  check_rows(5, 5, Documents(cumulative, false), {{0, 1, 2, 0, 1}, {3, 3, 3, 2, 2}});
  check_rows(5, 5, SlidingWindow{0, 1} & Documents(cumulative, false), {{0, 1, 2, 0, 1}, {2, 2, 1, 2, 1}});
  // Queries at the end of each document, as in a prompt that is read in chunks.
  const std::array<index_t, 3> queries{0, 1, 2};
  check_rows(2, 5, Documents(queries, cumulative, false), {{2, 1}, {3, 2}});
}

TEST_CASE("the position of a scaling counts the keys that a cache has stored",
          "[attention][scaling][decode]") {
  ssmax::KvCache<float> cache({.batch = 2, .kv_heads = 1, .width = 8, .value_width = 8, .capacity = 16});
  const std::vector<float> zeros(2 * 7 * 8);
  std::vector<float> out(2 * 2 * 8);
  const View<const float, 4> keys(zeros.data(), {2, 1, 7, 8});
  cache.append(keys, keys);
  for (const bool causal : {false, true}) {
    Sizes rows = unseen(2);
    const Recorder recorder{&rows};
    const ssmax::AttentionArguments<float> arguments{.q = {zeros.data(), {2, 1, 2, 8}},
                                                     .out = {out.data(), {2, 1, 2, 8}}};
    if (causal) {
      ssmax::attention({.q = arguments.q, .keys = cache, .out = arguments.out}, recorder, Causal{});
      CHECK(rows == Sizes{{5, 6}, {6, 7}});
    } else {
      ssmax::attention({.q = arguments.q, .keys = cache, .out = arguments.out}, recorder, Full{});
      CHECK(rows == Sizes{{5, 6}, {7, 7}});
    }
  }
}

TEST_CASE("queries that see the same keys have multipliers of their own positions", "[attention][scaling]") {
  constexpr index_t queries = 70, keys = 70;
  const std::vector<double> ones(queries * keys, 1.0);
  std::vector<double> lse(queries);
  const auto check = [&] {
    for (index_t i = 0; i < queries; ++i) {
      CAPTURE(i);
      CHECK(std::abs(lse[static_cast<std::size_t>(i)] - (static_cast<double>(i) * unit + std::log(70.0))) <
            1e-12);
    }
  };
  ssmax::logsumexp(View<const double, 2>(ones.data(), {queries, keys}),
                   View<double, 1>(lse.data(), {queries}), OfPosition{}, Full{});
  check();
  // q·k = 1.
  std::vector<double> out(queries * 4);
  const std::vector<double> halves(queries * 4, 0.5);
  const View<const double, 4> in(halves.data(), {1, 1, queries, 4});
  ssmax::attention<double>({.q = in,
                            .k = in,
                            .v = in,
                            .out = {out.data(), {1, 1, queries, 4}},
                            .lse = View<double, 3>(lse.data(), {1, 1, queries}),
                            .scale = 1},
                           OfPosition{});
  check();
}

TEST_CASE("a scaling by position has its gradient by position", "[attention][backward][scaling]") {
  struct Learns {
    std::vector<double>* dc;
    double operator()(const Row& row) const { return static_cast<double>(row.position); }
    void accumulate(const Row& row, double) const { (*dc)[static_cast<std::size_t>(row.position)] += 1; }
  };
  std::vector<double> dc(3);
  const std::vector<float> zeros(3 * 8);
  const View<const float, 4> in(zeros.data(), {1, 1, 3, 8});
  std::array<float, 3> lse{};
  std::vector<float> dq(3 * 8), dk(3 * 8), dv(3 * 8);
  ssmax::attention_backward(
      {.q = in, .k = in, .v = in, .out = in, .lse = View<const float, 3>(lse.data(), {1, 1, 3})},
      {.dout = in,
       .dq = {dq.data(), {1, 1, 3, 8}},
       .dk = {dk.data(), {1, 1, 3, 8}},
       .dv = {dv.data(), {1, 1, 3, 8}}},
      Learns{&dc});
  CHECK(dc == std::vector<double>{1, 1, 1});
}

TEST_CASE("Llama 4, Ministral, Qwen and Inkling count from the query's own position", "[scaling]") {
  const auto first_and_last = [](const auto& scaling) {
    // Eight equal logits of 1 in each of eight rows, all visible: lse = c + ln 8.
    const std::vector<double> ones(64, 1.0);
    std::vector<double> lse(8);
    ssmax::logsumexp(View<const double, 2>(ones.data(), {8, 8}), View<double, 1>(lse.data(), {8}), scaling,
                     Full{});
    return std::array{lse.front() - std::log(8.0), lse.back() - std::log(8.0)};
  };
  const auto near = [](const std::array<double, 2>& c, double first, double last) {
    return std::abs(c[0] - first) < 1e-12 && std::abs(c[1] - last) < 1e-12;
  };
  CHECK(near(first_and_last(ssmax::Llama4Temperature(0.1, 8)), 1, 1 + 0.1 * std::log(2.0)));
  CHECK(near(first_and_last(ssmax::MinistralTemperature(0.1, 7)), 1, 1 + 0.1 * std::log(2.0)));
  CHECK(near(first_and_last(ssmax::QwenLogN(4)), 1, std::log(8.0) / std::log(4.0)));
  CHECK(near(first_and_last(ssmax::InklingTemperature(0.1, 4)), 1, 1 + 0.1 * std::log(2.0)));
}

}  // namespace
