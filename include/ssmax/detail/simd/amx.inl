// AMX-BF16: eight tiles of 16 rows of 64 bytes.
// Included once, inside its target's namespace and region (dispatch/for_each_matrix.inl).
//
// The numbers of tiles are written out: the instructions hold them. Tiles 0 to 3 are sums, 4 and 5 rows of A,
// 6 and 7 pairs of B.
#pragma once

struct TileConfiguration {
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

/// Constant: GCC 12 believes that the instruction reads 8 of its 64 bytes.
alignas(64) inline constexpr TileConfiguration tile_configuration{
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/// What was stored before is in memory: GCC 12 does not know that loading a tile reads it.
SSMAX_INLINE void tiles_see_memory() { __asm__ volatile("" ::: "memory"); }

/// What a product of tiles reads and writes, in elements. C is [16·rows][·] and A [16·rows][32·steps]; B is in
/// pairs [16·steps][·][2].
struct TileOperands {
  const bfloat16* a;
  index_t a_stride;  // from one row to the next within a tile
  index_t a_second;  // from a tile to the one beneath it
  index_t a_third;   // and to the one beneath that two
  index_t a_step;    // to the next 32 columns
  const bfloat16* b;
  float* c;
  index_t group;  // lanes of a row of C, pairs of a row of B
};

/// C = or += A·B for 2 × 2 tiles, or 4 × 1 or 2 × 1: four sums at a time, since a product takes as long as
/// three others need to start, and no more loads than products.
template <int rows, int vectors, bool adds>
SSMAX_INLINE void tile_product_of(const TileOperands& t, index_t steps) {
  static_assert(rows * vectors == 4 || (rows == 2 && vectors == 1));
  const index_t c_bytes = t.group * static_cast<index_t>(sizeof(float)), b_bytes = c_bytes;
  const index_t a_bytes = t.a_stride * static_cast<index_t>(sizeof(bfloat16));
  float* const c1 = vectors == 2 ? t.c + 16 : t.c + 16 * t.group;
  float* const c2 = vectors == 2 ? t.c + 16 * t.group : t.c + 32 * t.group;
  float* const c3 = vectors == 2 ? c2 + 16 : t.c + 48 * t.group;
  if constexpr (adds) {
    _tile_loadd(0, t.c, c_bytes);
    _tile_loadd(1, c1, c_bytes);
    if constexpr (rows * vectors == 4) {
      _tile_loadd(2, c2, c_bytes);
      _tile_loadd(3, c3, c_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (rows * vectors == 4) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  const bfloat16 *a = t.a, *b = t.b;
  for (index_t step = 0; step < steps; ++step, a += t.a_step, b += 32 * t.group) {
    _tile_loadd(6, b, b_bytes);
    _tile_loadd(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (vectors == 2) {
      _tile_loadd(7, b + 32, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + t.a_second, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_loadd(5, a + t.a_second, a_bytes);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (rows == 4) {
        _tile_loadd(4, a + t.a_third, a_bytes);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, a + t.a_third + t.a_second, a_bytes);
        _tile_dpbf16ps(3, 5, 6);
      }
    }
  }
  _tile_stored(0, t.c, c_bytes);
  _tile_stored(1, c1, c_bytes);
  if constexpr (rows * vectors == 4) {
    _tile_stored(2, c2, c_bytes);
    _tile_stored(3, c3, c_bytes);
  }
}
