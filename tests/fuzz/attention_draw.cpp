// Draws cases of attention.
#include <set>

#include "attention.hpp"

namespace fuzz {
namespace {

/// Extents around the widths of vectors, the 16 queries from which tiles are used, and the edges of blocks of keys.
index_t draw_extent(Random& random, index_t most) {
  const index_t extent =
      random.chance(0.5)
          ? random.between(1, 9)
          : random.pick<index_t>({1,  2,  4,  8,  13, 15, 16,  17,  18,  23,  31,  32,  33,  48,   49,
                                  63, 64, 65, 80, 96, 97, 127, 128, 129, 240, 241, 255, 257, 1024, 1100});
  return std::min(extent, most);
}

std::vector<double> draw_values(Random& random, index_t count, Element element, double deviation) {
  std::vector<double> values;
  const bool few = random.chance(0.1);  // then ties are frequent, and sums exact
  for (index_t i = 0; i < count; ++i) {
    const double value = few ? static_cast<double>(random.between(-2, 2)) : deviation * random.normal();
    values.push_back(rounded(element, value));
  }
  return values;
}

/// What a layout's broadcasts leave of a tensor: all that share an element get the value of the first.
void share(std::vector<double>& values, const std::array<index_t, 4>& e, const Layout& layout) {
  const auto at = [&](index_t a, index_t b, index_t c, index_t d) {
    return static_cast<std::size_t>(((a * e[1] + b) * e[2] + c) * e[3] + d);
  };
  reference::for_each_index(e, [&](index_t a, index_t b, index_t c, index_t d) {
    values[at(a, b, c, d)] =
        values[at(layout.broadcast[0] ? 0 : a, layout.broadcast[1] ? 0 : b, layout.broadcast[2] ? 0 : c, d)];
  });
}

void draw_shape(Random& random, AttentionCase& c) {
  const double budget = random.chance(0.03) ? 1'500'000 : random.chance(0.3) ? 150'000 : 20'000;
  for (;;) {
    c.batch = random.chance(0.01) ? 0 : random.pick<index_t>({1, 1, 1, 2, 3});
    c.kv_heads = random.pick<index_t>({1, 1, 2, 3});
    c.heads = c.kv_heads * random.pick<index_t>({1, 1, 1, 2, 3, 4, 8});
    c.queries = random.chance(0.01) ? 0 : draw_extent(random, 300);
    const bool has_chunks = c.call == Call::partial && random.chance(0.3);
    c.keys = random.chance(0.02)   ? 0
             : has_chunks          ? random.pick<index_t>({1025, 1100, 2049, 2100})
             : random.chance(0.01) ? random.pick<index_t>({1023, 2049, 3100})
                                   : draw_extent(random, 1100);
    c.d = random.chance(0.02) ? 0 : draw_extent(random, 100);
    c.dv = random.chance(0.02) ? 0 : random.chance(0.5) ? c.d : draw_extent(random, 100);
    const double products =
        static_cast<double>(c.batch * c.heads * c.queries * c.keys) * static_cast<double>(c.d + c.dv + 4);
    const double sizes =
        static_cast<double>(c.batch * c.heads * (c.queries + c.keys)) * static_cast<double>(c.d + c.dv);
    if (products * (c.call == Call::backward ? 2 : 1) <= budget && sizes <= budget * 4) return;
  }
}

void draw_rope(Random& random, AttentionCase& c) {
  if (c.d < 2 || c.keys == 0 || c.queries == 0 || c.batch == 0 || !random.chance(0.25)) return;
  ssmax::RopeOptions options;
  options.width = 2 * random.between(1, c.d / 2);
  if (random.chance(0.5)) options.width = c.d / 2 * 2;
  options.theta = random.pick({10'000.0, 100.0, 500'000.0});
  options.pairing = random.chance(0.5) ? ssmax::Pairing::interleaved : ssmax::Pairing::half_split;
  if (random.chance(0.2)) options.scaling = ssmax::RopeScaling::linear(4);
  if (c.call == Call::decode) {
    c.rope_positions = c.keys + random.between(0, 3);
    c.rope = options;
    return;
  }
  const auto [low_query, high_query] = std::ranges::minmax(c.mask.of_query);
  const auto [low_key, high_key] = std::ranges::minmax(c.mask.of_key);
  const index_t low = std::min(low_query, low_key), high = std::max(high_query, high_key);
  options.first_position = random.chance(0.1) ? 100'000 : random.between(0, 4);
  c.key_position = options.first_position - low + random.between(0, 3);
  c.rope_positions = high + c.key_position - options.first_position + 1 + random.between(0, 2);
  c.rope = options;
}

/// Frequencies of its own, several axes, other channels, a factor.
void draw_rope_details(Random& random, AttentionCase& c) {
  ssmax::RopeOptions& options = *c.rope;
  if (random.chance(0.3)) options.first_channel = random.between(0, c.d - options.width);
  if (random.chance(0.3)) options.attention_factor = random.pick({0.5, 1.25});
  const bool has_frequencies = random.chance(0.3), has_axes = random.chance(0.4);
  for (index_t pair = 0; pair < options.width / 2; ++pair) {
    if (has_frequencies) c.frequencies.push_back(random.chance(0.2) ? 0 : random.uniform(-1, 1));
    if (has_axes) c.axes.push_back(random.between(0, 2));
  }
  if (has_frequencies) {
    options.theta = ssmax::RopeOptions{}.theta;
    options.scaling = {};
  }
  if (!has_axes) return;
  c.rope_sequences = random.chance(0.6) ? c.batch : 1;
  for (index_t i = 0; i < 3 * c.rope_sequences * c.rope_positions; ++i)
    c.axis_positions.push_back(random.between(-9, 99));
}

/// NaN in keys that no query sees, and now and then in one that some do.
void draw_poison(Random& random, AttentionCase& c) {
  if (c.keys == 0 || c.queries == 0 || c.batch == 0) return;
  const auto poison = [&](std::vector<double>& values, index_t row, index_t width) {
    for (index_t i = 0; i < width; ++i) values[static_cast<std::size_t>(row * width + i)] = nan;
  };
  if (random.chance(0.4)) {
    reference::for_each_index({c.batch, c.kv_heads, c.keys}, [&](index_t b, index_t h, index_t key) {
      bool seen = false;
      Query q{b, 0, 0, c.mask.shape};
      for (q.head = h * c.group(); q.head < (h + 1) * c.group(); ++q.head) {
        for (q.index = 0; q.index < c.queries; ++q.index) seen = seen || c.mask.sees(q, key);
      }
      if (seen) return;
      const index_t row = (b * c.kv_heads + h) * c.keys + key;
      poison(c.k, row, c.d);
      poison(c.v, row, c.dv);
    });
  }
  // A bias of -inf hides a key, but need not keep a NaN in it out of the row (score.hpp).
  const bool hides = std::ranges::count(c.score.bias, -infinity) > 0;
  if (c.call == Call::backward || hides || !random.chance(0.05)) return;
  const index_t row = random.between(0, c.batch * c.kv_heads * c.keys - 1);
  if (random.chance(0.5) && c.d > 0) {
    c.k[static_cast<std::size_t>(row * c.d + random.between(0, c.d - 1))] = nan;
  } else if (c.dv > 0) {
    c.v[static_cast<std::size_t>(row * c.dv + random.between(0, c.dv - 1))] = nan;
  }
}

/// How a cache comes to hold its keys: sequences of other lengths, appended in pieces.
void draw_cache(Random& random, AttentionCase& c, std::vector<index_t>& lengths) {
  if (c.batch > 0 && random.chance(0.6)) {
    for (index_t& length : lengths) length = random.between(0, c.keys);
    lengths[static_cast<std::size_t>(random.between(0, c.batch - 1))] = c.keys;
  }
  const index_t shortest = lengths.empty() ? c.keys : *std::ranges::min_element(lengths);
  c.queries = std::min(c.queries, shortest);
  c.capacity = std::max<index_t>(1, c.keys + random.between(0, 3));
  c.ring = random.chance(0.35);
  if (c.ring && c.keys > 1) c.capacity = std::max(c.queries, random.between(1, c.keys + 2));
  c.capacity = std::max<index_t>(c.capacity, 1);
  std::vector<index_t> left = lengths;
  while (std::ranges::any_of(left, [](index_t l) { return l > 0; })) {
    std::vector<index_t> counts;
    const bool all = random.chance(0.2);
    for (index_t& l : left) {
      counts.push_back(all ? l : random.between(0, l));
      l -= counts.back();
    }
    c.appends.push_back(counts);
  }
}

}  // namespace

AttentionCase draw_attention(Random& random, Call call, const Options& options, bool runs) {
  AttentionCase c{};
  c.call = call;
  c.element = random.pick({Element::f32, Element::f32, Element::f64, Element::f16, Element::bf16});
  c.stored = c.element;
  if (call == Call::decode && c.element == Element::f32 && random.chance(0.5)) c.stored = Element::f16;
  draw_shape(random, c);
  std::vector<index_t> lengths(static_cast<std::size_t>(c.batch), c.keys);
  if (call == Call::decode) {
    c.rotates_keys = false;
    c.d = std::max<index_t>(c.d, 1);
    c.dv = std::max<index_t>(c.dv, 1);
    draw_cache(random, c, lengths);
    if (runs) c.ring = false;
  }
  const index_t ring = c.ring && c.keys > c.capacity ? c.capacity : 0;
  c.mask = draw_mask(random, {c.batch, c.heads, c.queries, c.keys}, lengths, {.ring = ring, .runs = runs});
  c.scaling = draw_scaling(random, c.mask.shape, call == Call::backward && random.chance(0.5));
  const bool is_16_bit = c.element == Element::f16 || c.element == Element::bf16;
  c.score = draw_score(random, c.mask,
                       {.odd_names = options.odd_names,
                        .learn = call == Call::backward && random.chance(0.5),
                        .all = !is_16_bit && (call == Call::attention || call == Call::backward) &&
                               !c.scaling.learns() && !c.scaling.per_query});

  const double deviation = random.pick({0.1, 1.0, 1.0, 1.0, 3.0});
  const auto values = [&](const std::array<index_t, 4>& e, double size) {
    return draw_values(random, e[0] * e[1] * e[2] * e[3], c.element, size);
  };
  c.q = values(c.q_extents(), deviation);
  c.k = values(c.k_extents(), deviation);
  c.v = values(c.v_extents(), random.pick({1.0, 1.0, 0.01, 30.0}));
  for (Layout* layout : {&c.of_q, &c.of_k, &c.of_v}) *layout = draw_layout(random, true);
  for (Layout* layout : {&c.of_out, &c.of_lse, &c.of_dq, &c.of_dk, &c.of_dv})
    *layout = draw_layout(random, false);
  c.of_dout = draw_layout(random, true);
  c.packed = c.queries == c.keys && c.d == c.dv && c.d > 0 && call != Call::decode && random.chance(0.5);
  if (c.packed) c.of_q = c.of_k = c.of_v = {};
  if (call != Call::decode) {
    share(c.k, c.k_extents(), c.of_k);
    share(c.v, c.v_extents(), c.of_v);
  }
  share(c.q, c.q_extents(), c.of_q);
  // A broadcast would show a hidden key's NaN to all.
  if (c.of_k.broadcast == Layout{}.broadcast && c.of_v.broadcast == Layout{}.broadcast)
    draw_poison(random, c);
  draw_rope(random, c);
  if (c.rope) draw_rope_details(random, c);
  if (random.chance(0.15)) c.dropout = {random.pick({0.1, 0.5, 0.9}), random.next(), random.next()};
  if (random.chance(0.3)) c.scale = random.pick({1.0, 0.1, -0.5, 0.0, 0.3});
  if (random.chance(0.25)) {
    for (index_t h = 0; h < c.heads; ++h) c.sinks.push_back(rounded(c.computed(), 2 * random.normal()));
    if (random.chance(0.2)) c.sinks[0] = -infinity;
    c.scaled_sinks = call != Call::partial && random.chance(0.4);
  }
  c.wants_lse = call == Call::backward || random.chance(0.7);
  if (call != Call::backward && random.chance(0.3)) {
    for (bool& is_wanted : c.statistics) is_wanted = random.chance(0.8);
  }
  c.keeps_workspace = random.chance(0.5);
  c.float_products = c.element != Element::bf16 || random.chance(0.3);
  c.batch_invariant = random.chance(0.3);
  c.executor = draw_executor(random);
  if (call == Call::partial) {
    c.continues = random.chance(0.4);
    // From multiples of 1024 keys, states that continue each other are bit-identical to the whole call.
    for (index_t cut = 1024; c.continues && cut < c.keys; cut += 1024) c.cuts.push_back(cut);
    for (index_t i = c.continues ? 0 : random.between(0, 3); i > 0; --i)
      c.cuts.push_back(random.between(0, c.keys));
    std::ranges::sort(c.cuts);
    if (random.chance(0.3)) c.query_cuts.push_back(random.between(0, c.queries));
  }
  if (call == Call::backward) {
    c.dout = values(c.out_extents(), 1);
    share(c.dout, c.out_extents(), c.of_dout);
    if (random.chance(0.4)) {
      c.dlse = draw_values(random, c.batch * c.heads * c.queries, c.computed(), 1);
    }
    c.wants_dsinks = !c.sinks.empty() && random.chance(0.7);
  }
  return c;
}

std::string AttentionCase::words() const {
  constexpr const char* calls[] = {"attention", "states of attention", "decode", "attention_backward"};
  std::string text = std::string(calls[static_cast<int>(call)]) + "<" + name_of(element) + ">";
  if (call == Call::decode) text += " from a cache of " + std::string(name_of(stored));
  const auto add = [&](const char* name, index_t value) {
    text += std::string(" ") + name + " " + std::to_string(value);
  };
  add("batch", batch);
  add("heads", heads);
  add("kv_heads", kv_heads);
  add("queries", queries);
  add("keys", keys);
  add("d", d);
  add("dv", dv);
  text += "\n  mask " + mask.words + "; scaling " + scaling.words + "; score " + score.words +
          (score.learns ? ", learnt" : "");
  text += "\n  scale " + number(logit_scale()) +
          (sinks.empty()  ? ""
           : scaled_sinks ? "; scaled sinks"
                          : "; sinks") +
          (wants_lse ? "; lse" : "; no lse");
  constexpr const char* names_of_statistics[] = {"largest", "smallest", "sum_of_squares", "entropy"};
  for (std::size_t i = 0; i < 4; ++i) text += statistics[i] ? std::string("; ") + names_of_statistics[i] : "";
  if (rope) {
    text += "; rope of width " + std::to_string(rope->width) +
            (rope->pairing == ssmax::Pairing::interleaved ? " interleaved" : " half_split") + " from " +
            std::to_string(rope->first_position) + ", key_position " + std::to_string(key_position) +
            ", first_channel " + std::to_string(rope->first_channel) + ", attention_factor " +
            number(rope->attention_factor) + (frequencies.empty() ? "" : ", own frequencies") +
            (axes.empty() ? "" : ", several axes") +
            (rope_sequences > 1 ? ", positions of each sequence" : "");
  }
  if (dropout.p > 0) text += "; dropout " + number(dropout.p);
  text += "; " + executor.words() + (keeps_workspace ? "; workspace" : "") +
          (float_products ? "" : "; products of bfloat16") + (batch_invariant ? "; batch_invariant" : "");
  if (call == Call::partial) {
    text += continues ? "; states continue each other from" : "; cut at";
    for (const index_t cut : cuts) text += " " + std::to_string(cut);
    for (const index_t cut : query_cuts) text += "; queries cut at " + std::to_string(cut);
  }
  if (call == Call::decode) {
    text += std::string("\n  cache") + (ring ? " (ring)" : "") + " of capacity " + std::to_string(capacity) +
            ", lengths";
    for (const index_t length : mask.keys) text += " " + std::to_string(length);
  }
  text += "\n  q " + of_q.words() + "; k " + of_k.words() + "; v " + of_v.words() + "; out " + of_out.words();
  if (packed) text += "; q, k and v packed";
  if (call == Call::backward) {
    text += std::string("\n  dout ") + of_dout.words() + "; dq " + of_dq.words() + "; dk " + of_dk.words() +
            "; dv " + of_dv.words() + (dlse.empty() ? "" : "; dlse") + (wants_dsinks ? "; dsinks" : "");
  }
  return text;
}

void check_attention(const AttentionCase& c) {
  if (c.call == Call::decode) {
    if (c.element == Element::f64) return run_decode<double, double>(c);
    if (c.element == Element::f16) return run_decode<ssmax::half, ssmax::half>(c);
    if (c.element == Element::bf16) return run_decode<ssmax::bfloat16, ssmax::bfloat16>(c);
    if (c.stored == Element::f16) return run_decode<float, ssmax::half>(c);
    return run_decode<float, float>(c);
  }
  if (c.call == Call::backward) {
    return with_element(c.element, [&](auto zero) { run_backward<decltype(zero)>(c); });
  }
  const Forward expected = expect_forward(c);
  with_element(c.element, [&](auto zero) {
    if (c.call == Call::partial) return run_partial<decltype(zero)>(c, expected);
    run_attention<decltype(zero)>(c, expected);
  });
}

}  // namespace fuzz
