// Attention's gradients against PyTorch's autograd in float64 (golden/generate.py): masks, scores, scalings,
// sinks, rope and a scale, with all parameters.

#include "call.hpp"
#include "golden/golden_values.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace golden_backward_test {

using namespace ssmax;

constexpr index_t batch = golden::attention_batch, heads = golden::attention_q_heads,
                  kv_heads = golden::attention_kv_heads, queries = golden::gradients_queries,
                  keys = golden::gradients_keys, d = golden::gradients_d, dv = golden::gradients_dv;

template <class T>
std::vector<T> as(golden::Values values) {
  std::vector<T> result;
  for (const double value : values) result.push_back(static_cast<T>(value));
  return result;
}

/// Everything that the golden gradients depend on, and where ours go.
template <class T>
struct Model {
  std::vector<T> q = as<T>(golden::gradients_q), k = as<T>(golden::gradients_k),
                 v = as<T>(golden::gradients_v), dout = as<T>(golden::gradients_dout),
                 dlse = as<T>(golden::gradients_dlse), sinks = as<T>(golden::gradients_sinks),
                 s = as<T>(golden::attention_s), b = as<T>(golden::attention_b), p = as<T>(golden::p),
                 by_head = as<T>(golden::gradients_bias_by_head),
                 by_key = as<T>(golden::gradients_bias_by_key);
  std::vector<double> slopes = as<double>(golden::gradients_slopes);
  std::vector<T> out = dout, lse = dlse, dq = q, dk = k, dv = v, ds = std::vector<T>(heads), db = ds,
                 dp = std::vector<T>(keys), dsinks = ds;
  std::vector<double> dslopes = std::vector<double>(heads), dbias = std::vector<double>();

  auto ssmax() { return SSMax<T>{s, b}.gradient(ds, db); }
  auto table() { return SizeTable<T>{p, s, b}.gradient(dp, ds, db); }
  auto alibi() { return Alibi(slopes).gradient(dslopes); }
  auto bias(const std::vector<T>& values, const std::array<index_t, 4>& strides) {
    dbias.assign(values.size(), 0);
    const std::array<index_t, 4> extents{batch, heads, queries, keys};
    return Bias(View<const T, 4>(values.data(), extents, strides))
        .gradient(View<double, 4>(dbias.data(), extents, strides));
  }
  auto bias_by_head() { return bias(by_head, {0, queries * keys, keys, 1}); }
  auto bias_by_key() { return bias(by_key, {keys, 0, 0, 1}); }
};

/// Errors relative to the larger of the value and one, in units of half an ulp of one; a NaN is infinitely wrong.
template <class T, class G>
double worst(const std::vector<G>& computed, golden::Values expected) {
  if (computed.size() != expected.size()) return golden::inf;
  double result = 0;
  for (std::size_t i = 0; i < computed.size(); ++i) {
    const auto value = static_cast<double>(computed[i]);
    if (value == expected[i]) continue;
    const double error = std::abs(value - expected[i]) / std::max(1.0, std::abs(expected[i]));
    result = std::isfinite(error) ? std::max(result, error) : golden::inf;
  }
  return result / (static_cast<double>(std::numeric_limits<T>::epsilon()) / 2);
}

/// In double the printed digits are the limit: 5e-15, 45 half ulps of one. In float, logits carry a few roundings of
/// numbers below 8, multipliers of up to 3 enlarge them, and sums of up to 40 terms below 16 follow.
template <class T>
constexpr double tolerance = 512;

template <class T, class S, class M, class C>
void check(Model<T>& model, const golden::GradientCase& expected, const S& scaling, const M& mask,
           const C& score, const ssmax::AttentionOptions<T>& options = {}) {
  const std::array<index_t, 4> of_q{batch, heads, queries, d}, of_k{batch, kv_heads, keys, d},
      of_v{batch, kv_heads, keys, dv}, of_out{batch, heads, queries, dv};
  const std::array<index_t, 3> of_rows{batch, heads, queries};
  const View<const T, 4> q(model.q.data(), of_q), k(model.k.data(), of_k), v(model.v.data(), of_v);
  const View<T, 4> out(model.out.data(), of_out);
  const View<T, 3> lse(model.lse.data(), of_rows);
  for_each_target([&](const std::string&) {
    for (auto* values : {&model.ds, &model.db, &model.dp, &model.dsinks}) std::ranges::fill(*values, T(0));
    for (auto* values : {&model.dslopes, &model.dbias}) std::ranges::fill(*values, 0.0);
    ssmax::attention<ssmax::ComputeType<T>>(with({.q = q, .k = k, .v = v, .out = out, .lse = lse}, options),
                                            scaling, mask, score);
    ssmax::attention_backward<ssmax::ComputeType<T>>(
        backward_with({.q = q, .k = k, .v = v, .out = out, .lse = lse}, options),
        {.dout = {model.dout.data(), of_out},
         .dlse = {model.dlse.data(), of_rows},
         .dq = {model.dq.data(), of_q},
         .dk = {model.dk.data(), of_k},
         .dv = {model.dv.data(), of_v},
         .dsinks = options.sinks.empty() ? std::span<T>() : std::span<T>(model.dsinks)},
        scaling, mask, score);
    CHECK(worst<T>(model.out, expected.out) <= tolerance<T>);
    CHECK(worst<T>(model.lse, expected.lse) <= tolerance<T>);
    CHECK(worst<T>(model.dq, expected.dq) <= tolerance<T>);
    CHECK(worst<T>(model.dk, expected.dk) <= tolerance<T>);
    CHECK(worst<T>(model.dv, expected.dv) <= tolerance<T>);
    CHECK(worst<T>(model.ds, expected.ds) <= tolerance<T>);
    CHECK(worst<T>(model.db, expected.db) <= tolerance<T>);
    if (!expected.dp.empty()) CHECK(worst<T>(model.dp, expected.dp) <= tolerance<T>);
    if (!expected.dslopes.empty()) CHECK(worst<T>(model.dslopes, expected.dslopes) <= tolerance<T>);
    if (!expected.dbias.empty()) CHECK(worst<T>(model.dbias, expected.dbias) <= tolerance<T>);
    if (!expected.dsinks.empty()) CHECK(worst<T>(model.dsinks, expected.dsinks) <= tolerance<T>);
  });
}

bool is_picked(const Query& query, index_t key) { return (3 * query.index + query.head + 5 * key) % 4 != 1; }
bool is_some(const Query& query, index_t key) { return query.index % 2 == 0 && key >= 2; }

TEMPLATE_TEST_CASE("golden gradients of attention", "[golden][attention][backward]", double, float) {
  using T = TestType;
  Model<T> model;
  const Softcap softcap(golden::gradients_cap);
  SECTION("full") { check(model, golden::gradients_full, model.ssmax(), Full{}, Identity{}); }
  SECTION("causal, rope") {
    const Rope<T> rope({.width = 4}, keys);
    check(model, golden::gradients_causal_rope, model.ssmax(), Causal{}, Identity{}, {.rope = &rope});
  }
  SECTION("a window, a softcap, a table of sizes, a scale") {
    check(model, golden::gradients_window_table, model.table(), ssmax::SlidingWindow(2, 1), softcap,
          {.scale = golden::gradients_scale});
  }
  SECTION("padding, ALiBi") {
    std::vector<index_t> lengths;
    for (const double length : golden::gradients_lengths) lengths.push_back(static_cast<index_t>(length));
    check(model, golden::gradients_padded_alibi, model.ssmax(), ssmax::KeyLengths{lengths} & Causal{},
          model.alibi());
  }
  SECTION("a predicate, a bias with -inf for all batches") {
    check(model, golden::gradients_picked_bias, model.ssmax(), Where(is_picked), model.bias_by_head());
  }
  SECTION("sinks, rows without a visible key") {
    check(model, golden::gradients_some_sinks, model.ssmax(), Where(is_some), Identity{},
          {.sinks = model.sinks});
  }
  SECTION("everything") {
    const Rope<T> rope({.width = 2, .pairing = ssmax::Pairing::interleaved}, keys + 11);
    check(model, golden::gradients_all, model.ssmax(), Causal{},
          softcap | model.bias_by_key() | model.alibi(),
          {.scale = golden::gradients_scale, .rope = &rope, .key_position = 11, .sinks = model.sinks});
  }
  SECTION("scores in another order") {
    check(model, golden::gradients_all_reversed, model.table(), Where(is_picked),
          model.alibi() | model.bias_by_head() | softcap, {.sinks = model.sinks});
  }
}

}  // namespace golden_backward_test
