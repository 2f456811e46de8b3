// A plan over a source of keys fits every source that bind accepts: with the same common keys, others, or no common
// keys. A plan and its bound calls keep what they were given as temporaries.

#include "attention_problem.hpp"
#include "guarded_memory.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "test_executors.hpp"
#include "wrapped_source.hpp"

namespace plan_source_test {

using namespace ssmax;

template <class X>
using QueryOf = std::conditional_t<std::same_as<X, bfloat16>, bfloat16, float>;

/// A user's source over another source. With `factors`, sequence b has the factor factors[b].
template <class K>
struct Own : WrappedSource<K> {
  bool shares;
  const float* factors = nullptr;

  bool shares_keys() const { return shares; }
  auto run(index_t b, index_t h, index_t key) const {
    auto run = this->source.run(b, h, key);
    if (factors == nullptr) return run;
    run.k_scales = run.v_scales = factors + b;
    run.k_scales_stride = run.v_scales_stride = 0;
    return run;
  }
};

constexpr index_t heads = 4, width = 32, keys_of_each = 2100, page = 64;

template <class T>
struct Call {
  index_t batch, rows;
  std::vector<T> q, out;

  explicit Call(index_t a_batch, index_t a_rows = 1, index_t of_heads = heads, index_t d = width)
      : batch(a_batch),
        rows(a_rows),
        q(reference::normals<T>(static_cast<std::size_t>(batch * of_heads * rows * d), 9)),
        out(q.size(), T(-77.F)),
        extents{batch, of_heads, rows, d} {}
  AttentionArguments<float> arguments() { return {.q = {q.data(), extents}, .out = {out.data(), extents}}; }

  typename View<T, 4>::Extents extents;
};

/// Returns the result of attention over a source.
template <class T, class K>
std::vector<T> expected(const K& source) {
  Call<T> call(source.shape().batch);
  attention(over(call.arguments(), source), SSMax<float>{0.3F}, Causal{});
  return call.out;
}

/// Runs a plan over another source in exactly bytes(). Returns false if bind refuses the source.
template <class T, class K>
bool check_bound(const Plan<float>& plan, const K& source, const std::vector<T>& expected) {
  const SSMax<float> scaling{0.3F};
  bool is_bound = false;
  const auto check_run = [&](auto&& executor) {
    Call<T> call(source.shape().batch);
    const GuardedMemory memory(plan.bytes());
    const std::string error = refusal([&] {
      const auto bound = plan.bind(over(call.arguments(), source), scaling);
      is_bound = true;
      bound.run(memory.span(), executor);
    });
    INFO(error);
    CHECK((!is_bound || same_bits(call.out, expected)));
    CHECK(memory.is_intact());
  };
  check_run(Serial{});
  check_run(test_executors::Threads{3});
  return is_bound;
}

/// Sequences of the same length in one pool: two prompts, forks of them after 1024 and 2048 keys, and others.
template <class X>
struct Forks {
  PagedKvCache<X> cache{{.kv_heads = 2, .width = width, .page = page, .pages = 300}};
  index_t a = grow(cache.add()), b = grow(cache.add()), a1 = fork(a, 2048), a2 = fork(a, 2048),
          a3 = fork(a, 1024), b1 = fork(b, 1024), c = grow(cache.add()), d = grow(cache.add());
  /// Batches of four sequences: no common keys, other prompts, other numbers of common keys.
  std::vector<std::vector<index_t>> batches{{a, b, c, d},  {a, a1, c, d},   {c, d, a, a1},  {a, b, a1, b1},
                                            {a, a3, c, d}, {a, a1, a2, a3}, {b, b1, c, a2}, {a, a, a, a}};

  index_t fork(index_t id, index_t common) {
    const index_t result = cache.fork(id);
    cache.truncate(result, common);
    return grow(result);
  }
  /// Appends keys up to the length of all.
  index_t grow(index_t id) {
    const index_t count = keys_of_each - cache.length(id);
    const auto numbers = reference::normals<float>(static_cast<std::size_t>(2 * count * 2 * width),
                                                   static_cast<unsigned>(id + 1));
    const View<const float, 3> k(numbers.data(), {count, 2, width}),
        v(numbers.data() + count * 2 * width, {count, 2, width});
    cache.append(k, v, std::vector<index_t>(static_cast<std::size_t>(count), id));
    return id;
  }
};

/// Checks a plan for each batch over all batches.
template <class T, class Source>
void check_all(const std::vector<Source>& sources, const std::vector<std::vector<T>>& expected) {
  for (std::size_t planned = 0; planned < sources.size(); ++planned) {
    Call<T> call(sources[planned].shape().batch);
    const Plan plan(over(call.arguments(), sources[planned]), 3, Causal{});
    for (std::size_t bound = 0; bound < sources.size(); ++bound) {
      INFO("planned over batch " << planned << ", bound to " << bound);
      const bool is_bound = check_bound<T>(plan, sources[bound], expected[bound]);
      CHECK((is_bound || planned != bound));
    }
  }
}

/// The pool and the tables of forks as PagedKeys.
template <class X>
struct Pages {
  std::vector<std::vector<index_t>> tables;
  std::vector<index_t> lengths = std::vector<index_t>(4, keys_of_each);
  std::vector<PagedKeys<X, X, PageTable<index_t>>> sources;

  explicit Pages(const Forks<X>& forks) {
    const index_t row = width / (std::same_as<X, Q8_0> ? 32 : 1), head = page * row, pages = 300;
    const std::vector<index_t> ids{0};
    const auto first = forks.cache.source(ids).run(0, 0, 0);
    const index_t at = forks.cache.pages_of(0)[0];
    const auto view_of = [&](const X* of) {
      return View<const X, 4>(of - at * 2 * head, {pages, page, 2, row}, {2 * head, row, head, 1});
    };
    const auto factors_of = [&](const float* of) {
      if (!std::same_as<X, Int8>) return View<const float, 3>();
      return View<const float, 3>(of - at * 2 * page, {pages, page, 2}, {2 * page, 1, page});
    };
    for (const auto& batch : forks.batches) {
      std::vector<index_t>& table = tables.emplace_back();
      for (const index_t id : batch) {
        const auto some = forks.cache.pages_of(id);
        table.insert(table.end(), some.begin(), some.end());
      }
    }
    for (const auto& table : tables) {
      const View<const index_t, 2> entries(table.data(), {4, std::ssize(table) / 4});
      sources.emplace_back(view_of(first.k), view_of(first.v), PageTable<index_t>(entries, lengths),
                           KeyScales{factors_of(first.k_scales), factors_of(first.v_scales)});
    }
  }
};

template <class X>
void check_forks() {
  using T = QueryOf<X>;
  using Source = PagedKeys<X, X, typename PagedKvCache<X>::Pages>;
  const Forks<X> forks;
  const Pages<X> pages(forks);
  for_each_target_of<T>([&](const std::string&) {
    std::vector<Source> sources;
    std::vector<Own<Source>> own;
    std::vector<std::vector<T>> results;
    for (const auto& batch : forks.batches) sources.push_back(forks.cache.source(batch));
    for (const Source& source : sources) {
      own.push_back({{source}, true});
      results.push_back(expected<T>(Own<Source>{{source}, false}));
    }
    check_all(sources, results);
    check_all(own, results);
    check_all(pages.sources, results);
  });
}

TEST_CASE("a plan is bit-identical to attention over sources with other common keys", "[decode][plan]") {
  check_forks<float>();
  check_forks<half>();
  check_forks<bfloat16>();
  check_forks<Int8>();
  check_forks<Q8_0>();
}

TEST_CASE("common codes with other factors are no common keys", "[decode][plan][shared_keys]") {
  const Forks<Int8> forks;
  const auto source = forks.cache.source(forks.batches.back());
  const std::vector<float> factors{0.01F, 0.02F, 0.01F, 0.03F}, same(4, 0.01F);
  using Source = Own<PagedKeys<Int8, Int8, PagedKvCache<Int8>::Pages>>;
  const Source own{{source}, true, factors.data()}, of_same{{source}, true, same.data()};
  const std::vector<float> alone = expected<float>(Source{{source}, false, factors.data()});
  CHECK(same_bits(expected<float>(own), alone));
  for (const Source& planned : {own, of_same})
    check_bound<float>({over(Call<float>(4).arguments(), planned), 3, Causal{}}, own, alone);
}

TEST_CASE("a plan and a workspace have the memory of the list of sequences", "[decode][plan]") {
  const index_t batch = 4000, d = 4;  // the list is larger than the memory of the only lane
  std::vector<index_t> pages(static_cast<std::size_t>(batch)), lengths(pages.size(), 1),
      one(pages.size() + 1), none(pages.size(), 0);
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<index_t>(i), one[i + 1] = one[i] + 1;
  const std::vector<float> rows = reference::normals<float>(pages.size() * 4, 1);
  const View<const float, 4> stored(rows.data(), {batch, 1, 1, d});
  const PagedKeys keys(stored, stored,
                       PageTable<index_t>(View<const index_t, 2>(pages.data(), {batch, 1}), lengths));
  const auto check = [&](const SequenceLengths& of_queries) {
    const bool is_packed = of_queries.is_packed();
    AttentionOptions<float> options{.lengths = of_queries};
    const auto make = [&] { return Call<float>(is_packed ? 1 : batch, is_packed ? batch : 1, 1, d); };
    Call<float> got = make(), expected = make(), again = make();
    const Plan plan(with(over(got.arguments(), keys), options), 1, Causal{});
    const GuardedMemory memory(plan.bytes());
    plan.bind(over(got.arguments(), keys)).run(memory.span());
    CHECK(memory.is_intact());
    Explanation explanation;
    options.explanation = &explanation;
    attention(with(over(expected.arguments(), keys), options), Causal{});
    CHECK(same_bits(got.out, expected.out));
    const GuardedMemory exact(explanation.workspace_bytes);
    Workspace workspace(exact.span());
    options.workspace = &workspace;
    attention(with(over(again.arguments(), keys), options), Causal{});
    CHECK(same_bits(again.out, expected.out));
    CHECK(exact.is_intact());
  };
  check({});
  check(SequenceLengths::packed_queries(one));
  check(SequenceLengths::padded_queries(lengths));
  check(SequenceLengths::padded_queries(none));  // rows of q, but no query
}

TEST_CASE("bind refuses a Bias that attention refuses", "[decode][plan][errors]") {
  KvCache<float> cache({.batch = 2, .kv_heads = 1, .width = 4, .capacity = 8});
  const std::vector<float> rows(2 * 8 * 4, 1);
  const View<const float, 4> numbers(rows.data(), {2, 1, 8, 4});
  cache.append(numbers, numbers, nullptr, std::vector<index_t>{5, 8});
  Call<float> call(2, 1, 1, 4);
  const auto arguments = over(call.arguments(), cache);
  const Plan plan(arguments, 1, Causal{});
  for (const index_t keys : {5, 8}) {
    const Bias bias(View<const float, 4>(rows.data(), {2, 1, 1, keys}));
    const auto attend = [&] { attention(arguments, Causal{}, bias); };
    const std::string expected = refusal(attend);
    CHECK(expected.find("bias has extent") != std::string::npos);
    CHECK(refusal([&] { (void)plan.bind(arguments, bias); }) == expected);
  }
}

TEST_CASE("a plan keeps the lengths that it was given", "[attention][decode][plan]") {
  // Each head has 40 more rows in memory. Lengths that are read after the change name those rows.
  const index_t rows = 60, all_rows = 100, d = 8;
  const std::vector<index_t> packed{0, 20, 25, 60}, refilled{0, 50, 90, 100}, padded{20, 5, 35},
      padded_refilled{100, 90, 61};
  const std::vector<float> numbers =
      reference::normals<float>(static_cast<std::size_t>(3 * 2 * all_rows * d), 1);
  KvCache<float> cache({.batch = 3, .kv_heads = 2, .width = d, .capacity = all_rows});
  const View<const float, 4> stored(numbers.data(), {3, 2, all_rows, d});
  cache.append(stored, stored);
  const auto check = [&](index_t batch, const std::vector<index_t>& before, const std::vector<index_t>& after,
                         auto lengths_of, auto queries_of) {
    const View<float, 4>::Extents extents{batch, 2, rows, d}, strides{2 * all_rows * d, all_rows * d, d, 1};
    const View<const float, 4> q(numbers.data(), extents, strides);
    std::vector<float> out(numbers.size(), -77), expected = out;
    const auto to = [&](std::vector<float>& of) { return View<float, 4>(of.data(), extents, strides); };
    std::vector<index_t> given = before;
    const auto check_run = [&](const auto& plan, const auto& bind) {
      given = after;
      const GuardedMemory memory(plan.bytes());
      bind().run(memory.span());
      CHECK(memory.is_intact());
      CHECK(same_bits(out, expected));
      given = before;
      std::fill(out.begin(), out.end(), -77.F);
      std::fill(expected.begin(), expected.end(), -77.F);
    };
    const Softmax scaling;
    attention({.q = q, .k = q, .v = q, .out = to(expected), .lengths = lengths_of(before)}, scaling,
              Causal{});
    const Plan plan({.q = q, .k = q, .v = q, .lengths = lengths_of(given)}, 1, Causal{});
    check_run(plan, [&] { return plan.bind({.q = q, .k = q, .v = q, .out = to(out)}, scaling); });
    attention({.q = q, .keys = cache, .out = to(expected), .lengths = queries_of(before)}, scaling, Causal{});
    const Plan over_source({.q = q, .keys = cache, .lengths = queries_of(given)}, 1, Causal{});
    check_run(over_source,
              [&] { return over_source.bind({.q = q, .keys = cache, .out = to(out)}, scaling); });
  };
  using Given = const std::vector<index_t>&;
  check(
      1, packed, refilled, [](Given all) { return SequenceLengths::packed(all); },
      [](Given all) { return SequenceLengths::packed_queries(all); });
  check(
      3, padded, padded_refilled, [](Given all) { return SequenceLengths::padded(all); },
      [](Given all) { return SequenceLengths::padded_queries(all); });
}

/// A number that is NaN after its end.
struct Poisoned {
  volatile float number = 0.3F;

  Poisoned() = default;
  Poisoned(const Poisoned& other) : number(static_cast<float>(other.number)) {}
  Poisoned& operator=(const Poisoned&) = delete;
  ~Poisoned() { number = std::numeric_limits<float>::quiet_NaN(); }
};
struct Scaled : Poisoned {
  float operator()(const Row&) const { return number; }
};
struct Shifted : Poisoned {
  template <class Z>
  Z operator()(Z z, const Key& key) const {
    return z + static_cast<Z>(number) * static_cast<Z>(key.index % 3);
  }
  template <class Z>
  Z derivative(Z, const Key&) const {
    return 1;
  }
};
/// A view of a cache. After its end, a view of no keys that its plan has.
struct Viewed {
  using Element = float;

  const KvCache<float>* volatile cache;

  explicit Viewed(const KvCache<float>& of) : cache(&of) {}
  Viewed(const Viewed& other) : cache(static_cast<const KvCache<float>*>(other.cache)) {}
  Viewed& operator=(const Viewed&) = delete;
  ~Viewed() { cache = &other_keys(); }
  static KvCache<float>& other_keys() {
    static KvCache<float> cache({.width = 8, .capacity = 300});
    return cache;
  }
  KeySourceShape shape() const { return cache->shape(); }
  index_t length(index_t b) const { return cache->length(b); }
  KeyRange stored(index_t b) const { return cache->stored(b); }
  KeyRun<float> run(index_t b, index_t h, index_t key) const { return cache->run(b, h, key); }
};

TEST_CASE("a bound call keeps temporary sources, scalings and scores", "[attention][decode][plan]") {
  const index_t d = 8, n = 300;
  const std::vector<float> numbers = reference::normals<float>(n * d, 1), zeros(n * d);
  const View<const float, 4> stored(numbers.data(), {1, 1, n, d}), other(zeros.data(), {1, 1, n, d});
  KvCache<float> cache({.width = d, .capacity = n});
  cache.append(stored, stored);
  Viewed::other_keys().append(other, other);
  Call<float> expected(1, 1, 1, d), got(1, 1, 1, d), over_views(1, 1, 1, d);
  attention(over(expected.arguments(), cache), Scaled(), Causal{}, Shifted());

  const AttentionArguments<float> a = over_views.arguments(), b = got.arguments();
  const Plan plan({.q = b.q, .keys = Viewed(cache)}, 1, Causal{});
  AttentionArguments<float> named{.q = b.q, .keys = Viewed(cache), .out = b.out};
  const auto bound = plan.bind(named, Scaled(), Shifted());
  named.keys = {};
  const Plan views({.q = a.q, .k = stored, .v = stored}, 1, Causal{});
  const auto bound_views =
      views.bind({.q = a.q, .k = stored, .v = stored, .out = a.out}, Scaled(), Shifted());
  bound.run(GuardedMemory(plan.bytes()).span());
  bound_views.run(GuardedMemory(views.bytes()).span());
  CHECK(same_bits(got.out, expected.out));
  CHECK(same_bits(over_views.out, expected.out));
}

TEST_CASE("a plan refuses to run on another target", "[attention][decode][plan][errors]") {
  const index_t d = 32, n = 300;
  const std::vector<bfloat16> numbers = reference::normals<bfloat16>(n * d, 1);
  const View<const bfloat16, 4> all(numbers.data(), {1, 1, n, d});
  KvCache<bfloat16> cache({.width = d, .capacity = n});
  cache.append(all, all);
  std::vector<bfloat16> out(numbers.size(), bfloat16(-77.F));
  const std::vector<bfloat16> untouched = out;
  const View<bfloat16, 4> to(out.data(), {1, 1, n, d});
  const TargetScope scope;
  const std::vector<Target> targets = available_targets();
  const Softmax scaling;
  for (const Target planned : targets) {
    set_active_target(planned);
    const Plan plan({.q = all, .k = all, .v = all}, 1, Causal{});
    const Plan over_source({.q = all, .keys = cache}, 1, Causal{});
    const GuardedMemory memory(std::max(plan.bytes(), over_source.bytes()) + 1'000'000);
    const auto bound = plan.bind({.q = all, .k = all, .v = all, .out = to}, scaling);
    const auto bound_source = over_source.bind({.q = all, .keys = cache, .out = to}, scaling);
    for (const Target active : targets) {
      if (active == planned) continue;
      set_active_target(active);
      for (const auto& message :
           {refusal([&] { bound.run(memory.span()); }), refusal([&] { bound_source.run(memory.span()); })}) {
        INFO(message);
        CHECK(message.find(target_name(planned)) != std::string::npos);
        CHECK(message.find(target_name(active)) != std::string::npos);
      }
      CHECK(same_bits(out, untouched));
      std::copy(untouched.begin(), untouched.end(), out.begin());
    }
  }
}

TEST_CASE("bind compares the lengths of a source unless the source has the layout number of the plan",
          "[decode][plan]") {
  const std::vector<float> pool(std::size_t{4 * page * width});
  const std::vector<index_t> table{0, 1, 2, 3}, lengths{100, 70}, others{100, 71};
  const auto keys = [&](const std::vector<index_t>& of, std::uint64_t number) {
    const View<const float, 4> rows(pool.data(), {4, page, 1, width});
    return PagedKeys(rows, rows, PageTable<index_t>(View<const index_t, 2>(table.data(), {2, 2}), of))
        .with_layout(number);
  };
  using Keys = decltype(keys(lengths, 0));
  Call<float> call(2);
  for (const std::uint64_t number : {std::uint64_t{0}, std::uint64_t{7}}) {
    const Keys first = keys(lengths, number);
    const Plan plan(over(call.arguments(), first), 1, Causal{});
    const auto is_refused = [&](std::uint64_t other) {
      return refusal([&] {
               (void)plan.bind(over(call.arguments(), keys(others, other)), SSMax<float>{0.3F});
             }) != "(nothing was thrown)";
    };
    CHECK(is_refused(number) == (number == 0));
    CHECK(is_refused(8));
  }
}

}  // namespace plan_source_test
