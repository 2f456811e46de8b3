// The library against PyTorch in float64 (golden/generate.py). In double this is about logic: every value
// within 1e-13. In float it is about precision, with bounds argued below; u = 2^-24 is half an ulp of one.

#include "call.hpp"
#include "golden/golden_values.hpp"

#include "test.hpp"

namespace golden_test {

using namespace ssmax;

constexpr double u = 0x1p-24;

template <class T>
std::vector<T> as(golden::Values values) {
  std::vector<T> result;
  for (const double value : values) result.push_back(static_cast<T>(value));
  return result;
}

/// The largest error in units of what tolerance(expected) allows; a missing NaN or infinity counts as infinite.
template <class T, class Tolerance>
double worst(const std::vector<T>& computed, golden::Values expected, Tolerance tolerance) {
  if (computed.size() != expected.size()) return golden::inf;
  double result = 0;
  for (std::size_t i = 0; i < computed.size(); ++i) {
    const auto value = static_cast<double>(computed[i]);
    if (value == expected[i]) continue;
    const double ratio = std::abs(value - expected[i]) / tolerance(expected[i]);
    result = std::isfinite(ratio) ? std::max(result, ratio) : golden::inf;
  }
  return result;
}

// Probabilities. The exponent a = c (z - z_max) carries at most two roundings, so exp(a) is off by 2|a|u, the
// polynomial, the sum and the division add less than 8u; and |a| <= -ln y.
template <class T>
double y_tolerance(double y) {
  return std::is_same_v<T, double> ? 1e-13 * y : y * (8 + 2 * std::abs(std::log(y))) * u;
}

// Their logarithms: the same, and |c z| <= 20 is added and subtracted again with one rounding each.
template <class T>
double log_tolerance(double log_y) {
  return std::is_same_v<T, double> ? 1e-13 * std::max(1.0, std::abs(log_y)) : (2 * std::abs(log_y) + 40) * u;
}

// Gradients. dz = c y g - c y <g, y> has two terms below 3 * 2.8 * y, each with the relative error of y, and
// y (8 + 2 |ln y|) is at most 8: 135 u. In the log form sum g, below 8, stands for <g, y>: 256 u.
template <class T>
double dz_tolerance(double dz) {
  return std::is_same_v<T, double> ? 1e-13 * std::max(1.0, std::abs(dz)) : 256 * u;
}

// ds, db, dp add such errors over at most 5 rows of 7 keys with |ln n| < 2, |z| < 6.1, without the factor 3 of c.
template <class T>
double parameter_tolerance(double value) {
  return std::is_same_v<T, double> ? 1e-13 * std::max(1.0, std::abs(value)) : 5 * 2 * 6.1 * 256 / 3 * u;
}

template <class T>
struct Parameters {
  std::vector<T> ds = std::vector<T>(golden::heads);
  std::vector<T> db = std::vector<T>(golden::heads);
  std::vector<T> dp = std::vector<T>(golden::keys);
};

template <class T>
void check_parameters(const Parameters<T>& computed, golden::Values ds, golden::Values db,
                      golden::Values dp) {
  if (!ds.empty()) CHECK(worst(computed.ds, ds, parameter_tolerance<T>) <= 1);
  if (!db.empty()) CHECK(worst(computed.db, db, parameter_tolerance<T>) <= 1);
  if (!dp.empty()) CHECK(worst(computed.dp, dp, parameter_tolerance<T>) <= 1);
}

/// gradient_of(Parameters&) gives what backward takes: the scaling itself, or its gradient into the parameters.
template <class T, class Scaling, class Mask, class GradientOf>
void check_rows(const golden::RowsCase& expected, const Scaling& scaling, const Mask& mask,
                GradientOf gradient_of, index_t keys = golden::keys) {
  const auto count = static_cast<std::size_t>(golden::heads * golden::queries * keys);
  const std::array<index_t, 3> shape{golden::heads, golden::queries, keys};
  // The case with one key per row takes the first key of each.
  std::vector<T> logits, dout;
  for (std::size_t i = 0; i < std::size(golden::logits); ++i) {
    if (static_cast<index_t>(i) % golden::keys >= keys) continue;
    logits.push_back(static_cast<T>(golden::logits[i]));
    dout.push_back(static_cast<T>(golden::dout[i]));
  }
  const View<const T, 3> logits_view(logits.data(), shape), dout_view(dout.data(), shape);

  std::vector<T> y(count), dz(count);
  const View<T, 3> y_view(y.data(), shape), dz_view(dz.data(), shape);
  ssmax::softmax(logits_view, y_view, scaling, mask);
  CHECK(worst(y, expected.y, y_tolerance<T>) <= 1);
  Parameters<T> parameters;
  ssmax::softmax_backward<T, 3>({.out = y_view, .dout = dout_view, .logits = logits_view, .dlogits = dz_view},
                                gradient_of(parameters), mask);
  CHECK(worst(dz, expected.dz, dz_tolerance<T>) <= 1);
  check_parameters(parameters, expected.ds, expected.db, expected.dp);

  if (expected.log_y.empty()) return;
  ssmax::log_softmax(logits_view, y_view, scaling, mask);
  CHECK(worst(y, expected.log_y, log_tolerance<T>) <= 1);
  Parameters<T> log_parameters;
  ssmax::log_softmax_backward<T, 3>(
      {.out = y_view, .dout = dout_view, .logits = logits_view, .dlogits = dz_view},
      gradient_of(log_parameters), mask);
  CHECK(worst(dz, expected.log_dz, dz_tolerance<T>) <= 1);
  check_parameters(log_parameters, expected.log_ds, expected.log_db, expected.log_dp);
}

template <class T, class Scaling, class Mask>
void check_fixed(const golden::RowsCase& expected, const Scaling& scaling, const Mask& mask) {
  check_rows<T>(expected, scaling, mask, [&](Parameters<T>&) { return scaling; });
}

template <class T, class Mask>
void check_ssmax(const golden::RowsCase& expected, std::span<const T> s, std::span<const T> b,
                 const Mask& mask, index_t keys = golden::keys) {
  const SSMax<T> scaling = b.empty() ? SSMax<T>{s} : SSMax<T>{s, b};
  check_rows<T>(
      expected, scaling, mask,
      [&](Parameters<T>& into) {
        return b.empty() ? scaling.gradient(into.ds) : scaling.gradient(into.ds, into.db);
      },
      keys);
}

std::vector<index_t> golden_lengths() {
  std::vector<index_t> lengths;
  for (const double length : golden::lengths) lengths.push_back(static_cast<index_t>(length));
  return lengths;
}

TEMPLATE_TEST_CASE("golden rows", "[golden]", double, float) {
  using T = TestType;
  const std::vector<index_t> visible = golden_lengths();
  const Lengths lengths{visible};
  const std::vector<T> s = as<T>(golden::s), b = as<T>(golden::b), p = as<T>(golden::p);
  SECTION("Softmax") {
    check_fixed<T>(golden::softmax_full, Softmax{}, Full{});
    check_fixed<T>(golden::softmax_causal, Softmax{}, Causal{});
    check_fixed<T>(golden::softmax_lengths, Softmax{}, lengths);
  }
  SECTION("SSMax, one s per head") {
    check_ssmax<T>(golden::ssmax_full, s, {}, Full{});
    check_ssmax<T>(golden::ssmax_causal, s, {}, Causal{});
    check_ssmax<T>(golden::ssmax_lengths, s, {}, lengths);
  }
  SECTION("SSMax with bias") {
    check_ssmax<T>(golden::ssmax_bias_full, s, b, Full{});
    check_ssmax<T>(golden::ssmax_bias_causal, s, b, Causal{});
    check_ssmax<T>(golden::ssmax_bias_lengths, s, b, lengths);
  }
  SECTION("SSMax, multipliers of both signs and zero") {
    const std::vector<T> s_signs = as<T>(golden::s_signs), b_signs = as<T>(golden::b_signs);
    check_ssmax<T>(golden::ssmax_signs_causal, s_signs, b_signs, Causal{});
    check_ssmax<T>(golden::ssmax_signs_lengths, s_signs, b_signs, lengths);
    const std::vector<T> negative{T(-0.75), T(-2)}, zero{T(0), T(0)};
    check_ssmax<T>(golden::ssmax_negative_full, negative, {}, Full{});
    check_ssmax<T>(golden::ssmax_zero_causal, zero, zero, Causal{});
  }
  SECTION("SSMax over a single key") { check_ssmax<T>(golden::ssmax_bias_one_key, s, b, Full{}, 1); }
  SECTION("SSMax without s") {
    check_fixed<T>(golden::logn_full, LogN{}, Full{});
    check_fixed<T>(golden::logn_lengths, LogN{}, lengths);
  }
  SECTION("size table") {
    const SizeTable<T> scaling{p, s, b};
    const auto gradient = [&](Parameters<T>& into) { return scaling.gradient(into.dp, into.ds, into.db); };
    check_rows<T>(golden::size_table_causal, scaling, Causal{}, gradient);
    check_rows<T>(golden::size_table_lengths, scaling, lengths, gradient);
  }
  SECTION("Qwen, Llama 4, Ministral, YaRN") {
    check_fixed<T>(golden::qwen_full, QwenLogN{golden::qwen_length}, Full{});
    check_fixed<T>(golden::qwen_causal, QwenLogN{golden::qwen_length}, Causal{});
    check_fixed<T>(golden::llama4_causal, Llama4Temperature(0.1, golden::llama4_floor), Causal{});
    check_fixed<T>(golden::ministral_causal, MinistralTemperature(0.1, golden::ministral_length), Causal{});
    check_fixed<T>(golden::yarn_causal, Constant{std::pow(yarn_mscale(golden::yarn_extension), 2)}, Causal{});
  }
}

// RoPE. Cosine and sine are rounded once to T and |x| < 4, two products and a sum: 4 * 4 u in float.
template <class T>
double rope_tolerance(double value) {
  return std::is_same_v<T, double> ? 1e-13 * std::max(1.0, std::abs(value)) : 16 * u;
}

template <class T>
void check_rope(const golden::RopeCase& expected, RopeOptions options) {
  std::vector<index_t> positions;
  for (const double position : golden::rope_positions) positions.push_back(static_cast<index_t>(position));
  const auto rows = static_cast<index_t>(positions.size());
  const std::array<index_t, 2> shape{rows, golden::rope_channels};
  const Rope<T> table{options, positions.back() + 1};
  const std::vector<T> in = as<T>(golden::rope_in), dout = as<T>(golden::rope_dout);
  const std::span<const index_t> explicit_positions = positions;

  std::vector<T> out(in.size()), din(in.size());
  ssmax::rope<T>(View<const T, 2>(in.data(), shape), View<T, 2>(out.data(), shape), table,
                 explicit_positions);
  CHECK(worst(out, expected.out, rope_tolerance<T>) <= 1);
  ssmax::rope_backward<T>(View<const T, 2>(dout.data(), shape), View<T, 2>(din.data(), shape), table,
                          explicit_positions);
  CHECK(worst(din, expected.din, rope_tolerance<T>) <= 1);

  // The first three rows lie at the positions 0, 1, 2; the last two each start where they lie.
  std::vector<T> out_by_start(in.size()), din_by_start(in.size());
  const auto run_from = [&](index_t row, index_t count) {
    const index_t offset = row * golden::rope_channels, start = positions[static_cast<std::size_t>(row)];
    const std::array<index_t, 2> part{count, golden::rope_channels};
    ssmax::rope<T>(View<const T, 2>(in.data() + offset, part), View<T, 2>(out_by_start.data() + offset, part),
                   table, start);
    ssmax::rope_backward<T>(View<const T, 2>(dout.data() + offset, part),
                            View<T, 2>(din_by_start.data() + offset, part), table, start);
  };
  run_from(0, 3);
  run_from(3, 1);
  run_from(4, 1);
  CHECK(out_by_start == out);
  CHECK(din_by_start == din);

  // In place.
  std::vector<T> turned = in;
  const View<T, 2> view(turned.data(), shape);
  ssmax::rope<T>(View<const T, 2>(view), view, table, explicit_positions);
  CHECK(turned == out);
}

TEMPLATE_TEST_CASE("golden RoPE", "[golden]", double, float) {
  using T = TestType;
  check_rope<T>(golden::rope_half_split, {.width = 10});
  check_rope<T>(golden::rope_interleaved, {.width = 10, .pairing = Pairing::interleaved});
  check_rope<T>(golden::rope_partial_half_split, {.width = 6});
  check_rope<T>(golden::rope_partial_interleaved,
                {.width = 4, .theta = 500'000, .pairing = Pairing::interleaved});
  check_rope<T>(golden::rope_linear, {.width = 10, .scaling = RopeScaling::linear(4)});
  check_rope<T>(golden::rope_ntk, {.width = 10, .scaling = RopeScaling::ntk(4)});
  check_rope<T>(golden::rope_yarn, {.width = 10, .scaling = RopeScaling::yarn(4, 2048)});
  check_rope<T>(golden::rope_llama3,
                {.width = 10, .pairing = Pairing::interleaved, .scaling = RopeScaling::llama3(8, 2048)});
}

/// Turning (1, 0) in every pair shows cosine and sine of the angles themselves.
void check_frequencies(RopeOptions options, golden::Values frequencies) {
  const auto half = static_cast<index_t>(frequencies.size());
  const Rope<double> table{options, 101};
  for (const index_t position : {1, 100}) {
    std::vector<double> x(static_cast<std::size_t>(2 * half), 0), expected(x.size());
    for (std::size_t i = 0; i < frequencies.size(); ++i) {
      x[i] = 1;
      expected[i] = std::cos(static_cast<double>(position) * frequencies[i]);
      expected[i + frequencies.size()] = std::sin(static_cast<double>(position) * frequencies[i]);
    }
    const View<double, 2> view(x.data(), {1, 2 * half});
    ssmax::rope<double>(View<const double, 2>(view), view, table, position);
    // Frequencies are printed to 5e-15, which position 100 stretches to 5e-13.
    CHECK(worst(x, expected, [](double) { return 1e-12; }) <= 1);
  }
}

TEST_CASE("golden RoPE frequencies of a wide head", "[golden]") {
  check_frequencies({.width = 64, .scaling = RopeScaling::linear(8)}, golden::rope_wide_linear_frequencies);
  check_frequencies({.width = 64, .scaling = RopeScaling::ntk(8)}, golden::rope_wide_ntk_frequencies);
  check_frequencies({.width = 64, .scaling = RopeScaling::yarn(8, 4096)}, golden::rope_wide_yarn_frequencies);
  check_frequencies({.width = 64, .theta = 500'000, .scaling = RopeScaling::llama3(8, 8192)},
                    golden::rope_wide_llama3_frequencies);
}

// Attention. A logit c * scale * <q, k> of eight products is off by (8 + 4) u of its terms' magnitudes, whose
// sum stays below 24 here (RoPE keeps norms): 288 u in lse. The outputs, |v| < 4, move by at most twice |v|
// of that, weighted by probabilities that concentrate where the logits are large.
template <class T>
double attention_tolerance(double value) {
  return std::is_same_v<T, double> ? 1e-13 * std::max(1.0, std::abs(value)) : 2 * 4 * 288 * u;
}

template <class T, class Scaling, class Mask>
void check_attention(const golden::AttentionCase& expected, const Scaling& scaling, const Mask& mask,
                     const ssmax::AttentionOptions<T>& options) {
  using namespace golden;
  const std::vector<T> q = as<T>(attention_q), k = as<T>(attention_k), v = as<T>(attention_v);
  std::vector<T> out(expected.out.size()), lse(expected.lse.size());
  ssmax::attention<ssmax::ComputeType<T>>(
      with({.q = View<const T, 4>(q.data(), {attention_batch, attention_q_heads, attention_n, attention_d}),
            .k = View<const T, 4>(k.data(), {attention_batch, attention_kv_heads, attention_m, attention_d}),
            .v = View<const T, 4>(v.data(), {attention_batch, attention_kv_heads, attention_m, attention_dv}),
            .out = View<T, 4>(out.data(), {attention_batch, attention_q_heads, attention_n, attention_dv}),
            .lse = View<T, 3>(lse.data(), {attention_batch, attention_q_heads, attention_n})},
           options),
      scaling, mask);
  CHECK(worst(out, expected.out, attention_tolerance<T>) <= 1);
  CHECK(worst(lse, expected.lse, attention_tolerance<T>) <= 1);
}

TEMPLATE_TEST_CASE("golden attention", "[golden]", double, float) {
  using T = TestType;
  const std::vector<T> s = as<T>(golden::attention_s), b = as<T>(golden::attention_b);
  const SSMax<T> with_bias{s, b};
  check_attention<T>(golden::attention_full_ssmax, with_bias, Full{}, {.scale = 0.5});
  const Rope<T> whole{{.width = 8}, golden::attention_m};
  check_attention<T>(golden::attention_causal_rope, with_bias, Causal{}, {.rope = &whole});
  const Rope<T> partial{{.width = 4, .theta = 100, .pairing = Pairing::interleaved}, golden::attention_m};
  check_attention<T>(golden::attention_causal_partial_rope, Softmax{}, Causal{}, {.rope = &partial});
}

}  // namespace golden_test
