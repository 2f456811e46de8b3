#include "score.hpp"

#include "finding.hpp"

namespace fuzz {
namespace {

std::vector<Part> parts_of(ScoreKind kind) {
  using enum ScoreKind;
  switch (kind) {
    case identity:
      return {};
    case softcap:
      return {Part::softcap};
    case alibi:
      return {Part::alibi};
    case bias:
    case bias_half:
    case bias_bfloat16:
      return {Part::bias};
    case run:
      return {Part::run};
    case softcap_alibi:
      return {Part::softcap, Part::alibi};
    case alibi_bias:
      return {Part::alibi, Part::bias};
    case sloped_bias:
      return {Part::sloped_bias};
    case nested:
      return {Part::own, Part::softcap, Part::bias, Part::alibi};
    default:
      return {Part::own};
  }
}

const char* name_of(ScoreKind kind) {
  constexpr const char* names[] = {"Identity",
                                   "Softcap",
                                   "Alibi",
                                   "Bias",
                                   "Bias<half>",
                                   "Bias<bfloat16>",
                                   "the user's",
                                   "ScaleInvariant",
                                   "Softcap | Alibi",
                                   "Alibi | Bias",
                                   "(the user's | Softcap) | (Bias | Alibi)",
                                   "SlopedBias<half>",
                                   "the user's with slope(int)",
                                   "the user's with int row(Query)",
                                   "the user's with row(int)",
                                   "the user's with apply(T*, index_t, int = 3)",
                                   "the user's with first() and second()",
                                   "the user's derived from Alibi"};
  return names[static_cast<int>(kind)];
}

bool reads_matrix(ScoreKind kind) {
  return std::ranges::any_of(parts_of(kind),
                             [](Part part) { return part == Part::bias || part == Part::sloped_bias; });
}

template <Breadth breadth>
bool is_compiled(const DrawnMask& mask, ScoreKind kind) {
  if (mask.positions && mask.predicate) return Kinds<PositionPredicateMask, breadth>::has(kind);
  if (mask.positions) return Kinds<PositionMask, breadth>::has(kind);
  if (mask.predicate) return Kinds<PredicateMask, breadth>::has(kind);
  return Kinds<RangeMask, breadth>::has(kind);
}

}  // namespace

DrawnScore draw_score(Random& random, const DrawnMask& mask, const ScoreNeeds& needs) {
  DrawnScore drawn;
  // A matrix has one number of keys for all of the batch.
  bool same_keys = true;
  for (const index_t of_entry : mask.keys) same_keys = same_keys && of_entry == mask.shape.keys;
  const auto fits = [&](ScoreKind kind) {
    const bool odd = kind >= ScoreKind::named_slope;
    if (reads_matrix(kind) && !same_keys) return false;
    const bool compiled =
        needs.all ? is_compiled<Breadth::all>(mask, kind) : is_compiled<Breadth::some>(mask, kind);
    return compiled && (!odd || (needs.odd_names && random.chance(0.3)));
  };
  if (random.chance(0.6)) {
    do {
      drawn.kind = static_cast<ScoreKind>(random.between(0, static_cast<index_t>(ScoreKind::derived_alibi)));
    } while (!fits(drawn.kind));
  }
  drawn.words = name_of(drawn.kind);
  drawn.parts = parts_of(drawn.kind);
  drawn.learns = needs.learn && has_parameters(drawn.kind);
  drawn.cap = random.pick({0.5, 5.0, 30.0});
  drawn.tau = random.pick({0.3, 10.0});
  // Of some, the table ends before the distances do.
  drawn.run = std::make_shared<ssmax::ScaleInvariant>(drawn.tau, random.pick<index_t>({0, 7, 100, 1000}));
  const QueryShape& shape = mask.shape;
  for (index_t h = 0; h < shape.heads; ++h) drawn.slopes.push_back(random.pick({0.5, 0.0, -0.25, 0.07}));
  if (random.chance(0.4)) drawn.distance = ssmax::AlibiDistance::absolute;
  if (drawn.distance == ssmax::AlibiDistance::absolute) drawn.words += ", distances of Alibi absolute";
  if (!reads_matrix(drawn.kind)) return drawn;
  drawn.heads = draw_matrix_heads(random, shape.heads);
  drawn.words += drawn.heads.words();
  drawn.extents = {shape.batch, drawn.heads.count, shape.queries, shape.keys};
  index_t stride = 1;
  for (std::size_t i = 4; i-- > 0;) {
    if (random.chance(i == 3 ? 0.1 : 0.2)) {
      drawn.words += " broadcast" + std::to_string(i);
      continue;
    }
    drawn.strides[i] = stride;
    stride = stride * std::max<index_t>(drawn.extents[i], 1) + (random.chance(0.2) ? 3 : 0);
  }
  // SlopedBias takes no -inf.
  const double hidden = random.chance(0.2) && drawn.kind != ScoreKind::sloped_bias ? 0.1 : 0;
  if (hidden > 0) drawn.words += " with -inf";
  for (index_t i = 0; i < stride; ++i) {
    // Held by every type.
    const double value = rounded(Element::bf16, rounded(Element::f16, random.normal()));
    drawn.bias.push_back(hidden > 0 && random.chance(hidden) ? -infinity : value);
  }
  for (const double value : drawn.bias) {
    drawn.bias_float.push_back(static_cast<float>(value));
    drawn.bias_half.push_back(narrow<ssmax::half>(value));
    drawn.bias_bfloat16.push_back(narrow<ssmax::bfloat16>(value));
  }
  return drawn;
}

}  // namespace fuzz
