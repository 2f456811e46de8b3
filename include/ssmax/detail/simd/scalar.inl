// Implements one lane at a time in plain C++. It is the fallback for every processor, and tests compare the
// other targets with it. Included once, inside its target's namespace and region
// (dispatch/for_each_target.inl).
#pragma once

template <class Value_, class Bits, int mantissa_bits>
struct ScalarLane {
  using Value = Value_;
  using V = Value;
  using M = bool;
  static constexpr index_t width = 1;
  static constexpr int chains = 4;                       // exponentials in step, within one row
  static constexpr int group_chains = 1;                 // exponentials in step, across short rows
  static constexpr int tile_rows = 4, tile_vectors = 3;  // sums in registers, in attention's products

  static V set(Value v) { return v; }
  static V load(const Value* p) { return *p; }
  static V load_part(const Value*, index_t, Value fill) { return fill; }
  static void store(Value* p, V v) { *p = v; }
  static void store_part(Value*, V, index_t) {}

  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return a * b + c; }
  static V max(V a, V b) { return a > b ? a : b; }
  static V min(V a, V b) { return a < b ? a : b; }
  static V abs(V a) { return a < 0 ? -a : a; }
  static V sqrt(V a) { return std::sqrt(a); }

  static M less(V a, V b) { return a < b; }
  static M not_less(V a, V b) { return !(a < b); }
  static M unordered(V a, V b) { return std::isnan(a) || std::isnan(b); }
  static M either(M a, M b) { return a || b; }
  static M none() { return false; }
  static bool any(M m) { return m; }
  static bool all(M m) { return m; }
  static V keep(M m, V v) { return m ? v : V{0}; }
  static V select(M m, V a, V b) { return m ? a : b; }

  static V shift_exponent(V p, V t) {
    return __builtin_bit_cast(
        V, static_cast<Bits>(__builtin_bit_cast(Bits, p) + (__builtin_bit_cast(Bits, t) << mantissa_bits)));
  }

  static Value reduce_sum(V v) { return v; }
  static Value reduce_max(V v) { return v; }
  static constexpr int fold_step[] = {0};
  template <int stage>
  static void fold_inputs(V a, V b, V& low, V& high) {
    low = a;
    high = b;
  }
  template <int distance>
  static V swap(V v) {
    return v;
  }
};

struct F32 : ScalarLane<float, std::uint32_t, 23> {
  template <class X>
  static V load_widened(const X* p) {
    return static_cast<float>(*p);
  }
  static V set_widened(half x) { return static_cast<float>(x); }
  static void store_narrowed(half* p, V v) { *p = half(v); }
  static void store_narrowed(bfloat16* p, V v) { *p = bfloat16(v); }
};
struct F64 : ScalarLane<double, std::uint64_t, 52> {};
