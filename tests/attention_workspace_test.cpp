// Attention allocates once per call, and not at all with a large enough workspace. The old contents of the workspace
// do not affect the result.

#include "allocation_count.hpp"
#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_workspace_test {

constexpr std::array<Shape, 5> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 1, 1, 1, 1},
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 61, 300, 9, 7},
    {1, 1, 1, 1, 5000, 16, 8},  // threads divide the keys
    {1, 1, 1, 20, 5000, 16, 8},
}};

/// A call whose outputs are allocated beforehand.
template <class T>
struct Call {
  Problem<T> problem;
  Output<T> output;
  std::vector<float> sinks;
  ssmax::Rope<float> rope{{.width = 2}, 6000};
  Workspace* workspace = nullptr;

  explicit Call(const Shape& shape)
      : problem(shape), output(shape), sinks(static_cast<std::size_t>(shape.heads), 0.5F) {}
  template <class E = ssmax::Serial>
  void operator()(E&& executor = E{}) {
    const auto picked = [](const ssmax::Query& query, index_t key) { return (key + query.index) % 3 != 0; };
    ssmax::attention<Compute<T>>(
        with(arguments_of(problem, output),
             AttentionOptions<T>{
                 .rope = problem.shape.d > 1 ? &rope : nullptr, .sinks = sinks, .workspace = workspace}),
        SSMax<float>{0.7F}, Causal{} & ssmax::Where(picked), ssmax::Softcap(3), executor);
  }
};

template <class T, class E>
void check_allocations(E&& executor) {
  for (const Shape& shape : shapes) {
    INFO(name_of(shape));
    Call<T> call(shape);
    CHECK(allocations([&] { call(executor); }) == 1);
    Workspace workspace;
    CHECK(allocations([&] { Workspace(); }) == 0);
    CHECK(workspace.size() == 0);
    call.workspace = &workspace;
    CHECK(allocations([&] { call(executor); }) == 1);
    const std::size_t size = workspace.size();
    CHECK(allocations([&] { call(executor); }) == 0);
    CHECK(workspace.size() == size);
  }
}

TEST_CASE("attention allocates once per call, and not at all with a reused workspace",
          "[attention][workspace][slow]") {
  ssmax::ThreadPool pool(3);
  for_each_target([&](const std::string&) {
    check_allocations<float>(ssmax::Serial{});
    check_allocations<ssmax::half>(ssmax::Serial{});
    check_allocations<float>(pool);
  });
}

TEST_CASE("a workspace grows and keeps its memory", "[attention][workspace]") {
  for_each_target([](const std::string&) {
    Workspace workspace;
    Call<float> small(shapes[1]), large({1, 1, 1, 61, 300, 64, 64});
    small.workspace = large.workspace = &workspace;
    CHECK(allocations([&] { small(); }) == 1);
    CHECK(allocations([&] { large(); }) == 1);
    const std::size_t size = workspace.size();
    CHECK(allocations([&] { small(); }) == 0);
    CHECK(allocations([&] { large(); }) == 0);
    CHECK(workspace.size() == size);
  });
}

TEST_CASE("attention is bit-identical for any contents of the workspace", "[attention][workspace]") {
  for_each_target([](const std::string& target) {
    for (const Shape& shape : shapes) {
      INFO(target << ' ' << name_of(shape));
      Call<float> call(shape);
      call();
      const Output<float> expected = call.output;
      for (const int byte : {0x00, 0x7f, 0xff}) {  // all bytes 0xff make NaN
        Workspace workspace;
        std::byte* memory = workspace.reserve(std::size_t{8} << 20);
        std::fill_n(memory, workspace.size(), static_cast<std::byte>(byte));
        call.workspace = &workspace;
        CHECK(allocations([&] { call(); }) == 0);
        CHECK(call.output == expected);
      }
    }
  });
}

TEST_CASE("memory is the same for hundreds of keys and for thousands", "[attention][workspace]") {
  for_each_target([](const std::string&) {
    std::vector<std::size_t> sizes;
    for (const index_t keys : {200, 400, 4000}) {
      Workspace workspace;
      Call<float> call({1, 1, 1, 40, keys, 64, 64});
      call.workspace = &workspace;
      call();
      sizes.push_back(workspace.size());
    }
    CHECK(sizes[0] == sizes[1]);
    CHECK(sizes[0] == sizes[2]);
    CHECK(sizes[0] < std::size_t{1} << 18);  // memory for one kv head: few queries need little
  });
}

TEST_CASE("calls on empty inputs do not allocate", "[attention][workspace]") {
  Call<float> no_queries({1, 2, 1, 0, 30, 8, 5}), no_batch({0, 2, 1, 3, 30, 8, 5});
  CHECK(allocations([&] { no_queries(); }) == 0);
  CHECK(allocations([&] { no_batch(); }) == 0);
}

TEST_CASE("attention_partial allocates once; merge and finish do not allocate", "[attention][workspace]") {
  for (const Shape& s : {shapes[1], shapes[2]}) {
    const Problem<float> problem(s);
    Output<float> output(s), shift(s), sum(s), more_shift(s), more_sum(s);
    const AttentionState<float> state{shift.lse_view(), sum.lse_view(), sum.out_view()},
        more{more_shift.lse_view(), more_sum.lse_view(), more_sum.out_view()};
    Workspace workspace;
    const auto partial = [&](const AttentionState<float>& to) {
      ssmax::attention({.q = problem.q_view(),
                        .k = problem.k_view(),
                        .v = problem.v_view(),
                        .workspace = &workspace,
                        .state = to,
                        .all_keys = s.keys},
                       SSMax<float>{}, Causal{});
    };
    CHECK(allocations([&] { partial(state); }) == 1);
    CHECK(allocations([&] { partial(more); }) == 0);
    CHECK(allocations([&] { ssmax::merge<float>(state, more); }) == 0);
    CHECK(allocations([&] { ssmax::finish<float>(state, output.out_view(), output.lse_view()); }) == 0);
  }
}

TEST_CASE("a moved-from workspace is empty", "[attention][workspace]") {
  Workspace first;
  Call<float> call({1, 1, 1, 40, 100, 8, 8});
  call.workspace = &first;
  call();
  const std::size_t size = first.size();
  Workspace second = std::move(first);
  CHECK(second.size() == size);
  CHECK(first.size() == 0);
  const Output<float> expected = call.output;
  call();
  CHECK(call.output == expected);
  first = std::move(second);
  CHECK(second.size() == 0);
  CHECK(allocations([&] { call(); }) == 0);
}

TEST_CASE("attention_partial allocates for the keys of the call, not for all keys",
          "[attention][workspace]") {
  const index_t held = 4096;
  const Problem<float> problem({1, 1, 1, 20, held, 8, 8});
  ssmax::ThreadPool pool(2);
  const auto call = [&](index_t first_key, index_t keys) {
    std::vector<float> shift(20), sum(20), o(160);
    const long long before = allocated_bytes();
    ssmax::attention(
        {.q = problem.q_view(),
         .k = problem.k_view(),
         .v = problem.v_view(),
         .state = {{shift.data(), {1, 1, 20}}, {sum.data(), {1, 1, 20}}, {o.data(), {1, 1, 20, 8}}},
         .first_key = first_key,
         .all_keys = keys},
        pool);
    return std::pair(allocated_bytes() - before, o);
  };
  const auto expected = call(0, held);
  for (const index_t keys : {index_t{1} << 20, index_t{1} << 60}) {
    const auto result = call(keys / 2, keys);
    CHECK(result.first == expected.first);
    CHECK(same_bits(result.second, expected.second));
  }
}

}  // namespace attention_problem::attention_workspace_test
