// Makes, copies, moves, assigns and destroys an object of every class of the data namespace. data_code.cmake reads
// which functions of that namespace the compiler left in the object file: at -O0 all that are not always inlined.

#include <array>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include <ssmax/ssmax.hpp>

#include "../../call.hpp"

using namespace ssmax;

template <class T>
void use(const T& made) {
  T copy(made);
  T moved(std::move(copy));
  if constexpr (std::is_copy_assignable_v<T>) moved = made;
  if constexpr (std::is_move_assignable_v<T>) moved = T(made);
}

void use_data() {
  std::array<float, 16> numbers{};
  std::array<double, 16> sums{};
  std::array<index_t, 2> ends{0, 1};
  std::array<bool, 1> bits{true};
  const std::array<index_t, 4> one{1, 1, 1, 1};
  const View<float, 4> view(numbers.data(), one);
  const View<const bool, 4> matrix(bits.data(), one);
  const View<float, 3> rows(numbers.data(), std::array<index_t, 3>{1, 1, 1});
  use(view), use(half(1)), use(bfloat16(1)), use(Int8(1)), use(Fp8E4M3(1)), use(Fp8E5M2(1)), use(Q8_0{}),
      use(KeyRange{}), use(QueryShape{}), use(Query{}), use(Key{});
  use(Row{}), use(PlacedRow{}), use(KeySourceShape{}), use(KvCacheOptions{}), use(PagedKvCacheOptions{}),
      use(KeyScales{}), use(ChannelScales{});
  use(KeyScales::per_tensor(view, numbers.data(), view, nullptr));
  use(RopeScaling{}), use(RopeOptions{}), use(CrossEntropyOptions{}), use(CrossEntropy{}), use(Serial{});
  use(AttentionState<float>{rows, rows, view}), use(KeyRun<float>{}), use(Lanes<float>(numbers.data(), 1)),
      use(PlacedLanes<float>(Lanes<float>(numbers.data(), 1), numbers.data(), 0, nullptr, 0)),
      use(QkvViews<float>{}), use(KeptSpan<const float>(numbers)), use(AttentionResult<float>{view, rows}),
      use(AttentionResult<half>{}), use(Dropout{}), use(RowStatistics<float>{}), use(HeadStatistics<float>{}),
      use(GapCounts<float>{}), use(RaggedRows(ends));
  for (const index_t end : Integers(ends)) use(end), use(KeptIntegers(ends).back());

  use(Full{}), use(Causal{}), use(CausalTopLeft{}), use(Chunks(8)), use(Lengths(ends)), use(SlidingWindow(1)),
      use(PrefixLM(ends)), use(KeyLengths(ends)), use(LeftPadding(ends));
  use(Documents(ends, true)), use(MatrixMask(matrix)), use(MatrixMask(view));
  const std::array<std::uint64_t, 1> bitmap{1};
  use(SlidingWindow(7, 0, 4)), use(SparseBlocks{}), use(BlockSparse(SparseBlocks{}, bitmap)),
      use(as_mask(Causal{}));
  const Where where([](const Query&, index_t) { return true; });
  use(where), use(Causal{} & KeyLengths(ends));
  static_assert(std::is_same_v<decltype(Causal{} & KeyLengths(ends)), Both<Causal, KeyLengths>>);

  const SSMax<float> scaling(0.43F, 0.1F);
  const SizeTable<float> table(numbers);
  const PerQuery<float> per_query{View<const float, 3>(rows)};
  use(Softmax{}), use(LogN{}), use(PerHead<float>(1)), use(scaling), use(table),
      use(AdjustedSize(scaling, 0, 1));
  use(Constant(1)), use(QwenLogN(1)), use(Llama4Temperature()), use(MinistralTemperature()),
      use(InklingTemperature());
  use(per_query);
  const SSMaxGradient<float> learns = scaling.gradient(std::span<float>(numbers).first(1));
  const SizeTableGradient<float> table_learns = table.gradient(numbers);
  const PerQueryGradient<float, float> query_learns = per_query.gradient(rows);
  const RowFunctor<Softmax>& functor = Softmax{};
  use(learns), use(table_learns), use(query_learns), use(functor);

  const Alibi alibi(std::span<double>(sums).first(1));
  const AlibiGradient alibi_learns = alibi.gradient(std::span<double>(sums).first(1));
  const Bias bias{View<const float, 4>(view)};
  const BiasGradient<float, float> bias_learns = bias.gradient(view);
  const Composed<Softcap, ScaleInvariant> composed = Softcap(20) | ScaleInvariant(10, 4);
  use(SlopedBias(View<const float, 4>(view), std::span<const double>(sums).first(1)));
  use(Identity{}), use(Softcap(20)), use(alibi), use(alibi_learns), use(bias), use(bias_learns),
      use(composed);

  // Objects with a place of their own, which are not copied.
  Workspace workspace;
  ThreadPool pool(2);
  SpmdTeam team(2);
  const Spmd leader(team, 0);
  leader.lead_or_help([] {});
  use(leader);
#if defined(_OPENMP)
  use(OpenMP(2));
#endif
  use(StorageTraits<half>{}), use(StorageTraits<bfloat16>{}), use(StorageTraits<Q8_0>{}), use(Explanation{});
  use(SequenceLengths::packed(ends)), use(shared::SequenceRows{});

  // And the data that the library's parts hand each other.
  std::array<float, 4> out{};
  const View<float, 4> result(out.data(), one);
  Explanation explanation;
  attention({.q = view,
             .k = view,
             .v = view,
             .out = result,
             .lse = rows,
             .workspace = &workspace,
             .explanation = &explanation},
            learns, where, bias_learns, pool);
  attention_backward({.q = view, .k = view, .v = view, .out = result, .lse = rows},
                     {.dout = view, .dq = result, .dk = result, .dv = result}, learns, Causal{}, composed);
  KvCache<half> cache(KvCacheOptions{.batch = 1, .kv_heads = 1, .width = 1, .capacity = 1});
  attention({.q = view, .keys = cache, .out = result}, scaling, Causal{}, composed, pool);
  softmax(View<const float, 1>(numbers.data(), {1}), View<float, 1>(out.data(), {1}), scaling,
          RaggedRows(ends));
  softmax(View<const float, 2>(numbers.data(), {4, 4}), View<float, 2>(numbers.data(), {4, 4}), scaling,
          Causal{});
}
