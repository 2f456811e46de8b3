// Implements the kernels that widen 16-bit storage, 8-bit storage and Q8_0 to float and round float to 16-bit storage.
// Included once per target.

template <class S, class Storage>
void widen(const Storage* in, index_t n, float* out) {
  index_t i = 0;
  for (; i + S::width <= n; i += S::width) S::store(out + i, S::load_widened(in + i));
  for (; i < n; ++i) out[i] = static_cast<float>(in[i]);
}

template <class S>
void widen_groups(const Q8_0* in, index_t n, float* out) {
  static_assert(Q8_0::group % S::width == 0);
  for (index_t first = 0; first < n; first += Q8_0::group, ++in) {
    const typename S::V factor = S::set_widened(in->scale);
    SSMAX_UNROLL
    for (index_t i = 0; i < Q8_0::group; i += S::width)
      S::store(out + first + i, S::mul(S::load_widened(in->values + i), factor));
  }
}

template <class S, class Storage>
void narrow(const float* in, index_t n, Storage* out) {
  index_t i = 0;
  for (; i + S::width <= n; i += S::width) S::store_narrowed(out + i, S::load(in + i));
  for (; i < n; ++i) out[i] = Storage(in[i]);
}

template <class S>
void multiply_each(const float* in, const float* factors, index_t n, float* out) {
  index_t i = 0;
  for (; i + S::width <= n; i += S::width) S::store(out + i, S::mul(S::load(in + i), S::load(factors + i)));
  for (; i < n; ++i) out[i] = in[i] * factors[i];
}

template <class S>
void add_products(const float* in, const float* factors, index_t n, float* out) {
  index_t i = 0;
  for (; i + S::width <= n; i += S::width)
    S::store(out + i, S::fma(S::load(in + i), S::load(factors + i), S::load(out + i)));
  for (; i < n; ++i) out[i] += in[i] * factors[i];
}

template <>
struct KernelTable<ConversionKernels> {
  static constexpr ConversionKernels value{
      .widen_half = widen<F32, half>,
      .widen_bfloat16 = widen<F32, bfloat16>,
      .widen_q8_0 = widen_groups<F32>,
      .narrow_half = narrow<F32, half>,
      .narrow_bfloat16 = narrow<F32, bfloat16>,
  };
};

template <class X>
struct KernelTable<EightBitKernels<X>> {
  static constexpr EightBitKernels<X> value{
      .widen = widen<F32, X>, .multiply = multiply_each<F32>, .add_products = add_products<F32>};
};

/// The empty table of targets without products of bfloat16.
template <class X>
struct KernelTable<DequantizeKernels<X>> {
  static constexpr DequantizeKernels<X> value{};
};
