/// @defgroup rope Rotary embedding (rope.hpp)
/// Rotary position embedding (RoPE; Su et al., arXiv:2104.09864).
///
/// A rope rotates `width` channels of a head in pairs, from `first_channel` on. At position p, it rotates pair i by the
/// angle p·ω_i with ω_i = θ^(-2i/width), and multiplies the pair by the attention factor m:
///
///     (a, b) -> (a·m·cos - b·m·sin, b·m·cos + a·m·sin)
///
/// | pairing | channels of pair i, counted from `first_channel` | models |
/// |---|---|---|
/// | Pairing::half_split | i and i + width/2 | Llama in transformers, GPT-NeoX |
/// | Pairing::interleaved | 2i and 2i + 1 | Llama's original weights, GPT-J |
///
/// Other channels stay unchanged. The backward pass is the transpose: a rotation by the opposite angle, times m.
///
/// A constructor of Rope takes frequencies ω of your own. A pair with ω = 0 is not rotated and not multiplied by m. So
/// Gemma 4's global layers are a rope of width 512 whose ω are 0 from pair 64 on. Exception: an infinity or NaN in one
/// channel of such a pair makes the other channel NaN.
///
/// Other constructors take positions on several axes (MRoPE): pair i of token t rotates by positions(axes[i], t)·ω_i.
/// Each sequence of a batch may have positions of its own.
///
/// A RopeScaling changes ω, so that a model runs beyond its trained length L. "Turns" means the number of full
/// rotations of a pair within L positions:
///
/// | scaling | ω | source |
/// |---|---|---|
/// | linear(f) | ω / f | arXiv:2306.15595 |
/// | ntk(f) | θ·f^(width / (width - 2)) in place of θ | |
/// | dynamic_ntk(f, L, n) | ntk(f·max(n/L, 1) - (f - 1)), for n positions | transformers, `dynamic` |
/// | yarn(f, L) | below 1 turn: ω / f; above 32 turns: ω; between: a ramp over i | arXiv:2309.00071 |
/// | llama3(f, L, low, high) | below `low` turns: ω / f; above `high`: ω; between: a blend by turns | Llama 3.1 |
///
/// The attention factor of a YaRN model is `attention_factor`, which yarn_mscale computes. The scaling does not set it.
///
/// The constructor computes angles in double and rounds only m·cos and m·sin. So these have an error of 6e-8·m in
/// float (half an ulp of 1) at position 10^6 as at position 1. Tables hold `positions` positions from
/// `first_position` on. Throws std::invalid_argument for other positions.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <span>
#include <vector>

#include "detail/checks/views.hpp"
#include "detail/kernels/rope.hpp"
#include "view.hpp"

/// @addtogroup rope
/// @{
SSMAX_BEGIN_DATA

/// The channels that form a pair.
enum class Pairing {
  half_split,  ///< i and i + width/2.
  interleaved  ///< 2i and 2i + 1.
};

/// A change of ω. The static functions make one.
struct RopeScaling {
  /// The name of a method.
  enum class Method {
    none,    ///< Unchanged ω.
    linear,  ///< ω / f.
    ntk,     ///< Changed θ.
    yarn,    ///< ω / f, ω, or a ramp over the pairs.
    llama3   ///< ω / f, ω, or a blend by turns.
  };

  Method method = Method::none;   ///< The method.
  double factor = 1;              ///< f, above 0.
  double original_positions = 0;  ///< L, the trained length. yarn, llama3: above 0.
  /// yarn: number of turns below which ω is divided by f. llama3: low_freq_factor. Above 0.
  double low = 1;
  /// yarn: number of turns above which ω is unchanged. llama3: high_freq_factor. Above `low`.
  double high = 32;
  bool truncate = true;  ///< yarn: rounds the ends of the ramp to whole pairs, outwards.

  /// Returns the scaling ω / f.
  SSMAX_INLINE static constexpr RopeScaling linear(double factor) {
    return {Method::linear, factor, 0, 1, 1};
  }
  /// Returns the scaling with θ·f^(width / (width - 2)) in place of θ. The width must be above 2.
  SSMAX_INLINE static constexpr RopeScaling ntk(double factor) { return {Method::ntk, factor, 0, 1, 1}; }
  /// Returns the scaling ntk(f·max(n/L, 1) - (f - 1)) for a sequence of n = `positions` positions. All keys of the
  /// sequence must have the same ω: rotate stored keys in the call (rotate_source_keys).
  SSMAX_INLINE static constexpr RopeScaling dynamic_ntk(double factor, double original_positions,
                                                        double positions) {
    return ntk(factor * std::max(positions / original_positions, 1.0) - (factor - 1));
  }
  /// Returns the scaling with ω / f below `low` turns, ω above `high` turns, and a ramp over the pairs between them.
  /// With `truncate`, the ramp begins and ends at whole pairs. gpt-oss has `truncate` false.
  SSMAX_INLINE static constexpr RopeScaling yarn(double factor, double original_positions, double low = 1,
                                                 double high = 32, bool truncate = true) {
    return {Method::yarn, factor, original_positions, low, high, truncate};
  }
  /// Returns the scaling with ω / f below `low` turns, ω above `high` turns, and a blend by turns between them.
  SSMAX_INLINE static constexpr RopeScaling llama3(double factor, double original_positions, double low = 1,
                                                   double high = 4) {
    return {Method::llama3, factor, original_positions, low, high};
  }
};

/// The options of a Rope.
struct RopeOptions {
  index_t width = 0;                      ///< Number of rotated channels: even, 2 to 2^24.
  double theta = 10'000;                  ///< θ, above 1.
  Pairing pairing = Pairing::half_split;  ///< Channels that form a pair.
  RopeScaling scaling{};                  ///< Change of ω.
  index_t first_position = 0;             ///< First position of the tables, at least 0.
  index_t first_channel = 0;              ///< First rotated channel: 0 to 2^24.
  double attention_factor = 1;            ///< m, multiplies cos and sin. Finite and above 0.
};

namespace SSMAX_VISIBLE shared {

/// The tables of a Rope, `pitch` numbers per position from first_position on, and the kernels that read the tables.
template <class T>
struct RopeTables {
  const RopeKernels<T>* kernels = nullptr;
  const T *cosine = nullptr, *sine = nullptr;
  index_t pitch = 0, width = 0, first_position = 0;
  Pairing pairing{};
  index_t positions = 0, first_channel = 0;
  index_t sequences = 0;  // with positions of their own, after each other in the tables; 0: all have the same
};

/// The row of the tables that rotates a query or a key.
struct RopePlace {
  index_t position, sequence = 0;
};

}  // namespace shared

SSMAX_END

SSMAX_BEGIN_CODE
namespace detail {

/// Upper bound of the width: wider tables would take gigabytes.
inline constexpr index_t max_rope_width = index_t{1} << 24;

inline void require_of_rope(bool holds, const char* what) {
  if (!holds) fail_format("ssmax::Rope: %s", what);
}

/// Throws unless the options determine ω.
inline void check_rope(const RopeOptions& options) {
  if (options.width < 2 || options.width % 2 != 0) {
    fail_value("Rope", "width", "is", options.width, "must be even and at least", 2);
  }
  if (options.width > max_rope_width)
    fail_value("Rope", "width", "is", options.width, "must be at most", max_rope_width);
  require_of_rope(options.theta > 1 && std::isfinite(options.theta), "theta must be finite and above 1");
  const RopeScaling& scaling = options.scaling;
  require_of_rope(scaling.factor > 0 && std::isfinite(scaling.factor),
                  "scaling.factor must be finite and above 0");
  using Method = RopeScaling::Method;
  if (scaling.method == Method::ntk) require_of_rope(options.width > 2, "ntk needs a width above 2");
  if (scaling.method == Method::yarn || scaling.method == Method::llama3) {
    require_of_rope(scaling.original_positions > 0, "scaling.original_positions must be above 0");
    require_of_rope(scaling.low > 0 && scaling.high > scaling.low, "scaling must have 0 < low < high");
  }
}

inline void check_rope(const RopeOptions& options, index_t positions) {
  check_rope(options);
  if (positions < 1) fail_value("Rope", "positions", "are", positions, "must be at least", 1);
  constexpr index_t most = std::numeric_limits<index_t>::max();
  if (positions > most / static_cast<index_t>(sizeof(double)) / options.width) {
    fail_format("ssmax::Rope: positions are %td and width is %td, a table's bytes must be at most %td",
                positions, options.width, most);
  }
  if (options.first_position > most - positions) {
    fail_value("Rope", "first_position", "is", options.first_position, "leaves no room for positions",
               positions);
  }
  check_at_least("Rope", "first_position", options.first_position, 0);
  check_at_least("Rope", "first_channel", options.first_channel, 0);
  if (options.first_channel > max_rope_width)
    fail_value("Rope", "first_channel", "is", options.first_channel, "must be at most", max_rope_width);
  require_of_rope(options.attention_factor > 0 && std::isfinite(options.attention_factor),
                  "attention_factor must be finite and above 0");
}

/// Throws unless there is a finite frequency for each pair, and theta and scaling have no effect.
inline void check_frequencies(const RopeOptions& options, std::span<const double> frequencies) {
  check_equal("Rope", "frequencies", "has extent", std::ssize(frequencies), "pairs are", options.width / 2);
  require_of_rope(
      std::all_of(frequencies.begin(), frequencies.end(), [](double omega) { return std::isfinite(omega); }),
      "frequencies must be finite");
  require_of_rope(options.theta == RopeOptions{}.theta && options.scaling.method == RopeScaling::Method::none,
                  "frequencies replace theta and scaling, which must have their default values");
}

/// Throws unless each pair has an axis of `positions`.
inline void check_axes(const RopeOptions& options, const View<const index_t, 3>& positions, Integers axes) {
  check_view("Rope", "positions", positions);
  check_at_least("Rope", "positions", positions.extent(0), 1);
  check_equal("Rope", "axes", "has extent", std::ssize(axes), "pairs are", options.width / 2);
  for (index_t axis : axes) {
    check_at_least("Rope", "axes", axis, 0);
    if (axis >= positions.extent(1))
      fail_value("Rope", "axes", "has", axis, "positions has extent", positions.extent(1));
  }
}

}  // namespace detail

/// Returns YaRN's factor g(m) = 0.1·m·ln x + 1, or 1 for x <= 1, with x = `factor` and m = `mscale`. A model that
/// configures no `attention_factor` has g(mscale) / g(mscale_all_dim) if both are given, else g(1).
inline double yarn_mscale(double factor, double mscale = 1) {
  return factor > 1 ? 0.1 * mscale * std::log(factor) + 1 : 1;
}

/// Returns ω of each of the width / 2 pairs, with the scaling. Each ω has a relative error of 1e-14. Throws
/// std::invalid_argument if width, theta or scaling is out of range.
inline std::vector<double> rope_frequencies(const RopeOptions& options) {
  detail::check_rope(options);
  using Method = RopeScaling::Method;
  const RopeScaling& scaling = options.scaling;
  const auto width = static_cast<double>(options.width);
  const double theta = scaling.method == Method::ntk
                           ? options.theta * std::pow(scaling.factor, width / (width - 2))
                           : options.theta;
  std::vector<double> frequencies(static_cast<std::size_t>(options.width / 2));
  // Returns the pair, as a real number, that turns `turns` times within the original length. (YaRN's ramp is over i.)
  const auto pair_with_turns = [&](double turns) {
    return width * std::log(scaling.original_positions / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(theta));
  };
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double omega = std::pow(theta, -2.0 * static_cast<double>(i) / width);
    double kept = 1;  // part of ω that is not divided by the factor
    if (scaling.method == Method::linear) {
      kept = 0;
    } else if (scaling.method == Method::yarn) {
      const double begin = pair_with_turns(scaling.high), end = pair_with_turns(scaling.low);
      const double first = std::max(scaling.truncate ? std::floor(begin) : begin, 0.0);
      const double last = std::min(scaling.truncate ? std::ceil(end) : end, width - 1);
      const double length = std::max(last - first, 0.001);
      kept = 1 - std::clamp((static_cast<double>(i) - first) / length, 0.0, 1.0);
    } else if (scaling.method == Method::llama3) {
      const double turns = scaling.original_positions * omega / (2 * std::numbers::pi);
      kept = std::clamp((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0);
    }
    frequencies[i] = omega * kept + omega / scaling.factor * (1 - kept);
  }
  return frequencies;
}

namespace detail {

/// Throws if a position of [first, first + count) is missing in the tables, or if the last rotated channel is not one
/// of `channels`.
template <class T>
void check_rope(const char* function, const char* name, const RopeTables<T>& rope, index_t first,
                index_t count, index_t channels) {
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

/// Throws if the rope has positions of another number of sequences. 0: the function has no numbered sequences.
template <class T>
void check_rope_sequences(const char* function, const RopeTables<T>& rope, index_t sequences) {
  if (rope.sequences != 0 && rope.sequences != sequences)
    fail_value(function, "rope", "has positions of sequences", rope.sequences, "the call's are", sequences);
}

/// Rotates `rows` rows, the first at `first`, without checks. `in` may equal `out`, but must not overlap it otherwise.
template <class T>
void rotate(const RopeTables<T>& rope, StridedRows<const T> in, StridedRows<T> out, index_t rows,
            index_t channels, RopePlace first, bool inverse) {
  const index_t before = rope.sequences == 0 ? 0 : first.sequence * rope.positions,
                at = (before + first.position - rope.first_position) * rope.pitch;
  const auto kernel = rope.pairing == Pairing::interleaved ? rope.kernels->rotate_interleaved
                                                           : rope.kernels->rotate_half_split;
  const index_t begin = rope.first_channel, end = begin + rope.width;
  kernel({in.first + begin, in.stride}, {out.first + begin, out.stride}, rows,
         {rope.cosine + at, rope.sine + at, rope.pitch, rope.width / 2, inverse});
  if (in.first == out.first) return;
  for (index_t r = 0; r < rows; ++r) {
    std::copy(in[r], in[r] + begin, out[r]);
    std::copy(in[r] + end, in[r] + channels, out[r] + end);
  }
}

}  // namespace detail

/// Tables of cos and sin, T = float or double. The tables have 2·positions·(width / 2) elements, or twice as many if
/// interleaved.
template <class T>
class Rope {
 public:
  /// Makes the tables for positions [first_position, first_position + positions). Throws std::invalid_argument for
  /// options out of range, for positions < 1, and for tables of more bytes than index_t holds. Throws std::bad_alloc
  /// if the memory is not available.
  Rope(const RopeOptions& options, index_t positions) : options_(options), positions_(positions) {
    detail::check_rope(options, positions);
    fill(rope_frequencies(options), table_position());
  }

  /// Makes the tables with a frequency ω of your own for each of the width / 2 pairs. The rope copies the frequencies.
  /// Throws like the other constructor, also if a frequency is not finite, or if theta or scaling is not the default.
  Rope(const RopeOptions& options, std::span<const double> frequencies, index_t positions)
      : options_(options), positions_(positions), frequencies_(frequencies.begin(), frequencies.end()) {
    detail::check_rope(options, positions);
    detail::check_frequencies(options, frequencies_);
    fill(frequencies_, table_position());
  }

  /// Makes the tables of tokens that have a position on each of several axes (MRoPE). `positions` is [axis, token], and
  /// `axes` has an axis for each of the width / 2 pairs. Token t rotates pair i by the angle positions(axes[i], t)·ω_i.
  /// For attention and caches, t + first_position is the position of the token. `frequencies` may replace ω, as above.
  /// Over MPI, ranks do not compare `positions` and `axes`. Throws like the other constructors, also if `axes` has
  /// another extent than width / 2 or if an axis is missing in `positions`.
  Rope(const RopeOptions& options, View<const index_t, 2> positions, Integers axes,
       std::span<const double> frequencies = {})
      : Rope(options,
             View<const index_t, 3>(positions.data_handle(), {1, positions.extent(0), positions.extent(1)},
                                    {0, positions.stride(0), positions.stride(1)}),
             axes, frequencies) {
    sequences_ = 0;
  }
  /// The same with tokens of each sequence: `positions` is [sequence, axis, token]. A call of attention, `rope` and
  /// KvCache takes such a rope if it has as many sequences. PagedKvCache throws. With one axis, all `axes` are 0.
  Rope(const RopeOptions& options, View<const index_t, 3> positions, Integers axes,
       std::span<const double> frequencies = {})
      : options_(options),
        positions_(positions.extent(2)),
        sequences_(positions.extent(0)),
        frequencies_(frequencies.begin(), frequencies.end()) {
    detail::check_rope(options, positions_);
    detail::check_axes(options, positions, axes);
    if (!frequencies_.empty()) detail::check_frequencies(options, frequencies_);
    detail::check_at_least("Rope", "positions", std::numeric_limits<index_t>::max() / sequences_ / positions_,
                           16 * options.width);
    fill(frequencies_.empty() ? rope_frequencies(options) : frequencies_,
         [&](index_t p, std::size_t i) { return positions(p / positions_, axes[i], p % positions_); });
  }

  /// Returns the options.
  [[nodiscard]] const RopeOptions& options() const { return options_; }
  /// Returns the frequencies that the constructor received. Empty: ω is rope_frequencies(options()).
  [[nodiscard]] std::span<const double> frequencies() const { return frequencies_; }
  /// Returns the number of rotated channels.
  [[nodiscard]] index_t width() const { return options_.width; }
  /// Returns the first position of the tables.
  [[nodiscard]] index_t first_position() const { return options_.first_position; }
  /// Returns the number of positions in the tables, of each sequence.
  [[nodiscard]] index_t positions() const { return positions_; }
  /// Returns the number of sequences that have positions of their own, or 0 if all sequences have the same.
  [[nodiscard]] index_t sequences() const { return sequences_; }

  /// Returns the tables in the form that the drivers of attention take.
  [[nodiscard]] shared::RopeTables<T> tables() const {
    return {&kernels_(),      cosine_.data(), sine_.data(),
            pitch_,           options_.width, options_.first_position,
            options_.pairing, positions_,     options_.first_channel,
            sequences_};
  }

  /// Throws std::invalid_argument if a position of [first, first + count) is missing in the tables, or if the last
  /// rotated channel is not one of `channels`.
  void check(const char* function, const char* name, index_t first, index_t count, index_t channels) const {
    detail::check_rope(function, name, tables(), first, count, channels);
  }

 private:
  auto table_position() const {
    return [first = options_.first_position](index_t p, std::size_t) { return first + p; };
  }

  /// Row p of the tables has the angles position(p, i)·ω_i. The rows of a sequence follow those of the one before.
  template <class Position>
  void fill(std::span<const double> frequencies, const Position& position) {
    const index_t half = options_.width / 2;
    const bool interleaved = options_.pairing == Pairing::interleaved;
    pitch_ = interleaved ? options_.width : half;
    const index_t rows = positions_ * std::max<index_t>(sequences_, 1);
    cosine_.resize(static_cast<std::size_t>(rows * pitch_));
    sine_.resize(cosine_.size());
    for (index_t p = 0; p < rows; ++p) {
      for (index_t i = 0; i < half; ++i) {
        const auto pair = static_cast<std::size_t>(i);
        const double omega = frequencies[pair], angle = static_cast<double>(position(p, pair)) * omega;
        const double factor = omega == 0 ? 1 : options_.attention_factor;
        const auto c = static_cast<T>(factor * std::cos(angle)), s = static_cast<T>(factor * std::sin(angle));
        const auto at = static_cast<std::size_t>(p * pitch_ + (interleaved ? 2 * i : i));
        cosine_[at] = c;
        sine_[at] = interleaved ? -s : s;
        if (interleaved) {
          cosine_[at + 1] = c;
          sine_[at + 1] = s;
        }
      }
    }
  }

  RopeOptions options_;
  index_t positions_, sequences_ = 0;
  index_t pitch_ = 0;
  std::vector<double> frequencies_;  // empty, or of your own
  std::vector<T> cosine_, sine_;
  // A pointer that only the constructor sets: a translation unit without a Rope compiles no kernels.
  const detail::RopeKernels<T>& (*kernels_)() = detail::kernels<detail::RopeKernels<T>>;
};

namespace detail {

template <class T, int Rank>
void check_rope_views(const char* function, const View<const T, Rank>& in, const View<T, Rank>& out) {
  static_assert(Rank >= 2 && Rank <= 4, "ssmax::rope: views are [..., position, channel] of rank 2 to 4");
  check_view(function, "in", in);
  check_output(function, "out", out);
  check_same_extents(function, "out", out, "in", in);
  check_in_place_or_no_overlap(function, "out", out, "in", in);
}

/// Rotates all rows. Neighbouring rows have consecutive positions.
template <class T>
void rotate_all(const View<const T, 4>& in, const View<T, 4>& out, const RopeTables<T>& rope, index_t start,
                bool inverse) {
  for (index_t b = 0; b < in.extent(0); ++b) {
    for (index_t h = 0; h < in.extent(1); ++h) {
      rotate(rope, {&in(b, h, 0, 0), in.stride(2)}, {&out(b, h, 0, 0), out.stride(2)}, in.extent(2),
             in.extent(3), {start, b}, inverse);
    }
  }
}

template <class T, int Rank>
void rope_from(const char* function, const View<const T, Rank>& in, const View<T, Rank>& out,
               const Rope<T>& rope, index_t start, bool inverse) {
  check_rope_views(function, in, out);
  rope.check(function, "in", start, in.extent(Rank - 2), in.extent(Rank - 1));
  check_rope_sequences(function, rope.tables(), with_rank<4>(in).extent(0));
  if (!in.empty()) rotate_all(with_rank<4>(in), with_rank<4>(out), rope.tables(), start, inverse);
}

template <class T, int Rank>
void rope_at(const char* function, const View<const T, Rank>& in, const View<T, Rank>& out,
             const Rope<T>& rope, Integers positions, bool inverse) {
  check_rope_views(function, in, out);
  const index_t rows = in.extent(Rank - 2);
  check_equal(function, "positions", "has extent", std::ssize(positions), "positions of in are", rows);
  for (index_t position : positions) rope.check(function, "positions", position, 1, in.extent(Rank - 1));
  check_rope_sequences(function, rope.tables(), with_rank<4>(in).extent(0));
  if (in.empty()) return;
  const auto from = with_rank<4>(in);
  const auto to = with_rank<4>(out);
  for (index_t b = 0; b < from.extent(0); ++b) {
    for (index_t h = 0; h < from.extent(1); ++h) {
      for (index_t p = 0; p < rows; ++p) {
        rotate(rope.tables(), {&from(b, h, p, 0), from.stride(2)}, {&to(b, h, p, 0), to.stride(2)}, 1,
               from.extent(3), {positions[static_cast<std::size_t>(p)], b}, inverse);
      }
    }
  }
}

}  // namespace detail

/// Rotates each row [..., position, channel] of `in` to position start + its index and writes the row to `out`. Views
/// have rank 2 to 4. `out` may be the memory of `in`. Otherwise `out` must not overlap `in`. Throws
/// std::invalid_argument before any write, also for a position that is missing in the tables.
template <class T, int Rank>
void rope(std::type_identity_t<View<const T, Rank>> in, View<T, Rank> out, const Rope<T>& tables,
          index_t start) {
  detail::rope_from("rope", in, out, tables, start, false);
}

/// Rotates each row to the position that `positions` has for its index. Batch entries and heads share the positions.
/// The function checks every position before any write.
template <class T, int Rank>
void rope(std::type_identity_t<View<const T, Rank>> in, View<T, Rank> out, const Rope<T>& tables,
          Integers positions) {
  detail::rope_at("rope", in, out, tables, positions, false);
}

/// Writes the gradient of the input from the gradient of the output: the transpose of rope.
template <class T, int Rank>
void rope_backward(std::type_identity_t<View<const T, Rank>> dout, View<T, Rank> din, const Rope<T>& tables,
                   index_t start) {
  detail::rope_from("rope_backward", dout, din, tables, start, true);
}

/// Writes the gradient of the input for a rope with a position for every index.
template <class T, int Rank>
void rope_backward(std::type_identity_t<View<const T, Rank>> dout, View<T, Rank> din, const Rope<T>& tables,
                   Integers positions) {
  detail::rope_at("rope_backward", dout, din, tables, positions, true);
}

SSMAX_END
/// @}
