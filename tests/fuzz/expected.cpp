// What should come out of a case: the references' loops, computed in numbers that carry their own bounds.
#include "../attention_backward_problem.hpp"
#include "../dropout_reference.hpp"
#include "attention.hpp"

namespace fuzz {
namespace {

using attention_problem::Gradients;

/// The score by its definition, part by part.
struct Formula {
  static constexpr bool given = true;
  const AttentionCase* c;

  template <class R>
  R after(Part part, R z, const Query& q, index_t key) const {
    const DrawnScore& s = c->score;
    switch (part) {
      case Part::softcap: {
        const R limit = static_cast<R>(s.cap);
        return z == -std::numeric_limits<R>::infinity() ? z : limit * tanh(z / limit);
      }
      case Part::alibi:
        return z + static_cast<R>(s.slopes[static_cast<std::size_t>(q.head)]) *
                       static_cast<R>(alibi_distance(q, key));
      case Part::run: {
        const R a = factor<R>(q, key);
        return a * (z - a) + R(1);
      }
      case Part::bias:
        return z + static_cast<R>(s.bias_at(q, key));
      case Part::sloped_bias:
        return z +
               static_cast<R>(s.slopes[static_cast<std::size_t>(q.head)]) * static_cast<R>(s.bias_at(q, key));
      default:
        return own_score(z, q.head, q.index, key, distance(q, key));
    }
  }
  /// The scale-invariant score's, as it is once the library has rounded it.
  template <class R>
  R factor(const Query& q, index_t key) const {
    const auto t = static_cast<Real>(std::abs(distance(q, key)));
    const Real a = std::sqrt(1 + 2 * std::log1p(t / static_cast<Real>(c->score.tau)));
    return R(a, Bounded::unit * a);
  }
  template <class R>
  R slope(Part part, R z, const Query& q, index_t key) const {
    if (part == Part::own) return own_derivative(z);
    if (part == Part::run) return factor<R>(q, key);
    if (part != Part::softcap) return R(1);
    const R t = tanh(z / static_cast<R>(c->score.cap));
    return (R(1) - t) * (R(1) + t);
  }
  index_t distance(const Query& q, index_t key) const {
    return c->mask.key_position(q.batch, key) - c->mask.query_position(q);
  }
  index_t alibi_distance(const Query& q, index_t key) const {
    const bool is_absolute = c->score.distance == ssmax::AlibiDistance::absolute;
    return is_absolute ? -std::abs(distance(q, key)) : distance(q, key);
  }

  template <class R>
  R operator()(R z, const Query& q, index_t key) const {
    for (const Part part : c->score.parts) z = after(part, z, q, key);
    return z;
  }
  template <class R>
  R derivative(R z, const Query& q, index_t key) const {
    R product = 1;
    for (const Part part : c->score.parts) {
      product *= slope(part, z, q, key);
      z = after(part, z, q, key);
    }
    return product;
  }
  /// dz arrives at the last part.
  template <class R>
  void collect(R z, R dz, R size, const Query& q, index_t key, Gradients<R>& into) const {
    std::vector<R> before;
    for (const Part part : c->score.parts) {
      before.push_back(z);
      z = after(part, z, q, key);
    }
    const DrawnScore& s = c->score;
    for (std::size_t i = before.size(); i-- > 0;) {
      const Part part = s.parts[i];
      if (part == Part::alibi) {
        into.dslopes.add(static_cast<std::size_t>(q.head), dz * static_cast<R>(alibi_distance(q, key)), size);
      } else if (part == Part::bias) {
        into.dbias.add(s.bias_index(q, key), dz, size);
      }
      dz *= slope(part, before[i], q, key);
    }
  }
};

/// The case as reference::attend takes it.
struct Definition {
  const AttentionCase* c;
  Real scale;
  Formula score;
  bool scaled_sinks;

  explicit Definition(const AttentionCase& a)
      : c(&a), scale(a.logit_scale()), score{&a}, scaled_sinks(a.scaled_sinks) {}
  bool visible(const Query& q, index_t key) const { return c->mask.sees(q, key); }
  Bounded multiplier(const Query& q, index_t n) const {
    return c->scaling.formula({{q.head, c->mask.row_position(q), n}, q.batch, q.index});
  }
  Real sink(index_t head) const {
    return c->sinks.empty() ? -reference::infinity
                            : static_cast<Real>(c->sinks[static_cast<std::size_t>(head)]);
  }
  Real dropout_factor(const Query& q, index_t key) const {
    const ssmax::Dropout& dropout = c->dropout;
    if (dropout.p <= 0) return 1;
    const index_t position = q.index + c->mask.keys[static_cast<std::size_t>(q.batch)] - c->queries;
    if (reference::is_dropped(dropout, q.batch, q.head, position, key)) return 0;
    return 65536 / (65536 - std::rint(static_cast<Real>(dropout.p) * 65536));
  }
};

std::vector<Bounded> exact(const std::vector<double>& values) { return {values.begin(), values.end()}; }

/// The bf16 path splits a rotated number into two of bfloat16, high and low: the relative error, a third of what
/// attention_backward.hpp grants to a logit. Otherwise 0. The path leaves out the product of two low numbers: another
/// third, which turn_both adds to that of q.
Real split_error = 0;

/// Turns rows [batch, head, row, d] to their positions or, where sign is -1, back. Adds the relative error `split`.
template <class Position>
void turn(std::vector<Bounded>& values, const std::array<index_t, 4>& extents, const AttentionCase& c,
          index_t sign, Real split, const Position& position) {
  const ssmax::RopeOptions& options = *c.rope;
  const index_t half = options.width / 2;
  const bool neighbours = options.pairing == ssmax::Pairing::interleaved;
  Bounded* row = values.data();
  for (index_t batch = 0; batch < extents[0]; ++batch) {
    for (index_t head = 0; head < extents[1]; ++head) {
      for (index_t at = 0; at < extents[2]; ++at, row += extents[3]) {
        for (index_t i = 0; i < half; ++i) {
          const Real omega = c.frequencies.empty()
                                 ? std::pow(static_cast<Real>(options.theta),
                                            -2 * static_cast<Real>(i) / static_cast<Real>(options.width)) /
                                       static_cast<Real>(options.scaling.factor)
                                 : static_cast<Real>(c.frequencies[static_cast<std::size_t>(i)]);
          const Real angle = static_cast<Real>(c.rope_position(batch, position(batch, head, at), i)) * omega;
          const Real factor = omega == 0 ? 1 : static_cast<Real>(options.attention_factor);
          // Angles are formed in double.
          const Real error = factor * (Bounded::unit + std::abs(angle) * 0x1p-51L);
          const Bounded cosine(factor * std::cos(angle), error),
              sine(static_cast<Real>(sign) * factor * std::sin(angle), error);
          Bounded& a = row[options.first_channel + (neighbours ? 2 * i : i)];
          Bounded& b = row[options.first_channel + (neighbours ? 2 * i + 1 : i + half)];
          const Bounded before = a;
          a = before * cosine - b * sine;
          b = b * cosine + before * sine;
          a.error += split * std::abs(a.value);
          b.error += split * std::abs(b.value);
        }
      }
    }
  }
}

void turn_both(const AttentionCase& c, std::vector<Bounded>& q, std::vector<Bounded>& k, index_t sign) {
  if (!c.rope) return;
  const Real split = sign < 0 ? 0 : split_error;
  turn(q, c.q_extents(), c, sign, c.rotates_keys ? 2 * split : split,
       [&](index_t batch, index_t head, index_t i) {
         const Query query{batch, head, i, c.mask.shape};
         // A cache's keys stand where they were appended, whatever the mask says.
         if (!c.rotates_keys) return i + c.mask.keys[static_cast<std::size_t>(batch)] - c.queries;
         return c.key_position + c.mask.query_position(query);
       });
  if (!c.rotates_keys) return;
  turn(k, c.k_extents(), c, sign, split,
       [&](index_t batch, index_t, index_t key) { return c.key_position + c.mask.key_position(batch, key); });
}

reference::Inputs<Bounded> inputs_of(const AttentionCase& c) {
  reference::Inputs<Bounded> inputs{exact(c.q),    exact(c.k),    exact(c.v),
                                    c.q_extents(), c.k_extents(), c.v_extents()};
  turn_both(c, inputs.q, inputs.k, 1);
  return inputs;
}

/// Whether a target of this machine has products of bfloat16.
bool has_bfloat16_products() {
  const TargetScope scope;
  return std::ranges::any_of(ssmax::available_targets(), [](ssmax::Target target) {
    ssmax::set_active_target(target);
    return attention_problem::has_bfloat16_products();
  });
}

void set_unit(const AttentionCase& c) {
  Bounded::unit = static_cast<Real>(unit_of(c.element));
  Bounded::flushed = is_wide(c.element) ? 0x1p-1010L : 0x1p-118L;
  static const bool may_round = has_bfloat16_products();
  Bounded::rounded_weight = split_error = 0;
  if (c.float_products || !may_round) return;
  // The bounds of attention.hpp and attention_backward.hpp, which the allowance is not to multiply: each weight
  // and the sum of all are within this. With RoPE, one rounding more of a row that a gradient is multiplied by.
  Bounded::rounded_weight = (0x1p-8L + 1.2e-4L) / allowance;
  if (c.rope && c.call == Call::backward) Bounded::rounded_weight *= 1.5L;
  if (c.rope) split_error = 0x1p-16L / 3 / allowance;
}

/// The keys of a query whose c·z is not -inf.
struct SeenKeys {
  std::vector<Bounded> z, logits;  // logits: c·z
  Real c = 0;
  Bounded sink;

  SeenKeys(const Definition& definition, const reference::Inputs<Bounded>& inputs, const Query& query) {
    const View<const Bounded, 4> q = inputs.q_view(), k = inputs.k_view();
    const index_t kv_head = query.head / definition.c->group();
    std::vector<index_t> keys;
    for (index_t key = 0; key < k.extent(2); ++key) {
      if (definition.visible(query, key)) keys.push_back(key);
    }
    const bool sees_any = !keys.empty();
    const Bounded multiplier = sees_any ? definition.multiplier(query, std::ssize(keys)) : Bounded();
    c = multiplier.value;
    sink = reference::sink_term<Bounded>(definition, query.head, multiplier, sees_any);
    for (const index_t key : keys) {
      Bounded dot;
      for (index_t i = 0; i < q.extent(3); ++i)
        dot += q(query.batch, query.head, query.index, i) * k(query.batch, kv_head, key, i);
      const Bounded of_key = definition.score(Bounded(definition.scale) * dot, query, key);
      if (of_key.value == -reference::infinity) continue;
      z.push_back(of_key);
      logits.push_back(multiplier * of_key);
    }
  }
  bool has_nan() const {
    return std::ranges::any_of(logits, [](const Bounded& logit) { return std::isnan(logit.value); });
  }
};

/// The largest and the smallest z: the library rounds x = c·z·log2(e), and divides x by c·log2(e).
std::pair<Bounded, Bounded> bounds_of(const SeenKeys& seen) {
  Bounded largest = -reference::infinity, smallest = reference::infinity;
  // In place of a c of 0, the library takes 2^-100.
  const Real flushed = Bounded::flushed / (seen.c == 0 ? 0x1p-100L : std::abs(seen.c));
  Real error = 0;
  for (const Bounded& z : seen.z) {
    largest = std::max(largest, z);
    smallest = std::min(smallest, z);
    error = std::max(error, z.error + 2 * Bounded::unit * std::abs(z.value) + flushed);
  }
  return {{largest.value, error}, {smallest.value, error}};
}

/// Σ p² and -Σ p·ln p.
std::pair<Bounded, Bounded> squares_and_entropy(const SeenKeys& seen) {
  Bounded top = seen.sink, sum, squares, entropy;
  for (const Bounded& logit : seen.logits) top = std::max(top, logit);
  for (const Bounded& logit : seen.logits) sum += exp(logit - top);
  if (seen.sink.value != -reference::infinity) sum += exp(seen.sink - top);
  for (const Bounded& logit : seen.logits) {
    const Bounded ln_p = logit - top - log(sum), p = exp(logit - top) / sum;
    squares += p * p;
    if (p.value > 0) entropy += -p * ln_p;
  }
  // The library adds w·(x - shift), and ln of the sum once.
  entropy.error += 4 * Bounded::unit * (1 + std::abs(entropy.value));
  return {squares, entropy};
}

std::array<std::vector<Bounded>, 4> expect_statistics(const AttentionCase& c,
                                                      const reference::Inputs<Bounded>& inputs) {
  std::array<std::vector<Bounded>, 4> result;
  const Definition definition(c);
  reference::for_each_index({c.batch, c.heads, c.queries}, [&](index_t batch, index_t head, index_t index) {
    const SeenKeys seen(definition, inputs, {batch, head, index, c.mask.shape});
    const auto [largest, smallest] = bounds_of(seen);
    const auto [squares, entropy] = squares_and_entropy(seen);
    const Bounded all[] = {largest, smallest, squares, entropy};
    for (std::size_t i = 0; i < 4; ++i) result[i].push_back(seen.has_nan() ? Bounded(nan) : all[i]);
  });
  return result;
}

}  // namespace

Forward expect_forward(const AttentionCase& c) {
  set_unit(c);
  const auto inputs = inputs_of(c);
  auto attended = reference::attend(inputs, Definition(c));
  Forward result{std::move(attended.out), std::move(attended.lse), {}};
  if (c.wants_statistics()) result.statistics = expect_statistics(c, inputs);
  return result;
}

Backward expect_backward(const AttentionCase& c, const std::vector<double>& out) {
  set_unit(c);
  const auto inputs = inputs_of(c);
  const Definition definition(c);
  auto forward = reference::attend(inputs, definition);
  if (c.element == Element::f16 || c.element == Element::bf16) forward.out = exact(out);
  auto g = reference::differentiate(inputs, exact(c.dout), exact(c.dlse), forward, definition);
  turn_both(c, g.dq, g.dk, -1);
  return {std::move(g.dq),
          std::move(g.dk),
          std::move(g.dv),
          std::move(g.dc.values),
          std::move(g.dsinks.values),
          std::move(g.dslopes.values),
          std::move(g.dbias.values)};
}

void check_scaling_gradients(const AttentionCase& c, const std::vector<Bounded>& dc,
                             const std::string& where) {
  for (const ParameterGradient& gradient : c.scaling.gradients) {
    std::vector<Bounded> expected(gradient.size);
    Bounded::unit = static_cast<Real>(std::max(unit_of(c.element), unit_of(gradient.element)));
    Query q{0, 0, 0, c.mask.shape};
    std::size_t row = 0;
    for (q.batch = 0; q.batch < c.batch; ++q.batch) {
      for (q.head = 0; q.head < c.heads; ++q.head) {
        for (q.index = 0; q.index < c.queries; ++q.index, ++row) {
          PlacedRow scaled{{q.head, c.mask.row_position(q), 0}, q.batch, q.index};
          for (index_t key = 0; key < c.keys; ++key) scaled.n += c.mask.sees(q, key) ? 1 : 0;
          if (scaled.n > 0) expected[gradient.index(scaled)] += Bounded(gradient.weight(scaled)) * dc[row];
        }
      }
    }
    check_values(where + " " + gradient.name, gradient.values(), expected, gradient.element);
  }
}

}  // namespace fuzz
