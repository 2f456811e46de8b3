// case ATTENTION: write the element type, as in attention<float>
// case ATTENTION_SCALED: write the element type, as in attention<float>
// case ATTENTION_WITH_OPTIONS: write the element type, as in attention<float>
// case ATTENTION_WITH_SCORE: write the element type, as in attention<float>
// case SOURCE: write the element type, as in attention<float>
// case SOURCE_WITH_OPTIONS: write the element type, as in attention<float>
// case SOURCE_WITH_SCORE: write the element type, as in attention<float>
// case PARTIAL: write the element type, as in attention_partial<float>
// case PARTIAL_WITH_OPTIONS: write the element type, as in attention_partial<float>
// case BACKWARD: write the element type, as in attention_backward<float>
// case BACKWARD_WITH_SCORE: write the element type, as in attention_backward<float>
// case DECODE: write the element type, as in decode<float>
// case DECODE_WITH_OPTIONS: write the element type, as in decode<float>
// case VECTORS: a vector has no extents: write .data, .batch, heads, positions, channels
// case VECTORS_FOR_GRADIENTS: a vector has no extents: write .data, .batch, heads, positions, channels
// case RANK_3: the rank differs: tensors of attention are .batch, heads, positions, channels
// case RANK_3_OUT: the rank differs: tensors of attention are .batch, heads, positions, channels
// case OTHER_TYPE_OF_KEYS: the element type differs: where q, k, v and out are stored in different types, write
// case OTHER_TYPE_OF_OUT: the element type differs: where q, k, v and out are stored in different types, write
// case DOUBLE_KEYS: T is float, double, half, bfloat16, or Elements of types that one type computes
// case DOUBLE_OUT_OF_SOURCE: double queries need a source of double and a result of double
// case DOUBLE_VALUES_IN_CACHE: keys and values are computed in one type: double keys need double values
// case VIEW_OF_TEMPORARY: the view of a temporary would dangle: give the vector a name
// case SSMAX_OF_TEMPORARY: a temporary ends before the span is used: give the vector a name
// case SSMAX_OF_TEMPORARY_B: a temporary ends before the span is used: give the vector a name
// case SSMAX_OF_TEMPORARY_DEDUCED: a temporary ends before the span is used: give the vector a name
// case TABLE_OF_TEMPORARY: a temporary ends before the span is used: give the vector a name
#include <array>
#include <ssmax/ssmax.hpp>
#include <vector>

using namespace ssmax;

int main() {
  std::vector<float> memory(64), s(1), b(1);
  const View<float, 4> x(memory.data(), {1, 1, 4, 4});
  const View<float, 3> lse(memory.data(), {1, 1, 4}), flat(memory.data(), {1, 4, 4});
  const AttentionState<float> state{lse, lse, x};
  const Rope<float> rope({.width = 4}, 4);
  const KvCache<bfloat16> cache({.width = 4, .capacity = 4});
  ThreadPool pool(1);
  const SSMax scaling{s, b};

  attention<float>({.q = x, .k = x, .v = x, .out = x});
  attention<float>({.q = x, .k = x, .v = x, .out = x}, {}, {}, {}, pool);
  attention<float>({.q = x, .k = x, .v = x, .out = x, .lse = lse}, scaling, Causal{}, {.rope = &rope}, pool);
  attention<float>({x, x, x, {memory.data(), {1, 1, 4, 4}}}, scaling, Full{}, Softcap{50}, {.rope = &rope});
  attention_partial<float>({.q = x, .k = x, .v = x, .keys = 4, .state = state}, scaling, Full{}, {}, pool);
  attention_backward<float>({.q = x, .k = x, .v = x, .out = x, .lse = lse},
                            {.dout = x, .dq = x, .dk = x, .dv = x}, scaling.gradient(s, b), Full{}, {});
  attention<Elements<float, half>>({.q = x, .out = x}, scaling);
  decode<float>({.q = x, .out = x}, cache, {}, Causal{}, {.rope = &rope}, pool);
  attention<float>({.q = x, .out = x}, cache);
  attention<float>({.q = x, .out = x, .lse = lse}, cache, {}, Full{}, {.rope = &rope}, pool);
  attention<float>({.q = x, .out = x}, cache, scaling, Causal{}, Softcap{50}, {.rope = &rope}, pool);
  View<const float, 1> row = s, of_span = std::span<const float>(s);

#if defined(ATTENTION)
  attention({.q = x, .k = x, .v = x, .out = x});
#elif defined(ATTENTION_SCALED)
  attention({.q = {memory.data(), {1, 1, 4, 4}}, .k = x, .v = x, .out = x}, scaling, Causal{});
#elif defined(ATTENTION_WITH_OPTIONS)
  attention({.q = x, .k = x, .v = x, .out = x}, scaling, Causal{}, {.rope = &rope}, pool);
#elif defined(ATTENTION_WITH_SCORE)
  attention({.q = x, .k = x, .v = x, .out = x}, scaling, Causal{}, Softcap{50}, {.rope = &rope}, pool);
#elif defined(SOURCE)
  attention({.q = x, .out = x}, cache);
#elif defined(SOURCE_WITH_OPTIONS)
  attention({.q = x, .out = x}, cache, scaling, Causal{}, {.rope = &rope}, pool);
#elif defined(SOURCE_WITH_SCORE)
  attention({.q = x, .out = x}, cache, scaling, Causal{}, Softcap{50}, {.rope = &rope}, pool);
#elif defined(PARTIAL)
  attention_partial({.q = x, .k = x, .v = x, .keys = 4, .state = state}, scaling);
#elif defined(PARTIAL_WITH_OPTIONS)
  attention_partial({.q = x, .k = x, .v = x, .keys = 4, .state = state}, scaling, Causal{}, {.scale = 1});
#elif defined(BACKWARD)
  attention_backward({.q = x, .k = x, .v = x, .out = x, .lse = lse}, {.dout = x, .dq = x, .dk = x, .dv = x});
#elif defined(BACKWARD_WITH_SCORE)
  attention_backward({.q = x, .k = x, .v = x, .out = x, .lse = lse}, {.dout = x, .dq = x, .dk = x, .dv = x},
                     scaling, Causal{}, Softcap{50}, {.rope = &rope}, pool);
#elif defined(DECODE)
  decode({.q = x, .out = x}, cache);
#elif defined(DECODE_WITH_OPTIONS)
  decode({.q = x, .out = x}, cache, scaling, Causal{}, {.rope = &rope}, pool);
#elif defined(VECTORS)
  attention<float>({.q = memory, .k = memory, .v = memory, .out = memory});
#elif defined(VECTORS_FOR_GRADIENTS)
  attention_backward<float>({.q = x, .k = x, .v = x, .out = x, .lse = lse},
                            {.dout = x, .dq = x, .dk = memory, .dv = x});
#elif defined(RANK_3)
  attention<float>({.q = flat, .k = flat, .v = flat, .out = flat}, scaling);
#elif defined(RANK_3_OUT)
  attention<float>({.q = x, .k = x, .v = x, .out = flat}, scaling, Causal{}, {.rope = &rope});
#elif defined(OTHER_TYPE_OF_KEYS)
  attention<float>({.q = x, .k = View<const half, 4>{}, .v = x, .out = x}, scaling);
#elif defined(OTHER_TYPE_OF_OUT)
  attention<float>({.q = x, .k = x, .v = x, .out = View<half, 4>{}}, scaling);
#elif defined(DOUBLE_KEYS)
  attention<Elements<float, double>>({}, scaling);
#elif defined(DOUBLE_OUT_OF_SOURCE)
  attention<Elements<float, float, float, double>>({}, cache, scaling);
#elif defined(DOUBLE_VALUES_IN_CACHE)
  const KvCache<float, double> mixed({.width = 4, .capacity = 4});
#elif defined(VIEW_OF_TEMPORARY)
  row = View<const float, 1>{std::vector<float>(4)};
#elif defined(SSMAX_OF_TEMPORARY)
  const SSMax<float> dangling{std::vector<float>(1)};
#elif defined(SSMAX_OF_TEMPORARY_B)
  const SSMax<float> dangling{s, std::array<float, 1>{}};
#elif defined(SSMAX_OF_TEMPORARY_DEDUCED)
  const SSMax dangling{std::vector<float>(1)};
#elif defined(TABLE_OF_TEMPORARY)
  const SizeTable<float> dangling{std::vector<float>(9), s};
#endif
}
