// Dropout of attention's weights: Philox's known answers, and forward and backward against a loop in long double that drops
// the weights that an own Philox names. Results do not depend on threads, targets, batch mates, paths or cuts.

#include "attention_backward_problem.hpp"
#include "dropout_reference.hpp"
#include "guarded_memory.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::dropout_test {

using reference::is_dropped;
using Words = std::array<std::uint32_t, 4>;

TEST_CASE("Philox gives the known answers of its authors", "[dropout]") {
  using ssmax::detail::philox;
  CHECK(philox({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  constexpr std::uint32_t ones = 0xffffffff;
  CHECK(philox({ones, ones, ones, ones}, {ones, ones}) ==
        Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

/// out, dq, dk and dv by plain loops.
struct Expected {
  std::vector<Real> out, dq, dk, dv;
};

template <class T, class M>
Expected expected_of(const Problem<T>& x, const Dropout& dropout, double c, const M& mask) {
  const Shape& s = x.shape;
  Expected e{std::vector<Real>(x.dout.size()), std::vector<Real>(x.q.size()), std::vector<Real>(x.k.size()),
             std::vector<Real>(x.v.size())};
  const Real kept = 65536 / (65536 - std::rint(static_cast<Real>(dropout.p) * 65536)),
             scale = 1 / std::sqrt(static_cast<Real>(s.d));
  const auto at = [](auto& numbers, index_t i) -> auto& { return numbers[static_cast<std::size_t>(i)]; };
  for (index_t b = 0; b < s.batch; ++b) {
    for (index_t h = 0; h < s.heads; ++h) {
      const index_t kv = b * s.kv_heads + h / (s.heads / s.kv_heads);
      for (index_t i = 0; i < s.queries; ++i) {
        const Query query{.batch = b, .head = h, .index = i, .shape = x.query_shape()};
        const index_t row = (b * s.heads + h) * s.queries + i;
        std::vector<Real> p(static_cast<std::size_t>(s.keys)), factor(p), dp(p);
        Real total = 0, delta = 0;
        for (index_t j = mask.keys(query).begin; j < mask.keys(query).end; ++j) {
          Real z = 0;
          for (index_t t = 0; t < s.d; ++t)
            z += static_cast<Real>(at(x.q, row * s.d + t)) *
                 static_cast<Real>(at(x.k, (kv * s.keys + j) * s.d + t));
          total += at(p, j) = std::exp(static_cast<Real>(c) * scale * z);
        }
        for (index_t j = mask.keys(query).begin; j < mask.keys(query).end; ++j) {
          at(p, j) /= total;
          at(factor, j) = is_dropped(dropout, b, h, query.position(), j) ? 0 : kept;
          for (index_t t = 0; t < s.dv; ++t) {
            const Real v = static_cast<Real>(at(x.v, (kv * s.keys + j) * s.dv + t)),
                       dout = static_cast<Real>(at(x.dout, row * s.dv + t));
            at(e.out, row * s.dv + t) += at(p, j) * at(factor, j) * v;
            at(e.dv, (kv * s.keys + j) * s.dv + t) += at(p, j) * at(factor, j) * dout;
            at(dp, j) += at(factor, j) * v * dout;
          }
          delta += at(p, j) * at(dp, j);
        }
        if (!x.dlse.empty()) delta -= static_cast<Real>(at(x.dlse, row));
        for (index_t j = mask.keys(query).begin; j < mask.keys(query).end; ++j) {
          const Real u = static_cast<Real>(c) * scale * at(p, j) * (at(dp, j) - delta);
          for (index_t t = 0; t < s.d; ++t) {
            at(e.dq, row * s.d + t) += u * static_cast<Real>(at(x.k, (kv * s.keys + j) * s.d + t));
            at(e.dk, (kv * s.keys + j) * s.d + t) += u * static_cast<Real>(at(x.q, row * s.d + t));
          }
        }
      }
    }
  }
  return e;
}

template <class X>
void check_near(const std::vector<X>& got, const std::vector<Real>& expected, Real bound) {
  Real worst = 0, largest = 1;
  for (std::size_t i = 0; i < got.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<Real>(got[i]) - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  CHECK(worst <= bound * largest);
}

template <class T>
struct Call {
  Output<T> out;
  Result<T> gradients;
  bool operator==(const Call& other) const { return out == other.out && gradients == other.gradients; }
};

template <class T, class M, class E = Serial>
Call<T> run(const Problem<T>& x, const Dropout& dropout, double c, const M& mask, E&& executor = {}) {
  Call<T> call{Output<T>(x.shape), Result<T>(x)};
  const Constant scaling{c};
  attention<Compute<T>>({.q = x.q_view(),
                         .k = x.k_view(),
                         .v = x.v_view(),
                         .out = call.out.out_view(),
                         .lse = call.out.lse_view(),
                         .dropout = dropout},
                        scaling, mask, executor);
  BackwardArguments<Compute<T>> a = backward_arguments_of(x, call.out);
  a.dropout = dropout;
  attention_backward<Compute<T>>(a, gradients_to(x, call.gradients), scaling, mask, executor);
  return call;
}

constexpr Dropout tenth{.p = 0.1, .seed = 0x123456789abcdef, .offset = 42};

TEMPLATE_TEST_CASE("attention and its gradients with dropout", "[attention][dropout][bfloat16]", float,
                   double, bfloat16) {
  using T = TestType;
  const Real bound = std::same_as<T, double> ? 1e-13L : std::same_as<T, float> ? 1e-5L : 0.05L;
  for (const Shape& shape : every_driver) {
    for (const double p : {0.1, 0.5}) {
      const Dropout dropout{.p = p, .seed = 7, .offset = std::uint64_t{1} << 40};
      const Problem<T> x(shape, 0.5);
      const Expected expected = expected_of(x, dropout, 1.5, Causal{});
      for_each_target_of<T>([&](const std::string& target) {
        INFO(target << ", " << name_of(shape) << ", p " << p);
        const Call<T> call = run(x, dropout, 1.5, Causal{});
        check_near(call.out.out, expected.out, bound);
        check_near(call.gradients.dq, expected.dq, bound);
        check_near(call.gradients.dk, expected.dk, bound);
        check_near(call.gradients.dv, expected.dv, bound);
        for (const int threads : {2, 3, 4}) {
          ssmax::ThreadPool pool(threads);
          CHECK(call == run(x, dropout, 1.5, Causal{}, pool));
        }
      });
    }
  }
}

TEST_CASE("p = 0 is no dropout, and lse is that without dropout", "[attention][dropout]") {
  const Problem<float> x(every_driver[2]);
  const Call<float> without = run(x, {}, 1, Causal{}), none = run(x, {.p = 0, .seed = 3}, 1, Causal{});
  CHECK(without == none);
  CHECK(run(x, tenth, 1, Causal{}).out.lse.size() == without.out.lse.size());
  check_near(run(x, tenth, 1, Causal{}).out.lse,
             std::vector<Real>(without.out.lse.begin(), without.out.lse.end()), 1e-6L);
}

TEST_CASE("the frequency of dropped weights", "[attention][dropout]") {
  // q = 0 and v = 1: a result is the kept share of the keys, times 1 / (1 - p).
  const index_t queries = 64, keys = 4096;
  const std::vector<float> q(queries * 8), k(keys * 8), v(keys, 1);
  std::vector<float> out(queries);
  for (const double p : {0.1, 0.5, 0.9}) {
    attention({.q = {q.data(), {1, 1, queries, 8}},
               .k = {k.data(), {1, 1, keys, 8}},
               .v = {v.data(), {1, 1, keys, 1}},
               .out = {out.data(), {1, 1, queries, 1}},
               .dropout = {.p = p, .seed = 5}});
    double mean = 0;
    for (const float x : out) {
      CHECK(std::abs((1 - p) * x - (1 - p)) < 5 * std::sqrt(p * (1 - p) / keys));
      mean += x / static_cast<double>(queries);
    }
    CHECK(std::abs((1 - p) * mean - (1 - p)) < 4 * std::sqrt(p * (1 - p) / (keys * queries)));
  }
}

TEMPLATE_TEST_CASE("dropout over a cache, in parts, and of a sequence alone",
                   "[attention][decode][dropout][bfloat16]", float, bfloat16) {
  using T = TestType;
  using C = Compute<T>;
  const Shape shape{2, 4, 2, 40, 300, 16, 16};
  const Problem<T> x(shape);
  const std::vector<std::uint64_t> seeds{11, 12};
  const Dropout dropout{.p = 0.25, .offset = 9, .seeds = seeds};
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target);
    const AttentionArguments<C> views{.q = x.q_view(), .k = x.k_view(), .v = x.v_view(), .dropout = dropout};
    Output<T> whole(shape), cached(shape), alone(shape), planned(shape);
    const auto to = [](AttentionArguments<C> a, Output<T>& out) {
      a.out = out.out_view();
      a.lse = out.lse_view();
      return a;
    };
    attention<C>(to(views, whole), Causal{});

    KvCache<T> cache({.batch = 2, .kv_heads = 2, .width = 16, .capacity = 300});
    cache.append(x.k_view(), x.v_view());
    for (const int threads : {1, 2, 3, 4}) {
      ssmax::ThreadPool pool(threads);
      cached = Output<T>(shape);
      attention<C>(to({.q = x.q_view(), .keys = cache, .dropout = dropout}, cached), Causal{}, pool);
      CHECK(whole == cached);
    }

    // One query at a time, as in decode, over a longer and longer cache.
    cache.truncate(0, 260), cache.truncate(1, 260);
    for (index_t i = 0; i < 40; ++i) {
      const auto rows = [&](auto view) {
        return decltype(view)(&view(0, 0, i, 0), {view.extent(0), view.extent(1), 1, view.extent(3)},
                              {view.stride(0), view.stride(1), view.stride(2), 1});
      };
      const auto key = [&](View<const T, 4> view) {
        return View<const T, 4>(&view(0, 0, 260 + i, 0), {2, 2, 1, 16},
                                {view.stride(0), view.stride(1), view.stride(2), 1});
      };
      cache.append(key(x.k_view()), key(x.v_view()));
      const auto lse = alone.lse_view();
      attention<C>({.q = rows(x.q_view()),
                    .keys = cache,
                    .out = rows(alone.out_view()),
                    .lse = {&lse(0, 0, i), {2, 4, 1}, {lse.stride(0), lse.stride(1), 1}},
                    .dropout = dropout},
                   Causal{});
    }
    CHECK(whole == alone);

    // The second sequence alone.
    Output<T> second(shape);
    const index_t half_q = std::ssize(x.q) / 2, half_k = std::ssize(x.k) / 2;
    const auto lse = second.lse_view();
    attention<C>({.q = {x.q.data() + half_q, {1, 4, 40, 16}},
                  .k = {x.k.data() + half_k, {1, 2, 300, 16}},
                  .v = {x.v.data() + half_k, {1, 2, 300, 16}},
                  .out = {second.out.data() + half_q, {1, 4, 40, 16}},
                  .lse = {&lse(1, 0, 0), {1, 4, 40}},
                  .dropout = {.p = 0.25, .offset = 9, .seeds = std::span(seeds).subspan(1)}},
                 Causal{});
    CHECK(std::equal(whole.out.begin() + half_q, whole.out.end(), second.out.begin() + half_q,
                     [](T a, T b) { return static_cast<float>(a) == static_cast<float>(b); }));

    // The plan copies the seeds.
    std::vector<std::uint64_t> refilled = seeds;
    AttentionArguments<C> example = views;
    example.dropout.seeds = refilled;
    const Plan plan(to(example, planned), 2, Causal{});
    refilled.assign(2, 0);
    const GuardedMemory memory(plan.bytes());
    plan.run(to({.q = x.q_view(), .k = x.k_view(), .v = x.v_view()}, planned), memory.span(), Softmax{});
    CHECK(whole == planned);
  });
}

TEST_CASE("a wrong dropout of a call, and of a call of a plan, is refused",
          "[attention][dropout][plan][errors]") {
  std::vector<float> x(8), out(8);
  const View<float, 4> view(x.data(), {1, 1, 1, 8});
  AttentionArguments<float> a{
      .q = view, .k = view, .v = view, .out = {out.data(), {1, 1, 1, 8}}, .dropout = {.p = 0.5}};
  const Plan plan(a, 1, Causal{});
  const auto refused = [&](const std::string& words, const Dropout& dropout) {
    a.dropout = dropout;
    check_refused({"ssmax::attention: dropout." + words}, [&] { attention(a, Causal{}); });
    check_refused({"ssmax::Plan::bind: dropout." + words}, [&] { std::ignore = plan.bind(a, Softmax{}); });
  };
  refused("p is 1, must be at least 0 and below 1", {.p = 1});
  refused("p is -0.1", {.p = -0.1});
  refused("p is nan", {.p = nan<double>});
  const std::vector<std::uint64_t> seeds(2);
  refused("seeds has size 2, sequences are 1", {.p = 0.5, .seeds = seeds});
  a.dropout = {.p = 0.25};
  CHECK_NOTHROW(std::ignore = plan.bind(a, Softmax{}));
}

}  // namespace attention_problem::backward_problem::dropout_test
