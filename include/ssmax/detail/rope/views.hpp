// Rotates the rows of views: checks the views, then calls the kernels.
#pragma once

#include "../../view.hpp"
#include "../checks/views.hpp"
#include "tables.hpp"

SSMAX_BEGIN_DETAIL

template <class T, int Rank>
void check_rope_views(const char* function, const View<const T, Rank>& in, const View<T, Rank>& out) {
  static_assert(Rank >= 2 && Rank <= 4, "ssmax::rope: views are [..., position, channel] of rank 2 to 4");
  check_view(function, "in", in);
  check_output(function, "out", out);
  check_same_extents(function, "out", out, "in", in);
  check_in_place_or_no_overlap(function, "out", out, "in", in);
}

/// Rotates all rows. Neighbouring rows have consecutive positions.
template <class T, int Rank>
void rope_from(const char* function, const View<const T, Rank>& in, const View<T, Rank>& out,
               const RopeTables<T>& rope, index_t start, bool inverse) {
  check_rope_views(function, in, out);
  const auto from = with_rank<4>(in);
  const auto to = with_rank<4>(out);
  const index_t rows = from.extent(2), channels = from.extent(3);
  check_rope(function, "in", rope, start, rows, channels, from.extent(0));
  if (in.empty()) return;
  for (index_t b = 0; b < from.extent(0); ++b) {
    for (index_t h = 0; h < from.extent(1); ++h) {
      rotate(rope, {&from(b, h, 0, 0), from.stride(2)}, {&to(b, h, 0, 0), to.stride(2)}, rows, channels,
             {start, b}, inverse);
    }
  }
}

/// Rotates all rows. Each row has a position of its own.
template <class T, int Rank>
void rope_at(const char* function, const View<const T, Rank>& in, const View<T, Rank>& out,
             const RopeTables<T>& rope, Integers positions, bool inverse) {
  check_rope_views(function, in, out);
  const auto from = with_rank<4>(in);
  const auto to = with_rank<4>(out);
  const index_t rows = from.extent(2), channels = from.extent(3);
  check_equal(function, "positions", "has extent", std::ssize(positions), "positions of in are", rows);
  for (index_t position : positions)
    check_rope(function, "positions", rope, position, 1, channels, from.extent(0));
  if (in.empty()) return;
  for (index_t b = 0; b < from.extent(0); ++b) {
    for (index_t h = 0; h < from.extent(1); ++h) {
      for (index_t p = 0; p < rows; ++p) {
        rotate(rope, {&from(b, h, p, 0), from.stride(2)}, {&to(b, h, p, 0), to.stride(2)}, 1, channels,
               {positions[static_cast<std::size_t>(p)], b}, inverse);
      }
    }
  }
}

SSMAX_END
