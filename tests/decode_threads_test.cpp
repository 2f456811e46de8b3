// decode on many threads, which gives the same bits, and the memory that it takes.

#include "allocation_count.hpp"
#include "decode_problem.hpp"
#include "test.hpp"

namespace decode_problem::decode_threads_test {

TEST_CASE("any number of threads gives the same bits", "[decode][slow]") {
  std::vector<Data<float>> all;
  for (const Shape& shape : {Shape{8, 2, 1, 16, 9, {5000, 3, 1025, 2048}}, Shape{2, 1, 1, 8, 8, {3000}},
                             Shape{3, 1, 7, 16, 8, {2500, 7}}, Shape{4, 4, 40, 8, 5, {1100, 300, 40}},
                             Shape{1, 1, 400, 8, 8, {4000}}}) {
    all.emplace_back(shape);
  }
  ThreadPool two(2), three(3), seven(7);
  for_each_target([&](const std::string& target) {
    for (const Data<float>& data : all) {
      INFO(target << ", " << name_of(data.shape));
      const KvCache<half> cache = filled<half>(data);
      const Output<float> expected = run(data, cache, LogN{});
      for (ThreadPool* pool : {&two, &three, &seven}) {
        CHECK(run(data, cache, LogN{}, Causal{}, Identity{}, {}, *pool) == expected);
      }
      // A window leaves whole chunks of keys to nobody.
      const SlidingWindow window{700};
      const Output<float> narrow = run(data, cache, LogN{}, window);
      for (ThreadPool* pool : {&two, &three, &seven}) {
        CHECK(run(data, cache, LogN{}, window, Identity{}, {}, *pool) == narrow);
      }
    }
  });
}

TEST_CASE("a call allocates once, and with a workspace that was used before never", "[decode]") {
  ThreadPool pool(3);
  for (const Shape& shape : {Shape{8, 2, 1, 16, 9, {5000, 3}}, Shape{3, 1, 40, 16, 8, {2500, 70}}}) {
    const Data<float> data(shape), smaller(Shape{2, 1, shape.queries, 8, 4, {1100}});
    const KvCache<bfloat16> cache = filled<bfloat16>(data), smaller_cache = filled<bfloat16>(smaller);
    Output<float> result(shape);
    const auto call = [&](Workspace* workspace, auto&& executor) {
      const long before = allocation_count();
      attention({.q = data.q_view(),
                 .keys = cache,
                 .out = {result.out.data(), {2, shape.heads, shape.queries, shape.dv}},
                 .workspace = workspace},
                LogN{}, Causal{}, executor);
      return allocation_count() - before;
    };
    CHECK(call(nullptr, ssmax::Serial{}) == 1);
    CHECK(call(nullptr, pool) == 1);
    Workspace workspace;
    CHECK(call(&workspace, pool) == 1);
    const std::size_t size = workspace.size();
    CHECK(size > 0);
    CHECK(call(&workspace, pool) == 0);
    CHECK(call(&workspace, ssmax::Serial{}) == 0);
    Output<float> other(smaller.shape);
    const long before = allocation_count();
    attention({.q = smaller.q_view(),
               .keys = smaller_cache,
               .out = {other.out.data(), {1, 2, shape.queries, 4}},
               .workspace = &workspace},
              LogN{}, Causal{});
    const long during = allocation_count() - before;
    CHECK(during == 0);
    CHECK(workspace.size() == size);
    const std::vector<float> again = result.out;
    call(nullptr, ssmax::Serial{});
    CHECK(same_bits(again, result.out));
  }
}

}  // namespace decode_problem::decode_threads_test
