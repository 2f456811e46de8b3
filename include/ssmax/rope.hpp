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
/// RopeOptions::frequencies are ω of your own. A pair with ω = 0 is not rotated and not multiplied by m. So Gemma 4's
/// global layers are a rope of width 512 whose ω are 0 from pair 64 on. Exception: an infinity or NaN in one channel of
/// such a pair makes the other channel NaN.
///
/// A second constructor takes positions on several axes (MRoPE): pair i of token t rotates by positions(axes[i],
/// t)·ω_i. Each sequence of a batch may have positions of its own.
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
#include <concepts>
#include <limits>
#include <numbers>
#include <span>
#include <vector>

#include "detail/checks/views.hpp"
#include "detail/rope/tables.hpp"
#include "detail/rope/views.hpp"
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
  /// ω of your own, finite, one for each of the width / 2 pairs, in place of θ and scaling. Empty: ω of θ and scaling.
  /// A Rope copies the frequencies.
  KeptSpan<const double> frequencies{};
};

SSMAX_END

SSMAX_BEGIN_CODE
namespace detail {

/// Upper bound of the width: wider tables would take gigabytes.
inline constexpr index_t max_rope_width = index_t{1} << 24;

inline void require_of_rope(bool holds, const char* what) {
  if (!holds) fail_format("ssmax::Rope: %s", what);
}

/// Throws unless there is a finite frequency for each pair, and theta and scaling have no effect.
inline void check_frequencies(const RopeOptions& options) {
  const std::span<const double> frequencies = options.frequencies;
  check_equal("Rope", "frequencies", "has extent", std::ssize(frequencies), "pairs are", options.width / 2);
  require_of_rope(
      std::all_of(frequencies.begin(), frequencies.end(), [](double omega) { return std::isfinite(omega); }),
      "frequencies must be finite");
  require_of_rope(options.theta == RopeOptions{}.theta && options.scaling.method == RopeScaling::Method::none,
                  "frequencies replace theta and scaling, which must have their default values");
}

/// Throws unless the options determine ω.
inline void check_rope(const RopeOptions& options) {
  if (options.width < 2 || options.width % 2 != 0) {
    fail_value("Rope", "width", "is", options.width, "must be even and at least", 2);
  }
  if (options.width > max_rope_width)
    fail_value("Rope", "width", "is", options.width, "must be at most", max_rope_width);
  if (!options.frequencies.empty()) return check_frequencies(options);
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

/// Throws unless the options and `positions` of each of `sequences` make tables.
inline void check_rope(const RopeOptions& options, index_t positions, index_t sequences) {
  check_rope(options);
  if (positions < 1) fail_value("Rope", "positions", "are", positions, "must be at least", 1);
  check_at_least("Rope", "sequences", sequences, 1);
  constexpr index_t most = std::numeric_limits<index_t>::max();
  // A table has at most `width` numbers per position.
  if (positions > most / static_cast<index_t>(sizeof(double)) / options.width / sequences) {
    fail_format(
        "ssmax::Rope: positions are %td, sequences are %td and width is %td, a table's bytes must be at most "
        "%td",
        positions, sequences, options.width, most);
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

/// Returns ω of each of the width / 2 pairs, with the scaling, or a copy of `options.frequencies`. Each computed ω has
/// a relative error of 1e-14. Throws std::invalid_argument if width, theta, scaling or frequencies are out of range.
inline std::vector<double> rope_frequencies(const RopeOptions& options) {
  detail::check_rope(options);
  if (!options.frequencies.empty()) return {options.frequencies.begin(), options.frequencies.end()};
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

/// Tables of cos and sin, T = float or double. The tables have 2·sequences·positions·(width / 2) elements, or twice
/// as many if interleaved.
template <class T>
class Rope {
 public:
  /// Makes the tables for positions [first_position, first_position + positions). Throws std::invalid_argument for
  /// options out of range, for positions < 1, and for tables of more bytes than index_t holds. Throws std::bad_alloc
  /// if the memory is not available.
  Rope(const RopeOptions& options, index_t positions) : Rope(options, positions, 1) {
    fill([first = options.first_position](index_t p, std::size_t) { return first + p; });
  }

  /// Makes the tables of tokens that have a position on each of several axes (MRoPE). `positions` is [axis, token] or
  /// [sequence, axis, token], and `axes` has an axis for each of the width / 2 pairs. Token t rotates pair i by the
  /// angle positions(axes[i], t)·ω_i. With one axis, all `axes` are 0.
  ///
  /// For attention and caches, t + first_position is the position of the token. A call takes a rope with positions of
  /// several sequences if it has as many sequences. Exception: PagedKvCache throws. With positions of one sequence, all
  /// sequences of a call have these positions. Over MPI, every rank passes the same `positions` and `axes`. The ranks
  /// compare `axes` and the number of sequences, but not `positions`.
  ///
  /// Throws like the other constructor, also if `axes` has another extent than width / 2 or if an axis is missing in
  /// `positions`.
  template <class Index, int Rank>
  requires(std::same_as<const Index, const index_t> && (Rank == 2 || Rank == 3))
      Rope(const RopeOptions& options, View<Index, Rank> positions, Integers axes)
      : Rope(options, positions.extent(Rank - 1), Rank == 3 ? positions.extent(0) : 1) {
    const View<const index_t, 3> all = detail::with_rank<3>(positions);
    detail::check_axes(options, all, axes);
    for (index_t axis : axes) axes_.push_back(axis);
    fill([&](index_t p, std::size_t i) { return all(p / positions_, axes[i], p % positions_); });
  }

  /// Returns the options. Their `frequencies` are the copies of this rope, which must outlive them.
  [[nodiscard]] RopeOptions options() const {
    RopeOptions result = options_;
    result.frequencies = frequencies_;
    return result;
  }
  /// Returns the number of rotated channels.
  [[nodiscard]] index_t width() const { return options_.width; }
  /// Returns the first position of the tables.
  [[nodiscard]] index_t first_position() const { return options_.first_position; }
  /// Returns the number of positions in the tables, of each sequence.
  [[nodiscard]] index_t positions() const { return positions_; }
  /// Returns the number of sequences in the tables. 1: all sequences of a call have the same positions.
  [[nodiscard]] index_t sequences() const { return sequences_; }

  /// Returns the axis of each pair. Empty for the constructor without axes.
  [[nodiscard]] Integers axes() const { return axes_; }

  /// Returns the tables in the form that the drivers of attention take.
  [[nodiscard]] shared::RopeTables<T> tables() const {
    return {&kernels_(),      cosine_.data(), sine_.data(),
            pitch(),          options_.width, options_.first_position,
            is_interleaved(), positions_,     options_.first_channel,
            sequences_};
  }

  /// Throws std::invalid_argument if a position of [first, first + count) is missing in the tables, or if the last
  /// rotated channel is not one of `channels`. Throws also if sequences() is neither 1 nor `sequences`, the number of
  /// sequences of the call.
  void check(const char* function, const char* name, index_t first, index_t count, index_t channels,
             index_t sequences = 1) const {
    detail::check_rope(function, name, tables(), first, count, channels, sequences);
  }

 private:
  Rope(const RopeOptions& options, index_t positions, index_t sequences)
      : options_(options), positions_(positions), sequences_(sequences) {
    detail::check_rope(options, positions, sequences);
    frequencies_.assign(options.frequencies.begin(), options.frequencies.end());
    options_.frequencies = {};
  }

  bool is_interleaved() const { return options_.pairing == Pairing::interleaved; }
  index_t pitch() const { return is_interleaved() ? options_.width : options_.width / 2; }

  /// Row p of the tables has the angles position(p, i)·ω_i. The rows of a sequence follow those of the one before.
  template <class Position>
  void fill(const Position& position) {
    const std::vector<double> frequencies = rope_frequencies(options());
    const index_t half = options_.width / 2, rows = positions_ * sequences_;
    const index_t pitch_of_row = pitch();
    const bool interleaved = is_interleaved();
    cosine_.resize(static_cast<std::size_t>(rows * pitch_of_row));
    sine_.resize(cosine_.size());
    for (index_t p = 0; p < rows; ++p) {
      for (index_t i = 0; i < half; ++i) {
        const auto pair = static_cast<std::size_t>(i);
        const double omega = frequencies[pair], angle = static_cast<double>(position(p, pair)) * omega;
        const double factor = omega == 0 ? 1 : options_.attention_factor;
        const auto c = static_cast<T>(factor * std::cos(angle)), s = static_cast<T>(factor * std::sin(angle));
        const auto at = static_cast<std::size_t>(p * pitch_of_row + (interleaved ? 2 * i : i));
        cosine_[at] = c;
        sine_[at] = interleaved ? -s : s;
        if (interleaved) {
          cosine_[at + 1] = c;
          sine_[at + 1] = s;
        }
      }
    }
  }

  RopeOptions options_;  // without frequencies
  index_t positions_, sequences_;
  std::vector<double> frequencies_;  // empty, or of your own
  std::vector<index_t> axes_;        // empty, or of each pair
  std::vector<T> cosine_, sine_;
  // A pointer that only the constructor sets: a translation unit without a Rope compiles no kernels.
  const detail::RopeKernels<T>& (*kernels_)() = detail::kernels<detail::RopeKernels<T>>;
};

/// Rotates each row [..., position, channel] of `in` to position start + its index and writes the row to `out`. Views
/// have rank 2 to 4. `out` may be the memory of `in`. Otherwise `out` must not overlap `in`. Throws
/// std::invalid_argument before any write, also for a position that is missing in the tables. A rope with positions of
/// several sequences rotates batch entry b by those of sequence b: such views have rank 4 and a batch entry per
/// sequence.
template <class T, int Rank>
void rope(std::type_identity_t<View<const T, Rank>> in, View<T, Rank> out, const Rope<T>& tables,
          index_t start) {
  detail::rope_from("rope", in, out, tables.tables(), start, false);
}

/// Rotates each row to the position that `positions` has for its index. Batch entries and heads share the positions.
/// The function checks every position before any write.
template <class T, int Rank>
void rope(std::type_identity_t<View<const T, Rank>> in, View<T, Rank> out, const Rope<T>& tables,
          Integers positions) {
  detail::rope_at("rope", in, out, tables.tables(), positions, false);
}

/// Writes the gradient of the input from the gradient of the output: the transpose of rope.
template <class T, int Rank>
void rope_backward(std::type_identity_t<View<const T, Rank>> dout, View<T, Rank> din, const Rope<T>& tables,
                   index_t start) {
  detail::rope_from("rope_backward", dout, din, tables.tables(), start, true);
}

/// Writes the gradient of the input for a rope with a position for every index.
template <class T, int Rank>
void rope_backward(std::type_identity_t<View<const T, Rank>> dout, View<T, Rank> din, const Rope<T>& tables,
                   Integers positions) {
  detail::rope_at("rope_backward", dout, din, tables.tables(), positions, true);
}

SSMAX_END
/// @}
