// Lists the tables of ssmax::compiled. The library holds one of each for every instruction set.
#pragma once

#include "../kernels/convert.hpp"
#include "../kernels/cross_entropy.hpp"
#include "../kernels/decode.hpp"
#include "../kernels/dot.hpp"
#include "../kernels/dropout.hpp"
#include "../kernels/entmax.hpp"
#include "../kernels/prefill.hpp"
#include "../kernels/prefill_backward.hpp"
#include "../kernels/rope.hpp"
#include "../kernels/row_gradients.hpp"
#include "../kernels/rows.hpp"
#include "../kernels/scores.hpp"
#include "../kernels/short_attention.hpp"
#include "../kernels/short_rows.hpp"
#include "../kernels/statistics.hpp"

#define SSMAX_TABLES_OF(T, apply)                                                                            \
  apply(RowKernels<T>) apply(ShortRowKernels<T>) apply(DotKernels<T>) apply(RowGradientKernels<T>)           \
      apply(RopeKernels<T>) apply(PrefillKernels<T>) apply(PrefillBackwardKernels<T>) apply(ScoreKernels<T>) \
          apply(ShortAttentionKernels<T>) apply(EntmaxKernels<T>) apply(CrossEntropyKernels<T>)              \
              apply(DropoutKernels<T>) apply(StatisticsKernels<T>)

#define SSMAX_EIGHT_BIT_TABLES(X, apply) apply(EightBitKernels<X>) apply(DecodeKernels<float, X>)

/// Expands to apply(type) for every table that an extension defines itself.
#define SSMAX_EXTENSION_TABLES(apply)                                                                        \
  apply(PrefillKernels<float, bfloat16>) apply(RoundedBackwardKernels<float, bfloat16>)                      \
      apply(PairDecodeKernels<float, bfloat16>) apply(StatisticsKernels<float, bfloat16>)                    \
          apply(DequantizeKernels<Int8>) apply(DequantizeKernels<Fp8E4M3>) apply(DequantizeKernels<Fp8E5M2>) \
              apply(DequantizeKernels<Q8_0>)

/// Expands to apply(type) for every table.
#define SSMAX_FOR_EACH_TABLE(apply)                                                                   \
  SSMAX_EXTENSION_TABLES(apply)                                                                       \
  SSMAX_TABLES_OF(float, apply)                                                                       \
  SSMAX_TABLES_OF(double, apply)                                                                      \
  SSMAX_EIGHT_BIT_TABLES(Int8, apply)                                                                 \
  SSMAX_EIGHT_BIT_TABLES(Fp8E4M3, apply)                                                              \
  SSMAX_EIGHT_BIT_TABLES(Fp8E5M2, apply)                                                              \
  apply(ConversionKernels) apply(PairDropoutKernels) apply(DecodeKernels<float, float>)               \
      apply(DecodeKernels<float, half>) apply(DecodeKernels<float, bfloat16>)                         \
          apply(DecodeKernels<float, Q8_0>) apply(DecodeKernels<double, double>)                      \
              apply(ListedDecodeKernels<float, float>) apply(ListedDecodeKernels<float, half>)        \
                  apply(ListedDecodeKernels<float, bfloat16>) apply(ListedDecodeKernels<float, Q8_0>) \
                      apply(ListedDecodeKernels<double, double>)
