// docs/threads.md shows these calls: a pool of the library, threads of your own, and a program whose threads all execute
// the same code. The program compares the results bit by bit.
#include <algorithm>
#include <atomic>
#include <future>
#include <ssmax/ssmax.hpp>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

struct Tensors {
  View<const float, 4> q, k, v;  // [batch, head, position, channel]
  View<float, 4> out;
};

// Make one pool and reuse it: its threads sleep between calls.
void with_a_pool(const Tensors& x, ThreadPool& pool) {
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, SSMax<float>{0.43f}, Causal{}, pool);
}

// An executor over threads of your own. Here std::async stands for the pool of your program.
struct Async {
  index_t threads;

  index_t concurrency() const { return threads; }
  template <class F>
  void run(index_t n, const F& f) const {
    std::atomic<index_t> next = 0;
    const auto work = [&] {
      for (index_t i = next++; i < n; i = next++) f(i);
    };
    std::vector<std::future<void>> others;
    for (index_t t = 1; t < std::min(threads, n); ++t) others.push_back(std::async(std::launch::async, work));
    work();
    for (std::future<void>& other : others) other.get();  // rethrows an exception of a task
  }
};
static_assert(Executor<Async>);

void with_own_threads(const Tensors& x) {
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, SSMax<float>{0.43f}, Causal{}, Async{4});
}

// The threads of a program share this object. The op below has no state of its own, so the team is here.
struct Context {
  SpmdTeam team;
};

// An operator that every thread of the program enters. ith is the number of the thread.
void attention_op(Context& context, index_t ith, const Tensors& x) {
  const Spmd executor(context.team, ith);
  executor.lead_or_help([&] {
    attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, SSMax<float>{0.43f}, Causal{}, executor);
  });
}

// A scaling that throws in a task.
struct Refusing {
  double operator()(const Row& row) const {
    if (row.n == 100) throw std::runtime_error("n is 100");
    return 1;
  }
};

// Returns true if the exception of the scaling reaches the caller of attention.
bool exception_arrives(const Tensors& x, ThreadPool& pool) {
  try {
    attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, Refusing{}, Causal{}, pool);
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

int main() {
  constexpr index_t heads = 4, tokens = 300, d = 32;
  examples::Random random(1);
  std::vector<float> q(heads * tokens * d), k(q), v(q), expected(q);
  for (std::vector<float>* x : {&q, &k, &v}) {
    for (float& number : *x) number = random.standard();
  }
  const auto tensors = [&](std::vector<float>& out) {
    const auto view = [](const std::vector<float>& x) {
      return View<const float, 4>(x.data(), {1, heads, tokens, d});
    };
    return Tensors{view(q), view(k), view(v), {out.data(), {1, heads, tokens, d}}};
  };
  const Tensors serial = tensors(expected);
  attention({.q = serial.q, .k = serial.k, .v = serial.v, .out = serial.out}, SSMax<float>{0.43f}, Causal{});

  examples::Check check;
  ThreadPool pool(3);
  std::vector<float> out(q.size());
  with_a_pool(tensors(out), pool);
  check.holds("a pool is bit-identical to one thread", out == expected);

  out.assign(out.size(), 0);
  with_own_threads(tensors(out));
  check.holds("threads of the program are bit-identical to one thread", out == expected);

  out.assign(out.size(), 0);
  constexpr index_t nth = 3;
  Context context{SpmdTeam(nth)};
  {
    std::vector<std::jthread> threads;
    for (index_t ith = 0; ith < nth; ++ith)
      threads.emplace_back([&, ith] { attention_op(context, ith, tensors(out)); });
  }
  check.holds("a team is bit-identical to one thread", out == expected);
  check.holds("the exception of a scaling reaches the caller", exception_arrives(tensors(out), pool));
  return check.exit_code();
}
