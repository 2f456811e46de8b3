// Masks with runs: the members agree, attention computes what `sees` defines, and masked key blocks are skipped.

#include <atomic>
#include <random>
#include <tuple>

#include "attention_backward_problem.hpp"
#include "decode_problem.hpp"
#include "mask_members.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "wrapped_source.hpp"

namespace attention_problem::mask_runs_test {

using mask_members::check_members;

/// A bitmap of which about one bit in `every` is set.
struct Bitmap {
  SparseBlocks blocks;
  std::vector<std::uint64_t> words;

  Bitmap(index_t positions, index_t keys, index_t query_block, index_t key_block, index_t bitmaps,
         unsigned every)
      : blocks{.query_block = query_block,
               .key_block = key_block,
               .query_blocks = positions / query_block + 1,
               .key_blocks = keys / key_block + 1,
               .bitmaps = bitmaps},
        words(static_cast<std::size_t>(blocks.words())) {
    std::mt19937 random(every + static_cast<unsigned>(keys));
    for (std::uint64_t& word : words) {
      for (int bit = 0; bit < 64; ++bit) word |= std::uint64_t{random() % every == 0 ? 1U : 0U} << bit;
    }
  }
  BlockSparse mask() const { return {blocks, words}; }
  /// The definition, for a query of four heads.
  bool shows(const Query& query, index_t key) const {
    const index_t row = std::max<index_t>(0, query.position()) / blocks.query_block;
    const index_t bitmap = query.head * blocks.bitmaps / query.shape.heads;
    const index_t block = key / blocks.key_block;
    const auto at = (bitmap * blocks.query_blocks + row) * blocks.row_words() + block / 64;
    return (words[static_cast<std::size_t>(at)] >> (block % 64) & 1) != 0;
  }
};

bool in_window(const Query& query, index_t key, index_t first, index_t window) {
  const index_t p = query.position();
  return key <= p && (key < first || key > p - window);
}

bool is_before(const Query& query, index_t key) { return key <= query.position(); }

TEST_CASE("the members of masks with runs agree", "[attention][mask][slow]") {
  for (const QueryShape& shape :
       {QueryShape{1, 4, 1, 1}, {1, 4, 70, 70}, {2, 4, 5, 131}, {1, 4, 40, 9}, {1, 2, 33, 129}}) {
    for (const index_t first : {0, 1, 4, 200}) {
      for (const index_t left : {0, 6, 63, 299}) {
        check_members(shape, SlidingWindow{left, left % 5, first}, "SlidingWindow with first keys");
        check_members(shape, SlidingWindow{left, 0, first} & SlidingWindow{20, 3}, "two windows");
      }
    }
    for (const index_t block : {1, 3, 16, 64}) {
      for (const unsigned every : {1U, 2U, 9U}) {
        const Bitmap bitmap(shape.keys, shape.keys, 2 * block, block, shape.heads / 2, every);
        check_members(shape, bitmap.mask(), "BlockSparse");
        check_members(shape, Causal{} & bitmap.mask(), "Causal & BlockSparse");
        check_members(shape, bitmap.mask() & SlidingWindow{49, 0, 3}, "BlockSparse & SlidingWindow");
      }
    }
  }
}

struct Matrix {
  std::vector<float> values;
  View<const float, 4> view;

  Matrix(const Shape& s, bool broadcast)
      : values(static_cast<std::size_t>(s.batch * s.heads * s.queries * s.keys)),
        view(values.data(), {s.batch, s.heads, s.queries, s.keys},
             {broadcast ? 0 : s.heads * s.queries * s.keys, broadcast ? 0 : s.queries * s.keys, s.keys, 1}) {
    std::mt19937 random(5);
    bool visible = false;
    for (float& x : values) {
      if (random() % 40 == 0) visible = !visible;
      x = visible ? 0.F : -std::numeric_limits<float>::infinity();
    }
  }
};

constexpr std::array<Shape, 6> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 300, 8, 5},      // few queries
    {2, 4, 4, 40, 70, 9, 24},     // few keys
    {1, 4, 2, 61, 300, 8, 16},    // many queries
    {1, 4, 1, 70, 33, 8, 9},      // some of which see nothing
    {1, 2, 1, 10, 1100, 6, 3},    // two key chunks
    {1, 2, 2, 30, 2200, 16, 16},  // three key chunks
}};

/// Calls f(mask, definition).
template <class F>
void for_each_mask(const Shape& s, const F& f) {
  const index_t positions = std::max(s.queries, s.keys);
  f(SlidingWindow{49, 0, 4}, [](const Query& q, index_t key) { return in_window(q, key, 4, 50); });
  const Bitmap coarse(positions, s.keys, 64, 64, 1, 4), fine(positions, s.keys, 16, 8, s.kv_heads, 3),
      odd(positions, s.keys, 7, 100, s.heads, 2);
  for (const Bitmap* bitmap : {&coarse, &fine, &odd}) {
    f(bitmap->mask(), [&](const Query& q, index_t key) { return bitmap->shows(q, key); });
    f(Causal{} & bitmap->mask(),
      [&](const Query& q, index_t key) { return is_before(q, key) && bitmap->shows(q, key); });
  }
  const Matrix matrix(s, false);
  f(MatrixRuns(matrix.view) & SlidingWindow{199, 0, 1}, [&](const Query& q, index_t key) {
    return in_window(q, key, 1, 200) && matrix.view(q.batch, q.head, q.index, key) == 0;
  });
}

TEST_CASE("attention under masks with runs", "[attention][masks][bfloat16]") {
  for (const Shape& shape : shapes) {
    for_each_mask(shape, [&](const auto& mask, const auto& visible) {
      check_mask<float>(shape, mask, visible);
      check_mask<bfloat16>(shape, mask, visible);
    });
  }
  for_each_mask(shapes[2],
                [&](const auto& mask, const auto& visible) { check_mask<double>(shapes[2], mask, visible); });
}

TEST_CASE("scores under masks with runs", "[attention][masks][score]") {
  for (const Shape& shape : shapes) {
    for_each_mask(shape, [&](const auto& mask, const auto& visible) {
      check_score(Problem<float>(shape), mask, visible, Softcap{3},
                  [](auto z, const Query&, index_t) { return 3 * std::tanh(z / 3); });
    });
  }
}

TEST_CASE("gradients under masks with runs", "[attention][backward][masks][bfloat16][slow]") {
  for (const Shape& shape : shapes) {
    for_each_mask(shape, [&](const auto& mask, const auto& visible) {
      backward_problem::check(backward_problem::Problem<float>(shape), mask, visible);
      backward_problem::check(backward_problem::Problem<bfloat16>(shape), mask, visible);
    });
  }
}

TEST_CASE("a mask with and without runs: results of prefill are bit-identical",
          "[attention][backward][masks][bfloat16]") {
  using T = bfloat16;
  const Shape shape{1,   4, 1, 2400,
                    150, 8, 8};  // another rounding of c·z changes the bits of one row in two thousand
  const Matrix matrix(shape, false);
  const Problem<T> x(shape);
  const std::vector<T> dout(x.q.rbegin(), x.q.rend());
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target);
    const auto run_with = [&](const auto& mask) {
      Output<T> out(shape);
      std::vector<T> dq(x.q.size()), dk(x.k.size()), dv(x.v.size());
      AttentionArguments<float> a = arguments_of(x, out);
      a.scale = 3.0;
      attention(a, mask);
      attention_backward({.q = x.q_view(),
                          .k = x.k_view(),
                          .v = x.v_view(),
                          .out = out.out_view(),
                          .lse = out.lse_view(),
                          .scale = 3.0},
                         {.dout = View<const T, 4>(dout.data(), out.out_view().extents()),
                          .dq = View<T, 4>(dq.data(), x.q_view().extents()),
                          .dk = View<T, 4>(dk.data(), x.k_view().extents()),
                          .dv = View<T, 4>(dv.data(), x.v_view().extents())},
                         mask);
      return std::tuple(out, dq, dk, dv);
    };
    const auto [out, dq, dk, dv] = run_with(MatrixMask(matrix.view));
    const auto [run_out, run_dq, run_dk, run_dv] = run_with(MatrixRuns(matrix.view));
    CHECK(out == run_out);
    CHECK(same_bits(dq, run_dq));
    CHECK(same_bits(dk, run_dk));
    CHECK(same_bits(dv, run_dv));
  });
}

TEST_CASE("decode under masks with runs", "[decode][masks][bfloat16]") {
  using decode_problem::Data;
  for (const decode_problem::Shape& shape : {decode_problem::Shape{4, 2, 1, 8, 5, {2300, 40}},
                                             decode_problem::Shape{4, 1, 3, 16, 8, {1400, 300}}}) {
    const auto check_with = [&](const auto& mask, const auto& visible) {
      decode_problem::Plan plan;
      plan.visible = visible;
      const Data<float> data(shape);
      const auto cache = decode_problem::filled<float>(data);
      decode_problem::check(data, cache, decode_problem::Expected<float>(data, plan), Softmax{}, mask);
      const Data<bfloat16> rounded(shape);
      const auto rounded_cache = decode_problem::filled<bfloat16>(rounded);
      decode_problem::check(rounded, rounded_cache, decode_problem::Expected<bfloat16>(rounded, plan),
                            Softmax{}, mask);
    };
    check_with(SlidingWindow{49, 0, 4}, [](const Query& q, index_t key) { return in_window(q, key, 4, 50); });
    const Bitmap bitmap(shape.longest(), shape.longest(), 16, 64, 2, 5);
    check_with(Causal{} & bitmap.mask(),
               [&](const Query& q, index_t key) { return is_before(q, key) && bitmap.shows(q, key); });
  }
}

TEST_CASE("MatrixRuns reads a matrix once", "[mask]") {
  const Shape shape{2, 3, 3, 8, 90, 4, 4};
  for (const bool broadcast : {false, true}) {
    Matrix matrix(shape, broadcast);
    const std::vector<float> original = matrix.values;
    const MatrixRuns mask(matrix.view);
    check_members({2, 3, 8, 90}, mask, "MatrixRuns");
    std::fill(matrix.values.begin(), matrix.values.end(), 0.F);
    const Query query{1, 2, 7, {2, 3, 8, 90}};
    const index_t row = broadcast ? 7 : (1 * 3 + 2) * 8 + 7;
    for (index_t key = 0; key < 90; ++key) {
      CHECK(mask.sees(query, key) == (original[static_cast<std::size_t>(row * 90 + key)] == 0));
    }
  }
}

/// A window with first keys, which counts the calls of sees.
struct Counted {
  SlidingWindow<true> mask{99, 0, 4};
  std::atomic<int>* calls;

  KeyRange keys(const Query& query) const { return mask.keys(query); }
  bool sees(const Query& query, index_t key) const {
    ++*calls;
    return mask.sees(query, key);
  }
  KeyRange run(const Query& query, index_t from) const { return mask.run(query, from); }
};

/// A cache that notes the keys that are read.
struct Noting : WrappedSource<KvCache<float>> {
  std::vector<bool>* read;

  KeyRun<float> run(index_t b, index_t h, index_t key) const {
    KeyRun<float> run = source.run(b, h, key);
    run.count = 1;
    (*read)[static_cast<std::size_t>(key)] = true;
    return run;
  }
};

TEST_CASE("masked key blocks are not read, and sees is not called", "[attention][decode][masks]") {
  const index_t keys = 3000, heads = 2, d = 8;
  for (const index_t queries : {1, 60}) {
    const decode_problem::Data<float> data({heads, heads, queries, d, d, {keys}});
    const auto cache = decode_problem::filled<float>(data);
    std::vector<bool> read(static_cast<std::size_t>(keys));
    std::atomic<int> calls = 0;
    std::vector<float> out(static_cast<std::size_t>(heads * queries * d));
    attention(
        {.q = data.q_view(), .keys = Noting{{cache}, &read}, .out = {out.data(), {1, heads, queries, d}}},
        Counted{.calls = &calls});
    CHECK(calls == 0);
    index_t wrong = 0;
    for (index_t key = 0; key < keys; ++key) {
      const bool is_near = key < 128 || key >= (keys - queries - 100) / 128 * 128;
      if (read[static_cast<std::size_t>(key)] && !is_near) ++wrong;
    }
    CHECK(wrong == 0);
    CHECK(read[0]);
    CHECK(read[static_cast<std::size_t>(keys - 1)]);
  }
}

TEST_CASE("decode takes a run of visible keys that lies in two key chunks", "[decode][masks]") {
  using decode_problem::Data;
  const auto visible = [](const Query& q, index_t key) { return in_window(q, key, 4, 100); };
  for (const index_t queries : {1, 5}) {
    const Data<float> data({2, 1, queries, 8, 8, {1040, 2060}});
    decode_problem::Plan plan;
    plan.visible = visible;
    decode_problem::check(data, decode_problem::filled<float>(data),
                          decode_problem::Expected<float>(data, plan), Softmax{}, SlidingWindow{99, 0, 4});
  }
}

TEST_CASE("NaN in masked keys stays there", "[attention][decode][masks]") {
  for (const Shape& shape : shapes) {
    const Bitmap bitmap(std::max(shape.queries, shape.keys), shape.keys, 1000000, 16, 1, 3);
    const Problem<float> clean(shape);
    Problem<float> poisoned = clean;
    for (index_t key = 0; key < shape.keys; ++key) {
      if (bitmap.shows(Query{0, 0, 0, clean.query_shape()}, key)) continue;
      for (index_t head = 0; head < shape.batch * shape.kv_heads; ++head) {
        const index_t row = head * shape.keys + key;
        poisoned.k[static_cast<std::size_t>(row * shape.d)] = nan<float>;
        poisoned.v[static_cast<std::size_t>(row * shape.dv)] = nan<float>;
      }
    }
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      CHECK(run(clean, Softmax{}, bitmap.mask()) == run(poisoned, Softmax{}, bitmap.mask()));
    });
  }
}

TEST_CASE("masks with runs refuse extents that do not fit", "[mask][errors]") {
  const QueryShape shape{1, 4, 100, 100};
  check_refused({"SlidingWindow", "first", "-1"}, [&] { SlidingWindow(2, 0, -1).check(shape); });
  const auto refuses = [&](SparseBlocks blocks, std::size_t words,
                           std::initializer_list<std::string_view> parts) {
    const std::vector<std::uint64_t> bitmap(words);
    check_refused(parts, [&] { BlockSparse(blocks, bitmap).check(shape); });
  };
  const SparseBlocks fits{.query_blocks = 2, .key_blocks = 2};
  const std::vector<std::uint64_t> two_words(2);
  CHECK_NOTHROW(BlockSparse(fits, two_words).check(shape));
  refuses(fits, 3, {"bitmap", "3", "1 * 2 * 1"});
  constexpr index_t most = std::numeric_limits<index_t>::max();
  refuses({.query_blocks = most, .key_blocks = most}, 2, {"bitmap", "2", std::to_string(most)});
  refuses({.query_block = 0, .query_blocks = 2, .key_blocks = 2}, 2, {"query_block", "0", "1"});
  refuses({.key_block = 0, .query_blocks = 2, .key_blocks = 2}, 2, {"key_block", "0", "1"});
  refuses({.query_blocks = 1, .key_blocks = 2}, 1, {"query_blocks", "1", "2"});
  refuses({.query_blocks = 2, .key_blocks = 1}, 2, {"key_blocks", "1", "2"});
  refuses({.query_blocks = 2, .key_blocks = 2, .bitmaps = 3}, 6, {"bitmaps", "3", "4"});
  const Matrix matrix({1, 4, 4, 100, 99, 1, 1}, false);
  check_refused({"MatrixRuns", "99", "100"}, [&] { MatrixRuns(matrix.view).check(shape); });
}

TEST_CASE("MatrixRuns accepts a matrix without keys and refuses invalid views", "[mask][errors]") {
  const bool visible[] = {true, false, true, true};
  for (const std::array<index_t, 4>& extents :
       {std::array<index_t, 4>{1, 2, 3, 0}, {0, 2, 3, 4}, {1, 2, 0, 4}}) {
    const MatrixRuns mask(View<const bool, 4>(nullptr, extents));
    const QueryShape shape{extents[0], extents[1], extents[2], extents[3]};
    CHECK_NOTHROW(mask.check(shape));
    if (extents[0] > 0 && extents[2] > 0) CHECK(mask.count({.shape = shape}) == 0);
  }
  const auto refuses = [](const View<const bool, 4>& view, std::initializer_list<std::string_view> parts) {
    check_refused(parts, [&] { MatrixRuns{view}; });
  };
  refuses({nullptr, {1, 1, 2, 2}}, {"MatrixRuns", "is null but has size 4"});
  refuses({visible, {1, 1, 2, -2}}, {"MatrixRuns", "extent -2"});
  refuses({visible, {-1, 1, 2, 2}}, {"MatrixRuns", "extent -1"});
  // Any last stride.
  const MatrixRuns every_other(View<const bool, 4>(visible, {1, 1, 1, 2}, {0, 0, 0, 2}));
  CHECK(every_other.count({.shape = {1, 1, 1, 2}}) == 2);
}

}  // namespace attention_problem::mask_runs_test
