// Defines how the numbers of a tile are multiplied: in float or double, or as bfloat16 with float accumulation (the
// bf16 path). Products of bfloat16 may take units that a thread configures first (AMX tiles).
//
// | | float, double | bf16 path |
// |---|---|---|
// | q | multiplied by scale and c | in its storage type; logits are multiplied by scale and c |
// | a rotated row | one row | several parts, see parts.hpp |
// | products | one number at a time | tuples of two numbers |
// | shift of a state | an integer, raised when a logit exceeds it by 8 | the largest logit |
// | dk and dv | added for each tile | added for all tiles of a query block at once |
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../kernels/prefill.hpp"
#include "load.hpp"
#include "parts.hpp"

SSMAX_BEGIN_DETAIL

template <class Compute, class Operand>
struct Operands {
  static constexpr bool is_bf16 = !std::same_as<Compute, Operand>;
  static constexpr index_t tuple = tuple_size<Compute, Operand>;

  /// Returns the number of keys of a key block. On the bf16 path, 64 keys of width 64 and the operands of their
  /// products fit a first-level cache of 48 KiB. For wider heads, 128 keys share one rescaling.
  static index_t block_keys(index_t depth, index_t channels) {
    return is_bf16 && depth + channels <= 128 ? key_block / 2 : key_block;
  }

  /// Returns the number of keys that are loaded at once, for all tiles of a query block. On the bf16 path a tile
  /// processes several key blocks before the next tile. So its queries and its state stay in the caches. Measured:
  /// docs/measured.md.
  static index_t held_keys(index_t depth, index_t channels) {
    constexpr index_t most = 512, of_wide_heads = 256;
    static_assert(key_chunk % most == 0 && key_chunk % of_wide_heads == 0 && of_wide_heads % key_block == 0);
    if (!is_bf16) return key_block;
    return depth + channels <= 512 ? most : of_wide_heads;
  }

  /// Returns a query's row for its products: in place or in scratch. Requires widened_row[2 · d] on the bf16 path.
  static const Compute* load_query(const Problem<Compute>& problem, const Variant<Compute>& variant,
                                   const QueryRow& of, [[maybe_unused]] index_t depth,
                                   [[maybe_unused]] Compute* widened_row, Compute* scratch) {
    if constexpr (is_bf16) {
      load_query_parts(problem, variant, of, depth, widened_row, reinterpret_cast<Operand*>(scratch));
      return scratch;
    }
    return detail::load_query(problem, variant, of, scratch);
  }

  /// Writes the rows of keys for their products. out.stride is the depth of the products on the bf16 path, and at
  /// least d in float and double. Keys of 8 bits are prefetched `ahead` keys before they are loaded.
  static void load_keys(const Problem<Compute>& problem, const Variant<Compute>& variant,
                        const QueryShape& shape, const HeadKeys& keys, [[maybe_unused]] Compute* widened_row,
                        StridedRows<Operand> out, [[maybe_unused]] index_t ahead = 0) {
    if constexpr (is_bf16) {
      load_key_parts(problem, variant, shape, keys, widened_row, out, ahead);
    } else {
      detail::load_keys(problem, variant, shape, keys, out);
    }
  }

  /// Writes the rows of the values of keys for their products. Values of 8 bits are prefetched `ahead` keys before they
  /// are loaded.
  static void load_values(const AnyKeys<Compute>& source, const HeadKeys& keys, StridedRows<Operand> out,
                          [[maybe_unused]] index_t ahead = 0) {
    if constexpr (is_bf16) {
      const index_t dv = source.shape().value_width;
      for_each_run(source, keys, [&](index_t, const AnyKeyRun& run) {
        if (source.v_kind() == ElementKind::quantized) {
          source.dequantize_v(run, bytes_ahead(ahead, run.v_stride, source.v_size()), out);
        } else {
          for (index_t i = 0; i < run.count; ++i)
            std::copy_n(static_cast<const Operand*>(run.v) + i * run.v_stride, dv, out[i]);
        }
        out.first = out[run.count];
      });
    } else {
      detail::load_values(source, keys, out);
    }
  }

  /// Moves the sign of a multiplier, or the multiplier 0, into the row of q, which is exact. Returns the remaining
  /// multiplier, which is positive, so a masked logit stays -inf. Returns NaN for NaN and for infinities.
  static Compute positive_multiplier(Compute c, Operand* row, index_t depth) {
    if (!std::isfinite(c)) return std::numeric_limits<Compute>::quiet_NaN();
    if (c > 0) return c;
    const Compute sign = c < 0 ? -1 : 0;
    std::transform(row, row + depth, row,
                   [sign](Operand x) { return static_cast<Operand>(sign * static_cast<Compute>(x)); });
    return c < 0 ? -c : 1;
  }
};

/// A guard: its constructor configures this thread's units for the kernels' products, its destructor releases the
/// units. Kernels without such units need no configuration.
template <class Compute, class Operand>
class AcquiredProducts {
 public:
  explicit AcquiredProducts(const PrefillKernels<Compute, Operand>& kernels) : kernels_(kernels) {
    if (kernels_.acquire != nullptr) kernels_.acquire();
  }
  AcquiredProducts(const AcquiredProducts&) = delete;
  AcquiredProducts& operator=(const AcquiredProducts&) = delete;
  ~AcquiredProducts() {
    if (kernels_.release != nullptr) kernels_.release();
  }

 private:
  const PrefillKernels<Compute, Operand>& kernels_;
};

SSMAX_END
