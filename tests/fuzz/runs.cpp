// Calls under masks that find their runs: the bits of the same mask without the members `run`, `count` and `same_runs`.
#include <ssmax/mask_runs.hpp>

#include "../call.hpp"
#include "backward_run.hpp"
#include "kinds.hpp"

namespace fuzz {
namespace {

/// The user's mask: every run is cut into runs of two keys that touch.
struct OwnRuns {
  KeyRange keys(const Query& query) const { return {query.index % 3, query.shape.keys}; }
  bool sees(const Query& query, index_t key) const { return (key + query.head) % 150 < 70; }
  KeyRange run(const Query& query, index_t from) const {
    while (from < query.shape.keys && (from < keys(query).begin || !sees(query, from))) ++from;
    const index_t end = std::min(from + 2, query.shape.keys);
    return {from, end > from && !sees(query, end - 1) ? end - 1 : end};
  }
};

std::unique_ptr<bool[]> draw_matrix(Random& random, index_t count) {
  auto visible = std::make_unique<bool[]>(static_cast<std::size_t>(count));
  const double changes = random.pick({0.5, 0.05, 0.005});
  bool is_visible = random.chance(0.5);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    is_visible = is_visible != random.chance(changes);
    visible[i] = is_visible;
  }
  return visible;
}

/// The mask of a matrix for each head: of head h, that is matrix h % matrices.
ssmax::MatrixRuns repeated_matrix(const View<const bool, 4>& matrix, const QueryShape& shape) {
  const std::array<index_t, 4> extents{shape.batch, shape.heads, shape.queries, shape.keys};
  const auto visible = std::make_unique<bool[]>(static_cast<std::size_t>(shape.rows() * shape.keys));
  bool* next = visible.get();
  reference::for_each_index(extents, [&](index_t batch, index_t head, index_t query, index_t key) {
    *next++ = matrix(batch, head % matrix.extent(1), query, key);
  });
  return ssmax::MatrixRuns(View<const bool, 4>(visible.get(), extents));
}

/// Calls f(mask, i) for the mask and for the mask without its runs. The third one has a matrix for each head.
template <class F>
void with_and_without_runs(const AttentionCase& c, const F& f) {
  const PositionPredicateMask mask{{{c.mask.mask.get()}}};
  f(WithRuns<PositionPredicateMask>{mask}, 0);
  f(mask, 1);
  if (c.mask.repeated) f(WithRuns<PositionPredicateMask>{{{{c.mask.repeated.get()}}}}, 2);
}

/// Throws unless two results differ by no more than sums in another order do.
void check_close(const std::string& what, const std::vector<double>& got, const std::vector<double>& other,
                 const AttentionCase& c, Element stored) {
  double most = 1;
  for (const double v : c.v) {
    if (std::isfinite(v)) most = std::max(most, std::abs(v));
  }
  const double bound =
      (4 * static_cast<double>(c.keys + 8) * 0x1p-24 + (c.float_products ? 0 : 0x1p-6)) * most;
  for (std::size_t i = 0; i < got.size(); ++i)
    check_value(what, static_cast<index_t>(i), got[i], other[i], bound + storing(stored, other[i]), stored);
}

template <class T>
void compare_runs(const AttentionCase& c) {
  using A = Compute<T>;
  const InputTensors<T> in(c);
  Settings<A> settings(c);
  const PlacedScaling scaling{c.scaling.scaling.get()};
  for_each_target([&](const std::string& target) {
    ssmax::Explanation explanation;
    auto options = settings.template options<T>(c);
    options.explanation = &explanation;
    const OutputTensors<T> forward[] = {OutputTensors<T>(c), OutputTensors<T>(c), OutputTensors<T>(c)};
    with_and_without_runs(c, [&](const auto& mask, int i) {
      const View<T, 4> out = forward[i].out.view();
      if (c.call != Call::decode) {
        return ssmax::attention<Compute<T>>(
            ssmax::with({.q = in.q(), .k = in.k(), .v = in.v(), .out = out, .lse = forward[i].lse_view()},
                        options),
            scaling, mask, c.executor);
      }
      ssmax::KvCache<T> cache({c.batch, c.kv_heads, c.d, c.dv, c.keys + 1});
      cache.append(in.k(), in.v(), nullptr, c.mask.keys);
      ssmax::attention<Compute<T>>(
          ssmax::with({.q = in.q(), .keys = cache, .out = out, .lse = forward[i].lse_view()}, options),
          scaling, mask, c.executor);
    });
    if (c.mask.repeated && !forward[0].same_bits(forward[2]))
      throw Finding(target + ": other bits with a matrix for each head");
    // The decode paths add from the first visible key of a chunk to the last. Without runs, they add the range `keys`.
    if (explanation.path == ssmax::Path::decode || explanation.path == ssmax::Path::decode_bf16) {
      check_close(target + " out without runs", forward[0].out.values(), forward[1].out.values(), c,
                  c.element);
      check_close(target + " lse without runs", forward[0].lse.values(), forward[1].lse.values(), c,
                  Element::f32);
    } else if (!forward[0].same_bits(forward[1])) {
      throw Finding(target + ": other bits without runs");
    }
    if (c.call != Call::backward) return;
    const Tensor<T> dout(c.out_extents(), c.of_dout);
    dout.fill(c.dout);
    GradientTensors<T> gradients[] = {GradientTensors<T>(c), GradientTensors<T>(c), GradientTensors<T>(c)};
    with_and_without_runs(c, [&](const auto& mask, int i) {
      const std::vector<Tensor<T>>& all = gradients[i].all;
      ssmax::attention_backward<Compute<T>>(
          ssmax::backward_with(
              backward_over_views(in.q(), in.k(), in.v(), forward[0].out.view(), forward[0].lse_view()),
              options),
          {.dout = dout.view(),
           .dq = all[0].view(),
           .dk = all[1].view(),
           .dv = all[2].view(),
           .dsinks = gradients[i].dsinks},
          scaling, mask, c.executor);
    });
    if (!gradients[0].same_bits(gradients[1]))
      throw Finding(target + ": other bits of a gradient without runs");
    if (c.mask.repeated && !gradients[0].same_bits(gradients[2]))
      throw Finding(target + ": other bits of a gradient with a matrix for each head");
  });
}

}  // namespace

DrawnMask draw_run_mask(Random& random, const QueryShape& shape, RunMasks masks) {
  DrawnMask drawn;
  const auto set = [&](const char* words, const auto& mask, std::shared_ptr<const void> memory = nullptr) {
    hold(drawn, mask, std::move(memory));
    drawn.words = words;
  };
  const index_t left = random.between(0, shape.keys), right = random.chance(0.5) ? 0 : random.between(0, 9);
  const ssmax::SlidingWindow with_first(left, right, random.between(0, std::min<index_t>(shape.keys, 200)));
  const ssmax::SlidingWindow window(random.between(0, shape.keys), random.between(0, shape.keys));
  // Blocks.
  ssmax::SparseBlocks sizes{.query_block = random.pick<index_t>({1, 7, 64}),
                            .key_block = random.pick<index_t>({1, 3, 16, 64, 100}),
                            .bitmaps = random.chance(0.5) ? 1 : std::max<index_t>(shape.heads, 1)};
  sizes.query_blocks = shape.keys / sizes.query_block + 1;
  sizes.key_blocks = shape.keys / sizes.key_block + random.between(1, 2);
  const auto bits = std::make_shared<std::vector<std::uint64_t>>(static_cast<std::size_t>(sizes.words()));
  const bool few = random.chance(0.5);
  for (std::uint64_t& word : *bits)
    word = few ? random.next() & random.next() & random.next() : random.next();
  const ssmax::BlockSparse blocks(sizes, *bits);

  constexpr int last[] = {6, 8, 13};
  switch (random.between(0, last[static_cast<int>(masks)])) {
    case 0:
      set("the user's runs", OwnRuns{});
      break;
    case 1:
      set("SlidingWindow with first keys", with_first);
      break;
    case 2:
      set("BlockSparse", blocks, bits);
      break;
    case 3:
      set("Causal & BlockSparse", ssmax::Causal{} & blocks, bits);
      break;
    case 4:
      set("BlockSparse & SlidingWindow", blocks & window, bits);
      break;
    case 5:
      set("SlidingWindow with first keys & BlockSparse", with_first & blocks, bits);
      break;
    case 6:
      set("SlidingWindow with first keys & Causal & the user's runs",
          with_first & ssmax::Causal{} & OwnRuns{});
      break;
    case 7:
    case 8: {
      std::vector<index_t> parents;
      for (index_t i = 0; i < shape.queries; ++i) parents.push_back(random.between(-1, i - 1));
      const ssmax::Tree tree(parents, random.between(1, shape.keys + 1));
      if (random.chance(0.5)) {
        set("Tree", tree);
      } else {
        set("Tree & SlidingWindow with first keys", tree & with_first);
      }
      break;
    }
    case 9:
    case 10: {
      const MatrixHeads heads = draw_matrix_heads(random, shape.heads);
      const auto visible = draw_matrix(random, shape.batch * heads.count * shape.queries * shape.keys);
      const View<const bool, 4> view(visible.get(), {shape.batch, heads.count, shape.queries, shape.keys});
      const ssmax::MatrixRuns matrix(view, heads.kind), repeated = repeated_matrix(view, shape);
      if (random.chance(0.5)) {
        set("", repeated);
        drawn.repeated = drawn.mask;
        set("MatrixRuns", matrix);
      } else {
        set("", repeated & with_first);
        drawn.repeated = drawn.mask;
        set("MatrixRuns & SlidingWindow with first keys", matrix & with_first);
      }
      drawn.words += heads.words();
      break;
    }
    default: {
      const index_t count = random.between(1, 4);
      const auto bounds = std::make_shared<std::pair<std::vector<index_t>, std::vector<index_t>>>(
          draw_bounds(random, count, shape.queries), draw_bounds(random, count, shape.keys));
      const auto memory =
          std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(bounds, bits);
      const ssmax::Documents documents(bounds->first, bounds->second, random.chance(0.5));
      if (random.chance(0.5)) {
        set("Documents & SlidingWindow with first keys", documents & with_first, memory);
      } else {
        set("BlockSparse & Documents", blocks & documents, memory);
      }
    }
  }
  return drawn;
}

void run_runs(Random& random, const Options& options, std::string& words) {
  AttentionCase c =
      draw_attention(random, random.pick({Call::attention, Call::decode, Call::backward}), options, true);
  const bool is_16_bit = c.element == Element::f16 || c.element == Element::bf16;
  c.element = c.stored = is_16_bit ? Element::bf16 : Element::f32;
  c.statistics = {};
  c.score = {};
  c.score.words = "Identity";
  // With products of bfloat16, gradients may have other bits without runs.
  c.float_products = c.float_products || c.call == Call::backward;
  words = c.words();
  if (is_16_bit) return compare_runs<ssmax::bfloat16>(c);
  compare_runs<float>(c);
}

}  // namespace fuzz
