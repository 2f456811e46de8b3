// Attention by a team of the program's own threads: the bits of Serial and of ThreadPool, forward, backward and decode.

#include <atomic>

#include "attention_backward_problem.hpp"
#include "decode_problem.hpp"
#include "spmd_team.hpp"
#include "test.hpp"

namespace spmd_attention_test {

using namespace ssmax;
using spmd_team::in_every_thread;
using spmd_team::led;

constexpr std::array<index_t, 4> team_sizes{1, 2, 3, 7};

constexpr std::array<attention_problem::Shape, 8> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 1, 1, 1, 1},
    {1, 2, 1, 0, 30, 8, 5},
    {1, 2, 1, 3, 0, 8, 5},
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 61, 300, 9, 24},
    {1, 1, 1, 257, 257, 5, 3},
    {1, 1, 1, 1, 5000, 16, 8},  // few tasks: chunks of keys, which a second run merges
    {2, 6, 3, 37, 70, 9, 24},   // short sequences
}};

/// Checks that `call(executor)` gives the same with teams as with Serial and ThreadPool.
template <class Call>
void check_same(const Call& call) {
  static ThreadPool pool(2);
  const auto expected = call(Serial{});
  CHECK(call(pool) == expected);
  for (const index_t nth : team_sizes) {
    CAPTURE(nth);
    SpmdTeam team(nth);
    const auto result = led(team, call);
    CHECK(result == expected);
    CHECK(result.explanation.threads <= nth);
  }
}

TEST_CASE("a team gives the same bits: attention", "[attention][spmd][bfloat16]") {
  for (const attention_problem::Shape& shape : shapes) {
    const attention_problem::Problem<float> problem(shape);
    const attention_problem::Problem<bfloat16> rounded(shape);
    const SSMax<float> scaling{0.7F};
    for_each_target_of<bfloat16>([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      check_same(
          [&](auto&& executor) { return attention_problem::run(problem, scaling, Causal{}, {}, executor); });
      check_same(
          [&](auto&& executor) { return attention_problem::run(rounded, scaling, Causal{}, {}, executor); });
    });
  }
}

TEST_CASE("a team gives the same bits: the backward", "[attention][backward][spmd][bfloat16]") {
  using namespace attention_problem::backward_problem;
  for (const attention_problem::Shape& shape : shapes) {
    const Problem<float> problem(shape);
    const Problem<bfloat16> rounded(shape);
    for_each_target_of<bfloat16>([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      check_same([&](auto&& executor) { return run_backward(problem, LogN{}, Causal{}, {}, executor); });
      check_same([&](auto&& executor) { return run_backward(rounded, LogN{}, Causal{}, {}, executor); });
    });
  }
}

TEST_CASE("a team gives the same bits: decode", "[decode][spmd]") {
  using decode_problem::Data, decode_problem::Shape;
  for (const Shape& shape : {Shape{8, 2, 1, 16, 9, {5000, 3, 1025}}, Shape{3, 1, 7, 16, 8, {2500, 7}},
                             Shape{4, 4, 40, 8, 5, {1100, 300, 40}}}) {
    const Data<float> data(shape);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const KvCache<half> cache = decode_problem::filled<half>(data);
      check_same([&](auto&& executor) {
        return decode_problem::run(data, cache, LogN{}, Causal{}, Identity{}, {}, executor);
      });
    });
  }
}

TEST_CASE("many calls in a row without a barrier give the same bits", "[attention][spmd]") {
  const attention_problem::Problem<float> problem({1, 2, 1, 3, 40, 8, 5}), longer({1, 1, 1, 1, 2100, 4, 4});
  const auto expected = attention_problem::run(problem, LogN{}, Causal{});
  const auto expected_longer = attention_problem::run(longer, LogN{}, Causal{});
  for (const index_t nth : team_sizes) {
    CAPTURE(nth);
    SpmdTeam team(nth);
    index_t wrong = 0;
    in_every_thread(team, [&](const Spmd& executor) {
      for (int call = 0; call < 500; ++call) {
        executor.lead_or_help(
            [&] { wrong += attention_problem::run(problem, LogN{}, Causal{}, {}, executor) != expected; });
        executor.lead_or_help([&] {
          wrong += attention_problem::run(longer, LogN{}, Causal{}, {}, executor) != expected_longer;
        });
      }
    });
    CHECK(wrong == 0);
  }
}

/// A mask that throws for one query.
struct Throws {
  KeyRange keys(const Query& query) const {
    if (query.index == 60) throw std::domain_error("of a mask");
    return {0, query.shape.keys};
  }
};

TEST_CASE("errors of a call free the team", "[attention][spmd]") {
  const attention_problem::Problem<float> problem(shapes[4]);
  const auto expected = attention_problem::run(problem, LogN{}, Causal{});
  for (const index_t nth : team_sizes) {
    CAPTURE(nth);
    SpmdTeam team(nth);
    std::atomic<index_t> refused = 0;
    in_every_thread(team, [&](const Spmd& executor) {
      executor.lead_or_help([&] {
        CHECK_THROWS_WITH(attention_problem::run(problem, LogN{}, Throws{}, {}, executor), "of a mask");
      });
      try {
        executor.lead_or_help([&] {
          const float element = 1;
          const View<const float, 4> one(&element, {1, 1, 1, 1});
          attention({.q = problem.q_view(), .k = one, .v = one, .out = {}}, LogN{}, Causal{}, executor);
        });
      } catch (const std::invalid_argument&) {
        ++refused;
      }
      executor.lead_or_help(
          [&] { CHECK(attention_problem::run(problem, LogN{}, Causal{}, {}, executor) == expected); });
    });
    CHECK(refused == 1);  // in the leader only
  }
}

}  // namespace spmd_attention_test
