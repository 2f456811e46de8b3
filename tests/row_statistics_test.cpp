// Statistics of attention's rows against loops in long double, on every target. out and lse do not change. Statistics
// do not depend on threads or on how a prompt is cut.

#include "attention_problem.hpp"
#include "guarded_memory.hpp"
#include "refusal.hpp"
#include "sequence_lengths_problem.hpp"
#include "test.hpp"

namespace attention_problem::row_statistics_test {

using sequence_lengths_problem::Sequences;
using sequence_lengths_problem::Tensor;

const auto at = [](auto& numbers, index_t i) -> auto& { return numbers[static_cast<std::size_t>(i)]; };

/// One row: z and c·z of its visible keys by plain loops, and what attention may return.
struct Row {
  std::vector<Real> z;
  Real c = 0, sink = -infinity<Real>;
  Real products = 0;  // the largest scale·Σ|q_t k_t|

  [[nodiscard]] Real largest() const { return z.empty() ? -infinity<Real> : std::ranges::max(z); }
  [[nodiscard]] Real smallest() const { return z.empty() ? infinity<Real> : std::ranges::min(z); }
  /// Returns Σ p² and -Σ p·ln p.
  [[nodiscard]] std::pair<Real, Real> squares_and_entropy() const {
    Real top = sink, total = 0, squares = 0, entropy = 0;
    for (const Real x : z) top = std::max(top, c * x);
    for (const Real x : z) total += std::exp(c * x - top);
    if (sink > -infinity<Real>) total += std::exp(sink - top);
    for (const Real x : z) {
      const Real ln_p = c * x - top - std::log(total), p = std::exp(ln_p);
      squares += p * p;
      if (p > 0) entropy -= p * ln_p;
    }
    return {squares, entropy};
  }
};

/// A call with all statistics.
template <class T>
struct Call {
  Output<T> output;
  std::vector<Compute<T>> largest = output.lse, smallest = largest, squares = largest, entropy = largest;

  explicit Call(const Shape& shape) : output(shape) {}
  RowStatistics<Compute<T>> statistics() {
    const Shape& s = output.shape;
    const auto view = [&](auto& numbers) {
      return View<Compute<T>, 3>(numbers.data(), {s.batch, s.heads, s.queries});
    };
    return {view(largest), view(smallest), view(squares), view(entropy)};
  }
  bool operator==(const Call& other) const { return output == other.output && same_statistics(other); }
  [[nodiscard]] bool same_statistics(const Call& other) const {
    return same_bits(largest, other.largest) && same_bits(smallest, other.smallest) &&
           same_bits(squares, other.squares) && same_bits(entropy, other.entropy);
  }
};

template <class T, class S, class M, class C = Identity, class E = Serial>
Call<T> run_with(const Problem<T>& x, const S& scaling, const M& mask, AttentionOptions<T> options = {},
                 const C& score = {}, E&& executor = {}) {
  Call<T> call(x.shape);
  options.statistics = call.statistics();
  options.explanation = &call.output.explanation;
  attention<Compute<T>>(with(arguments_of(x, call.output), options), scaling, mask, score, executor);
  return call;
}

template <class T>
struct Case {
  std::string name;
  /// The call with all statistics, in one or more threads, and the call without statistics.
  std::function<Call<T>(const Problem<T>&, index_t threads)> run;
  std::function<Output<T>(const Problem<T>&)> without;
  std::function<bool(const Query&, index_t key)> sees;
  std::function<Real(const Query&, index_t n)> c;
  std::function<Real(Real z)> score = [](Real z) { return z; };
  bool has_sinks = false, are_scaled = false;
};

const std::vector<double> some_sinks{0.5, -1, 3, -0.25};

template <class T, class S, class M, class C = Identity>
Case<T> make(const std::string& name, const S& scaling, const M& mask, AttentionOptions<T> options = {},
             const C& score = {}) {
  return {.name = name,
          .run =
              [=](const Problem<T>& x, index_t threads) {
                ThreadPool pool(static_cast<int>(threads));
                return run_with(x, scaling, mask, options, score, pool);
              },
          .without = [=](const Problem<T>& x) { return run(x, scaling, mask, score, options); },
          .sees =
              [=](const Query& query, index_t key) {
                const KeyRange keys = mask.keys(query);
                return key >= keys.begin && key < keys.end && ssmax::detail::sees(mask, query, key);
              },
          .c =
              [=](const Query& query, index_t n) {
                return static_cast<Real>(
                    scaling(ssmax::Row{query.head, std::max<index_t>(0, query.position()), n}));
              },
          .has_sinks = !options.sinks.empty(),
          .are_scaled = options.scaled_sinks};
}

template <class T>
std::vector<Case<T>> cases_of(const std::vector<Compute<T>>& sinks) {
  using C = Compute<T>;
  std::vector<Case<T>> cases{make<T>("causal", Softmax{}, Causal{}),
                             make<T>("window, sinks", Constant{1.5}, SlidingWindow(37), {.sinks = sinks}),
                             make<T>("SSMax with s below 0", SSMax<C>{C(-0.4)}, Causal{}),
                             make<T>("scattered keys, scaled sinks", Constant{-0.5},
                                     Causal{} & Where(scattered), {.sinks = sinks, .scaled_sinks = true}),
                             make<T>("large logits", Constant{1e6}, Full{}),
                             make<T>("batch_invariant", Softmax{}, Causal{}, {.batch_invariant = true}),
                             make<T>("softcap", Constant{-1.5}, Full{}, {}, Softcap(3))};
  cases.back().score = [](Real z) { return 3 * std::tanh(z / 3); };
  return cases;
}

template <class T>
Row row_of(const Problem<T>& x, const Case<T>& some, const Query& query) {
  const Shape& s = x.shape;
  const index_t row = (query.batch * s.heads + query.head) * s.queries + query.index,
                kv = query.batch * s.kv_heads + query.head / (s.heads / s.kv_heads);
  const Real scale = 1 / std::sqrt(static_cast<Real>(s.d));
  Row result;
  for (index_t key = 0; key < s.keys; ++key) {
    if (!some.sees(query, key)) continue;
    Real z = 0, size = 0;
    for (index_t t = 0; t < s.d; ++t) {
      const Real product = static_cast<Real>(at(x.q, row * s.d + t)) *
                           static_cast<Real>(at(x.k, (kv * s.keys + key) * s.d + t));
      z += scale * product;
      size += scale * std::abs(product);
    }
    result.z.push_back(some.score(z));
    result.products = std::max(result.products, size);
  }
  const auto n = static_cast<index_t>(result.z.size());
  if (n > 0) result.c = some.c(query, n);
  if (!some.has_sinks) return result;
  const Real sink = some_sinks[static_cast<std::size_t>(query.head)];
  result.sink = !some.are_scaled ? sink : n > 0 ? result.c * sink : -infinity<Real>;
  return result;
}

/// Calls f(query) for each query.
template <class T, class F>
void for_each_query(const Problem<T>& x, const F& f) {
  for (Query query{0, 0, 0, x.query_shape()}; query.batch < x.shape.batch; ++query.batch) {
    for (query.head = 0; query.head < x.shape.heads; ++query.head) {
      for (query.index = 0; query.index < x.shape.queries; ++query.index) f(std::as_const(query));
    }
  }
}

template <class T>
void check_rows(const Problem<T>& x, const Case<T>& some, const Call<T>& call) {
  const Shape& s = x.shape;
  const Real epsilon = std::numeric_limits<Compute<T>>::epsilon();
  const bool is_bf16 = call.output.explanation.path == Path::prefill_bf16;
  const auto is_near = [](Real got, Real expected, Real bound) {
    return got == expected || std::abs(got - expected) <= bound;
  };
  Real worst[4] = {};
  index_t row = 0;
  for_each_query(x, [&](const Query& query) {
    const Row exact = row_of(x, some, query);
    const auto [squares, entropy] = exact.squares_and_entropy();
    const Real of_logit = static_cast<Real>(s.d + 6) * epsilon * exact.products,
               of_weight =
                   2 * std::abs(exact.c) * of_logit + 16 * epsilon + (is_bf16 ? rounded_weights : Real(0));
    const bool near[4] = {is_near(at(call.largest, row), exact.largest(), of_logit),
                          is_near(at(call.smallest, row), exact.smallest(), of_logit),
                          is_near(at(call.squares, row), squares, 2 * of_weight * squares),
                          is_near(at(call.entropy, row), entropy, of_weight * (2 + 2 * entropy))};
    for (int i = 0; i < 4; ++i) worst[i] += near[i] ? 0 : 1;
    ++row;
  });
  CHECK(worst[0] == 0);
  CHECK(worst[1] == 0);
  CHECK(worst[2] == 0);
  CHECK(worst[3] == 0);
}

/// Returns positions [first, first + count) of [batch, head, position, …].
template <class T, int Rank>
View<T, Rank> part(const View<T, Rank>& view, index_t first, index_t count) {
  std::array<index_t, Rank> extents, strides;
  for (int i = 0; i < Rank; ++i) {
    extents[static_cast<std::size_t>(i)] = i == 2 ? count : view.extent(i);
    strides[static_cast<std::size_t>(i)] = view.stride(i);
  }
  return View<T, Rank>(view.data_handle() + first * view.stride(2), extents, strides);
}

constexpr std::array<Shape, 7> shapes{{
    {1, 4, 2, 1, 1, 8, 5},
    {2, 4, 4, 2, 2, 3, 8},
    {2, 4, 2, 5, 300, 8, 5},
    {1, 4, 1, 70, 33, 9, 9},      // some queries without visible keys
    {1, 4, 2, 53, 1031, 16, 4},   // two key chunks
    {1, 4, 4, 131, 127, 64, 24},  // a short sequence
    {1, 4, 2, 1, 4099, 17, 3},    // key chunks that threads share
}};

TEMPLATE_TEST_CASE("statistics of rows, and out and lse, which they do not change", "[attention][bfloat16]",
                   float, double, bfloat16) {
  using T = TestType;
  const std::vector<Compute<T>> sinks(some_sinks.begin(), some_sinks.end());
  const std::vector<Case<T>> cases = cases_of<T>(sinks);
  for (const Shape& shape : shapes) {
    const Problem<T> x(shape);
    for_each_target_of<T>([&](const std::string& target) {
      for (const Case<T>& some : cases) {
        INFO(target << ", " << name_of(shape) << ", " << some.name);
        const Call<T> call = some.run(x, 1);
        check_rows(x, some, call);
        CHECK(call == some.run(x, 3));
        const Output<T> without = some.without(x);
        if (call.output.explanation.path == without.explanation.path) CHECK(call.output == without);
        if (without.explanation.path == Path::decode) CHECK(call.output.explanation.path == Path::decode);
      }
    });
  }
}

TEMPLATE_TEST_CASE("statistics of a cut prompt, over a cache, of a plan and with dropout",
                   "[attention][decode][bfloat16]", float, bfloat16) {
  using T = TestType;
  using C = Compute<T>;
  const Shape shape{2, 4, 2, 150, 1200, 16, 16};
  const Problem<T> x(shape);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target);
    const Call<T> whole = run_with(x, Softmax{}, Causal{});
    CHECK(whole.same_statistics(run_with(x, Softmax{}, Causal{}, {.dropout = {.p = 0.5, .seed = 1}})));

    KvCache<T> cache({.batch = 2, .kv_heads = 2, .width = 16, .capacity = 1200});
    const auto cut_into = [&](const std::vector<index_t>& counts, bool batch_invariant) {
      Call<T> cut(shape);
      const RowStatistics<C> all = cut.statistics();
      cache.clear();
      cache.append(part(x.k_view(), 0, 1050), part(x.v_view(), 0, 1050));
      index_t first = 0;
      for (const index_t count : counts) {
        cache.append(part(x.k_view(), 1050 + first, count), part(x.v_view(), 1050 + first, count));
        attention<C>(
            {.q = part(x.q_view(), first, count),
             .keys = cache,
             .out = part(cut.output.out_view(), first, count),
             .lse = part(cut.output.lse_view(), first, count),
             .batch_invariant = batch_invariant,
             .statistics = {part(all.largest, first, count), part(all.smallest, first, count),
                            part(all.sum_of_squares, first, count), part(all.entropy, first, count)}},
            Causal{});
        first += count;
      }
      return cut;
    };
    CHECK(whole == cut_into({9, 124, 17}, false));
    const Call<T> invariant = run_with(x, Softmax{}, Causal{}, {.batch_invariant = true});
    CHECK(invariant == cut_into({1, 2, 17, 1, 129}, true));

    Call<T> planned(shape), over_cache(shape);
    AttentionArguments<C> a = arguments_of(x, planned.output),
                          over_source = arguments_of(x, over_cache.output);
    a.statistics = planned.statistics();
    over_source.k = {}, over_source.v = {};
    over_source.keys = cache;
    over_source.statistics = over_cache.statistics();
    const Plan plan(a, 2, Causal{}), plan_of_source(over_source, 2, Causal{});
    const GuardedMemory memory(std::max(plan.bytes(), plan_of_source.bytes()));
    plan.run(a, memory.span(), Softmax{});
    CHECK(whole == planned);
    plan_of_source.run(over_source, memory.span(), Softmax{});
    CHECK(whole == over_cache);
    const Plan without(arguments_of(x, planned.output), 1, Causal{});
    check_refused({"statistics are given, the plan was made without"},
                  [&] { without.run(a, memory.span(), Softmax{}); });
  });
}

/// Packed and padded sequences, of every path. The statistics of a sequence are bit-identical to a call with this
/// sequence alone.
TEMPLATE_TEST_CASE("statistics of sequences of different lengths", "[attention][lengths][bfloat16]", float,
                   bfloat16) {
  using T = TestType;
  using C = Compute<T>;
  for (const bool is_packed : {true, false}) {
    const Sequences sequences({1, 7, 40, 0, 3, 130, 2}, {300, 7, 40, 5, 1100, 200, 1}, is_packed);
    const auto q = Tensor<T>::random(sequences, true, 4, 16, 1),
               k = Tensor<T>::random(sequences, false, 2, 16, 100),
               v = Tensor<T>::random(sequences, false, 2, 8, 200);
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ", packed " << is_packed);
      Tensor<T> out(sequences, true, 4, 8);
      const Tensor<C> numbers(sequences, true, 4, 1);
      std::array<Tensor<C>, 4> alone{numbers, numbers, numbers, numbers};
      for (index_t b = 0; b < sequences.count(); ++b) {
        attention<C>({.q = q.alone(b),
                      .k = k.alone(b),
                      .v = v.alone(b),
                      .out = out.alone(b),
                      .statistics = {alone[0].numbers_alone(b), alone[1].numbers_alone(b),
                                     alone[2].numbers_alone(b), alone[3].numbers_alone(b)}},
                     SSMax<C>{C(0.4)}, Causal{});
      }
      const auto check = [&](auto&& executor) {
        std::array<Tensor<C>, 4> together{numbers, numbers, numbers, numbers};
        attention<C>({.q = q.view(),
                      .k = k.view(),
                      .v = v.view(),
                      .out = out.view(),
                      .statistics = {together[0].numbers(), together[1].numbers(), together[2].numbers(),
                                     together[3].numbers()},
                      .lengths = sequences.lengths()},
                     SSMax<C>{C(0.4)}, Causal{}, executor);
        CHECK(together == alone);
      };
      check(Serial{});
      check(ThreadPool(3));
    });
  }
}

/// One query per sequence over a cache: sequences of different lengths, and lists of neighbours.
TEST_CASE("statistics of decode over a cache", "[attention][decode]") {
  const Shape shape{3, 4, 2, 1, 1100, 16, 16};
  const Problem<float> x(shape);
  for_each_target_of<float>([&](const std::string& target) {
    INFO(target);
    KvCache<float> cache({.batch = 3, .kv_heads = 2, .width = 16, .capacity = 1100});
    const std::vector<index_t> lengths{1100, 7, 40};
    cache.append(x.k_view(), x.v_view(), nullptr, lengths);
    std::vector<int> list(3 * 40), counts{40, 7, 40};
    for (std::size_t i = 0; i < list.size(); ++i) list[i] = static_cast<int>(i * 37 % 1100);
    Call<float> all(shape);
    const AttentionArguments<float> views = arguments_of(x, all.output);
    const auto check = [&](const auto& keys) {
      Call<float> together(shape), alone(shape);
      Explanation explanation;
      const auto run_call = [&](Call<float>& call, bool has_statistics, auto&& executor) {
        AttentionArguments<float> a = arguments_of(x, call.output);
        a.k = {}, a.v = {};
        a.keys = keys;
        if (has_statistics) a.statistics = call.statistics();
        a.explanation = &explanation;
        attention(a, SSMax<float>{0.5F}, Causal{}, executor);
      };
      run_call(together, true, Serial{});
      CHECK(explanation.path == Path::decode);
      ThreadPool three(3);
      run_call(alone, true, three);
      CHECK(together == alone);
      run_call(alone, false, Serial{});
      CHECK(together.output == alone.output);
      for (const float largest : together.largest) CHECK(std::isfinite(largest));
    };
    check(cache);
    const View<const float, 4> k(x.k.data(), {1100, 1, 2, 16}), v(x.v.data(), {1100, 1, 2, 16});
    const View<const int, 2> lists(list.data(), {3, 40});
    check(PagedKeys(k, v, PageTable<int>(lists, counts)));
  });
}

/// Logits 2^21 + j, whose shifts the kernels do not take, with weights 2^j / Σ 2^i.
TEMPLATE_TEST_CASE("statistics of large logits that are close to each other", "[attention][decode][bfloat16]",
                   float, double, bfloat16) {
  using T = TestType;
  constexpr index_t keys = 8;
  const auto base = static_cast<float>(1 << 21);
  for (const index_t queries : {1, 20}) {
    Problem<T> x({1, 1, 1, queries, keys, 4, 4});
    for (std::size_t i = 0; i < x.q.size(); ++i) x.q[i] = T(i % 4 < 2 ? 1.F : 0.F);
    for (index_t j = 0; j < keys; ++j) {
      at(x.k, 4 * j) = T(base);
      at(x.k, 4 * j + 1) = T(static_cast<float>(j));
    }
    Real sum = 0, squares = 0, entropy = 0;
    for (index_t j = 0; j < keys; ++j) sum += std::exp2(static_cast<Real>(j));
    for (index_t j = 0; j < keys; ++j) {
      const Real p = std::exp2(static_cast<Real>(j)) / sum;
      squares += p * p;
      entropy -= p * std::log(p);
    }
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      const Call<T> call = run_with(x, Constant{std::numbers::ln2}, Full{}, {.scale = 1});
      const auto check = [](const auto& numbers, Real expected) {
        const Real bound = 16 * std::numeric_limits<Compute<T>>::epsilon() * expected;
        for (const auto number : numbers) CHECK(std::abs(static_cast<Real>(number) - expected) <= bound);
      };
      check(call.largest, static_cast<Real>(base) + keys - 1);
      check(call.smallest, static_cast<Real>(base));
      check(call.squares, squares);
      check(call.entropy, entropy);
    });
  }
}

/// Integers from -3 to 3, whose products with each other are exact.
template <class T>
Problem<T> integers(const Shape& shape) {
  Problem<T> x(shape);
  for (auto* numbers : {&x.q, &x.k}) {
    for (std::size_t i = 0; i < numbers->size(); ++i)
      (*numbers)[i] = T(static_cast<float>((i * 7919 / 13 + i * i * 31) % 7) - 3.0F);
  }
  return x;
}

/// A score function whose results are exact.
struct Halved {
  template <class T>
  T operator()(T z, const Key&) const {
    return z / 2 + 1;
  }
  template <class T>
  T derivative(T, const Key&) const {
    return T(0.5);
  }
};

/// With c·log2(e) a power of two, c·log2(e)·z is exact, so that `largest` and `smallest` are logits bit for bit.
TEMPLATE_TEST_CASE("the largest logit is exact where c·log2(e) is a power of two", "[attention][bfloat16]",
                   float, double, bfloat16) {
  using T = TestType;
  for (const Shape& shape : shapes) {
    const Problem<T> x = integers<T>(shape);
    std::vector<Real> products;  // q·k, [query][key]
    for_each_query(x, [&](const Query& query) {
      for (const Real z : row_of(x, make<T>("", Softmax{}, Full{}), query).z)
        products.push_back(std::rint(z * std::sqrt(static_cast<Real>(shape.d))));
    });
    const auto check = [&](double c, double scale, const auto& mask, const auto& score) {
      const Case<T> some = make<T>("", Constant{c}, mask, {.scale = scale}, score);
      std::vector<Compute<T>> largest, smallest;
      auto product = products.begin();
      for_each_query(x, [&](const Query& query) {
        Row row;
        for (index_t key = 0; key < shape.keys; ++key, ++product) {
          if (some.sees(query, key)) row.z.push_back(*product * static_cast<Real>(scale));
        }
        if constexpr (std::same_as<decltype(score), const Halved&>) {
          for (Real& z : row.z) z = z / 2 + 1;
        }
        largest.push_back(static_cast<Compute<T>>(row.largest()));
        smallest.push_back(static_cast<Compute<T>>(row.smallest()));
      });
      for_each_target_of<T>([&](const std::string& target) {
        INFO(target << ", " << name_of(shape) << ", c " << c << ", scale " << scale);
        const Call<T> call = some.run(x, 1);
        CHECK(call.largest == largest);
        CHECK(call.smallest == smallest);
        CHECK(call == some.run(x, 2));
      });
    };
    constexpr double unit = std::numbers::ln2;  // unit·log2(e) is 1 in double
    check(unit, 0.25, Causal{}, Identity{});
    check(-unit / 8, 1, Full{}, Identity{});
    check(4 * unit, 0.5, Causal{} & Where(scattered), Identity{});
    check(unit, 0.25, Causal{}, Halved{});
  }
}

/// With any other c, c·log2(e)·z is rounded. A call in which only the key with the largest logit is visible returns
/// the same `largest`.
TEMPLATE_TEST_CASE("the largest logit is bit-identical to a call with its key alone", "[attention][bfloat16]",
                   float, double, bfloat16) {
  using T = TestType;
  for (const Shape& shape : shapes) {
    const Problem<T> x(shape);
    const Case<T> all = make<T>("", Softmax{}, Full{});
    std::vector<index_t> best, worst;
    for_each_query(x, [&](const Query& query) {
      const std::vector<Real> z = row_of(x, all, query).z;
      best.push_back(std::ranges::max_element(z) - z.begin());
      worst.push_back(std::ranges::min_element(z) - z.begin());
    });
    using Sees = std::function<bool(const Query&, index_t)>;
    const auto only = [&](const std::vector<index_t>& keys) {
      return Where(Sees([&](const Query& query, index_t key) {
        const index_t row = (query.batch * shape.heads + query.head) * shape.queries + query.index;
        return key == keys[static_cast<std::size_t>(row)];
      }));
    };
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ", " << name_of(shape));
      for (const double c : {1.0, -0.3}) {
        const Call<T> call =
            run_with(x, Constant{c}, Where(Sees([](const Query&, index_t) { return true; })));
        CHECK(same_bits(call.largest, run_with(x, Constant{c}, only(best)).largest));
        CHECK(same_bits(call.smallest, run_with(x, Constant{c}, only(worst)).smallest));
      }
    });
  }
}

TEST_CASE("one statistic alone, with strides", "[attention]") {
  const Shape shape{1, 4, 2, 7, 200, 8, 8};
  const Problem<float> x(shape);
  const Call<float> all = run_with(x, Softmax{}, Causal{});
  std::vector<float> numbers(4 * 10, -77);
  Output<float> output(shape);
  AttentionArguments<float> a = arguments_of(x, output);
  a.lse = {};
  a.statistics.entropy = {numbers.data(), {1, 4, 7}, {1, 10, 1}};
  attention(a, Causal{});
  for (index_t i = 0; i < std::ssize(numbers); ++i)
    CHECK(at(numbers, i) == (i % 10 < 7 ? at(all.entropy, i / 10 * 7 + i % 10) : -77));
}

TEMPLATE_TEST_CASE("statistics of rows with NaN, infinities and sinks of NaN", "[attention][bfloat16]", float,
                   double, bfloat16) {
  using T = TestType;
  using C = Compute<T>;
  Problem<T> x({1, 4, 4, 20, 150, 8, 8});
  const auto key = [&](index_t head, index_t j) -> T& { return at(x.k, (head * 150 + j) * 8); };
  key(0, 131) = T(nan<float>);  // masked for query 0 alone
  key(1, 3) = T(infinity<float>);
  std::ranges::fill(x.q.begin() + 1 * 160, x.q.begin() + 2 * 160, T(1));
  const std::vector<C> sinks{-infinity<C>, -infinity<C>, nan<C>, infinity<C>};
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target);
    const Call<T> call = run_with(x, Softmax{}, Causal{}, {.sinks = sinks});
    const auto are_nan = [&](index_t row) {
      return std::array{std::isnan(at(call.largest, row)), std::isnan(at(call.smallest, row)),
                        std::isnan(at(call.squares, row)), std::isnan(at(call.entropy, row))};
    };
    const std::array all{true, true, true, true}, none{false, false, false, false};
    CHECK(are_nan(0) == none);
    for (index_t i = 1; i < 40; ++i) CHECK(are_nan(i) == all);
    for (index_t i = 40; i < 60; ++i) CHECK(are_nan(i) == std::array{false, false, true, true});
    for (index_t i = 60; i < 80; ++i) {
      CHECK(at(call.squares, i) == 0);
      CHECK(at(call.entropy, i) == 0);
      CHECK(at(call.smallest, i) < at(call.largest, i));
    }
  });
}

TEST_CASE("wrong statistics are refused", "[attention][errors]") {
  std::vector<float> x(8), out(8), numbers(4);
  const auto call = [&](const RowStatistics<float>& statistics) {
    const View<float, 4> view(x.data(), {1, 1, 2, 4});
    return [=, &out] {
      attention(
          {.q = view, .k = view, .v = view, .out = {out.data(), {1, 1, 2, 4}}, .statistics = statistics});
    };
  };
  check_refused({"ssmax::attention: statistics.largest", "extent 3", "q", "2"},
                call({.largest = {numbers.data(), {1, 1, 3}}}));
  check_refused({"statistics.smallest", "overlap", "k"}, call({.smallest = {x.data(), {1, 1, 2}}}));
  check_refused({"statistics.entropy", "overlap", "out"}, call({.entropy = {out.data(), {1, 1, 2}}}));
  check_refused({"statistics.largest", "overlap", "statistics.entropy"},
                call({.largest = {numbers.data(), {1, 1, 2}}, .entropy = {numbers.data() + 1, {1, 1, 2}}}));
}

}  // namespace attention_problem::row_statistics_test
