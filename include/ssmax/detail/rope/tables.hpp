// Defines the tables of a rope as drivers read them, checks that the tables hold the positions of a call, and rotates
// rows.
#pragma once

#include <algorithm>
#include <limits>

#include "../checks/error.hpp"
#include "../kernels/rope.hpp"

SSMAX_BEGIN_SHARED

/// The tables of a Rope, `pitch` numbers per position from first_position on, and the kernels that read the tables.
/// `sequences` is 1 if all sequences of a call have the same positions. Otherwise the tables of the sequences follow
/// each other.
template <class T>
struct RopeTables {
  const RopeKernels<T>* kernels = nullptr;
  const T *cosine = nullptr, *sine = nullptr;
  index_t pitch = 0, width = 0, first_position = 0;
  bool interleaved = false;
  index_t positions = 0, first_channel = 0, sequences = 1;
};

/// The row of the tables that rotates a query or a key.
struct RopePlace {
  index_t position, sequence = 0;
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Throws if a position of [first, first + count) is missing in the tables, or if the last rotated channel is not one
/// of `channels`. Throws also if the tables are of several sequences, but not of `sequences`.
template <class T>
void check_rope(const char* function, const char* name, const RopeTables<T>& rope, index_t first,
                index_t count, index_t channels, index_t sequences) {
  if (rope.sequences != 1 && rope.sequences != sequences)
    fail_value(function, "rope", "has positions of sequences", rope.sequences, "the call's are", sequences);
  const index_t end = rope.first_channel + rope.width;
  if (channels < end)
    fail_value(function, name, "has channels", channels, "the rope's first_channel + width is", end);
  if (first < rope.first_position)
    fail_value(function, name, "has position", first, "the rope's first is", rope.first_position);
  const index_t last = rope.first_position + (rope.positions - 1);
  if (count > 0 && count - 1 > last - first) {
    // The message names the largest index_t if first + count overflows.
    const index_t furthest = std::numeric_limits<index_t>::max();
    const index_t position = first > furthest - (count - 1) ? furthest : first + (count - 1);
    fail_value(function, name, "has position", position, "the rope's last is", last);
  }
}

/// Rotates `rows` rows, the first at `first`, without checks. `in` may equal `out`, but must not overlap it otherwise.
template <class T>
void rotate(const RopeTables<T>& rope, StridedRows<const T> in, StridedRows<T> out, index_t rows,
            index_t channels, RopePlace first, bool inverse) {
  const index_t before = rope.sequences == 1 ? 0 : first.sequence * rope.positions,
                at = (before + first.position - rope.first_position) * rope.pitch;
  const auto kernel = rope.interleaved ? rope.kernels->rotate_interleaved : rope.kernels->rotate_half_split;
  const index_t begin = rope.first_channel, end = begin + rope.width;
  kernel({in.first + begin, in.stride}, {out.first + begin, out.stride}, rows,
         {rope.cosine + at, rope.sine + at, rope.pitch, rope.width / 2, inverse});
  if (in.first == out.first) return;
  for (index_t r = 0; r < rows; ++r) {
    std::copy(in[r], in[r] + begin, out[r]);
    std::copy(in[r] + end, in[r] + channels, out[r] + end);
  }
}

SSMAX_END
