// Teams of the program's own threads: every call once, by all threads, call after call, exceptions, late helpers.

#include <atomic>
#include <chrono>
#include <ctime>
#include <set>
#include <thread>

#include "allocation_count.hpp"
#include "executor_calls.hpp"
#include "refusal.hpp"
#include "spmd_team.hpp"
#include "test.hpp"

namespace spmd_test {

using namespace ssmax;
using namespace executor_calls;
using spmd_team::in_every_thread;

static_assert(ssmax::Executor<Spmd> && ssmax::Executor<const Spmd&>);
static_assert(!std::is_copy_constructible_v<SpmdTeam> && !std::is_move_constructible_v<SpmdTeam>);
static_assert(!std::is_convertible_v<index_t, SpmdTeam>);

const std::vector<index_t> team_sizes{1, 2, 3, 7};

TEST_CASE("a team makes every call once", "[spmd]") {
  for (const index_t nth : team_sizes) {
    CAPTURE(nth);
    SpmdTeam team(nth);
    std::atomic<int> led = 0;
    in_every_thread(team, [&](const Spmd& executor) {
      executor.lead_or_help([&] {
        ++led;
        CHECK(executor.concurrency() == nth);
        check_each_once(executor);
      });
    });
    CHECK(led == 1);
  }
}

TEST_CASE("all threads of a team work at once, and the leader is one of them", "[spmd]") {
  for (const index_t nth : team_sizes) {
    CAPTURE(nth);
    SpmdTeam team(nth);
    in_every_thread(team, [&](const Spmd& executor) {
      for (int call = 0; call < 3; ++call) {
        executor.lead_or_help([&] {
          for (int run = 0; run < 3; ++run) {
            const auto seen = threads_at_once(executor, nth);
            CHECK(static_cast<index_t>(seen.size()) == nth);
            CHECK(seen.contains(std::this_thread::get_id()));
          }
          CHECK(threads_at_once(executor, 1) == std::set{std::this_thread::get_id()});
        });
      }
    });
  }
}

TEST_CASE("1000 calls in a row without a barrier, and every thread reads what each has written", "[spmd]") {
  constexpr std::size_t calls = 1000;
  for (const index_t nth : team_sizes) {
    CAPTURE(nth);
    SpmdTeam team(nth);
    std::vector<std::vector<int>> results(calls, std::vector<int>(7));
    std::atomic<int> wrong = 0;
    in_every_thread(team, [&](const Spmd& executor) {
      for (std::size_t call = 0; call < calls; ++call) {
        std::vector<int>& result = results[call];
        const auto n = static_cast<index_t>(call % 7);
        executor.lead_or_help([&] {
          for (const int addend : {1, 2, static_cast<int>(call)}) {
            executor.run(n, [&](index_t i) { result[static_cast<std::size_t>(i)] += addend; });
          }
        });
        const auto written = result.begin() + n;
        const auto right = std::count(result.begin(), written, 3 + static_cast<int>(call));
        if (right != n || std::count(written, result.end(), 0) != result.end() - written) ++wrong;
      }
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("the leader finishes alone, and the helpers that come later return", "[spmd]") {
  SpmdTeam team(3);
  const Spmd leader(team, 0);
  for (int call = 0; call < 50; ++call) leader.lead_or_help([&] { check_each_once(leader); });
  for (const index_t ith : {1, 2}) {
    for (int call = 0; call < 50; ++call) {
      Spmd(team, ith).lead_or_help([] { FAIL("a helper does not lead"); });
    }
  }
  in_every_thread(team, [&](const Spmd& executor) {
    executor.lead_or_help([&] { CHECK(threads_at_once(executor, 3).size() == 3); });
  });
}

TEST_CASE("a team works with the helpers that come", "[spmd]") {
  SpmdTeam team(4);
  in_every_thread(
      team,
      [&](const Spmd& executor) {
        executor.lead_or_help([&] { CHECK(threads_at_once(executor, 2).size() == 2); });
        executor.lead_or_help([&] { check_each_once(executor); });
      },
      2);
}

TEST_CASE("a helper that is early waits for the leader, and does so asleep", "[spmd]") {
  SpmdTeam team(2);
  std::atomic<bool> led = false;
  bool seen = false;
  std::thread helper([&] {
    Spmd(team, 1).lead_or_help([] {});
    seen = led;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const std::clock_t before = std::clock();  // of all threads of this process
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double milliseconds = 1e3 * static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  const Spmd leader(team, 0);
  leader.lead_or_help([&] {
    led = true;
    CHECK(threads_at_once(leader, 2).size() == 2);
  });
  helper.join();
  CHECK(seen);
  CAPTURE(milliseconds);
  CHECK(milliseconds < 10);
}

TEST_CASE("a run inside a call of a team is made by the thread of that call", "[spmd]") {
  for (const index_t nth : team_sizes) {
    CAPTURE(nth);
    SpmdTeam team(nth);
    ThreadPool pool(2);
    in_every_thread(team, [&](const Spmd& executor) {
      executor.lead_or_help([&] {
        std::vector<std::vector<int>> inner(7);
        std::atomic<int> elsewhere{0};
        executor.run(7, [&](index_t i) {
          const auto here = std::this_thread::get_id();
          inner[static_cast<std::size_t>(i)] = counts(executor, 11);
          executor.run(5, [&](index_t) { elsewhere += std::this_thread::get_id() != here; });
          pool.run(5, [&](index_t) { elsewhere += std::this_thread::get_id() != here; });
        });
        for (const auto& result : inner) CHECK(result == once(11));
        CHECK(elsewhere == 0);
        CHECK(static_cast<index_t>(threads_at_once(executor, nth).size()) ==
              nth);  // the leader is outside again
      });
    });
  }
}

TEST_CASE("an exception of a call reaches the leader when all calls have ended", "[spmd]") {
  for (const index_t nth : team_sizes) {
    CAPTURE(nth);
    SpmdTeam team(nth);
    std::atomic<int> in_helpers = 0;
    std::atomic<index_t> calls = 0;
    in_every_thread(team, [&](const Spmd& executor) {
      const auto leader = std::this_thread::get_id();
      const auto helper_throws = [&](index_t) {
        ++calls;
        while (calls < nth) std::this_thread::yield();
        if (nth == 1 || std::this_thread::get_id() != leader) throw std::runtime_error("of a call");
      };
      try {
        executor.lead_or_help([&] {
          CHECK_THROWS_WITH(executor.run(nth, helper_throws), "of a call");
          CHECK(calls == nth);
          check_each_once(executor);
          executor.run(nth, [&](index_t i) {
            if (i == nth - 1) throw std::runtime_error("of the last");
          });
          FAIL("the last run throws");
        });
        in_helpers += executor.concurrency() > 1;
      } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()) == "of the last");
      }
      executor.lead_or_help([&] { check_each_once(executor); });  // the team is as good as before
    });
    CHECK(in_helpers == nth - 1);
  }
}

TEST_CASE("an exception of the leader's function frees the helpers", "[spmd]") {
  for (const index_t nth : team_sizes) {
    CAPTURE(nth);
    SpmdTeam team(nth);
    std::atomic<int> thrown = 0, returned = 0;
    in_every_thread(team, [&](const Spmd& executor) {
      for (int call = 0; call < 20; ++call) {
        try {
          executor.lead_or_help([&] {
            if (call % 2 == 0) executor.run(nth, [](index_t) {});
            throw std::invalid_argument("of the function");
          });
          ++returned;
        } catch (const std::invalid_argument&) {
          ++thrown;
        }
      }
    });
    CHECK(thrown == 20);
    CHECK(returned == 20 * (nth - 1));
  }
}

TEST_CASE("a call of a team does not allocate", "[spmd]") {
  SpmdTeam team(3);
  std::atomic<index_t> sum = 0;
  long during = -1;
  in_every_thread(team, [&](const Spmd& executor) {
    executor.lead_or_help(
        [&] { CHECK(threads_at_once(executor, 3).size() == 3); });  // all threads have started
    for (int call = 0; call < 100; ++call) {
      executor.lead_or_help([&] {
        const long calls = allocations([&] { executor.run(20, [&](index_t i) { sum += i; }); });
        during = std::max(during, calls);
      });
    }
  });
  CHECK(during == 0);
  CHECK(sum == 100 * 190);
  CHECK(allocation_count() > 0);  // or they were not counted
}

TEST_CASE("a team has between 1 and 4096 threads", "[spmd]") {
  for (const index_t nth : {index_t{0}, index_t{-1}, std::numeric_limits<index_t>::min()}) {
    check_refused({"ssmax::SpmdTeam: nth is " + std::to_string(nth) + ", must be at least 1"},
                  [&] { SpmdTeam team(nth); });
  }
  for (const index_t nth : {index_t{4097}, std::numeric_limits<index_t>::max()}) {
    check_refused({"ssmax::SpmdTeam: nth is " + std::to_string(nth) + ", must be at most 4096"},
                  [&] { SpmdTeam team(nth); });
  }
  CHECK(SpmdTeam(4096).concurrency() == 4096);
}

TEST_CASE("a thread's number is one of its team", "[spmd]") {
  for (const index_t nth : team_sizes) {
    SpmdTeam team(nth);
    for (const index_t ith : {index_t{-1}, nth, nth + 1, std::numeric_limits<index_t>::max()}) {
      const std::string numbers = "ith is " + std::to_string(ith) + ", nth is " + std::to_string(nth) + ":";
      check_refused({"ssmax::Spmd: " + numbers}, [&] { Spmd(team, ith); });
    }
  }
}

TEST_CASE("only the leader runs calls", "[spmd]") {
  SpmdTeam team(2);
  check_refused({"ssmax::Spmd: ith is 1, nth is 2:", "lead_or_help"},
                [&] { Spmd(team, 1).run(3, [](index_t) { FAIL("not called"); }); });
  check_each_once(Spmd(team, 0));  // outside lead_or_help, alone
}

}  // namespace spmd_test
