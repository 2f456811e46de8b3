// The rotations of published models against the formulas of their configurations, in long double: frequencies, the
// attention factor, rows, and attention over views and caches with its backward.

#include <numbers>
#include <optional>

#include "reference_attention.hpp"
#include "rope_turns.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace rope_turns::rope_models_test {

using reference::Real;

constexpr Real two_pi = 2 * std::numbers::pi_v<Real>;

/// A rotation as the library takes it, and as the model's configuration defines it.
struct Model {
  std::string name;
  index_t channels;  // of a head
  RopeOptions options;
  std::vector<double> frequencies;  // empty: from the options
  std::vector<Real> omega;          // [pair]
  Real factor;                      // of cos and sin
  std::vector<index_t> axes{};      // [pair], or empty: the position of a token is its index
  double all_dim = 0;               // mscale_all_dim of DeepSeek, which changes the scale of logits

  template <class T>
  Rope<T> rope(index_t tokens) const {
    RopeOptions with_frequencies = options;
    with_frequencies.frequencies = frequencies;
    if (axes.empty()) return Rope<T>(with_frequencies, tokens);
    std::vector<index_t> positions;
    for (const index_t axis : {0, 1, 2}) {
      for (index_t token = 0; token < tokens; ++token) positions.push_back(position(token, axis));
    }
    return Rope<T>(with_frequencies, View<const index_t, 2>(positions.data(), {3, tokens}), axes);
  }
  /// Returns the scale of a call, or nothing for 1/√channels. DeepSeek multiplies whole logits by g(a)².
  std::optional<double> scale() const {
    if (all_dim == 0) return {};
    const double g = yarn_mscale(40, all_dim);
    return g * g / std::sqrt(192.0);
  }
  Real exact_scale() const {
    const Real g = Real(all_dim) / 10 * std::log(Real(40)) + 1;
    return all_dim == 0 ? 1 / std::sqrt(static_cast<Real>(channels)) : g * g / std::sqrt(Real(192));
  }
  /// Two tokens of text, then an image of rows of three patches: time, row and column.
  static index_t position(index_t token, index_t axis) {
    const index_t patch = token - 2;
    return patch < 0 ? token
                     : 2 + std::array{index_t{0}, patch / 3, patch % 3}[static_cast<std::size_t>(axis)];
  }
};

std::vector<Real> map(std::vector<Real> omega, const std::function<Real(std::size_t, Real)>& change) {
  for (std::size_t i = 0; i < omega.size(); ++i) omega[i] = change(i, omega[i]);
  return omega;
}

/// YaRN as transformers computes it: low and high are pairs.
std::vector<Real> yarn(index_t width, Real theta, Real factor, Real original, Real slow, Real fast,
                       bool truncate) {
  const auto pair = [&](Real turns) {
    return static_cast<Real>(width) * std::log(original / (turns * two_pi)) / (2 * std::log(theta));
  };
  Real low = pair(fast), high = pair(slow);
  if (truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max<Real>(low, 0), high = std::min<Real>(high, static_cast<Real>(width - 1));
  return map(reference::rope_frequencies(width, theta), [&](std::size_t i, Real omega) {
    const Real ramp = std::clamp<Real>((static_cast<Real>(i) - low) / (high - low), 0, 1);
    return omega / factor * ramp + omega * (1 - ramp);
  });
}

std::vector<Real> llama3(index_t width, Real theta, Real factor, Real low, Real high, Real original) {
  return map(reference::rope_frequencies(width, theta), [=](std::size_t, Real omega) {
    const Real wavelength = two_pi / omega;
    if (wavelength < original / high) return omega;
    if (wavelength > original / low) return omega / factor;
    const Real smooth = (original / wavelength - low) / (high - low);
    return (1 - smooth) * omega / factor + smooth * omega;
  });
}

/// A long factor per pair, which rises as the published ones do.
double long_factor(std::size_t pair) { return 1 + 0.08 * static_cast<double>(pair * pair) / 3; }

std::vector<Model> models() {
  std::vector<Model> all;
  all.push_back({"Llama 3.1",
                 128,
                 {.width = 128, .theta = 500'000, .scaling = RopeScaling::llama3(8, 8192, 1, 4)},
                 {},
                 llama3(128, 500'000, 8, 1, 4, 8192),
                 1});
  all.push_back({"gpt-oss",
                 64,
                 {.width = 64,
                  .theta = 150'000,
                  .scaling = RopeScaling::yarn(32, 4096, 1, 32, false),
                  .attention_factor = yarn_mscale(32)},
                 {},
                 yarn(64, 150'000, 32, 4096, 1, 32, false),
                 0.1L * std::log(32.0L) + 1});
  std::vector<double> proportional = rope_frequencies({.width = 512, .theta = 1e6});
  std::fill(proportional.begin() + 64, proportional.end(), 0);
  all.push_back({"Gemma 4, global layers",
                 512,
                 {.width = 512},
                 proportional,
                 map(reference::rope_frequencies(512, 1e6L),
                     [](std::size_t i, Real omega) { return i < 64 ? omega : 0; }),
                 1});
  all.push_back({"Ministral 3",
                 128,
                 {.width = 128,
                  .theta = 1e6,
                  .scaling = RopeScaling::yarn(16, 16'384),
                  .attention_factor = yarn_mscale(16, 1) / yarn_mscale(16, 1)},
                 {},
                 yarn(128, 1e6L, 16, 16'384, 1, 32, true),
                 1});
  all.push_back({"DeepSeek V3, latent attention",
                 576,
                 {.width = 64,
                  .pairing = Pairing::interleaved,
                  .scaling = RopeScaling::yarn(40, 4096),
                  .first_channel = 512},
                 {},
                 yarn(64, 10'000, 40, 4096, 1, 32, true),
                 1,
                 {},
                 1});
  all.push_back(all.back());
  all.back().name = "DeepSeek V2-Lite, latent attention";
  all.back().all_dim = 0.707;
  std::vector<double> divided = rope_frequencies({.width = 96});
  for (std::size_t i = 0; i < divided.size(); ++i) divided[i] /= long_factor(i);
  all.push_back({"Phi-3, LongRoPE",
                 96,
                 {.width = 96, .attention_factor = std::sqrt(1 + std::log(32.0) / std::log(4096.0))},
                 divided,
                 map(reference::rope_frequencies(96, 10'000),
                     [](std::size_t i, Real omega) { return omega / Real(long_factor(i)); }),
                 std::sqrt(1 + std::log(32.0L) / std::log(4096.0L))});
  std::vector<index_t> axes(64, 2);
  std::fill_n(axes.begin(), 16, 0);
  std::fill_n(axes.begin() + 16, 24, 1);
  all.push_back(
      {"Qwen2.5-VL", 128, {.width = 128, .theta = 1e6}, {}, reference::rope_frequencies(128, 1e6L), 1, axes});
  // A factor beside channels that are not rotated: pairs in the middle of a head, with others after them.
  all.push_back({"a part of the head, with a factor",
                 23,
                 {.width = 10, .first_channel = 3, .attention_factor = 1.5},
                 {1, 0, 0.25, -0.5, 0},
                 {1, 0, 0.25L, -0.5L, 0},
                 1.5L});
  return all;
}

/// The rotation of a row by the formula, or with direction -1 its transpose.
template <class T>
std::vector<Real> rotated(const Model& model, const T* row, index_t token, int direction = 1) {
  std::vector<Real> out(row, row + model.channels);
  const RopeOptions& options = model.options;
  for (std::size_t i = 0; i < model.omega.size(); ++i) {
    auto [a, b] = channels_of(options.pairing, options.width, static_cast<index_t>(i));
    a += static_cast<std::size_t>(options.first_channel);
    b += static_cast<std::size_t>(options.first_channel);
    if (model.omega[i] == 0) continue;
    const index_t position = model.axes.empty() ? token : Model::position(token, model.axes[i]);
    const Real angle = static_cast<Real>(direction * position) * model.omega[i];
    const Real cosine = model.factor * std::cos(angle), sine = model.factor * std::sin(angle);
    out[a] = Real(row[a]) * cosine - Real(row[b]) * sine;
    out[b] = Real(row[b]) * cosine + Real(row[a]) * sine;
  }
  return out;
}

template <class T>
std::vector<T> uniform(index_t count, unsigned seed) {
  std::vector<T> values = reference::normals<T>(static_cast<std::size_t>(count), seed);
  for (T& value : values) value = std::clamp<T>(value / 2, -1, 1);
  return values;
}

template <class T>
Real distance(const std::vector<T>& values, const std::vector<Real>& expected) {
  Real worst = values.size() == expected.size() ? 0 : reference::infinity;
  for (std::size_t i = 0; i < std::min(values.size(), expected.size()); ++i) {
    worst = reference::worse(worst, std::abs(Real(values[i]) - expected[i]));
  }
  return worst;
}

// ---- Frequencies and factors ------------------------------------------------------------------------------

TEST_CASE("models have the frequencies and the factor of their configurations", "[rope]") {
  for (const Model& model : models()) {
    INFO(model.name);
    const Turns<double> turns(model.rope<double>(2), 1);
    REQUIRE(turns.sine.size() == model.omega.size());
    Real of_omega = 0, of_factor = 0;
    for (std::size_t i = 0; i < model.omega.size(); ++i) {
      const Real omega = std::atan2(Real(turns.sine[i]), Real(turns.cosine[i])), expected = model.omega[i];
      of_omega = reference::worse(of_omega, expected == 0 ? std::abs(omega) : std::abs(omega / expected - 1));
      const Real factor = std::hypot(Real(turns.sine[i]), Real(turns.cosine[i]));
      of_factor = reference::worse(of_factor, std::abs(factor - (expected == 0 ? 1 : model.factor)));
    }
    CHECK(of_omega <= 1e-14L);
    CHECK(of_factor <= 1e-15L);
  }
}

double relative(double value, double expected) { return std::abs(value / expected - 1); }

TEST_CASE("YaRN without truncation: gpt-oss (vllm#27722, keras-hub#2981)", "[rope]") {
  const auto omega =
      rope_frequencies({.width = 64, .theta = 150'000, .scaling = RopeScaling::yarn(32, 4096, 1, 32, false)});
  CHECK(relative(omega[12], 0.006794959) <= 1e-6);
  CHECK(relative(omega[17], 1.293187e-4) <= 1e-6);
  const auto truncated =
      rope_frequencies({.width = 64, .theta = 150'000, .scaling = RopeScaling::yarn(32, 4096)});
  CHECK(relative(truncated[12], 0.007015714) <= 1e-6);
  CHECK(relative(truncated[17], 2.279478e-4) <= 1e-6);
}

TEST_CASE("YaRN's ramp may end after the last pair, up to width - 1 (keras-hub#2981)", "[rope]") {
  for (const index_t width : {64, 128}) {
    for (const bool truncate : {true, false}) {
      const auto omega =
          rope_frequencies({.width = width, .scaling = RopeScaling::yarn(8, 131'072, 1, 32, truncate)});
      const auto expected = yarn(width, 10'000, 8, 131'072, 1, 32, truncate);
      CHECK(std::abs(Real(omega.back()) / expected.back() - 1) <= 1e-14L);
      // The last pair is on the ramp: a ramp that ended at width / 2 - 1 would divide it by 8.
      CHECK(omega.back() > reference::rope_frequencies(width, 10'000).back() / 7);
    }
  }
}

TEST_CASE("g(m): exllamav3#259, mlx-lm#1507, vllm#48351, sglang#22711, mobius#548", "[rope]") {
  const auto square = [](double x) { return x * x; };
  CHECK(relative(square(yarn_mscale(8)), 1.459129) <= 1e-6);
  CHECK(relative(square(yarn_mscale(16)), 1.631390) <= 1e-6);
  CHECK(relative(square(yarn_mscale(64)), 2.004740) <= 1e-6);
  CHECK(yarn_mscale(1) == 1);
  CHECK(yarn_mscale(0.5) == 1);
  CHECK(relative(square(yarn_mscale(40, 0.707)), 1.5896) <= 1e-4);  // DeepSeek V2-Lite
  CHECK(relative(square(yarn_mscale(40, 1)), 1.8739) <= 1e-4);      // DeepSeek V3
}

TEST_CASE("Gemma 4, global layers: Megatron-Bridge#4195, coreai-models#66", "[rope]") {
  const auto omega = rope_frequencies({.width = 512, .theta = 1e6});
  CHECK(relative(omega[1], 0.947464) <= 1e-6);
  CHECK(relative(omega[63], 0.0333762) <= 1e-5);
}

TEST_CASE("dynamic NTK has one theta for all keys (transformers#46624, #25104)", "[rope]") {
  for (const auto [n, theta] :
       {std::array{1024.0, 10'000.0}, {2048, 10'000}, {4096, 30'527.737}, {8192, 72'195.860}}) {
    const auto omega = rope_frequencies({.width = 128, .scaling = RopeScaling::dynamic_ntk(2, 2048, n)});
    CHECK(relative(std::pow(omega[1], -64), theta) <= 1e-7);
  }
}

// ---- Rotations --------------------------------------------------------------------------------------------

TEST_CASE("rows of models are rotated as their configurations say", "[rope]") {
  for_each_target([](const std::string&) {
    for (const Model& model : models()) {
      INFO(model.name);
      const Rope<float> rope = model.rope<float>(4097);
      const std::vector<float> row = uniform<float>(model.channels, 1);
      for (const index_t position : {0, 1, 100, 4096}) {
        std::vector<float> out(row.size()), in_place = row, back(row.size());
        const std::array<index_t, 2> extents{1, model.channels};
        const View<const float, 2> in(row.data(), extents);
        ssmax::rope<float>(in, View<float, 2>(out.data(), extents), rope, position);
        const View<float, 2> same(in_place.data(), extents);
        ssmax::rope<float>(same, same, rope, position);
        ssmax::rope_backward<float>(in, View<float, 2>(back.data(), extents), rope, position);
        CHECK(distance(out, rotated(model, row.data(), position)) <= 1e-6L);
        CHECK(same_bits(in_place, out));
        CHECK(distance(back, rotated(model, row.data(), position, -1)) <= 1e-6L);
      }
    }
  });
}

/// Queries at positions 3 to 6 of 7 keys, whose exact results come from rows that `rotated` rotates.
template <class T>
struct Call {
  static constexpr index_t heads = 2, queries = 4, keys = 7, value_width = 5;
  Model model;
  Rope<T> rope;
  std::vector<T> q, k, v, dout;
  std::vector<T> out = std::vector<T>(heads * queries * value_width);
  std::vector<T> lse = std::vector<T>(heads * queries);
  reference::Attended<Real> expected;
  reference::Gradients<Real> gradients;

  explicit Call(const Model& of)
      : model(of),
        rope(of.rope<T>(keys)),
        q(uniform<T>(heads * queries * of.channels, 1)),
        k(uniform<T>(keys * of.channels, 2)),
        v(uniform<T>(keys * value_width, 3)),
        dout(uniform<T>(heads * queries * value_width, 4)) {
    const index_t d = model.channels;
    reference::Inputs<Real> inputs{rotate(q, queries),     rotate(k, keys), {v.begin(), v.end()},
                                   {1, heads, queries, d}, {1, 1, keys, d}, {1, 1, keys, value_width}};
    const reference::Definition definition{
        model.exact_scale(),
        {{1, heads, queries, keys}, [](const Query& query, index_t key) { return key <= query.position(); }},
        {},
        [](const Query&, index_t) { return 1; },
        [](index_t) { return -reference::infinity; }};
    expected = reference::attend(inputs, definition);
    gradients = reference::differentiate(inputs, {dout.begin(), dout.end()}, {}, expected, definition);
    gradients.dq = rotate(gradients.dq, queries, -1);
    gradients.dk = rotate(gradients.dk, keys, -1);
  }

  template <class R>
  std::vector<Real> rotate(const std::vector<R>& rows, index_t count, int direction = 1) const {
    std::vector<Real> result;
    for (index_t row = 0; row * model.channels < std::ssize(rows); ++row) {
      const auto turned =
          rotated(model, rows.data() + row * model.channels, keys - count + row % count, direction);
      result.insert(result.end(), turned.begin(), turned.end());
    }
    return result;
  }

  View<const T, 4> q_view() const { return {q.data(), {1, heads, queries, model.channels}}; }
  View<const T, 4> k_view() const { return {k.data(), {1, 1, keys, model.channels}}; }
  View<const T, 4> v_view() const { return {v.data(), {1, 1, keys, value_width}}; }
  View<T, 4> out_view() { return {out.data(), {1, heads, queries, value_width}}; }
  View<T, 3> lse_view() { return {lse.data(), {1, heads, queries}}; }

  void check_forward() {
    CHECK(distance(out, expected.out) <= tolerance);
    CHECK(distance(lse, expected.lse) <= tolerance);
    std::ranges::fill(out, T{0});
  }
  static constexpr Real tolerance = 32 * reference::rounding<T>;
};

TEMPLATE_TEST_CASE("attention rotates as models do, over views and caches, and backward",
                   "[rope][attention][backward]", float, double) {
  using T = TestType;
  for_each_target([](const std::string&) {
    for (const Model& model : models()) {
      INFO(model.name);
      Call<T> call(model);
      const index_t d = model.channels;
      attention<T>({.q = call.q_view(),
                    .k = call.k_view(),
                    .v = call.v_view(),
                    .out = call.out_view(),
                    .lse = call.lse_view(),
                    .scale = model.scale(),
                    .rope = &call.rope},
                   Causal{});
      std::vector<T> dq(call.q.size()), dk(call.k.size()), dv(call.v.size());
      attention_backward<T>({.q = call.q_view(),
                             .k = call.k_view(),
                             .v = call.v_view(),
                             .out = call.out_view(),
                             .lse = call.lse_view(),
                             .scale = model.scale(),
                             .rope = &call.rope},
                            {.dout = View<const T, 4>(call.dout.data(), {1, Call<T>::heads, Call<T>::queries,
                                                                         Call<T>::value_width}),
                             .dq = View<T, 4>(dq.data(), {1, Call<T>::heads, Call<T>::queries, d}),
                             .dk = View<T, 4>(dk.data(), {1, 1, Call<T>::keys, d}),
                             .dv = View<T, 4>(dv.data(), {1, 1, Call<T>::keys, Call<T>::value_width})},
                            Causal{});
      CHECK(distance(dq, call.gradients.dq) <= call.tolerance);
      CHECK(distance(dk, call.gradients.dk) <= call.tolerance);
      CHECK(distance(dv, call.gradients.dv) <= call.tolerance);
      call.check_forward();

      KvCache<T> cache({.width = d, .value_width = Call<T>::value_width, .capacity = Call<T>::keys});
      cache.append(call.k_view(), call.v_view(), &call.rope);
      attention<T>({.q = call.q_view(),
                    .keys = cache,
                    .out = call.out_view(),
                    .lse = call.lse_view(),
                    .scale = model.scale(),
                    .rope = &call.rope},
                   Causal{});
      call.check_forward();

      PagedKvCache<T> paged({.width = d, .value_width = Call<T>::value_width, .page = 4, .pages = 2});
      const std::vector<index_t> ids{paged.add()};
      const std::vector<index_t> sequences(static_cast<std::size_t>(Call<T>::keys), ids[0]);
      paged.append(View<const T, 3>(call.k.data(), {Call<T>::keys, 1, d}),
                   View<const T, 3>(call.v.data(), {Call<T>::keys, 1, Call<T>::value_width}), sequences,
                   &call.rope);
      attention<T>({.q = call.q_view(),
                    .keys = paged.source(ids),
                    .out = call.out_view(),
                    .lse = call.lse_view(),
                    .scale = model.scale(),
                    .rope = &call.rope},
                   Causal{});
      call.check_forward();
    }
  });
}

}  // namespace rope_turns::rope_models_test
