// Loads queries into lanes: one query per lane of a vector.
#pragma once

#include <algorithm>
#include <new>
#include <type_traits>

#include "scores.hpp"

SSMAX_BEGIN_DETAIL

/// The keys that are visible to lanes of the last vector without a query.
enum class UnusedLanes {
  repeat_last,  // the keys of the last query: these lanes need no masking of their own
  empty,        // no key: every logit is masked
  left_out      // no key, but the hull ignores these lanes: the caller excludes them from every sum
};

/// Writes rows and hulls of `count` queries. row(i) returns the row of query i. Returns the number of lanes, a
/// multiple of the vector length.
template <class Compute, class Operand, class Row>
index_t list_queries(const LaneScratch<Compute, Operand>& memory, index_t count, UnusedLanes unused,
                     const Row& row) {
  const index_t width = memory.kernels.width, lanes = round_up(count, width);
  for (index_t i = 0; i < lanes; i += width) {
    Hull hull;
    const index_t real = std::min(i + width, count);
    for (index_t lane = i; lane < real; ++lane) {
      // Constructed in place: a copy would stall on store forwarding.
      const QueryRow& made = *new (memory.rows + lane) QueryRow(row(lane));
      hull.add(made.keys);
    }
    if (real < i + width) {
      QueryRow last = memory.rows[count - 1];
      if (unused != UnusedLanes::repeat_last) last = {last.query, {}, 0};
      if (unused != UnusedLanes::left_out) hull.add(last.keys);
      std::fill(memory.rows + real, memory.rows + i + width, last);
    }
    memory.hulls[i / width] = hull;
  }
  return lanes;
}

/// Points memory.in at the rows of one vector of queries, which starts at lane i. load(row, scratch) returns the
/// row of a query to which a key is visible. All other lanes, and lanes from `count` on, point at `depth` zeros.
template <class Compute, class Operand, class Load>
void gather_rows(const LaneScratch<Compute, Operand>& memory, index_t i, index_t count, index_t depth,
                 const Load& load) {
  const Compute* zeros = nullptr;
  for (index_t lane = 0; lane < memory.kernels.width; ++lane) {
    const QueryRow& row = memory.rows[i + lane];
    Compute* scratch = memory.staged + lane * memory.pitch;
    if (i + lane < count && row.keys.size() > 0) {
      memory.in[lane] = load(row, scratch);
      continue;
    }
    // The bf16 path moves signs of multipliers into each row: a row of its own for each lane.
    if (zeros == nullptr || Operands<Compute, Operand>::is_bf16) {
      std::fill_n(reinterpret_cast<Operand*>(scratch), depth, Operand{});
      zeros = scratch;
    }
    memory.in[lane] = zeros;
  }
}

/// Transposes the gathered rows into lanes, from lane i on. Multiplies each row by factor[lane] if `factor` is
/// given. A tuple of Operand moves as one number of type Compute.
template <class Compute, class Operand>
void put_in_lanes(const LaneScratch<Compute, Operand>& memory, index_t i, index_t depth,
                  std::type_identity_t<const Compute*> factor, Operand* lanes) {
  const index_t tile_lanes = memory.tile_lanes, rows = depth / tuple_size<Compute, Operand>;
  memory.kernels.transpose(
      memory.in, memory.kernels.width, rows, factor,
      reinterpret_cast<Compute*>(lanes) + i / tile_lanes * rows * tile_lanes + i % tile_lanes, tile_lanes);
}

/// Loads the queries of `lanes` lanes into memory.q. The first `count` lanes hold a query. The bf16 path writes the
/// queries' multipliers to memory.multipliers.
template <class Compute, class Operand>
void load_queries(const Problem<Compute>& problem, const Variant<Compute>& variant,
                  const Multipliers& multiply, const LaneScratch<Compute, Operand>& memory, index_t lanes,
                  index_t count) {
  using Op = Operands<Compute, Operand>;
  const index_t width = memory.kernels.width, depth = memory.depth;
  Compute* factor = memory.lane.q_factor;
  for (index_t i = 0; i < lanes; i += width) {
    gather_rows(memory, i, count, depth, [&](const QueryRow& row, Compute* scratch) {
      return Op::load_query(problem, variant, row, depth, memory.widened_row, scratch);
    });
    for (index_t lane = 0; lane < width; ++lane) {
      factor[lane] = static_cast<Compute>(multiply.of_product(memory.rows[i + lane]));
      if constexpr (Op::is_bf16) {
        Operand* row = reinterpret_cast<Operand*>(memory.staged + lane * memory.pitch);
        memory.multipliers[i + lane] = Op::positive_multiplier(factor[lane], row, depth);
      }
    }
    put_in_lanes(memory, i, depth, Op::is_bf16 ? nullptr : factor, memory.q);
  }
}

SSMAX_END
