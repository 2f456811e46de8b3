// NaN and infinity in masked keys and values, and in queries and dout of rows without keys, leave the gradients
// bit-identical. In visible inputs, NaN affects only the results that depend on them.

#include "attention_backward_problem.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::attention_backward_hidden_test {

// ---- Masked inputs ----------------------------------------------------------------------------------------

/// Returns the number of values whose bits differ from the expected bits.
template <class T>
int count_changed(const std::vector<T>& values, const std::vector<T>& expected) {
  int changed = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) changed += same_bits(values[i], expected[i]) ? 0 : 1;
  return changed;
}

/// All results of a backward call.
template <class T>
struct All {
  Result<T> result;
  std::vector<Compute<T>> ds, db;

  void check_same(const All& expected) const {
    CHECK(count_changed(result.dq, expected.result.dq) == 0);
    CHECK(count_changed(result.dk, expected.result.dk) == 0);
    CHECK(count_changed(result.dv, expected.result.dv) == 0);
    CHECK(count_changed(result.dsinks, expected.result.dsinks) == 0);
    CHECK(count_changed(ds, expected.ds) == 0);
    CHECK(count_changed(db, expected.db) == 0);
  }
};

template <class T, class M, class C>
All<T> run_all(const Problem<T>& problem, const M& mask, const C& score, const AttentionOptions<T>& options) {
  const FourHeads<Compute<T>> heads(problem.shape.heads);
  std::vector<Compute<T>> ds(heads.s.size()), db(heads.s.size());
  Result<T> result = run_backward(problem, heads.scaling().gradient(ds, db), mask, score, options);
  return {std::move(result), std::move(ds), std::move(db)};
}

/// Writes `poison` into keys that are masked for all queries of a kv head, and into queries without visible keys.
template <class T, class Visible>
Problem<T> spoil(const Problem<T>& clean, const Visible& visible, T poison) {
  const Shape& s = clean.shape;
  Problem<T> problem = clean;
  const auto spoil_row = [&](std::vector<T>& values, index_t row, index_t width) {
    std::fill_n(values.begin() + row * width, width, poison);
  };
  for (index_t row = 0; row < clean.rows(); ++row) {
    const Query query{row / s.queries / s.heads, row / s.queries % s.heads, row % s.queries,
                      clean.query_shape()};
    bool sees = false;
    for (index_t key = 0; key < s.keys; ++key) sees = sees || visible(query, key);
    if (sees) continue;
    spoil_row(problem.q, row, s.d);
    spoil_row(problem.dout, row, s.dv);
  }
  for (index_t row = 0; row < s.batch * s.kv_heads * s.keys; ++row) {
    bool seen = false;
    for (index_t i = 0; i < s.heads / s.kv_heads * s.queries; ++i) {
      const index_t head = row / s.keys % s.kv_heads * (s.heads / s.kv_heads) + i / s.queries;
      const Query query{row / s.keys / s.kv_heads, head, i % s.queries, clean.query_shape()};
      seen = seen || visible(query, row % s.keys);
    }
    if (seen) continue;
    spoil_row(problem.k, row, s.d);
    spoil_row(problem.v, row, s.dv);
  }
  return problem;
}

template <class T, class M, class Visible, class C = Identity>
void check_hidden(const M& mask, const Visible& visible, const C& score = {},
                  AttentionOptions<T> options = {}) {
  const std::vector<Compute<T>> sinks(4, Compute<T>(0.5));
  for (const Shape& shape : few_and_many) {
    const Problem<T> clean(shape);
    if (!options.sinks.empty()) options.sinks = std::span(sinks).first(static_cast<std::size_t>(shape.heads));
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const All<T> expected = run_all(clean, mask, score, options);
      for (const float poison : {nan<float>, infinity<float>, -infinity<float>}) {
        run_all(spoil(clean, visible, T(poison)), mask, score, options).check_same(expected);
      }
      CHECK(
          std::ranges::all_of(expected.result.dq, [](T x) { return std::isfinite(static_cast<float>(x)); }));
      CHECK(std::ranges::any_of(expected.result.dq, [](T x) { return x != T(0); }));
    });
  }
}

bool is_picked(const Query& query, index_t key) {
  return query.index % 5 != 2 && key % 11 != 3 && (query.index * 7919 + query.head + key * 104729) % 5 < 3;
}

TEST_CASE("keys that are masked for all queries do not affect gradients",
          "[attention][backward][special][bfloat16]") {
  check_hidden<float>(Causal{}, before);
  check_hidden<float>(SlidingWindow(3, 1), [](const Query& query, index_t key) {
    return key >= query.position() - 3 && key <= query.position() + 1;
  });
  check_hidden<float>(Where(is_picked), is_picked);
  check_hidden<double>(Where(is_picked), is_picked);
  check_hidden<ssmax::half>(Where(is_picked), is_picked);
  check_hidden<ssmax::bfloat16>(Causal{}, before);
}

TEST_CASE("padding and keys before a sequence do not affect gradients", "[attention][backward][special]") {
  const std::vector<index_t> lengths{25, 0};
  const auto of_batch = [&](const Query& query, index_t key) {
    return key < lengths[static_cast<std::size_t>(query.batch)];
  };
  // One length per batch entry.
  struct Padding {
    const std::vector<index_t>& lengths;
    KeyRange keys(const Query& query) const { return {0, lengths[static_cast<std::size_t>(query.batch)]}; }
  };
  check_hidden<float>(Padding{lengths}, of_batch);
  check_hidden<float>(Padding{lengths} & Where(is_picked), [&](const Query& query, index_t key) {
    return of_batch(query, key) && is_picked(query, key);
  });
}

TEST_CASE("masked keys do not affect gradients with scores, sinks and rope",
          "[attention][backward][special]") {
  const std::vector<float> sinks(4);
  const ssmax::Rope<float> rope({.width = 4}, 700);
  check_hidden<float>(Where(is_picked), is_picked, Softcap(3),
                      {.rope = &rope, .key_position = 50, .sinks = sinks});
  check_hidden<float>(Causal{}, before, Softcap(3), {.rope = &rope, .key_position = 50, .sinks = sinks});
}

TEST_CASE("other documents do not affect gradients", "[attention][backward][special]") {
  const Shape shape{1, 2, 1, 90, 90, 8, 5};
  const std::vector<index_t> begins{0, 20, 21, 60, 90};
  const ssmax::Documents mask(begins, true);
  const Problem<float> clean(shape);
  for_each_target([&](const std::string& target) {
    const All<float> expected = run_all(clean, mask, Identity{}, {});
    for (std::size_t document = 0; document + 1 < begins.size(); ++document) {
      INFO(target << " document " << document);
      // One whole document is poisoned. The gradients of the others must not change.
      Problem<float> problem = clean;
      const index_t first = begins[document], count = begins[document + 1] - first;
      for (index_t head = 0; head < 2; ++head) {
        std::fill_n(problem.q.begin() + (head * 90 + first) * 8, count * 8, nan<float>);
        std::fill_n(problem.dout.begin() + (head * 90 + first) * 5, count * 5, nan<float>);
      }
      std::fill_n(problem.k.begin() + first * 8, count * 8, nan<float>);
      std::fill_n(problem.v.begin() + first * 5, count * 5, nan<float>);
      const All<float> result = run_all(problem, mask, Identity{}, {});
      const auto compare = [&](std::vector<float> values, std::vector<float> of_clean, index_t width) {
        int kept = 0;
        for (std::size_t i = 0; i < values.size(); ++i) {
          const index_t position = static_cast<index_t>(i) / width % 90;
          if (position < first || position >= first + count) continue;
          kept += std::isnan(values[i]) ? 0 : 1;
          values[i] = of_clean[i] = 0;
        }
        CHECK(kept == 0);
        CHECK(count_changed(values, of_clean) == 0);
      };
      compare(result.result.dq, expected.result.dq, 8);
      compare(result.result.dk, expected.result.dk, 8);
      compare(result.result.dv, expected.result.dv, 5);
    }
  });
}

// ---- Where NaN spreads ------------------------------------------------------------------------------------

/// Checks that values are NaN where the reference is NaN, and bit-identical to a clean run elsewhere.
template <class T, class A>
void check_nan(std::vector<T> values, std::vector<T> clean, const std::vector<A>& expected) {
  int misplaced = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool is_nan = std::isnan(static_cast<float>(values[i]));
    if (is_nan != std::isnan(expected[i])) ++misplaced;
    if (is_nan) values[i] = clean[i] = T(0.0F);
  }
  CHECK(misplaced == 0);
  CHECK(count_changed(values, clean) == 0);
}

template <class T, class M, class Visible>
void check_spread(const Shape& shape, const M& mask, const Visible& visible) {
  using Values = std::vector<T> Problem<T>::*;
  const FourHeads<Compute<T>> heads(shape.heads);
  const Problem<T> clean(shape);
  struct Place {
    const char* name;
    Values values;
    index_t width;
  };
  for (const Place& place :
       {Place{"q", &Problem<T>::q, shape.d}, Place{"k", &Problem<T>::k, shape.d},
        Place{"v", &Problem<T>::v, shape.dv}, Place{"dout", &Problem<T>::dout, shape.dv}}) {
    const auto size = static_cast<index_t>((clean.*place.values).size());
    for (const index_t at : {index_t{0}, size / 3 / place.width * place.width + 1, size / 2, size - 1}) {
      Problem<T> problem = clean;
      (problem.*place.values)[static_cast<std::size_t>(at)] = T(nan<float>);
      const auto definition = define<T>(problem, visible, heads.multiplier(), {}, {}, {});
      for_each_target_of<T>([&](const std::string& target) {
        INFO(target << ' ' << name_of(shape) << place.name << " element " << at);
        const Output<T> output = run<T>(problem, heads.scaling(), mask);
        const Result<T> result = backward(problem, output, heads.scaling(), mask);
        const Result<T> untouched = run_backward(clean, heads.scaling(), mask);
        const auto expected = gradients_of<Compute<T>>(problem, definition, {}, {}, &output);
        check_nan(result.dq, untouched.dq, expected.dq);
        check_nan(result.dk, untouched.dk, expected.dk);
        check_nan(result.dv, untouched.dv, expected.dv);
      });
    }
  }
}

TEST_CASE("NaN in visible inputs affects only the results that depend on them",
          "[attention][backward][special][slow]") {
  for (const Shape& shape : few_and_many) {
    if (shape.heads == 4) continue;  // whose fourth multiplier is 0
    check_spread<float>(shape, Causal{}, before);
    check_spread<float>(shape, Where(is_picked), is_picked);
    check_spread<float>(shape, SlidingWindow(5, 2), [](const Query& query, index_t key) {
      return key >= query.position() - 5 && key <= query.position() + 2;
    });
  }
  check_spread<double>(few_and_many[1], Causal{}, before);
  check_spread<ssmax::half>(few_and_many[1], Causal{}, before);
}

TEST_CASE("NaN in dlse affects only its row", "[attention][backward][special]") {
  const Shape shape{1, 1, 1, 33, 40, 4, 3};
  const Problem<float> clean(shape);
  Problem<float> problem = clean;
  problem.dlse[20] = nan<float>;  // this query sees keys 0 to 27
  for_each_target([&](const std::string&) {
    const Result<float> expected = run_backward(clean, Softmax{}, Causal{}),
                        result = run_backward(problem, Softmax{}, Causal{});
    std::vector<float> dq(result.dq.size()), dk(result.dk.size());
    std::fill_n(dq.begin() + 20 * 4, 4, nan<float>);
    std::fill_n(dk.begin(), 28 * 4, nan<float>);
    check_nan(result.dq, expected.dq, dq);
    check_nan(result.dk, expected.dk, dk);
    CHECK(count_changed(result.dv, expected.dv) == 0);
  });
}

}  // namespace attention_problem::backward_problem::attention_backward_hidden_test
