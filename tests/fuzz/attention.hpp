// A case of attention: everything that one call takes, drawn before element types are types, and what should come out.
#pragma once

#include <optional>
#include <ssmax/rope.hpp>
#include <ssmax/target.hpp>
#include <string>
#include <vector>

#include "bounded.hpp"
#include "executor.hpp"
#include "finding.hpp"
#include "mask.hpp"
#include "scaling.hpp"
#include "score.hpp"
#include "tensor.hpp"

namespace fuzz {

enum class Call { attention, partial, decode, backward };

struct AttentionCase {
  Call call;
  Element element, stored;  // stored: the cache's
  index_t batch, heads, kv_heads, queries, keys, d, dv;
  std::vector<double> q, k, v;  // [batch, head, position, channel]
  DrawnMask mask;
  DrawnScaling scaling;
  DrawnScore score;
  std::optional<ssmax::RopeOptions> rope;
  index_t rope_positions = 0, key_position = 0;
  std::vector<double> frequencies;  // the rope's own, or empty
  std::vector<index_t> axes,
      axis_positions;          // of a rope on several axes: [pair] and [sequence, axis, position], or empty
  index_t rope_sequences = 1;  // with positions of their own
  ssmax::Dropout dropout{};
  std::optional<double> scale;
  std::vector<double> sinks;
  bool scaled_sinks = false;
  bool wants_lse = true, keeps_workspace = false;
  std::array<bool, 4> statistics{};  // which ones are wanted, in the order of RowStatistics
  bool float_products = true;        // or bfloat16's own, where the target has them
  bool batch_invariant = false;
  Layout of_q, of_k, of_v, of_out, of_lse, of_dout, of_dq, of_dk, of_dv;
  bool packed = false;  // q, k and v lie in one matrix
  AnyExecutor executor;
  // partial: where the keys and the queries are cut, and whether each state continues the one before.
  // decode: capacity, how many new positions each append brings to each sequence.
  std::vector<index_t> cuts, query_cuts;
  bool continues = false;
  index_t capacity = 0;
  bool ring = false;
  std::vector<std::vector<index_t>> appends;
  // backward
  std::vector<double> dout, dlse;  // dlse: empty where it is left out
  bool wants_dsinks = false;

  /// Returns the position of a sequence on the axis of a pair.
  index_t rope_position(index_t sequence, index_t position, index_t pair) const {
    if (axes.empty()) return position;
    const index_t axis = axes[static_cast<std::size_t>(pair)], of = sequence % rope_sequences;
    return axis_positions[static_cast<std::size_t>((of * rope_axes() + axis) * rope_positions + position -
                                                   rope->first_position)];
  }
  index_t rope_axes() const { return std::ssize(axis_positions) / (rope_sequences * rope_positions); }
  bool rotates_keys = true;  // decode: those of the cache have been
  index_t group() const { return heads / std::max<index_t>(kv_heads, 1); }
  double logit_scale() const {
    return scale.value_or(1 / std::sqrt(static_cast<double>(std::max<index_t>(d, 1))));
  }
  bool wants_statistics() const { return std::ranges::count(statistics, true) > 0; }
  Element computed() const { return is_wide(element) ? Element::f64 : Element::f32; }
  std::array<index_t, 4> q_extents() const { return {batch, heads, queries, d}; }
  std::array<index_t, 4> k_extents() const { return {batch, kv_heads, keys, d}; }
  std::array<index_t, 4> v_extents() const { return {batch, kv_heads, keys, dv}; }
  std::array<index_t, 4> out_extents() const { return {batch, heads, queries, dv}; }
  std::array<index_t, 4> lse_extents() const { return {1, batch, heads, queries}; }
  std::string words() const;
};

struct Options {
  bool odd_names = true;
};

/// `runs`: under a mask that finds its runs.
AttentionCase draw_attention(Random& random, Call call, const Options& options, bool runs = false);

struct Forward {
  std::vector<Bounded> out, lse;
  std::array<std::vector<Bounded>, 4> statistics;  // in the order of RowStatistics, if the case wants some
};
Forward expect_forward(const AttentionCase& c);

struct Backward {
  std::vector<Bounded> dq, dk, dv, dc;  // dc: of each row's multiplier
  std::vector<Bounded> dsinks, dslopes, dbias;
};
/// `out` as the forward stored it.
Backward expect_backward(const AttentionCase& c, const std::vector<double>& out);

/// Runs the case on every target, and throws a Finding.
void check_attention(const AttentionCase& c);

template <class T>
void run_attention(const AttentionCase& c, const Forward& expected);
template <class T>
void run_partial(const AttentionCase& c, const Forward& expected);
template <class T>
void run_backward(const AttentionCase& c);
template <class T, class X>
void run_decode(AttentionCase c);

/// The gradient of every parameter of the scaling, from the rows' dc.
void check_scaling_gradients(const AttentionCase& c, const std::vector<Bounded>& dc,
                             const std::string& where);

}  // namespace fuzz
