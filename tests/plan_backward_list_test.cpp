// The list of a backward covers each kv head of each sequence once.

#include <random>

#include "sequence_lengths_problem.hpp"
#include "test.hpp"

namespace plan_backward_list_test {

using namespace ssmax;
using sequence_lengths_problem::Sequences;

TEST_CASE("the list of a backward covers each kv head of each sequence once", "[attention][backward][plan]") {
  std::mt19937 random(3);
  const auto draw = [&](int most) {
    return static_cast<index_t>(random() % (static_cast<unsigned>(most) + 1));
  };
  for (int round = 0; round < 300; ++round) {
    const bool has_lengths = round % 3 > 0, has_long = round % 2 > 0;
    const index_t batch = 1 + draw(40), kv_heads = 1 + draw(7), threads = 1 + draw(15);
    std::vector<index_t> queries, keys;
    for (index_t b = 0; b < batch; ++b) {
      queries.push_back(draw(has_long && b % 7 == 3 ? 9000 : 90));
      keys.push_back(draw(3) == 0 ? 0 : queries.back());
    }
    const Sequences sequences(queries, keys, round % 3 == 1);
    const index_t n = has_lengths ? 0 : queries[0], m = has_lengths ? 0 : keys[0];
    const auto extents = [&](bool of_queries, index_t heads) {
      if (has_lengths) return sequences.extents(of_queries, heads, 8);
      return std::array{batch, heads, of_queries ? n : m, index_t{8}};
    };
    const float number{};
    const View<const float, 4> q{&number, extents(true, 2 * kv_heads)}, k{&number, extents(false, kv_heads)};
    const View<float, 4> dk{nullptr, extents(false, kv_heads)};
    BackwardArguments<float> a{.q = q, .k = k, .v = k, .out = q};
    if (has_lengths) a.lengths = sequences.lengths();
    shared::BackwardCall<float> call{};
    detail::build_call("list", a,
                       {.dout = q, .dq = {nullptr, extents(true, 2 * kv_heads)}, .dk = dk, .dv = dk}, call);
    call.facts.is_example = true;
    const Softmax scaling;
    const Full mask;
    const Identity score;
    const detail::UserGradientVariant<float, Softmax, Full, Identity> variant(scaling, mask, score);
    compiled::open_call(call, variant);
    Workspace workspace;
    shared::WorkList<float> list;
    compiled::make_backward_list<float>(call.problem, variant, threads, workspace, list);
    std::vector<int> times(static_cast<std::size_t>(batch));
    for (index_t p = 0; p < list.path_count; ++p) {
      const auto& path = list.paths[p];
      index_t begin = 0;
      for (const shared::Works& works : detail::works_of(list, path)) {
        for (index_t i = 0; i < works.count; ++i) ++times[static_cast<std::size_t>(works.first + i)];
        CHECK(works.begin == begin);
        begin += works.count * kv_heads;
      }
      CHECK(list.phases[p].lanes <= threads);
      if (!path.driver->keeps_order) CHECK(path.tasks == begin);
    }
    for (std::size_t b = 0; b < times.size(); ++b) {
      const std::size_t at = has_lengths ? b : 0;
      CHECK(times[b] == (queries[at] + keys[at] > 0 ? 1 : 0));
    }
    CHECK(list.list_bytes == workspace.size());
  }
}

}  // namespace plan_backward_list_test
