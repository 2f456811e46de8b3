// Scores drawn at random: as data, as their formula, and as the types that the library takes.
#pragma once

#include <array>
#include <memory>
#include <ssmax/score.hpp>
#include <string>
#include <vector>

#include "element.hpp"
#include "mask.hpp"
#include "user_types.hpp"

namespace fuzz {

/// One of what a composed score is made of.
enum class Part { softcap, alibi, run, bias, sloped_bias, own };

/// Each is a type of its own for the library.
enum class ScoreKind {
  identity,
  softcap,
  alibi,
  bias,  // of the type that is computed in
  bias_half,
  bias_bfloat16,
  own,
  run,
  softcap_alibi,
  alibi_bias,
  nested,       // (own | softcap) | (bias | alibi)
  sloped_bias,  // of half
  named_slope,  // from here on: members with the names of fast paths
  named_row,
  named_row_of_int,
  named_apply,
  named_parts,
  derived_alibi
};

struct DrawnScore {
  std::string words;
  ScoreKind kind = ScoreKind::identity;
  std::vector<Part> parts;
  double cap = 1;
  std::shared_ptr<const ssmax::ScaleInvariant> run{};
  double tau = 10;
  ssmax::AlibiDistance distance = ssmax::AlibiDistance::relative;
  std::vector<double> slopes, bias;  // of the heads; as `strides` say, broadcast where 0
  std::array<index_t, 4> extents{}, strides{};
  MatrixHeads heads;
  bool learns = false;

  // What the library points to, and where it puts gradients.
  mutable std::vector<float> bias_float;
  mutable std::vector<ssmax::half> bias_half;
  mutable std::vector<ssmax::bfloat16> bias_bfloat16;
  mutable std::vector<double> dslopes, dbias;

  std::size_t bias_index(const Query& q, index_t key) const {
    return static_cast<std::size_t>(q.batch * strides[0] + q.head % heads.count * strides[1] +
                                    q.index * strides[2] + key * strides[3]);
  }
  double bias_at(const Query& q, index_t key) const { return bias[bias_index(q, key)]; }
};

struct ScoreNeeds {
  bool odd_names, learn, all;  // all: of Breadth::all
};
DrawnScore draw_score(Random& random, const DrawnMask& mask, const ScoreNeeds& needs);

constexpr bool has_parameters(ScoreKind kind) {
  using enum ScoreKind;
  return kind == alibi || kind == bias || kind == bias_half || kind == bias_bfloat16 ||
         kind == softcap_alibi || kind == alibi_bias || kind == nested;
}

/// Calls f(score) with the score as the library takes it, with somewhere to put its gradients where `learn`
/// says so. `Kinds` says which can be asked for: others are not compiled.
template <class A, bool learn, class Kinds, class F>
void with_score(const DrawnScore& drawn, const Kinds& kinds, const F& f) {
  using enum ScoreKind;
  const auto one = [&]<ScoreKind kind>(std::integral_constant<ScoreKind, kind>, const auto& make) {
    if constexpr (Kinds::has(kind) && (!learn || has_parameters(kind))) {
      if (drawn.kind == kind) f(make());
    }
  };
  static_cast<void>(kinds);
  const auto softcap_of = [&] { return ssmax::Softcap(drawn.cap); };
  const auto alibi_of = [&] {
    const ssmax::Alibi alibi(drawn.slopes, drawn.distance);
    if constexpr (learn) {
      return alibi.gradient(drawn.dslopes);
    } else {
      return alibi;
    }
  };
  const auto bias_from = [&]<class T>(const std::vector<T>& values) {
    const ssmax::Bias<T> bias(ssmax::View<const T, 4>(values.data(), drawn.extents, drawn.strides),
                              drawn.heads.kind);
    if constexpr (learn) {
      return bias.gradient(ssmax::View<double, 4>(drawn.dbias.data(), drawn.extents, drawn.strides));
    } else {
      return bias;
    }
  };
  const auto bias_of = [&] {
    if constexpr (std::is_same_v<A, float>) {
      return bias_from(drawn.bias_float);
    } else {
      return bias_from(drawn.bias);
    }
  };
#define SSMAX_FUZZ_SCORE(kind, ...) \
  one(std::integral_constant<ScoreKind, kind>{}, [&] { return __VA_ARGS__; })
  SSMAX_FUZZ_SCORE(identity, ssmax::Identity{});
  SSMAX_FUZZ_SCORE(softcap, softcap_of());
  SSMAX_FUZZ_SCORE(alibi, alibi_of());
  SSMAX_FUZZ_SCORE(bias, bias_of());
  SSMAX_FUZZ_SCORE(bias_half, bias_from(drawn.bias_half));
  SSMAX_FUZZ_SCORE(bias_bfloat16, bias_from(drawn.bias_bfloat16));
  SSMAX_FUZZ_SCORE(own, OwnScore{});
  SSMAX_FUZZ_SCORE(run, *drawn.run);
  SSMAX_FUZZ_SCORE(softcap_alibi, softcap_of() | alibi_of());
  SSMAX_FUZZ_SCORE(alibi_bias, alibi_of() | bias_of());
  SSMAX_FUZZ_SCORE(nested,
                   ssmax::Composed(ssmax::Composed(OwnScore{}, softcap_of()), bias_of() | alibi_of()));
  SSMAX_FUZZ_SCORE(sloped_bias, ssmax::SlopedBias(ssmax::View<const ssmax::half, 4>(
                                                      drawn.bias_half.data(), drawn.extents, drawn.strides),
                                                  drawn.slopes, drawn.heads.kind));
  SSMAX_FUZZ_SCORE(named_slope, NamedSlope{});
  SSMAX_FUZZ_SCORE(named_row, NamedRow{});
  SSMAX_FUZZ_SCORE(named_row_of_int, NamedRowOfInt{});
  SSMAX_FUZZ_SCORE(named_apply, NamedApply{});
  SSMAX_FUZZ_SCORE(named_parts, NamedParts{});
  SSMAX_FUZZ_SCORE(derived_alibi, DerivedAlibi(std::span<const double>(drawn.slopes)));
#undef SSMAX_FUZZ_SCORE
}

/// How many pairs of mask and score are compiled for a call: each is code of its own.
enum class Breadth { all, some };

/// Which scores are compiled with a kind of mask: all with ranges, and enough of each way with the others.
template <class M, Breadth breadth>
struct Kinds {
  static constexpr bool has(ScoreKind kind) {
    using enum ScoreKind;
    constexpr bool all = breadth == Breadth::all;
    if (kind == identity) return true;
    if (std::is_same_v<M, RangeMask>)
      return all || kind == softcap || kind == alibi || kind == run || kind == bias || kind == nested;
    if (std::is_same_v<M, PredicateMask>) return all && (kind == softcap || kind == bias);
    if (std::is_same_v<M, PositionMask>) return all && (kind == alibi || kind == run || kind == own);
    if (std::is_same_v<M, PositionPredicateMask>) return (all && kind == softcap_alibi) || kind == nested;
    return false;
  }
};

/// Calls f(mask, score).
template <class A, Breadth breadth, bool learn = false, class F>
void with_policies(const DrawnMask& mask, const DrawnScore& score, const F& f) {
  if (mask.full && score.kind != ScoreKind::identity) {
    with_score<A, learn>(score, Kinds<RangeMask, breadth>{},
                         [&](const auto& s) { f(RangeMask{mask.mask.get()}, s); });
    return;
  }
  with_mask(mask, [&]<class M>(const M& m) {
    with_score<A, learn>(score, Kinds<M, breadth>{}, [&](const auto& s) { f(m, s); });
  });
}

}  // namespace fuzz
