// Executors drawn at random, as one type: the library's, and one of the user's that makes its calls backwards.
#pragma once

#include <array>
#include <memory>
#include <ssmax/execution.hpp>
#include <string>

#include "../spmd_team.hpp"
#include "random.hpp"

namespace fuzz {

struct AnyExecutor {
  enum class Kind { serial, pool, team, own } kind = Kind::serial;
  index_t threads = 1;

  index_t concurrency() const { return threads; }
  template <class F>
  void run(index_t n, const F& f) const {
    switch (kind) {
      case Kind::serial:
        return ssmax::Serial{}.run(n, f);
      case Kind::pool:
        return pool(threads).run(n, f);
      case Kind::team: {
        ssmax::SpmdTeam team(threads);
        return spmd_team::in_every_thread(
            team, [&](const ssmax::Spmd& member) { member.lead_or_help([&] { member.run(n, f); }); });
      }
      case Kind::own:
        for (index_t i = n; i-- > 0;) f(i);
    }
  }
  std::string words() const {
    constexpr const char* names[] = {"Serial", "ThreadPool", "Spmd", "the user's executor"};
    return std::string(names[static_cast<int>(kind)]) + " of " + std::to_string(threads);
  }

  /// One for each number of threads, for the whole run.
  static ssmax::ThreadPool& pool(index_t threads) {
    static std::array<std::unique_ptr<ssmax::ThreadPool>, 4> pools;
    auto& pool = pools[static_cast<std::size_t>(threads)];
    if (pool == nullptr) pool = std::make_unique<ssmax::ThreadPool>(threads);
    return *pool;
  }
};

inline AnyExecutor draw_executor(Random& random) {
  using enum AnyExecutor::Kind;
  if (random.chance(0.6)) return {};
  if (random.chance(0.5)) return {random.chance(0.8) ? pool : team, random.between(1, 3)};
  return {own, random.pick<index_t>({1, 2, 5, 16})};
}

}  // namespace fuzz
