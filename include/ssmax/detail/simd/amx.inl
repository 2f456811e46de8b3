// Wraps AMX-BF16: eight tiles of 16 rows of 64 bytes. Included once, inside its target's namespace and region
// (dispatch/for_each_matrix.inl).
//
// The code writes out the numbers of tiles, because the instructions contain them. Tiles 0 to 3 hold sums,
// tiles 4 and 5 rows of A, tiles 6 and 7 pairs of B.
#pragma once

struct TileConfiguration {
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

/// The configuration of all tiles. It is a constant, because GCC 12 assumes that the instruction reads 8 of
/// its 64 bytes.
alignas(64) inline constexpr TileConfiguration tile_configuration{
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/// Forces earlier stores to be in memory: GCC 12 assumes that loading a tile does not read memory.
SSMAX_INLINE void tiles_see_memory() { __asm__ volatile("" ::: "memory"); }

/// The operands of a product of tiles, in elements. C is [32][·] and A is [32][32·steps]. B is in pairs,
/// [16·steps][·][2].
struct TileOperands {
  const bfloat16* a;
  index_t a_stride;  // from one row to the next within a tile
  index_t a_second;  // from a tile to the tile below it
  index_t a_step;    // from 32 columns to the next 32
  const bfloat16* b;
  float* c;
};

/// Returns the bytes per row of C and per row of pairs of B. Both have `group` lanes.
constexpr index_t tile_row_bytes(index_t group) { return group * static_cast<index_t>(sizeof(float)); }

template <int set>
SSMAX_INLINE void tile_store_first(float* c, index_t group) {
  if constexpr (set == 0) _tile_stored(0, c, tile_row_bytes(group));
  if constexpr (set == 1) _tile_stored(2, c, tile_row_bytes(group));
}
template <int set>
SSMAX_INLINE void tile_store_second(float* c, index_t group) {
  if constexpr (set == 0) _tile_stored(1, c + 16 * group, tile_row_bytes(group));
  if constexpr (set == 1) _tile_stored(3, c + 16 * group, tile_row_bytes(group));
}

/// Computes C = A·B, or C += A·B, for 32 rows of 16 lanes. Set 0 uses tiles 0 and 1, set 1 uses tiles 2 and
/// 3. The caller stores these tiles later. If `before` is not null, the function stores the tiles of the
/// other set to `before` between its products: a store takes as long as a product.
template <int set, bool adds>
SSMAX_INLINE void tile_strip(const TileOperands& t, index_t steps, index_t group, float* before) {
  const index_t b_bytes = tile_row_bytes(group), c_bytes = b_bytes;
  const index_t a_bytes = t.a_stride * static_cast<index_t>(sizeof(bfloat16));
  if constexpr (adds && set == 0) {
    _tile_loadd(0, t.c, c_bytes);
    _tile_loadd(1, t.c + 16 * group, c_bytes);
  } else if constexpr (adds) {
    _tile_loadd(2, t.c, c_bytes);
    _tile_loadd(3, t.c + 16 * group, c_bytes);
  } else if constexpr (set == 0) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_zero(2);
    _tile_zero(3);
  }
  const bfloat16 *a = t.a, *b = t.b;
  for (index_t step = 0; step < steps; ++step, a += t.a_step, b += 32 * group) {
    _tile_loadd(6, b, b_bytes);
    _tile_loadd(4, a, a_bytes);
    if constexpr (set == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (set == 1) _tile_dpbf16ps(2, 4, 6);
    if (step == 0 && before != nullptr) tile_store_first<1 - set>(before, group);
    _tile_loadd(5, a + t.a_second, a_bytes);
    if constexpr (set == 0) _tile_dpbf16ps(1, 5, 6);
    if constexpr (set == 1) _tile_dpbf16ps(3, 5, 6);
    if (step == 0 && before != nullptr) tile_store_second<1 - set>(before, group);
  }
  if (steps == 0 && before != nullptr) {
    tile_store_first<1 - set>(before, group);
    tile_store_second<1 - set>(before, group);
  }
}

/// An iterator over the operands of strips: all lanes of 32 rows, then all lanes of the next 32 rows. So rows
/// of A that are not in the first-level cache are loaded into it once.
struct TileWalk {
  TileOperands at;
  index_t vectors;         // number of vectors of 16 lanes
  index_t a_rows, c_rows;  // from 32 rows to the next 32
  index_t vector = 0;

  SSMAX_INLINE TileOperands next() {
    const TileOperands now = at;
    if (++vector < vectors) {
      at.b += 32;
      at.c += 16;
    } else {
      vector = 0;
      at.a += a_rows;
      at.b -= 32 * (vectors - 1);
      at.c += c_rows - 16 * (vectors - 1);
    }
    return now;
  }
};

template <bool adds>
SSMAX_INLINE void tile_strips(TileWalk walk, index_t strips, index_t steps, index_t group) {
  float* before = nullptr;
  for (index_t left = strips; left > 0; left -= 2) {
    const TileOperands even = walk.next();
    tile_strip<0, adds>(even, steps, group, before);
    if (left == 1) {
      tile_store_first<0>(even.c, group);
      tile_store_second<0>(even.c, group);
      return;
    }
    const TileOperands odd = walk.next();
    tile_strip<1, adds>(odd, steps, group, even.c);
    before = odd.c;
  }
  if (before == nullptr) return;
  tile_store_first<1>(before, group);
  tile_store_second<1>(before, group);
}

/// Computes C = A·B, or C += A·B, for 32 rows of 32 lanes. It suits long sums: it has as many loads as products. It
/// computes four sums at a time, because a product takes as long as three other products need to start.
template <bool adds>
SSMAX_INLINE void tile_square(const TileOperands& t, index_t steps, index_t group) {
  const index_t b_bytes = tile_row_bytes(group), c_bytes = b_bytes;
  const index_t a_bytes = t.a_stride * static_cast<index_t>(sizeof(bfloat16));
  float* const below = t.c + 16 * group;
  if constexpr (adds) {
    _tile_loadd(0, t.c, c_bytes);
    _tile_loadd(1, t.c + 16, c_bytes);
    _tile_loadd(2, below, c_bytes);
    _tile_loadd(3, below + 16, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const bfloat16 *a = t.a, *b = t.b;
  for (index_t step = 0; step < steps; ++step, a += t.a_step, b += 32 * group) {
    _tile_loadd(6, b, b_bytes);
    _tile_loadd(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 32, b_bytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + t.a_second, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, t.c, c_bytes);
  _tile_stored(1, t.c + 16, c_bytes);
  _tile_stored(2, below, c_bytes);
  _tile_stored(3, below + 16, c_bytes);
}

SSMAX_INLINE __m128i eight_words(const bfloat16* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

/// Writes out[channel][32 keys] = v[key][channel] for 8 channels, with 24 shuffles. Each 128-bit part holds 8
/// keys, and the keys stay in their part. Exception: unless `whole`, reads and writes `parts` parts from
/// `first_part` on, and v is the first of their keys.
template <bool whole>
SSMAX_INLINE void transpose_words(const bfloat16* v, index_t stride, bfloat16* out, index_t first_part = 0,
                                  index_t parts = 4) {
  __m512i key[8], pair[8], four[8];
  SSMAX_UNROLL
  for (int i = 0; i < 8; ++i) {
    const bfloat16* row = v + i * stride;
    key[i] = _mm512_castsi128_si512(eight_words(row));
    if (whole || parts > 1) key[i] = _mm512_inserti32x4(key[i], eight_words(row + 8 * stride), 1);
    if (whole || parts > 2) key[i] = _mm512_inserti32x4(key[i], eight_words(row + 16 * stride), 2);
    if (whole || parts > 3) key[i] = _mm512_inserti32x4(key[i], eight_words(row + 24 * stride), 3);
  }
  SSMAX_UNROLL
  for (int i = 0; i < 4; ++i) {
    pair[i] = _mm512_unpacklo_epi16(key[2 * i], key[2 * i + 1]);
    pair[4 + i] = _mm512_unpackhi_epi16(key[2 * i], key[2 * i + 1]);
  }
  SSMAX_UNROLL
  for (int i = 0; i < 4; ++i) {
    four[i] = _mm512_unpacklo_epi32(pair[2 * i], pair[2 * i + 1]);
    four[4 + i] = _mm512_unpackhi_epi32(pair[2 * i], pair[2 * i + 1]);
  }
  // four[2i] holds two channels of keys 0 to 3 of each part, four[2i + 1] the same channels of keys 4 to 7.
  constexpr int channel[4] = {0, 4, 2, 6};
  const auto written = static_cast<__mmask16>((1u << 4 * parts) - 1u);
  SSMAX_UNROLL
  for (int i = 0; i < 4; ++i) {
    bfloat16* to = out + channel[i] * 32 + first_part * 8;
    const __m512i low = _mm512_unpacklo_epi64(four[2 * i], four[2 * i + 1]),
                  high = _mm512_unpackhi_epi64(four[2 * i], four[2 * i + 1]);
    if constexpr (whole) {
      _mm512_storeu_si512(to, low);
      _mm512_storeu_si512(to + 32, high);
    } else {
      _mm512_mask_storeu_ps(reinterpret_cast<float*>(to), written, _mm512_castsi512_ps(low));
      _mm512_mask_storeu_ps(reinterpret_cast<float*>(to + 32), written, _mm512_castsi512_ps(high));
    }
  }
}
