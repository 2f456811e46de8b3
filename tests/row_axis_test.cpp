// Rows along any dimension: a last stride other than 1. Bit-identical to the call over the transposed copy, for every
// function, mask, scaling and executor, in place, and with a stride in some of the arguments only.

#include "reference.hpp"
#include "refusal.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace row_axis_test {

using namespace ssmax;

/// Logits [batch, head, query, key]. In memory, contiguous or as [batch, head, key, query] with a gap after each key.
struct Layout {
  index_t batch, heads, queries, keys;
  bool is_strided = false;

  std::array<index_t, 4> extents() const { return {batch, heads, queries, keys}; }
  std::array<index_t, 4> strides() const {
    const index_t gap = queries + 3;
    if (!is_strided) return {heads * queries * keys, queries * keys, keys, 1};
    return {heads * gap * keys, gap * keys, 1, gap};
  }
  std::size_t size() const { return static_cast<std::size_t>(batch * heads * (queries + 3) * keys); }
  template <class T>
  View<T, 4> of(std::vector<T>& values) const {
    return {values.data(), extents(), strides()};
  }
  template <class T>
  View<const T, 4> in(const std::vector<T>& values) const {
    return {values.data(), extents(), strides()};
  }
};

template <class T>
std::vector<T> transposed(const std::vector<T>& values, const Layout& from, const Layout& to) {
  std::vector<T> result(to.size(), T(7));
  const View<T, 4> out = to.of(result);
  const View<const T, 4> in = from.in(values);
  reference::for_each_index(to.extents(), [&](auto... i) { out(i...) = in(i...); });
  return result;
}

/// A multiplier per row, which depends on every number of the row: each row is a group.
struct OwnMultiplier {
  double operator()(const PlacedRow& row) const {
    return (row.query % 3 == 0 ? -0.5 : 0.75) +
           1 / static_cast<double>(1 + row.n + row.head + 2 * row.position + row.batch);
  }
};

template <class T>
struct Results {
  using C = ssmax::detail::ComputeType<T>;
  std::vector<T> y, log_y, sparse, dz, log_dz;
  std::vector<C> lse, ds, db;
};

template <class T, class S, class G, class M, class E>
Results<T> computed(const Layout& in, const Layout& out, const std::vector<T>& z, const std::vector<T>& dout,
                    const S& scaling, const G& gradient, const M& mask, E&& executor) {
  using C = ssmax::detail::ComputeType<T>;
  const std::vector<T> empty(out.size(), T(7));
  Results<T> r{empty, empty, empty, empty, empty, {}, {}, {}};
  r.lse.resize(static_cast<std::size_t>(in.batch * in.heads * in.queries));
  r.ds.resize(static_cast<std::size_t>(in.heads));
  r.db = r.ds;
  softmax(in.in(z), out.of(r.y), scaling, mask, executor);
  log_softmax(in.in(z), out.of(r.log_y), scaling, mask, executor);
  sparsemax(in.in(z), out.of(r.sparse), scaling, mask, executor);
  logsumexp(in.in(z), View<C, 3>(r.lse.data(), {in.batch, in.heads, in.queries}), scaling, mask, executor);
  softmax_backward<T, 4>({out.in(r.y), in.in(dout), in.in(z), out.of(r.dz)}, gradient(r), mask, executor);
  log_softmax_backward<T, 4>({out.in(r.log_y), in.in(dout), in.in(z), out.of(r.log_dz)}, gradient(r), mask,
                             executor);
  return r;
}

template <class T>
void check_same(const Results<T>& expected, const Results<T>& strided, const Layout& contiguous,
                const Layout& out) {
  const auto same = [&](const std::vector<T>& a, const std::vector<T>& b) {
    return same_bits(transposed(a, contiguous, out), b);
  };
  CHECK(same(expected.y, strided.y));
  CHECK(same(expected.log_y, strided.log_y));
  CHECK(same(expected.sparse, strided.sparse));
  CHECK(same(expected.dz, strided.dz));
  CHECK(same(expected.log_dz, strided.log_dz));
  CHECK(same_bits(expected.lse, strided.lse));
  CHECK(same_bits(expected.ds, strided.ds));
  CHECK(same_bits(expected.db, strided.db));
}

template <class T, class M>
void check_mask(const Layout& contiguous, const M& mask) {
  using C = ssmax::detail::ComputeType<T>;
  Layout strided = contiguous;
  strided.is_strided = true;
  std::vector<T> z = reference::normals<T>(contiguous.size(), 1), dout = reference::normals<T>(z.size(), 2);
  for (std::size_t i = 40; i < z.size(); i += 4099)
    z[i] = T(i % 2 == 0 ? 3e4f : std::numeric_limits<float>::quiet_NaN());
  const std::vector<T> z_strided = transposed(z, contiguous, strided),
                       dout_strided = transposed(dout, contiguous, strided);
  std::vector<C> s, b;
  for (index_t h = 0; h < contiguous.heads; ++h) {
    s.push_back(C(0.3) + C(h));
    b.push_back(C(0.1) - C(h));
  }
  const SSMax<C> scaling{s, b};
  const auto learnt = [&](Results<T>& r) { return scaling.gradient(r.ds, r.db); };
  const auto own = [](Results<T>&) { return OwnMultiplier{}; };
  Serial serial;
  const Results<T> expected = computed(contiguous, contiguous, z, dout, scaling, learnt, mask, serial);
  check_same(expected, computed(strided, strided, z_strided, dout_strided, scaling, learnt, mask, serial),
             contiguous, strided);
  check_same(
      expected,
      computed(strided, strided, z_strided, dout_strided, scaling, learnt, mask, test_executors::Reverse{7}),
      contiguous, strided);
  check_same(expected, computed(strided, contiguous, z_strided, dout_strided, scaling, learnt, mask, serial),
             contiguous, contiguous);
  check_same(computed(contiguous, contiguous, z, dout, OwnMultiplier{}, own, mask, serial),
             computed(contiguous, strided, z, dout, OwnMultiplier{}, own, mask, serial), contiguous, strided);
  // In place.
  std::vector<T> y = z_strided, dz = dout_strided;
  softmax(strided.in(y), strided.of(y), scaling, mask, test_executors::Reverse{3});
  softmax_backward<T, 4>({.out = strided.in(y), .dout = strided.in(dz), .dlogits = strided.of(dz)}, scaling,
                         mask, test_executors::Reverse{3});
  CHECK(same_bits(y, transposed(expected.y, contiguous, strided)));
  CHECK(same_bits(dz, transposed(expected.dz, contiguous, strided)));
}

TEMPLATE_TEST_CASE("rows along any dimension are bit-identical to the transposed copy", "[softmax][rows]",
                   float, double, bfloat16) {
  using T = TestType;
  for_each_target([](const std::string& target) {
    for (const Layout& layout :
         {Layout{1, 1, 1, 1}, Layout{1, 1, 2, 2}, Layout{2, 2, 67, 3}, Layout{1, 1, 500, 8},
          Layout{2, 1, 5, 64}, Layout{1, 2, 331, 47}, Layout{1, 1, 16, 4096}, Layout{1, 1, 70, 1500},
          Layout{1, 1, 3, 5003}, Layout{2, 3, 0, 5}, Layout{1, 1, 4, 0}, Layout{0, 1, 4, 3},
          Layout{1, 1, 1000, 100}}) {
      CAPTURE(target, layout.batch, layout.heads, layout.queries, layout.keys);
      check_mask<T>(layout, Full{});
      if (layout.keys > 2000) continue;
      check_mask<T>(layout, Causal{});
      const std::array<index_t, 5> queries{0, layout.queries / 7, layout.queries / 7, layout.queries / 2,
                                           layout.queries};
      const std::array<index_t, 5> keys{0, layout.keys / 3, layout.keys / 2, layout.keys / 2, layout.keys};
      check_mask<T>(layout, Documents{queries, keys, false});
    }
  });
}

TEST_CASE("a matrix over its first dimension", "[softmax][rows]") {
  // [edges, heads] over the edges.
  const std::vector<float> z{0, 1, 2, 3, 4, 5};
  std::vector<float> y(6);
  softmax(View<const float, 2>(z.data(), {2, 3}, {1, 2}), View<float, 2>(y.data(), {2, 3}, {1, 2}));
  for (std::size_t i = 0; i < 6; ++i)
    CHECK(std::abs(y[i] - std::array{0.0158762f, 0.1173104f, 0.8668134f}[i / 2]) < 1e-6f);
  // A stride of 0 repeats a logit, a negative stride runs backward.
  softmax(View<const float, 2>(z.data() + 5, {2, 3}, {-1, 0}),
          View<float, 2>(y.data() + 5, {2, 3}, {-1, -2}));
  for (const float weight : y) CHECK(std::abs(weight - 1.0f / 3) < 1e-6f);
  check_refused({"ssmax::softmax: out is an output with stride 0"}, [&] {
    softmax(View<const float, 2>(z.data(), {2, 3}, {1, 2}), View<float, 2>(y.data(), {2, 3}, {1, 0}));
  });
}

}  // namespace row_axis_test
