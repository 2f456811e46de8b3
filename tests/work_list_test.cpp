// The list of a call, made without computing a product: its works cover each query and key once.

#include <map>
#include <numeric>
#include <random>
#include <tuple>

#include "call.hpp"
#include "test.hpp"

namespace work_list_test {

using namespace ssmax;
using namespace ssmax::detail;

/// A source of pages of 64 keys of width 1, whose memory no test reads.
struct Pages {
  using Element = float;
  index_t kv_heads, most;  // most: pages of a sequence
  std::vector<index_t> lengths, table;
  std::vector<float> memory = std::vector<float>(std::size_t{1} << 20);

  KeySourceShape shape() const { return {std::ssize(lengths), kv_heads, 1, 1}; }
  index_t length(index_t b) const { return lengths[static_cast<std::size_t>(b)]; }
  KeyRange stored(index_t b) const { return {0, length(b)}; }
  bool shares_keys() const { return true; }
  KeyRun<float> run(index_t b, index_t h, index_t key) const {
    const float* at =
        memory.data() + (table[static_cast<std::size_t>(b * most + key / 64)] * kv_heads + h) * 64 + key % 64;
    return {.k = at, .k_stride = 1, .v = at, .v_stride = 1, .count = 64 - key % 64};
  }
};

/// A call over pages, and its list.
template <class T>
struct Listed {
  using Compute = ComputeType<T>;

  Pages pages;
  std::vector<index_t> queries;  // empty: q has `rows` queries of every sequence
  index_t heads, rows;
  std::vector<index_t> cumulative = std::vector<index_t>(queries.size() + 1);
  Workspace memory{};
  WorkList<Compute> list{};
  Explanation explanation{};

  /// Makes the list, and checks that its works cover each row and key once.
  void check(index_t threads) {
    std::partial_sum(queries.begin(), queries.end(), cumulative.begin() + 1);
    const bool is_packed = !queries.empty();
    const index_t batch = is_packed ? 1 : pages.shape().batch;
    if (is_packed) rows = cumulative.back();
    AttentionOptions<T> options{.explanation = &explanation};
    if (is_packed) options.lengths = SequenceLengths::packed_queries(cumulative);
    T q{};
    const View<const T, 4> view(&q, {batch, heads, rows, 1});
    const Full mask;
    const Softmax scaling;
    const Identity score;
    const UserVariant<Compute, Softmax, Full, Identity> variant(scaling, mask, score);
    const QueryTensor<Compute> of_view(view);
    Problem<Compute> problem{};
    build_problem<Compute>("list", of_view, options, problem);
    problem.keys = AnyKeys<Compute>(pages);
    problem.in_cache = true;
    of_view.functions()->make_list(problem, variant, Result<Compute>{}, threads, memory, list);
    check_cover(problem);
  }

  /// The keys that works compute for a row of a kv head, in the order of the phases.
  using Covered = std::map<std::tuple<index_t, index_t, index_t>, std::vector<KeyRange>>;

  void check_cover(const Problem<Compute>& problem) const {
    Covered covered;
    for (index_t p = 0; p < list.phase_count; ++p) {
      const PhaseWorks& phase = list.phases[p];
      for (const PathWorks<Compute>& path : paths_of(list, phase)) {
        CHECK(path.rows >= 1);
        for (const Split& split : {path.split, path.together}) CHECK(path.pieces(split) >= 1);
        for (index_t task = 0; task < path.tasks; ++task) cover(problem, phase, path, task, covered);
      }
    }
    std::size_t expected = 0;
    for (index_t b = 0; b < problem.sequences(); ++b) {
      const Sequence sequence = sequence_of(problem, b);
      const index_t of_head = sequence.queries * problem.heads_per_kv_head();
      expected += static_cast<std::size_t>(of_head * problem.kv_heads());
      for (index_t h = 0; h < problem.kv_heads(); ++h) {
        for (index_t row = 0; row < of_head; ++row) {
          index_t next = 0;
          for (const KeyRange keys : covered[{b, h, row}]) {
            CHECK(keys.begin == next);
            next = keys.end;
          }
          CHECK(next == sequence.stored.end);
        }
      }
    }
    CHECK(covered.size() == expected);
  }

  void cover(const Problem<Compute>& problem, const PhaseWorks& phase, const PathWorks<Compute>& path,
             index_t task, Covered& covered) const {
    const Works& works = works_of(list, path, task);
    const index_t at = task - works.begin, units = phase.are_together ? 1 : works.count;
    REQUIRE(at >= 0);
    REQUIRE(at < units * works.blocks * problem.kv_heads());
    index_t block = at / (units * problem.kv_heads()), head = at % problem.kv_heads(),
            place = works.first + at % (units * problem.kv_heads()) / problem.kv_heads();
    if (path.driver->keeps_order) {
      block = at % works.blocks, head = at / works.blocks % problem.kv_heads();
      place = works.first + at / (works.blocks * problem.kv_heads());
    }
    const index_t members = phase.are_together ? works.count : 1, first = block * path.queries;
    for (index_t row = first; row < std::min(works.rows, first + path.queries); ++row) {
      const index_t of_member = works.rows / members;
      const Sequence sequence = phase.are_together ? list.members[place + row / of_member]
                                : list.listed > 0  ? list.sequences[place]
                                                   : sequence_of(problem, place);
      covered[{sequence.batch, head, row % of_member}].push_back(sequence.stored);
      if (path.split.chunks == 1 || sequence.stored.size() <= 0) continue;
      CHECK(path.first_chunk * key_chunk <= sequence.stored.begin);
      CHECK((path.first_chunk + path.split.chunks) * key_chunk >= sequence.stored.end);
    }
  }
};

/// Sequences whose lengths and pages a generator draws. Some begin with the pages of an earlier sequence.
Pages random_pages(std::mt19937& random, index_t batch, index_t kv_heads, bool shares) {
  Pages pages{kv_heads, 48, {}, {}};
  const auto below = [&](index_t n) {
    return static_cast<index_t>(random() % static_cast<std::uint32_t>(n));
  };
  for (index_t b = 0, next = 0; b < batch; ++b) {
    pages.lengths.push_back(below(4) == 0 ? below(64) : below(48 * 64));
    const index_t from = b > 0 && shares && below(3) > 0 ? below(b) : -1, common = below(49);
    for (index_t i = 0; i < pages.most; ++i)
      pages.table.push_back(from >= 0 && i < common ? pages.table[static_cast<std::size_t>(from * 48 + i)]
                                                    : next++);
  }
  return pages;
}

TEST_CASE("the works of random calls cover each row and key once", "[attention][list]") {
  std::mt19937 random(56);
  index_t groups = 0, splits = 0, paths = 0;
  for (int i = 0; i < 60; ++i) {
    const index_t batch = 1 + static_cast<index_t>(random() % 9), kv_heads = 1 + i % 2;
    std::vector<index_t> queries;
    const bool has_lengths = i % 3 > 0;
    for (index_t b = 0; has_lengths && b < batch; ++b)
      queries.push_back(random() % 3 > 0 ? 1 : static_cast<index_t>(random() % 60));
    const auto check = [&](auto type) {
      Listed<decltype(type)> call{random_pages(random, batch, kv_heads, i % 4 > 0), queries,
                                  kv_heads * (1 + i % 5), 1 + i % 7 * 5};
      for (const index_t threads : {1, 3, 16}) {
        INFO(i << ", " << threads << " threads");
        call.check(threads);
        groups += call.list.group_count;
        for (index_t p = 0; p < call.list.path_count; ++p) splits += call.list.paths[p].split.chunks > 1;
        paths = std::max(paths, call.list.path_count);
      }
    };
    check(float{});
    check(bfloat16{});
  }
  CHECK(groups > 20);
  CHECK(splits > 20);
  CHECK(paths >= 3);
}

TEST_CASE("equal works are one entry of the list; unequal ones come in the order of their costs",
          "[attention][list]") {
  std::mt19937 random(1);
  Pages pages = random_pages(random, 8, 2, false);
  std::fill(pages.lengths.begin(), pages.lengths.end(), 2000);
  Listed<float> uniform{pages, {}, 4, 1};
  uniform.check(1);
  CHECK(uniform.list.listed == 0);  // no sequence has common pages
  CHECK(uniform.list.list_bytes == 0);
  Listed<float> tokens{pages, std::vector<index_t>(8, 1), 4, 1};
  tokens.check(1);
  for (const auto* list : {&uniform.list, &tokens.list}) {
    REQUIRE(list->path_count == 1);
    CHECK(list->paths[0].works_count == 1);
    CHECK(list->paths[0].tasks == 16);
  }
  pages.lengths = {100, 3000, 200, 3000, 0, 2000, 50, 2000};
  Listed<float> unequal{pages, std::vector<index_t>(8, 1), 4, 1};
  unequal.check(1);
  std::vector<index_t> order;
  const PathWorks<float>& path = unequal.list.paths[0];
  for (index_t i = 0; i < path.works_count; ++i) order.push_back(unequal.list.works[path.works + i].first);
  CHECK(order == std::vector<index_t>{1, 3, 5, 7, 2, 0, 6, 4});
}

}  // namespace work_list_test
