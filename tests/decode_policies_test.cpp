// What decode makes of scalings, multipliers, ropes, masks, scores, sinks and matrices: n and positions come
// from the cache, each sequence has its own.

#include "decode_problem.hpp"
#include "test.hpp"

namespace decode_problem::decode_policies_test {

// ---- n and positions come from the cache ------------------------------------------------------------------

/// Distance of an output from what other policies would give.
template <class T>
Real distance(const Output<T>& output, const Data<T>& data, const Plan& plan) {
  return largest_error(output.out, loops<Real>(data, plan).out);
}

TEMPLATE_TEST_CASE("n and the position that a scaling sees are those of the sequence", "[decode]", float,
                   double) {
  using T = TestType;
  const std::vector<T> s{T(0.43), T(1), T(-0.2), T(0), T(0.7), T(1.3)};
  const std::vector<T> b{T(0.1), T(0), T(-0.5), T(0.7), T(1), T(-0.1)};
  const auto ln = [](index_t n) { return std::log(static_cast<Real>(n)); };
  const auto ssmax_of = [&](index_t head, Real size) {
    return Real(s[static_cast<std::size_t>(head)]) * size + Real(b[static_cast<std::size_t>(head)]);
  };
  for (const Shape& shape : few_and_many) {
    const Data<T> data(shape);
    const KvCache<T> cache = filled<T>(data, nullptr, 1000);
    const Plan log_n{.multiplier = [&](index_t, index_t, index_t n) { return ln(n); }};
    const Plan with_s{.multiplier = [&](index_t h, index_t, index_t n) { return ssmax_of(h, ln(n)); }};
    const auto of_row = [](const ssmax::Row& row) {
      return 0.5 + 0.25 * static_cast<double>(row.head) + 0.001 * static_cast<double>(row.position) -
             0.002 * static_cast<double>(row.n);
    };
    const Plan position{.multiplier = [&](index_t head, index_t p, index_t n) {
      return static_cast<Real>(of_row({head, p, n}));
    }};
    check(data, cache, Expected<T>(data, log_n), LogN{});
    check(data, cache, Expected<T>(data, with_s), SSMax<T>{s, b});
    check(data, cache, Expected<T>(data, position), of_row);

    // Not the call's queries, not the cache's capacity, not the longest sequence.
    const Output<T> output = run(data, cache, SSMax<T>{s, b});
    for (const index_t wrong : {shape.queries, index_t{1000}, index_t{300}}) {
      const Plan plan{.multiplier = [&](index_t h, index_t, index_t) { return ssmax_of(h, ln(wrong)); }};
      CHECK(distance(output, data, plan) > 0.01L);
    }
    CHECK(distance(output, data, with_s) < 1e-5L);
  }
}

TEMPLATE_TEST_CASE("multipliers may be large, negative or zero, and so may logits", "[decode][slow]", float,
                   double) {
  using T = TestType;
  for (const Shape& shape : {Shape{3, 1, 2, 16, 9, {2300, 2}}, Shape{3, 1, 7, 16, 9, {2300, 7}}}) {
    for (const double deviation : {1.0, 4.0, 40.0}) {
      const Data<T> data(shape, deviation);
      const KvCache<T> cache = filled<T>(data);
      for (const double c : {1e3, -0.5, 0.0}) {
        const Plan plan{.multiplier = [&](index_t, index_t, index_t) { return static_cast<Real>(c); }};
        check(data, cache, Expected<T>(data, plan), ssmax::Constant{c});
      }
    }
  }
}

TEMPLATE_TEST_CASE("queries are rotated to their positions in each sequence", "[decode]", float, double) {
  using T = TestType;
  const Shape long_ones{2, 1, 1, 32, 8, {1030, 1}};
  for (const ssmax::RopeOptions& turn :
       {ssmax::RopeOptions{.width = 16},
        ssmax::RopeOptions{.width = 10, .pairing = ssmax::Pairing::interleaved}}) {
    const Rope<T> rope(turn, 1030);
    for (const Shape& shape : {few_and_many[0], few_and_many[1], long_ones}) {
      const Data<T> data(shape);
      check(data, filled<T>(data, &rope), Expected<T>(data, {.rope = &turn}), Softmax{}, Causal{}, Identity{},
            {.rope = &rope});
    }
  }
}

// ---- Masks, scores, sinks ---------------------------------------------------------------------------------

TEST_CASE("masks show keys of each sequence", "[decode]") {
  const std::vector<index_t> some{4, 1, 30}, more{310, 0, 36};
  const auto at = [](const std::vector<index_t>& values, const Query& query) {
    return values[static_cast<std::size_t>(query.batch)];
  };
  const auto log_n = [](index_t, index_t, index_t n) {
    return n == 0 ? Real(1) : std::log(static_cast<Real>(n));
  };
  const auto check_mask = [&](const auto& mask, const auto& visible) {
    for (const Shape& shape : few_and_many) {
      const Data<float> data(shape);
      check(data, filled<float>(data), Expected<float>(data, {.visible = visible, .multiplier = log_n}),
            LogN{}, mask);
    }
  };
  SECTION("Full") {
    check_mask(ssmax::Full{}, [](const Query&, index_t) { return true; });
  }
  SECTION("SlidingWindow") {
    check_mask(SlidingWindow{50, 1}, [](const Query& query, index_t key) {
      return key >= query.position() - 50 && key <= query.position() + 1;
    });
    check_mask(SlidingWindow{0}, [](const Query& query, index_t key) { return key == query.position(); });
  }
  SECTION("Chunks, CausalTopLeft") {
    check_mask(ssmax::Chunks{32}, [](const Query& query, index_t key) {
      return key <= query.position() && key / 32 == query.position() / 32;
    });
    check_mask(ssmax::CausalTopLeft{}, [](const Query& query, index_t key) { return key <= query.index; });
  }
  SECTION("PrefixLM") {
    check_mask(ssmax::PrefixLM{more}, [&](const Query& query, index_t key) {
      return key <= query.position() || key < at(more, query);
    });
  }
  SECTION("KeyLengths") {
    check_mask(KeyLengths{some}, [&](const Query& query, index_t key) { return key < at(some, query); });
    check_mask(KeyLengths{more} & Causal{}, [&](const Query& query, index_t key) {
      return key < at(more, query) && key <= query.position();
    });
  }
  SECTION("Where, with queries without a visible key") {
    const auto pick = [](const Query& query, index_t key) {
      return query.head != 4 && (key % 3 == 1 || key == query.position() || key > 290);
    };
    check_mask(Causal{} & ssmax::Where(pick),
               [&](const Query& query, index_t key) { return key <= query.position() && pick(query, key); });
  }
}

// Positions restart with every document, and what a rotation does depends on differences of positions alone.
TEST_CASE("a document's queries are rotated as its keys in the cache were", "[decode]") {
  const ssmax::RopeOptions turn{.width = 16};
  const Rope<float> rope(turn, 100);
  for (const index_t queries : {2, 7}) {
    const Data<float> data({6, 2, queries, 16, 9, {100, 100}});
    const std::vector<index_t> ends_of_queries{0, 0, queries}, ends_of_keys{0, 60, 100};
    const auto visible = [](const Query& query, index_t key) { return key >= 60 && key <= query.position(); };
    const ssmax::Documents documents(ends_of_queries, ends_of_keys, true);
    check(data, filled<float>(data), Expected<float>(data, {.visible = visible}), Softmax{}, documents);
    check(data, filled<float>(data, &rope), Expected<float>(data, {.visible = visible, .rope = &turn}),
          Softmax{}, documents, Identity{}, {.rope = &rope});
  }
}

TEST_CASE("CausalTopLeft rotates queries over a cache to their index", "[decode]") {
  const Rope<float> rope({.width = 16}, 100);
  const Data<float> data({6, 2, 7, 16, 9, {100, 100}});
  const KvCache<float> cache = filled<float>(data, &rope);
  std::vector<float> out(static_cast<std::size_t>(2 * 6 * 7 * 9)), expected = out;
  const View<const float, 4> q(data.q.data(), {2, 6, 7, 16});
  ssmax::attention({.q = q, .keys = cache, .out = {out.data(), {2, 6, 7, 9}}, .rope = &rope},
                   ssmax::CausalTopLeft{});
  ssmax::attention({.q = q,
                    .k = {data.k.data(), {2, 2, 100, 16}},
                    .v = {data.v.data(), {2, 2, 100, 9}},
                    .out = {expected.data(), {2, 6, 7, 9}},
                    .rope = &rope},
                   ssmax::CausalTopLeft{});
  Real error = 0;
  for (std::size_t i = 0; i < out.size(); ++i)
    error = worse(error, std::abs(static_cast<Real>(out[i]) - static_cast<Real>(expected[i])));
  CHECK(error < 2e-6L);
}

TEST_CASE("score functions receive the positions of each sequence", "[decode]") {
  const std::vector<double> slopes = ssmax::Alibi::slopes(6);
  const auto alibi = [&](Real z, index_t head, index_t distance) {
    return z + Real(slopes[static_cast<std::size_t>(head)]) * static_cast<Real>(distance);
  };
  const auto absolute = [&](Real z, index_t head, index_t distance) {
    return alibi(z, head, -std::abs(distance));
  };
  const auto every_key = [](const Query&, index_t) { return true; };
  const auto cap = [](Real z, index_t, index_t) { return Real(2) * std::tanh(z / 2); };
  const auto log_n = [](index_t, index_t, index_t n) { return std::log(static_cast<Real>(n)); };
  for (const Shape& shape : few_and_many) {
    const Data<float> data(shape, 2);
    const KvCache<float> cache = filled<float>(data);
    check(data, cache, Expected<float>(data, {.multiplier = log_n, .score = alibi}), LogN{}, Causal{},
          ssmax::Alibi{slopes});
    check(data, cache, Expected<float>(data, {.visible = every_key, .score = absolute}), Softmax{},
          ssmax::Full{}, ssmax::Alibi{slopes, ssmax::AlibiDistance::absolute});
    check(data, cache, Expected<float>(data, {.multiplier = log_n, .score = cap}), LogN{}, Causal{},
          ssmax::Softcap{2});
    check(data, cache,
          Expected<float>(
              data, {.multiplier = log_n,
                     .score = [&](Real z, index_t h,
                                  index_t distance) { return alibi(cap(z, h, distance), h, distance); }}),
          LogN{}, Causal{}, ssmax::Softcap{2} | ssmax::Alibi{slopes});
  }
}

TEST_CASE("sinks and the scale", "[decode]") {
  const std::vector<float> of_many{0.5F, -3, 8, 0, -std::numeric_limits<float>::infinity(), 2};
  for (const Shape& shape : few_and_many) {
    const std::vector<float> sinks(of_many.begin(), of_many.begin() + shape.heads);
    const Data<float> data(shape);
    const auto nothing_for_some = [](const Query& query, index_t key) {
      return key <= query.position() && query.head != 2;
    };
    const Plan plan{.visible = nothing_for_some, .sinks = {sinks.begin(), sinks.end()}, .scale = 0.7L};
    check(data, filled<float>(data), Expected<float>(data, plan), Softmax{},
          Causal{} & ssmax::Where(nothing_for_some), Identity{}, {.scale = 0.7, .sinks = sinks});
  }
}

TEST_CASE("masks and biases that are matrices, where all sequences are of one length", "[decode]") {
  const Shape shape{4, 2, 3, 8, 5, {70, 70}};
  const Data<float> data(shape);
  const KvCache<float> cache = filled<float>(data);
  const std::vector<float> bias = reference::normals<float>(2 * 4 * 3 * 70, 3);
  const View<const float, 4> values(bias.data(), {2, 4, 3, 70});
  std::vector<float> additive = bias;
  for (std::size_t i = 0; i < additive.size(); i += 3) additive[i] = -std::numeric_limits<float>::infinity();
  const View<const float, 4> holes(additive.data(), {2, 4, 3, 70});
  const auto visible = [&](const Query& query, index_t key) {
    return key <= query.position() && std::isfinite(holes(query.batch, query.head, query.index, key));
  };
  check(data, cache, Expected<float>(data, {.visible = visible}), Softmax{},
        Causal{} & ssmax::MatrixMask(holes));
  // A bias that depends on head and distance alone, so that the reference can say it too.
  std::vector<float> by_distance(4 * 3 * 70);
  const View<float, 4> relative(by_distance.data(), {2, 4, 3, 70}, {0, 3 * 70, 70, 1});
  for (index_t head = 0; head < 4; ++head) {
    for (index_t query = 0; query < 3; ++query) {
      for (index_t key = 0; key < 70; ++key) {
        relative(0, head, query, key) = static_cast<float>((key - (67 + query) + head) % 5) / 4;
      }
    }
  }
  const auto score = [](Real z, index_t head, index_t distance) {
    return z + static_cast<Real>((distance + head) % 5) / 4;
  };
  check(data, cache, Expected<float>(data, {.score = score}), Softmax{}, Causal{},
        ssmax::Bias<float>(View<const float, 4>(relative)));
  // Quarters are exact in every type.
  const auto check_stored = [&](auto zero) {
    using X = decltype(zero);
    std::vector<X> stored;
    for (const float x : by_distance) stored.push_back(X(x));
    const View<const X, 4> bias_of_type(stored.data(), {2, 4, 3, 70}, {0, 3 * 70, 70, 1});
    check(data, cache, Expected<float>(data, {.score = score}), Softmax{}, Causal{},
          ssmax::Bias<X>(bias_of_type));
  };
  check_stored(ssmax::half{});
  check_stored(ssmax::bfloat16{});
  check_stored(double{});
}

}  // namespace decode_problem::decode_policies_test
