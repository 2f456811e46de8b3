// Calls of every function over rows, whose results tests compare between executors and layouts.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdlib>
#include <ssmax/detail/attention/terms/any_executor.hpp>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "catch.hpp"
#include "reference.hpp"
#include "same_bits.hpp"
#include "test_executors.hpp"

namespace row_calls {

using namespace ssmax;
using ssmax::shared::AnyExecutor;

/// Extents and strides of a view.
template <int Rank>
struct Layout {
  using Extents = std::array<index_t, static_cast<std::size_t>(Rank)>;
  Extents extents, strides;

  explicit Layout(const Extents& all)
      : extents(all), strides(View<const float, Rank>(nullptr, all).strides()) {}
  Layout(const Extents& all, const Extents& steps) : extents(all), strides(steps) {}

  std::size_t size() const {
    index_t last = 0;
    for (std::size_t i = 0; i < extents.size(); ++i) {
      if (extents[i] == 0) return 0;
      last += (extents[i] - 1) * strides[i];
    }
    return static_cast<std::size_t>(last + 1);
  }
  template <class T>
  View<T, Rank> of(std::vector<T>& values) const {
    return {values.data(), extents, strides};
  }
  template <class T>
  View<const T, Rank> of(const std::vector<T>& values) const {
    return {values.data(), extents, strides};
  }
};

/// Returns the elements in another layout. Gaps have the value 7.
template <class T, int Rank>
std::vector<T> moved(const std::vector<T>& values, const Layout<Rank>& from, const Layout<Rank>& to) {
  std::vector<T> result(to.size(), T(7));
  const View<T, Rank> out = to.of(result);
  const View<const T, Rank> in = from.of(values);
  reference::for_each_index(to.extents, [&](auto... i) { out(i...) = in(i...); });
  return result;
}

/// A multiplier per row, of both signs, which depends on every number of the row: each row is a group.
struct OwnMultiplier {
  double operator()(const PlacedRow& row) const {
    return (row.query % 3 == 0 ? -0.5 : 0.75) +
           1 / static_cast<double>(1 + row.n + row.head + 2 * row.position + row.batch);
  }
};

/// s and b of each head, of both signs.
template <class C>
struct Learnt {
  std::vector<C> s, b;

  explicit Learnt(index_t heads) {
    for (index_t h = 0; h < heads; ++h) {
      s.push_back(C(0.4) - C(0.7) * C(h));
      b.push_back(C(0.1) + C(0.8) * C(h));
    }
  }
  SSMax<C> scaling() const { return SSMax<C>{s, b}; }
};

template <class T>
struct Results {
  using C = ssmax::ComputeType<T>;
  std::vector<T> y, log_y, sparse, entmax, dz, log_dz, sparse_dz, entmax_dz;
  std::vector<C> lse, ds, db, sparse_ds, sparse_db;
};

/// Returns the scaling whose gradients are added to the results.
template <class T, class C>
auto learning(const SSMax<C>& scaling, Results<T>& results) {
  return scaling.gradient(results.ds, results.db);
}
template <class T>
OwnMultiplier learning(const OwnMultiplier& scaling, Results<T>&) {
  return scaling;
}

/// Logits and gradients of results, and the layouts of both. `rows` are the extents of logsumexp, whose second to last
/// one counts the heads.
template <class T, int Rank, int RowRank>
struct Problem {
  using C = ssmax::ComputeType<T>;
  Layout<Rank> in, out;
  Layout<RowRank> rows;
  std::vector<T> z, dout;

  Problem(const Layout<Rank>& layout, const Layout<RowRank>& of_rows)
      : in(layout),
        out(layout),
        rows(of_rows),
        z(reference::normals<T>(layout.size(), 1)),
        dout(reference::normals<T>(layout.size(), 2)) {}

  index_t heads() const { return rows.extents[RowRank - 2]; }

  /// Returns the same problem with views of other layouts.
  Problem with_layouts(const Layout<Rank>& to_in, const Layout<Rank>& to_out) const {
    Problem result = *this;
    result.in = to_in;
    result.out = to_out;
    result.z = moved(z, in, to_in);
    result.dout = moved(dout, in, to_in);
    return result;
  }

  /// The executor is erased, so that the functions are compiled once for all executors.
  template <class S, class M>
  Results<T> computed(const S& scaling, const M& mask, const AnyExecutor& executor) const {
    const std::vector<T> empty(out.size(), T(7));
    const std::vector<C> zeros(static_cast<std::size_t>(heads()));
    Results<T> r{empty, empty, empty, empty, empty, empty, empty, empty, std::vector<C>(rows.size()),
                 zeros, zeros, zeros, zeros};
    softmax(in.of(z), out.of(r.y), scaling, mask, executor);
    log_softmax(in.of(z), out.of(r.log_y), scaling, mask, executor);
    sparsemax(in.of(z), out.of(r.sparse), scaling, mask, executor);
    logsumexp(in.of(z), rows.of(r.lse), scaling, mask, executor);
    const auto read = [&](const std::vector<T>& values) { return out.of(values); };
    softmax_backward<T, Rank>({read(r.y), in.of(dout), in.of(z), out.of(r.dz)}, learning(scaling, r), mask,
                              executor);
    log_softmax_backward<T, Rank>({read(r.log_y), in.of(dout), in.of(z), out.of(r.log_dz)},
                                  learning(scaling, r), mask, executor);
    if constexpr (std::same_as<S, SSMax<C>>) {  // one scaling: fewer functions to compile
      const auto sparse = scaling.gradient(r.sparse_ds, r.sparse_db);
      entmax15(in.of(z), out.of(r.entmax), scaling, mask, executor);
      sparsemax_backward<T, Rank>({read(r.sparse), in.of(dout), in.of(z), out.of(r.sparse_dz)}, sparse, mask,
                                  executor);
      entmax15_backward<T, Rank>({read(r.entmax), in.of(dout), in.of(z), out.of(r.entmax_dz)}, sparse, mask,
                                 executor);
    }
    return r;
  }
  template <class S, class M>
  Results<T> computed(const S& scaling, const M& mask) const {
    Serial serial;
    return computed(scaling, mask, AnyExecutor(serial));
  }
};

/// Checks that the results are the expected ones, whose layout was another one.
template <class T, int Rank>
void check_same(const Results<T>& expected, const Layout<Rank>& from, const Results<T>& results,
                const Layout<Rank>& to) {
  const auto same = [&](const std::vector<T>& a, const std::vector<T>& b) {
    return same_bits(moved(a, from, to), b);
  };
  CHECK(same(expected.y, results.y));
  CHECK(same(expected.log_y, results.log_y));
  CHECK(same(expected.sparse, results.sparse));
  CHECK(same(expected.entmax, results.entmax));
  CHECK(same(expected.dz, results.dz));
  CHECK(same(expected.log_dz, results.log_dz));
  CHECK(same(expected.sparse_dz, results.sparse_dz));
  CHECK(same(expected.entmax_dz, results.entmax_dz));
  CHECK(same_bits(expected.lse, results.lse));
  CHECK(same_bits(expected.ds, results.ds));
  CHECK(same_bits(expected.db, results.db));
  CHECK(same_bits(expected.sparse_ds, results.sparse_ds));
  CHECK(same_bits(expected.sparse_db, results.sparse_db));
}

/// Checks that the results are bit-identical for every executor.
template <class P, class M>
void check_executors(const P& problem, const M& mask) {
  const Learnt<typename P::C> learnt(problem.heads());
  const auto expected = problem.computed(learnt.scaling(), mask);
  const auto check = [&](auto&& executor) {
    check_same(expected, problem.out, problem.computed(learnt.scaling(), mask, AnyExecutor(executor)),
               problem.out);
  };
  for (const index_t threads : {2, 7, 100}) {
    CAPTURE(threads);
    check(test_executors::Reverse{threads});
  }
  check(ThreadPool(3));
}

/// Checks that the results are bit-identical to those of contiguous rows if views have the layout `strided`.
template <class P, int Rank, class M>
void check_layout(const P& problem, const Layout<Rank>& strided, const M& mask) {
  const Learnt<typename P::C> learnt(problem.heads());
  const Layout<Rank>& contiguous = problem.in;
  const auto check = [&](const auto& scaling, const P& of, const AnyExecutor& executor) {
    check_same(problem.computed(scaling, mask), contiguous, of.computed(scaling, mask, executor), of.out);
  };
  Serial serial;
  test_executors::Reverse reverse{7};
  const P all = problem.with_layouts(strided, strided);
  check(learnt.scaling(), all, AnyExecutor(serial));
  check(learnt.scaling(), all, AnyExecutor(reverse));
  check(learnt.scaling(), problem.with_layouts(strided, contiguous), AnyExecutor(serial));
  check(OwnMultiplier{}, problem.with_layouts(contiguous, strided), AnyExecutor(serial));
  // In place.
  const auto expected = problem.computed(learnt.scaling(), mask);
  auto y = all.z, dz = all.dout;
  const auto in = [&](const auto& values) { return strided.of(values); };
  softmax(in(y), strided.of(y), learnt.scaling(), mask, AnyExecutor(reverse));
  softmax_backward<typename decltype(y)::value_type, Rank>(
      {.out = in(y), .dout = in(dz), .dlogits = strided.of(dz)}, learnt.scaling(), mask,
      AnyExecutor(reverse));
  CHECK(same_bits(y, moved(expected.y, contiguous, strided)));
  CHECK(same_bits(dz, moved(expected.dz, contiguous, strided)));
}

}  // namespace row_calls
