// PagedKeys: attention over the pages of a pool is attention over a cache of the same keys, in every layout of pool and
// table. Memory that no sequence uses holds NaN.

#include <numeric>
#include <random>

#include "decode_sources.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace decode_problem::paged_keys_test {

using ssmax::PagedKeys, ssmax::PageTable;

enum class Layout { rows, both_in_one, heads_first };

/// Pages of the keys of a cache, in random order in the pool. Pages within `gap` are not in the pool, for sequences of
/// more than 500 keys.
template <class X, class Index>
struct Pool {
  index_t pages = 0, size, heads, d, dv;
  Layout layout;
  std::vector<X> memory;
  std::vector<Index> table, compressed, begins{0};
  std::vector<Index> lengths;
  index_t columns;

  Pool(const KvCache<X>& cache, index_t a_size, Layout a_layout, ssmax::KeyRange gap, unsigned seed)
      : size(a_size),
        heads(cache.shape().kv_heads),
        d(cache.shape().width),
        dv(cache.shape().value_width),
        layout(a_layout) {
    const index_t batch = cache.shape().batch;
    index_t longest = 0;
    for (index_t b = 0; b < batch; ++b) longest = std::max(longest, cache.length(b));
    columns = (longest + size - 1) / size + 2;
    const std::size_t entries = static_cast<std::size_t>(batch * columns);
    std::vector<Index> free(entries);
    std::iota(free.begin(), free.end(), Index{0});
    std::shuffle(free.begin(), free.end(), std::mt19937(seed));
    // Entries beyond the length would be out of the pool.
    table.assign(entries, std::numeric_limits<Index>::max());
    pages = static_cast<index_t>(entries);
    memory.assign(static_cast<std::size_t>(pages * size * heads * (d + dv)),
                  X(std::numeric_limits<float>::quiet_NaN()));
    for (index_t b = 0; b < batch; ++b) {
      lengths.push_back(static_cast<Index>(cache.length(b)));
      for (index_t i = 0; i * size < cache.length(b); ++i) {
        const bool is_gone = cache.length(b) > 500 && i * size >= gap.begin && (i + 1) * size <= gap.end;
        const Index entry = is_gone ? Index(-1) : free.back();
        if (!is_gone) free.pop_back();
        table[static_cast<std::size_t>(b * columns + i)] = entry;
        compressed.push_back(entry);
        for (index_t key = i * size; !is_gone && key < std::min((i + 1) * size, cache.length(b)); ++key) {
          for (index_t h = 0; h < heads; ++h) {
            const KeyRun<X> from = cache.run(b, h, key);
            const auto page = static_cast<index_t>(entry);
            std::copy_n(from.k, d, const_cast<X*>(&k()(page, key % size, h, 0)));
            std::copy_n(from.v, dv, const_cast<X*>(&v()(page, key % size, h, 0)));
          }
        }
      }
      begins.push_back(static_cast<Index>(compressed.size()));
    }
  }

  View<const X, 4> k() const { return view(memory.data(), d); }
  View<const X, 4> v() const {
    const index_t of_page = size * heads * d;
    return view(memory.data() + (layout == Layout::both_in_one ? of_page : pages * of_page), dv);
  }
  View<const X, 4> view(const X* data, index_t width) const {
    const index_t of_page = size * heads * (layout == Layout::both_in_one ? d + dv : width);
    const bool heads_first = layout == Layout::heads_first;
    return {data,
            {pages, size, heads, width},
            {of_page, heads_first ? width : heads * width, heads_first ? size * width : width, 1}};
  }
  auto keys() const {
    return PagedKeys(k(), v(),
                     PageTable<Index>(View<const Index, 2>(table.data(), {std::ssize(lengths), columns}),
                                      std::span<const Index>(lengths)));
  }
  auto keys_of_compressed_table() const {
    return PagedKeys(k(), v(),
                     PageTable<Index>(std::span(compressed), std::span(begins), std::span(lengths)));
  }
};

template <class T, class Index>
void compare(index_t size, Layout layout, index_t queries, index_t longest = 1300) {
  const Data<T> data({4, 2, queries, 24, layout == Layout::both_in_one ? 24 : 9, {longest, queries, 517}});
  const KvCache<T> cache = filled<T>(data);
  const Pool<T, Index> pool(cache, size, layout, {}, 3), windowed(cache, size, layout, {0, 350}, 4),
      gapped(cache, size, layout, {64, 350}, 5);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << " pages of " << size << ", layout " << static_cast<int>(layout) << ", queries "
                << queries);
    const auto check = [&](const auto& keys, const auto& mask) { check_source(data, cache, keys, mask); };
    check(pool.keys(), Causal{});
    check(pool.keys_of_compressed_table(), ssmax::SlidingWindow{200});
    check(windowed.keys(), ssmax::SlidingWindow{60});
    check(gapped.keys(), ssmax::SlidingWindow{59, 0, 32});
  });
}

TEST_CASE("attention over pages is attention over a cache", "[decode][paged_keys][bfloat16]") {
  SECTION("float, int32") {
    for (const index_t size : {1, 16, 48, 2048}) compare<float, std::int32_t>(size, Layout::rows, 1);
    compare<float, std::int32_t>(16, Layout::both_in_one, 9);
  }
  SECTION("bfloat16, int64") {
    compare<bfloat16, std::int64_t>(16, Layout::heads_first, 1);
    compare<bfloat16, std::int64_t>(16, Layout::both_in_one, 3);
    compare<bfloat16, std::int64_t>(32, Layout::rows, 40);
  }
  SECTION("half, int16") { compare<half, std::int16_t>(7, Layout::heads_first, 5); }
  SECTION("double") { compare<double, int>(128, Layout::rows, 12); }
  SECTION("keys beyond the second-level cache, which kernels prefetch across pages") {
    compare<float, int>(16, Layout::both_in_one, 1, 6000);
    compare<bfloat16, int>(16, Layout::both_in_one, 4, 6000);
    compare<bfloat16, int>(48, Layout::both_in_one, 1, 6000);
    compare<half, int>(200, Layout::both_in_one, 2, 6000);
  }
}

TEST_CASE("pages that are neighbours in memory are one run of at most 1024 keys", "[paged_keys]") {
  const std::vector<float> memory(400 * 16 * 2 * 4);
  std::vector<int> table(400), lengths{6400};
  std::iota(table.begin(), table.end(), 0);
  std::swap(table[100], table[101]);
  const View<const int, 2> entries(table.data(), {1, 400});
  const View<const float, 4> rows(memory.data(), {400, 16, 2, 4}),
      heads_first(memory.data(), {400, 16, 2, 4}, {128, 4, 64, 1});
  const PagedKeys joined(rows, rows, PageTable<int>(entries, lengths)),
      apart(heads_first, heads_first, PageTable<int>(entries, lengths));
  CHECK(joined.run(0, 1, 5).count == 1024 + 16 - 5);
  CHECK(joined.run(0, 1, 1500).count == 100);
  CHECK(joined.run(0, 1, 1600).count == 16);
  CHECK(joined.run(0, 1, 6390).count == 10);
  CHECK(apart.run(0, 1, 5).count == 11);
}

TEST_CASE("wrong pages are refused", "[paged_keys][errors]") {
  const std::vector<float> memory(1000);
  std::vector<int> table{0, 1, 2, 3}, lengths{20, 32}, begins{0, 2, 4};
  const View<const float, 4> k(memory.data(), {4, 16, 1, 8});
  View<const float, 4> v = k;
  const auto refused = [&](std::initializer_list<std::string_view> parts) {
    check_refused(parts, [&] {
      PagedKeys keys(k, v, PageTable<int>(View<const int, 2>(table.data(), {2, 2}), std::span(lengths)));
    });
  };
  const auto compressed_refused = [&](std::initializer_list<std::string_view> parts) {
    check_refused(parts, [&] {
      PagedKeys keys(k, v, PageTable<int>(std::span(table), std::span(begins), std::span(lengths)));
    });
  };
  v = {memory.data(), {3, 16, 1, 8}};
  refused({"ssmax::PagedKeys: v has extent 3 in dimension 0, k has 4"});
  v = {nullptr, {4, 16, 1, 8}};
  refused({"ssmax::PagedKeys: v is null"});
  v = k;
  table[1] = 4;
  refused({"ssmax::PagedKeys: table has entry 4, must be below the pages of k 4"});
  table[1] = 1;
  lengths = {33, 0};
  refused({"ssmax::PagedKeys: lengths needs pages 3, the table has entries 2"});
  lengths = {-1, 0};
  refused({"ssmax::PagedKeys: lengths has entry -1"});
  const std::array<int, 1> entry{0};
  const std::array<index_t, 1> too_long{std::numeric_limits<index_t>::max()};
  check_refused(
      {"ssmax::PagedKeys: lengths has entry " + std::to_string(too_long[0]) + ", must be at most"}, [&] {
        PagedKeys keys(
            k, v, PageTable<int, index_t>(View<const int, 2>(entry.data(), {1, 1}), std::span(too_long)));
      });
  lengths = {1};
  refused({"ssmax::PageTable: lengths has size 1", "2"});
  lengths = {20, 32};
  begins = {0, 3, 2};
  compressed_refused({"ssmax::PageTable: begins has entry 2", "3"});
  begins = {0, 2, 5};
  compressed_refused({"ssmax::PageTable: begins has entry 5", "4"});
  begins = {0, 2};
  compressed_refused({"ssmax::PageTable: begins has size 2", "2"});
  begins = {0, 1, 4};
  lengths = {16, 48};
  table = {0, -1, 1, -1};
  compressed_refused({"ssmax::PagedKeys: table has a second gap at entry 2", "1"});
}

TEST_CASE("results that overlap the pool are refused, and keys in a gap must be masked",
          "[paged_keys][errors]") {
  std::vector<float> memory(4 * 16 * 8), q(8), out(8);
  std::vector<int> table{0, -1, 2}, lengths{48};
  const View<const float, 4> k(memory.data(), {4, 16, 1, 8});
  const PagedKeys keys(k, k, PageTable<int>(View<const int, 2>(table.data(), {1, 3}), std::span(lengths)));
  const auto call = [&](float* result, const auto& mask) {
    return [&, result, mask] {
      ssmax::attention({.q = {q.data(), {1, 1, 1, 8}}, .keys = keys, .out = {result, {1, 1, 1, 8}}}, mask);
    };
  };
  check_refused({"ssmax::attention: out", "overlaps"},
                call(memory.data() + 16, ssmax::SlidingWindow{9, 0, 8}));
  check_refused({"ssmax::attention: "}, call(out.data(), Causal{}));
  CHECK(refusal(call(out.data(), ssmax::SlidingWindow{9, 0, 8})) == "(nothing was thrown)");
}

}  // namespace decode_problem::paged_keys_test
