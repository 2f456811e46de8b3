// Gradients are bit-identical for every executor: many and few heads, short and long sequences, all parameters. A call
// allocates once, and not at all with a reused workspace.

#include <thread>

#include "allocation_count.hpp"
#include "attention_backward_problem.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace attention_problem::backward_problem::attention_backward_threads_test {

using test_executors::Reverse;
using test_executors::Threads;

constexpr std::array<Shape, 9> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 1, 1, 1, 1},
    {2, 8, 4, 5, 130, 8, 5},
    {2, 12, 3, 37, 70, 9, 24},
    {1, 1, 1, 1030, 530, 5, 3},  // few heads: threads divide queries and keys
    {1, 1, 1, 1, 5000, 16, 8},
    {1, 4, 1, 4, 2100, 6, 5},
    {1, 1, 1, 2100, 20, 6, 5},
    {1, 2, 1, 500, 700, 6, 8},
    {1, 2, 1, 70, 33, 6, 5},
}};

/// All results of a backward call with SSMax, slopes, and a bias that is summed over some dimensions.
template <class T>
struct Everything {
  Result<T> result;
  std::vector<Compute<T>> ds, db;
  std::vector<double> dslopes;
  std::vector<float> dbias;

  bool operator==(const Everything& other) const {
    return result == other.result && same_bits(ds, other.ds) && same_bits(db, other.db) &&
           same_bits(dslopes, other.dslopes) && same_bits(dbias, other.dbias);
  }
};

template <class T>
struct Call {
  Problem<T> problem;
  std::vector<Compute<T>> s, b, sinks;
  std::vector<double> slopes;
  std::vector<float> bias;
  std::array<index_t, 4> extents, strides;

  /// `summed`: one bit for each dimension that the bias is broadcast along.
  explicit Call(const Shape& shape, int summed = 5)
      : problem(shape), extents{shape.batch, shape.heads, shape.queries, shape.keys}, strides{} {
    using A = Compute<T>;
    const auto heads = static_cast<std::size_t>(shape.heads);
    s = reference::normals<A>(heads, 1, 0.3, 0.5);
    b = reference::normals<A>(heads, 2, 0.2);
    sinks = reference::normals<A>(heads, 3);
    slopes = reference::normals<double>(heads, 4, 0.01);
    index_t size = 1;
    for (std::size_t i = 4; i-- > 0;) {
      if ((summed >> i & 1) != 0) continue;
      strides[i] = size;
      size *= extents[i];
    }
    bias = reference::normals<float>(static_cast<std::size_t>(size), 5);
  }
  template <class M, class E>
  Everything<T> operator()(const M& mask, AttentionOptions<T> options, E&& executor) const {
    Everything<T> all{Result<T>(problem), std::vector<Compute<T>>(s.size()),
                      std::vector<Compute<T>>(s.size()), std::vector<double>(s.size()),
                      std::vector<float>(bias.size())};
    const auto score = Softcap(4) |
                       Bias(View<const float, 4>(bias.data(), extents, strides))
                           .gradient(View<float, 4>(all.dbias.data(), extents, strides)) |
                       Alibi(slopes).gradient(all.dslopes);
    options.sinks = sinks;
    const auto scaling = SSMax<Compute<T>>{s, b}.gradient(all.ds, all.db);
    all.result = run_backward(problem, scaling, mask, score, options, executor);
    return all;
  }
  /// Runs a call that writes only dq, dk and dv.
  template <class M, class E>
  Result<T> plain(const M& mask, E&& executor) const {
    return run_backward(problem, SSMax<Compute<T>>{s, b}, mask, AttentionOptions<T>{}, executor);
  }
};

template <class T, class M>
void check_same(const Call<T>& call, const M& mask, const AttentionOptions<T>& options = {}) {
  static ThreadPool two(2), three(3), seven(7);
  const Shape& s = call.problem.shape;
  const bool is_long = s.queries * s.keys > 100'000;
  for_each_target([&](const std::string& target) {
    INFO(target << ' ' << name_of(s));
    const Everything<T> expected = call(mask, options, ssmax::Serial{});
    CHECK(call(mask, options, seven) == expected);
    CHECK(call(mask, options, Reverse{5}) == expected);
    const Result<T> plain = call.plain(mask, ssmax::Serial{});
    CHECK(call.plain(mask, three) == plain);
    CHECK(call.plain(mask, Reverse{3}) == plain);
    if (is_long) return;
    CHECK(call(mask, options, two) == expected);
    CHECK(call(mask, options, three) == expected);
    for (const index_t threads : {1, 2, 64}) CHECK(call(mask, options, Reverse{threads}) == expected);
  });
}

TEST_CASE("gradients are bit-identical for every executor: full and causal",
          "[attention][backward][threads][slow]") {
  for (const Shape& shape : shapes) {
    check_same(Call<float>(shape), Full{});
    check_same(Call<float>(shape), Causal{});
  }
  check_same(Call<double>(shapes[2]), Causal{});
  check_same(Call<double>(shapes[3]), Causal{});
  check_same(Call<ssmax::half>(shapes[2]), Causal{});
  check_same(Call<ssmax::half>(shapes[7]), Causal{});
}

TEST_CASE("gradients are bit-identical for every executor: windows and predicates",
          "[attention][backward][threads][slow]") {
  for (const Shape& shape : shapes) {
    check_same(Call<float>(shape), SlidingWindow(600, 1));
    check_same(Call<float>(shape), SlidingWindow(20, 2));
    if (shape.queries < 500) check_same(Call<float>(shape), ssmax::Where(scattered));
  }
}

TEST_CASE("gradients are bit-identical for every executor: rope and a broadcast bias",
          "[attention][backward][threads][slow]") {
  const ssmax::Rope<float> rope({.width = 4}, 6000);
  for (const Shape& shape : {shapes[1], shapes[2], shapes[8]}) {
    for (int summed = 0; summed < 16; ++summed) {
      INFO("bias summed over " << summed);
      const Call<float> call(shape, summed);
      const AttentionOptions<float> options{.rope = &rope, .key_position = 100};
      static ThreadPool three(3);
      const auto expected = call(Causal{}, options, ssmax::Serial{});
      CHECK(call(Causal{}, options, three) == expected);
      CHECK(call(Causal{}, options, Reverse{5}) == expected);
    }
  }
}

TEST_CASE("gradients are bit-identical for every executor: huge and infinite logits",
          "[attention][backward][threads]") {
  ThreadPool three(3);
  for (const Shape& shape : {shapes[1], shapes[3], shapes[7]}) {
    Problem<float> problem(shape, 3);
    for (std::size_t i = 0; i < problem.v.size(); i += 1000) problem.v[i] = infinity<float>;
    const ssmax::Constant scaling{1e5};
    INFO(name_of(shape));
    const Result<float> expected = run_backward(problem, scaling, Causal{});
    CHECK(run_backward(problem, scaling, Causal{}, {}, three) == expected);
    CHECK(run_backward(problem, scaling, Causal{}, {}, Reverse{5}) == expected);
  }
}

TEST_CASE("backward runs on threads of one call and inside the tasks of a pool",
          "[attention][backward][threads]") {
  ThreadPool pool(3);
  std::vector<Problem<float>> problems;
  std::vector<Result<float>> expected, results;
  for (const Shape& shape : {shapes[1], shapes[2], shapes[7], shapes[8]}) {
    problems.emplace_back(shape);
    expected.push_back(run_backward(problems.back(), SSMax<float>{}, Causal{}));
    results.emplace_back(problems.back());
    CHECK(run_backward(problems.back(), SSMax<float>{}, Causal{}, {}, Threads{4}) == expected.back());
  }
  pool.run(static_cast<index_t>(problems.size()), [&](index_t i) {
    const auto at = static_cast<std::size_t>(i);
    results[at] = run_backward(problems[at], SSMax<float>{}, Causal{}, {}, pool);
  });
  CHECK(results == expected);
}

TEST_CASE("backward uses an executor, except for empty inputs", "[attention][backward][threads]") {
  index_t runs = 0;
  const auto call = [&](const Shape& shape) {
    const Problem<float> problem(shape);
    const Output<float> output = run<float>(problem, SSMax<float>{}, Causal{});
    runs = 0;
    backward(problem, output, SSMax<float>{}, Causal{}, Identity{}, {}, Reverse{4, &runs});
    return runs;
  };
  CHECK(call(shapes[2]) > 0);
  CHECK(call({0, 2, 1, 3, 30, 8, 5}) == 0);
}

/// A score that throws for one key of one query.
struct Throws {
  template <class T>
  T operator()(T z, const ssmax::Key&) const {
    return z;
  }
  template <class T>
  T derivative(T, const ssmax::Key& key) const {
    if (key.query.index == 2 && key.index == 20) throw std::domain_error("no such key");
    return T{1};
  }
};

TEST_CASE("an exception from the derivative of a score reaches the caller",
          "[attention][backward][threads]") {
  ThreadPool pool(3);
  for (const Shape& shape : {shapes[1], shapes[2], shapes[5]}) {
    const Problem<float> problem(shape);
    CHECK_THROWS_AS(run_backward(problem, SSMax<float>{}, Full{}, Throws{}), std::domain_error);
    CHECK_THROWS_AS(run_backward(problem, SSMax<float>{}, Full{}, Throws{}, {}, pool), std::domain_error);
  }
}

// ---- Memory -----------------------------------------------------------------------------------------------

/// A backward call whose inputs and outputs are allocated beforehand.
template <class T>
struct Prepared {
  using A = Compute<T>;

  Problem<T> problem;
  std::vector<A> sinks, ds, db, dsinks;
  std::vector<double> slopes, dslopes;
  ssmax::Rope<A> rope{{.width = 2}, 6000};
  AttentionOptions<T> options{};
  Output<T> output;
  Result<T> result;

  explicit Prepared(const Shape& shape)
      : problem(shape),
        sinks(8, A(0.5)),
        ds(8),
        db(8),
        dsinks(8),
        slopes(8),
        dslopes(8),
        output(shape),
        result(problem) {
    const auto heads = static_cast<std::size_t>(shape.heads);
    for (auto* values : {&sinks, &ds, &db, &dsinks}) values->resize(heads);
    slopes.resize(heads);
    dslopes.resize(heads);
    options.rope = shape.d > 1 ? &rope : nullptr;
    options.key_position = std::max<index_t>(0, shape.queries - shape.keys);
    options.sinks = sinks;
    output = run<T>(problem, scaling(), mask(), score(), options);
  }
  auto scaling() { return SSMax<A>{A(0.7)}.gradient(ds, db); }
  auto score() { return Softcap(3) | Alibi(slopes).gradient(dslopes); }
  static auto mask() {
    return Causal{} &
           ssmax::Where([](const Query& query, index_t key) { return (key + query.index) % 3 != 0; });
  }
  template <class E = ssmax::Serial>
  void operator()(E&& executor = E{}) {
    AttentionGradients<Compute<T>> gradients = gradients_to(problem, result);
    gradients.dsinks = dsinks;
    ssmax::attention_backward<Compute<T>>(backward_with(backward_arguments_of(problem, output), options),
                                          gradients, scaling(), mask(), score(), executor);
  }
};

template <class T, class E>
void check_allocations(E&& executor) {
  for (const Shape& shape : {shapes[0], shapes[1], shapes[5], shapes[7], shapes[8]}) {
    INFO(name_of(shape));
    Prepared<T> call(shape);
    CHECK(allocations([&] { call(executor); }) <= 1);
    const Result<T> expected = call.result;
    Workspace workspace;
    call.options.workspace = &workspace;
    CHECK(allocations([&] { call(executor); }) <= 1);
    const std::size_t size = workspace.size();
    // Old contents do not affect the result: bytes of 0xff are NaN.
    std::fill_n(workspace.reserve(size), size, std::byte{0xff});
    CHECK(allocations([&] { call(executor); }) == 0);
    CHECK(workspace.size() == size);
    CHECK(call.result == expected);
  }
}

TEST_CASE("backward allocates once, and not at all with a reused workspace",
          "[attention][backward][workspace][slow]") {
  ThreadPool pool(3);
  for_each_target([&](const std::string&) {
    check_allocations<float>(ssmax::Serial{});
    check_allocations<double>(ssmax::Serial{});
    check_allocations<ssmax::half>(ssmax::Serial{});
    check_allocations<float>(pool);
  });
}

TEST_CASE("forward and backward share a workspace", "[attention][backward][workspace]") {
  Workspace workspace;
  Prepared<float> call(shapes[7]);
  call();
  const Result<float> expected = call.result;
  call.options.workspace = &workspace;
  for (int i = 0; i < 2; ++i) {
    call.output = run<float>(call.problem, call.scaling(), call.mask(), call.score(), call.options);
    call();
    CHECK(call.result == expected);
  }
}

TEST_CASE("the memory of a backward is linear in the sequence", "[attention][backward][workspace]") {
  std::vector<double> sizes;
  for (const index_t n : {500, 1000, 2000}) {
    Workspace workspace;
    Prepared<float> call({1, 1, 1, n, n, 16, 16});
    call.options.workspace = &workspace;
    call();
    sizes.push_back(static_cast<double>(workspace.size()));
  }
  CHECK(sizes[2] <= 4.1 * sizes[0]);
  CHECK(sizes[2] < 4 * 2000 * 2000);
}

}  // namespace attention_problem::backward_problem::attention_backward_threads_test
