// Defines the empty table of targets without products of bfloat16. Included once per target.

template <class X>
struct KernelTable<DequantizeKernels<X>> {
  static constexpr DequantizeKernels<X> value{};
};
