// The functors on Eigen's types: whatever goes in, the same numbers as the rows themselves give.

#include <Eigen/Core>
#include <ssmax/eigen.hpp>

#include "target_scope.hpp"
#include "test.hpp"

namespace eigen_test {

using namespace ssmax;

template <class T>
using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// softmax(c·x) of every row, in long double.
Eigen::MatrixXd expected(const Eigen::MatrixXd& x, double c) {
  Eigen::MatrixXd y(x.rows(), x.cols());
  for (Eigen::Index r = 0; r < x.rows(); ++r) {
    const Eigen::Array<long double, 1, Eigen::Dynamic> z =
        x.row(r).cast<long double>().array() * static_cast<long double>(c);
    const Eigen::Array<long double, 1, Eigen::Dynamic> e = (z - z.maxCoeff()).exp();
    y.row(r) = (e / e.sum()).cast<double>().matrix();
  }
  return y;
}

double ssmax_c(double s, Eigen::Index n) { return s * std::log(static_cast<double>(n)); }

template <class A, class B>
double distance(const A& a, const B& b) {
  return (a.template cast<double>().matrix() - b.template cast<double>().matrix()).cwiseAbs().maxCoeff();
}

TEST_CASE("rows and columns of both storage orders", "[eigen]") {
  const double s = 0.5;  // exact in every type
  for (const auto& [rows, columns] :
       {std::pair{1, 1}, {1, 9}, {9, 1}, {7, 5}, {33, 70}, {300, 40}, {3, 5000}}) {
    const Eigen::MatrixXd x = 3 * Eigen::MatrixXd::Random(rows, columns);
    const Eigen::MatrixXd by_rows = expected(x, ssmax_c(s, columns));
    const Eigen::MatrixXd by_columns = expected(x.transpose(), ssmax_c(s, rows)).transpose();
    const RowMajor<double> row_major = x;
    CAPTURE(rows, columns);
    const SSMax<double> ssmax{s};
    CHECK(distance(ssmax(x), by_rows) < 1e-14);
    CHECK(distance(ssmax(row_major), by_rows) < 1e-14);
    CHECK(distance(ssmax(x, Axis::columns), by_columns) < 1e-14);
    CHECK(distance(ssmax(row_major, Axis::columns), by_columns) < 1e-14);
    CHECK(distance(SSMax<float>{0.5f}(Eigen::MatrixXf(x.cast<float>())), by_rows) < 2e-6);
  }
}

TEST_CASE("the type of the result is the type of the argument", "[eigen]") {
  static_assert(std::is_same_v<decltype(Softmax{}(Eigen::MatrixXf())), Eigen::MatrixXf>);
  static_assert(std::is_same_v<decltype(Softmax{}(Eigen::ArrayXXd())), Eigen::ArrayXXd>);
  static_assert(std::is_same_v<decltype(Softmax{}(RowMajor<float>())), RowMajor<float>>);
  static_assert(std::is_same_v<decltype(Softmax{}(Eigen::Vector4f())), Eigen::Vector4f>);
  CHECK(Softmax{}(Eigen::MatrixXf(0, 5)).size() == 0);
  CHECK(Softmax{}(Eigen::MatrixXf(5, 0)).size() == 0);
}

TEST_CASE("a vector is one row, whichever way it stands", "[eigen]") {
  const Eigen::VectorXd x = Eigen::VectorXd::Random(17);
  const Eigen::MatrixXd y = expected(x.transpose(), 1);
  CHECK(distance(Softmax{}(x).transpose(), y) < 1e-15);
  CHECK(distance(Softmax{}(Eigen::RowVectorXd(x.transpose())), y) < 1e-15);
  CHECK(distance(Softmax{}(x, Axis::columns).transpose(), y) < 1e-15);
  const Eigen::Vector3d fixed(1, 2, 3);
  CHECK(distance(Softmax{}(fixed).transpose(), expected(fixed.transpose(), 1)) < 1e-15);
}

TEST_CASE("expressions, arrays, Map, Ref and blocks, in and out", "[eigen]") {
  const Eigen::MatrixXd x = Eigen::MatrixXd::Random(6, 8);
  const Eigen::MatrixXd y = expected(x, 1);

  CHECK(distance(Softmax{}(2.0 * x - x), y) < 1e-14);
  CHECK(distance(Softmax{}(x.transpose().transpose()), y) < 1e-15);
  CHECK(distance(Softmax{}(x.transpose()), expected(x.transpose(), 1)) < 1e-15);
  CHECK(distance(Softmax{}(x.array() + 1.0), y) < 1e-14);
  const Eigen::MatrixXd square = x * x.transpose();
  CHECK(distance(Softmax{}(x * x.transpose()), expected(square, 1)) < 1e-14);

  std::vector<double> memory(48, -1.0);
  Eigen::Map<RowMajor<double>> map(memory.data(), 6, 8);
  Softmax{}(x, map);
  CHECK(distance(map, y) < 1e-15);

  Eigen::MatrixXd whole = Eigen::MatrixXd::Constant(10, 12, -7.0);
  Softmax{}(x, whole.block(2, 3, 6, 8));
  CHECK(distance(whole.block(2, 3, 6, 8), y) < 1e-15);
  whole.block(2, 3, 6, 8).setConstant(-7.0);
  CHECK((whole.array() == -7.0).all());  // nothing outside the block was touched

  Eigen::MatrixXd target(6, 8);
  Eigen::Ref<Eigen::MatrixXd> ref(target);
  const Eigen::Ref<const Eigen::MatrixXd> constant_ref(x);
  Softmax{}(constant_ref, ref);
  CHECK(distance(target, y) < 1e-15);

  RowMajor<double> strided_memory = RowMajor<double>::Constant(6, 16, -7.0);
  Eigen::Map<RowMajor<double>, 0, Eigen::Stride<Eigen::Dynamic, 2>> strided(
      strided_memory.data(), 6, 8, Eigen::Stride<Eigen::Dynamic, 2>(16, 2));
  Softmax{}(x, strided);
  CHECK(distance(strided, y) < 1e-15);
  CHECK(strided_memory(0, 1) == -7.0);
}

TEST_CASE("in place is out of place", "[eigen]") {
  for_each_target([](const std::string& target) {
    CAPTURE(target);
    const Eigen::MatrixXf x = Eigen::MatrixXf::Random(37, 21);
    for (const Axis axis : {Axis::rows, Axis::columns}) {
      const Eigen::MatrixXf out = Softmax{}(x, axis);
      Eigen::MatrixXf in_place = x;
      Softmax{}(in_place, in_place, axis);
      CHECK(in_place == out);
    }
  });
}

TEST_CASE("Eigen's half and bfloat16 compute in float", "[eigen]") {
  const Eigen::MatrixXf x = 2 * Eigen::MatrixXf::Random(9, 40);
  const auto check = [&](auto scalar, double epsilon) {
    using T = decltype(scalar);
    const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic> narrow = x.cast<T>();
    const Eigen::MatrixXd exact = expected(narrow.template cast<double>(), 1);
    const Eigen::MatrixXd got = Softmax{}(narrow).template cast<double>();
    CHECK(((got - exact).cwiseAbs().array() / exact.array()).maxCoeff() <=
          epsilon / 2 * 1.001);  // rounded once
  };
  check(Eigen::half(), 0x1p-10);
  check(Eigen::bfloat16(), 0x1p-7);
}

TEST_CASE("views of matrices feed the other functions", "[eigen]") {
  const RowMajor<float> x = RowMajor<float>::Random(4, 6);
  RowMajor<float> y(4, 6);
  ssmax::log_softmax(View<const float, 2>(x.data(), {4, 6}), View<float, 2>(y.data(), {4, 6}));
  CHECK(distance(y.array().exp(), expected(x.cast<double>(), 1)) < 1e-6);
  const Eigen::MatrixXf columns = x;
  Eigen::MatrixXf out(4, 6);
  ssmax::softmax(ssmax::column_view(columns), ssmax::column_view(out));
  CHECK(distance(out.transpose(), expected(x.cast<double>().transpose(), 1)) < 1e-6);
}

TEST_CASE("another shape is refused before anything is written", "[eigen]") {
  const Eigen::MatrixXf x = Eigen::MatrixXf::Random(4, 6);
  Eigen::MatrixXf y = Eigen::MatrixXf::Constant(4, 7, -7.0f);
  try {
    Softmax{}(x, y);
    FAIL("accepted a wider out");
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find("out has extent 7 in dimension 1, logits has 6") !=
          std::string::npos);
  }
  CHECK((y.array() == -7.0f).all());
}

/// Calls Softmax{}(in, out), which must be refused with nothing of `memory` changed.
template <class In, class Out, class Memory>
void check_overlap_refused(const In& in, Out&& out, const Memory& memory, Axis axis = Axis::rows) {
  const Memory before = memory;
  std::string message = "(nothing was thrown)";
  try {
    Softmax{}(in, out, axis);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CAPTURE(message);
  CHECK(message.find("softmax: out (") != std::string::npos);
  CHECK(message.find("overlaps logits (") != std::string::npos);
  CHECK((memory.array() == before.array()).all());
}

TEST_CASE("an out that overlaps the logits other than as a whole is refused", "[eigen]") {
  for (const Axis axis : {Axis::rows, Axis::columns}) {
    Eigen::MatrixXf m = Eigen::MatrixXf::Random(100, 100);
    check_overlap_refused(m.transpose(), m, m, axis);
    check_overlap_refused(m, m.transpose(), m, axis);
    check_overlap_refused(m.block(0, 0, 60, 60), m.block(3, 5, 60, 60), m, axis);
    Eigen::MatrixXf tall = Eigen::MatrixXf::Random(300, 20);
    check_overlap_refused(tall.topRows(200), tall.middleRows(7, 200), tall, axis);
    RowMajor<double> wide = RowMajor<double>::Random(20, 300);
    check_overlap_refused(wide.leftCols(200), wide.middleCols(7, 200), wide, axis);
    Eigen::Matrix<Eigen::half, Eigen::Dynamic, Eigen::Dynamic> narrow = tall.cast<Eigen::half>();
    check_overlap_refused(narrow.topRows(200), narrow.middleRows(7, 200), narrow, axis);
    // The same memory under other strides, which only a Map can say.
    Eigen::Map<Eigen::MatrixXf, 0, Eigen::OuterStride<>> as_two(m.data(), 50, 40, Eigen::OuterStride<>(100)),
        as_one(m.data(), 50, 40, Eigen::OuterStride<>(50));
    check_overlap_refused(as_two, as_one, m, axis);
    Eigen::Ref<Eigen::MatrixXf> ref(m);
    check_overlap_refused(ref.topRows(50), ref.bottomRows(51).topRows(50), m, axis);
  }
  Eigen::VectorXd vector = Eigen::VectorXd::Random(40);
  check_overlap_refused(vector.head(20), vector.segment(1, 20), vector);
  Eigen::Map<Eigen::VectorXd, 0, Eigen::InnerStride<>> even(vector.data(), 20, Eigen::InnerStride<>(2));
  check_overlap_refused(vector.head(20), even, vector);
}

TEST_CASE("out may be the logits or must not overlap them", "[eigen]") {
  for (const Axis axis : {Axis::rows, Axis::columns}) {
    const auto exact = [&](const Eigen::MatrixXf& x) {
      const Eigen::MatrixXd wide = x.cast<double>();
      return axis == Axis::rows ? expected(wide, 1)
                                : Eigen::MatrixXd(expected(wide.transpose(), 1).transpose());
    };
    const Eigen::MatrixXf x = Eigen::MatrixXf::Random(300, 20);
    Eigen::MatrixXf m = x;
    Softmax{}(m.block(7, 2, 200, 9), m.block(7, 2, 200, 9), axis);
    CHECK(distance(m.block(7, 2, 200, 9), exact(x.block(7, 2, 200, 9))) < 1e-6);
    m = x;
    Softmax{}(m.transpose(), m.transpose(), axis);
    CHECK(distance(m.transpose(), exact(x.transpose())) < 1e-6);
    m = x;
    Eigen::Ref<Eigen::MatrixXf> ref(m);
    Softmax{}(m, ref, axis);
    CHECK(distance(m, exact(x)) < 1e-6);

    // Blocks side by side, and above each other, of one matrix.
    m = x;
    Softmax{}(m.leftCols(10), m.rightCols(10), axis);
    CHECK(distance(m.rightCols(10), exact(x.leftCols(10))) < 1e-6);
    m = x;
    Softmax{}(m.topRows(150), m.bottomRows(150), axis);
    CHECK(distance(m.bottomRows(150), exact(x.topRows(150))) < 1e-6);
    // Every other column, and every other row.
    m = x;
    const Eigen::OuterStride<> two_columns(600);
    Eigen::Map<Eigen::MatrixXf, 0, Eigen::OuterStride<>> even(m.data(), 300, 10, two_columns),
        odd(m.data() + 300, 300, 10, two_columns);
    const Eigen::MatrixXf even_before = even;
    Softmax{}(even, odd, axis);
    CHECK(distance(odd, exact(even_before)) < 1e-6);
    CHECK(even == even_before);
    m = x;
    using Strides = Eigen::Stride<Eigen::Dynamic, 2>;
    Eigen::Map<Eigen::MatrixXf, 0, Strides> even_rows(m.data(), 150, 20, Strides(300, 2)),
        odd_rows(m.data() + 1, 150, 20, Strides(300, 2));
    const Eigen::MatrixXf even_rows_before = even_rows;
    Softmax{}(even_rows, odd_rows, axis);
    CHECK(distance(odd_rows, exact(even_rows_before)) < 1e-6);
    CHECK(even_rows == even_rows_before);
  }
}

TEST_CASE("expressions of out's own memory are worked out before it is written", "[eigen]") {
  for (const Axis axis : {Axis::rows, Axis::columns}) {
    const Eigen::MatrixXf x = Eigen::MatrixXf::Random(400, 31);
    const auto check = [&](const Eigen::MatrixXf& logits, auto call) {
      Eigen::MatrixXf m = x, apart(x.rows(), x.cols());
      Softmax{}(logits, apart, axis);
      call(m);
      CHECK(m == apart);
    };
    check(2 * x, [&](Eigen::MatrixXf& m) { Softmax{}(2 * m, m, axis); });
    check(x.colwise().reverse(), [&](Eigen::MatrixXf& m) { Softmax{}(m.colwise().reverse(), m, axis); });
    // `out` without memory of its own: written from the last row on.
    Eigen::MatrixXf m = x, apart(x.rows(), x.cols());
    Softmax{}(x, apart, axis);
    auto reversed = m.colwise().reverse();
    Softmax{}(m, reversed, axis);
    CHECK(reversed == apart);
  }
}

TEST_CASE("attention's views of RowMajor matrices and of columns", "[eigen][view]") {
  constexpr ssmax::index_t tokens = 6, heads = 4, kv_heads = 2, d = 3;
  RowMajor<float> qkv = RowMajor<float>::Random(tokens, (heads + 2 * kv_heads) * d);
  const auto [q, k, v] = ssmax::qkv_views(qkv, heads, kv_heads);
  CHECK(q.extent(1) == heads);
  CHECK(k.extent(1) == kv_heads);
  CHECK(&q(0, 3, 5, 2) == &qkv(5, 3 * d + 2));
  CHECK(&k(0, 1, 2, 0) == &qkv(2, (heads + 1) * d));
  CHECK(&v(0, 1, 4, 1) == &qkv(4, (heads + kv_heads + 1) * d + 1));
  CHECK(ssmax::qkv_views(qkv, 2).v.extent(3) == 4);
  // A block, and a matrix that is const.
  auto queries = qkv.leftCols(heads * d);
  CHECK(&ssmax::heads_view(queries, heads)(0, 3, 5, 2) == &qkv(5, 3 * d + 2));
  const RowMajor<float>& constant = qkv;
  const ssmax::View<const float, 4> view = ssmax::heads_view(constant, 8);
  CHECK(&view(0, 7, 5, 2) == &qkv(5, 7 * d + 2));
  // ColMajor: channels in rows, tokens in columns.
  Eigen::MatrixXf columns = qkv.transpose();
  CHECK(&ssmax::heads_view(ssmax::column_view(columns), 8)(0, 7, 5, 2) == &columns(7 * d + 2, 5));
  CHECK_THROWS_AS(ssmax::heads_view(qkv, 7), std::invalid_argument);
}

}  // namespace eigen_test
