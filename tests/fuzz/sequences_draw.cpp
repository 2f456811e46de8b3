// Draws cases of sequences.
#include <ssmax/attention.hpp>
#include <ssmax/eight_bit.hpp>
#include <ssmax/mask_runs.hpp>

#include "kinds.hpp"
#include "sequences.hpp"

namespace fuzz {
namespace {

using ssmax::bfloat16;
using ssmax::half;

struct Types {
  const char* words;
  index_t group;  // widths are multiples of it
  void (*run)(const SequencesCase& c);
};
constexpr Types all_types[] = {
    {"float", 1, run_sequences<float, float>},
    {"float over half and float", 1, run_sequences<float, half, float>},
    {"float over Int8", 1, run_sequences<float, ssmax::Int8>},
    {"half over Q8_0", 32, run_sequences<half, ssmax::Q8_0>},
    {"bfloat16", 1, run_sequences<bfloat16, bfloat16>},
    {"bfloat16 over Fp8E4M3, to float", 1, run_sequences<bfloat16, ssmax::Fp8E4M3, ssmax::Fp8E4M3, float>},
    {"bfloat16 over Q8_0 and bfloat16", 32, run_sequences<bfloat16, ssmax::Q8_0, bfloat16>}};

/// Frequencies of its own, and positions of each sequence on two axes.
void draw_rope_details(Random& random, SequencesCase& c) {
  const bool has_frequencies = random.chance(0.3), has_axes = random.chance(0.5);
  for (index_t pair = 0; pair < c.rope.width / 2; ++pair) {
    if (has_frequencies) c.frequencies.push_back(random.chance(0.2) ? 0 : random.uniform(-1, 1));
    if (has_axes) c.axes.push_back(random.between(0, 1));
  }
  if (!has_axes) return;
  const index_t tokens = 2 * c.rope_positions();  // of both axes
  for (index_t i = 0; i < c.sequences() * tokens; ++i) c.positions.push_back(random.between(-9, 999));
  if (c.rotates_source_keys) return;
  // Common keys are stored once, with one rotation.
  for (const Families* families : {&c.families, &c.others}) {
    for (index_t b = 0; b < c.sequences(); ++b) {
      const auto i = static_cast<std::size_t>(b);
      for (const index_t axis : {0, 1}) {
        const auto first = c.positions.begin() + axis * c.rope_positions();
        std::copy_n(first + families->leaders[i] * tokens, families->common[i], first + b * tokens);
      }
    }
  }
}

/// Cuts prompts whose results do not depend on the cut.
void draw_prefix(Random& random, SequencesCase& c) {
  const bool may_cut = c.is_causal && (!c.seeds.empty() || c.batch_invariant);
  if (!may_cut || !random.chance(0.7)) return;
  for (index_t b = 0; b < c.sequences(); ++b) {
    const index_t queries = c.queries[static_cast<std::size_t>(b)];
    if (queries > c.length(b)) return c.prefix.clear();
    c.prefix.push_back(random.between(0, queries));
  }
}

/// Sequences that begin with the first keys of the first one.
Families draw_families(Random& random, const SequencesCase& c, index_t common) {
  Families families;
  for (index_t b = 0; b < c.sequences(); ++b) {
    const auto free = [&](index_t of) { return c.length(of) - c.queries[static_cast<std::size_t>(of)]; };
    const bool joins = b > 0 && common > 0 && random.chance(0.8);
    families.leaders.push_back(joins ? 0 : b);
    families.common.push_back(joins ? std::clamp<index_t>(std::min(free(0), free(b)), 0, common) : 0);
  }
  return families;
}

void draw_lengths(Random& random, SequencesCase& c, bool may_share, bool are_many) {
  const index_t common =
      may_share ? random.pick<index_t>({1024, 1024, 1024, 2048}) + random.between(0, 40) : 0;
  const index_t queries = may_share ? random.between(1, std::max<index_t>(1, 18 * c.kv_heads / c.heads))
                                    : random.pick<index_t>({1, 4, 9, 40});
  const bool fits = c.has_rope || c.kind == SequencesCase::Kind::tree || random.chance(0.8);
  const index_t count =
      are_many ? random.between(300, 900) : random.between(may_share ? 2 : 1, may_share ? 3 : 5);
  for (index_t b = 0; b < count; ++b) {
    const index_t most = are_many ? 3 : random.pick<index_t>({5, 5, 40, 130, 300});
    c.lengths.push_back(may_share && random.chance(0.8) ? common + random.between(0, most)
                                                        : random.between(0, most));
    const index_t own = may_share && random.chance(0.7) ? queries
                        : random.chance(0.1)            ? 0
                                                        : random.between(1, queries);
    c.queries.push_back(fits ? std::min(own, c.lengths.back()) : own);
  }
  c.families = draw_families(random, c, common);
  c.others = draw_families(random, c, common);
  c.has_others = random.chance(may_share ? 0.7 : 0.1);
}

}  // namespace

void run_sequences(Random& random, const Options&, std::string& words) {
  SequencesCase c{};
  c.seed = random.next();
  c.types = static_cast<int>(random.between(0, std::ssize(all_types) - 1));
  const Types& types = all_types[c.types];
  const bool are_many = random.chance(0.04), may_share = !are_many && random.chance(0.15);
  // 1. Extents.
  const auto width = [&] {
    return types.group * (types.group > 1 ? random.between(1, 2) : random.between(1, may_share ? 9 : 40));
  };
  c.kv_heads = are_many ? 1 : random.pick<index_t>({1, 1, 2, 3});
  c.heads = are_many ? 1 : c.kv_heads * random.pick<index_t>({1, 1, 2, 4, 8});
  c.d = are_many ? types.group : width();
  c.dv = random.chance(0.5) ? c.d : width();
  c.page = random.pick<index_t>({1, 5, 16, 64, 128});
  c.has_rope = c.d > 1 && random.chance(0.5);
  c.kind = random.pick({SequencesCase::Kind::range, SequencesCase::Kind::range, SequencesCase::Kind::runs,
                        SequencesCase::Kind::tree});
  draw_lengths(random, c, may_share, are_many);
  if (random.chance(0.05)) c.queries.assign(c.queries.size(), 0);
  // 2. Options.
  if (c.has_rope) {
    c.rope.width = 2 * random.between(1, c.d / 2);
    c.rope.first_channel = random.between(0, c.d - c.rope.width);
    c.rope.attention_factor = random.pick({1.0, 1.25});
    c.rotates_source_keys = random.chance(0.4);
    c.key_position = c.rotates_source_keys ? random.between(0, 9) : 0;
    draw_rope_details(random, c);
  }
  c.rounded_rotation = random.chance(0.3);
  c.float_products = random.chance(0.3);
  c.batch_invariant = random.chance(0.4);
  c.wants_lse = random.chance(0.7);
  c.executor = draw_executor(random);
  if (random.chance(0.2)) {
    for (index_t h = 0; h < c.heads; ++h) c.sinks.push_back(static_cast<float>(random.normal()));
    c.scaled_sinks = random.chance(0.4);
  }
  if (random.chance(0.2)) {
    c.dropout = {.p = 0.3, .offset = random.next()};
    for (index_t b = 0; b < c.sequences(); ++b) c.seeds.push_back(random.next());
  }
  // 3. The layout of the rows.
  const index_t most = *std::ranges::max_element(c.queries), least = *std::ranges::min_element(c.queries);
  c.packed = random.chance(0.5);
  c.gives_lengths = c.packed || most > least || random.chance(0.7);
  c.rows = most + (c.gives_lengths ? random.between(0, 2) : 0);
  // 4. The mask.
  const QueryShape longest{c.sequences(), c.heads, most, c.longest()};
  if (c.kind == SequencesCase::Kind::tree) {
    for (index_t i = 0; i < most; ++i) c.parents.push_back(random.between(-1, i - 1));
    const index_t window =
        random.chance(0.5) ? std::numeric_limits<index_t>::max() : random.between(1, c.longest() + 1);
    hold(c.mask, ssmax::Tree(c.parents, window));
    c.mask.words = "Tree";
  } else if (c.kind == SequencesCase::Kind::runs) {
    c.mask = draw_run_mask(random, longest, RunMasks::of_any_queries);
  } else {
    const index_t left = random.between(0, c.longest()), right = random.between(0, 3);
    c.is_causal = true;
    switch (random.between(0, 4)) {
      case 0:
        hold(c.mask, ssmax::Full{});
        c.mask.words = "Full";
        c.is_causal = false;
        break;
      case 1:
        hold(c.mask, ssmax::SlidingWindow(left, right));
        c.is_causal = right == 0;
        c.mask.words = "SlidingWindow(" + std::to_string(left) + ", " + std::to_string(right) + ")";
        break;
      case 2:
        hold(c.mask, ssmax::Chunks(left + 1));
        c.mask.words = "Chunks(" + std::to_string(left + 1) + ")";
        break;
      default:
        hold(c.mask, ssmax::Causal{});
        c.mask.words = "Causal";
    }
  }
  draw_prefix(random, c);
  // 5. Other numbers of queries, for a plan.
  if (c.gives_lengths && !c.has_rope && c.kind == SequencesCase::Kind::range && random.chance(0.1)) {
    for (const index_t n : c.queries)
      c.refilled.push_back(c.packed ? n + random.between(0, c.sequences() > 7 ? 0 : 1)
                                    : random.between(0, c.rows));
  }
  words = c.words();
  types.run(c);
  if (!c.refilled.empty()) check_backward_plan(c);
}

std::string SequencesCase::words() const {
  std::string text = std::string("sequences of ") + all_types[types].words;
  const auto add = [&](const char* name, index_t value) {
    text += std::string(" ") + name + " " + std::to_string(value);
  };
  const auto list = [&](const char* name, const std::vector<index_t>& numbers) {
    text += std::string("\n  ") + name;
    for (std::size_t i = 0; i < std::min<std::size_t>(numbers.size(), 12); ++i)
      text += " " + std::to_string(numbers[i]);
    if (numbers.size() > 12) add("… of", std::ssize(numbers));
  };
  add("heads", heads);
  add("kv_heads", kv_heads);
  add("d", d);
  add("dv", dv);
  add("page", page);
  list("keys", lengths);
  list("common keys", families.common);
  if (has_others) list("common keys of the other source", others.common);
  list("queries", queries);
  list("queries of a first call of each sequence", prefix);
  list("queries that refill the lengths of a plan", refilled);
  text += packed ? "; packed" : gives_lengths ? "; padded" : "; no lengths";
  text += "\n  mask " + mask.words + "; " + executor.words();
  if (has_rope) add("; rope of width", rope.width);
  if (has_rope) add("from channel", rope.first_channel);
  if (!frequencies.empty()) text += ", own frequencies";
  if (!positions.empty()) text += ", positions of each sequence on two axes";
  if (!seeds.empty()) text += "; dropout";
  if (rotates_source_keys) add("; rotate_source_keys, key_position", key_position);
  text += std::string(rounded_rotation ? "; rounded_rotation" : "") +
          (float_products ? "; float_products" : "") + (batch_invariant ? "; batch_invariant" : "") +
          (sinks.empty()  ? ""
           : scaled_sinks ? "; scaled sinks"
                          : "; sinks") +
          (wants_lse ? "; lse" : "");
  return text;
}

}  // namespace fuzz
