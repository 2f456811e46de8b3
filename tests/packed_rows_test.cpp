// Rows of different lengths that are packed into one dimension: against long double, bit-identical for every executor,
// for any last stride and in place, and errors.

#include "refusal.hpp"
#include "row_calls.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace packed_rows_test {

using namespace ssmax;
using reference::Real;
using row_calls::Layout;
using row_calls::OwnMultiplier;

constexpr index_t heads = 2;

/// Boundaries of rows: empty ones, short ones of all lengths, and some that are longer than short kernels take.
std::vector<std::int32_t> boundaries(index_t rows) {
  constexpr std::array<std::int32_t, 23> lengths{0,  1,  2,  3,   5,   7,   8,   13,   15, 16, 17,  0,
                                                 31, 60, 64, 100, 255, 256, 257, 1031, 0,  4,  5003};
  std::vector<std::int32_t> begins{0};
  for (index_t r = 0; r < rows; ++r)
    begins.push_back(begins.back() + lengths[static_cast<std::size_t>(r * 7 % std::ssize(lengths))]);
  return begins;
}

template <class T>
struct Problem : row_calls::Problem<T, 2, 2> {
  std::vector<std::int32_t> begins;

  explicit Problem(std::vector<std::int32_t> ends)
      : row_calls::Problem<T, 2, 2>(Layout<2>({heads, ends.back()}),
                                    Layout<2>({heads, std::ssize(ends) - 1})),
        begins(std::move(ends)) {
    this->z = reference::normals<T>(this->z.size(), 1, 2);
  }
  explicit Problem(index_t row_count) : Problem(boundaries(row_count)) {}

  index_t elements() const { return begins.back(); }
  RaggedRows ragged() const { return RaggedRows(begins); }
};

/// Returns the largest error of a result, relative to 1 + abs(expected).
template <class T>
Real error_of(std::span<const T> values, const std::vector<Real>& expected) {
  Real worst = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const Real value = reference::widen(values[i]);
    if (value != expected[i])
      worst = reference::worse(worst, std::abs(value - expected[i]) / (1 + std::abs(expected[i])));
  }
  return worst;
}

TEMPLATE_TEST_CASE("packed rows against long double", "[softmax][ragged]", float, double, bfloat16) {
  using T = TestType;
  using C = ssmax::ComputeType<T>;
  const Real unit = std::is_same_v<T, bfloat16> ? Real{0x1p-8} : Real{std::numeric_limits<C>::epsilon()};
  for_each_target([&](const std::string& target) {
    for (const index_t rows : {0, 1, 2, 23, 97}) {
      const Problem<T> problem(rows);
      const row_calls::Learnt<C> learnt(heads);
      const row_calls::Results<T> r = problem.computed(learnt.scaling(), problem.ragged());
      Real worst = 0, ds[heads] = {}, db[heads] = {}, size = 1;
      for (index_t head = 0; head < heads; ++head) {
        for (index_t row = 0; row < rows; ++row) {
          const index_t begin = problem.begins[static_cast<std::size_t>(row)];
          const auto first = static_cast<std::size_t>(head * problem.elements() + begin);
          const auto n = static_cast<std::size_t>(problem.begins[static_cast<std::size_t>(row) + 1] - begin);
          const auto part = [&](const std::vector<T>& v) { return std::span<const T>(v).subspan(first, n); };
          const auto h = static_cast<std::size_t>(head);
          const Real log_n = n == 0 ? 0 : std::log(static_cast<Real>(n));
          const auto of_row =
              reference::whole_row(part(problem.z), Real{learnt.s[h]} * log_n + Real{learnt.b[h]});
          const auto lse = static_cast<Real>(r.lse[static_cast<std::size_t>(head * rows + row)]);
          const Real expected = reference::logsumexp(of_row);
          if (lse != expected)
            worst = reference::worse(worst, std::abs(lse - expected) / (1 + std::abs(expected)));
          worst = reference::worse(worst, error_of(part(r.y), reference::softmax(of_row)));
          worst = reference::worse(worst, error_of(part(r.log_y), reference::log_softmax(of_row)));
          const auto backward = reference::softmax_backward(of_row, part(problem.dout));
          const auto log_backward = reference::log_softmax_backward(of_row, part(problem.dout));
          const Real slack = 8;  // a gradient cancels, and reads a rounded result
          worst = reference::worse(worst, error_of(part(r.dz), backward.dz) / slack);
          worst = reference::worse(worst, error_of(part(r.log_dz), log_backward.dz) / (slack * (1 + log_n)));
          const Real dc = backward.dc + log_backward.dc;
          ds[h] += dc * log_n;
          db[h] += dc;
          size += std::abs(dc) * (1 + log_n) + static_cast<Real>(n);
        }
      }
      CAPTURE(target, rows);
      CHECK(worst <= 8 * unit);
      for (std::size_t h = 0; h < heads; ++h) {
        CHECK(std::abs(static_cast<Real>(r.ds[h]) - ds[h]) <= 8 * unit * size);
        CHECK(std::abs(static_cast<Real>(r.db[h]) - db[h]) <= 8 * unit * size);
      }
    }
  });
}

TEMPLATE_TEST_CASE("packed rows are bit-identical for every executor and layout",
                   "[softmax][ragged][threads]", float, half) {
  using T = TestType;
  for_each_target([&](const std::string& target) {
    for (const index_t rows : {0, 1, 7, 500}) {
      CAPTURE(target, rows);
      Problem<T> problem(rows);
      // Rows that need the general path.
      for (std::size_t i = 500; i < problem.z.size(); i += 977)
        problem.z[i] = T(i % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : 6e4f);
      const row_calls::Problem<T, 2, 2>& calls = problem;
      check_executors(calls, problem.ragged());
      // [element, head] in memory, with a gap after each element.
      check_layout(calls, Layout<2>(calls.in.extents, {1, heads + 1}), problem.ragged());
    }
  });
}

TEST_CASE("packed rows and each row as a call of its own", "[softmax][ragged]") {
  for_each_target([&](const std::string& target) {
    CAPTURE(target);
    const Problem<float> problem(97);
    const std::vector<float> y = problem.computed(OwnMultiplier{}, problem.ragged()).y;
    bool is_close = true;
    for (index_t head = 0; head < heads; ++head) {
      for (index_t row = 0; row < 97; ++row) {
        const index_t begin = problem.begins[static_cast<std::size_t>(row)],
                      n = problem.begins[static_cast<std::size_t>(row) + 1] - begin;
        const auto scaling = [&](const Row& own) {
          is_close = is_close && own.position == n - 1;
          return OwnMultiplier{}(PlacedRow{{.head = head, .position = own.position, .n = own.n}, 0, row});
        };
        std::vector<float> alone(static_cast<std::size_t>(n));
        const auto first = static_cast<std::size_t>(head * problem.elements() + begin);
        softmax(View<const float, 1>(problem.z.data() + first, {n}), View<float, 1>(alone), scaling);
        for (std::size_t i = 0; i < alone.size(); ++i)
          is_close = is_close && reference::relative_difference(alone[i], y[first + i]) < 1e-6;
      }
    }
    CHECK(is_close);
  });
}

TEST_CASE("packed rows with one dimension, and integers of several types", "[softmax][ragged]") {
  const std::vector<float> z{1, 2, 3, 4};
  std::vector<float> y(4), lse(3);
  const std::array<std::uint8_t, 4> begins{0, 1, 1, 4};
  softmax(View<const float, 1>(z), View<float, 1>(y), Softmax{}, RaggedRows(begins));
  logsumexp(View<const float, 1>(z), View<float, 1>(lse), Softmax{}, RaggedRows(begins));
  CHECK(y[0] == 1);
  CHECK(std::abs(y[3] - 0.66524096f) < 1e-6f);
  CHECK(std::abs(lse[0] - 1) < 1e-6f);
  CHECK(lse[1] == -std::numeric_limits<float>::infinity());
}

TEST_CASE("errors of packed rows", "[softmax][ragged][errors]") {
  std::vector<float> z(5), y(5, 7), lse(2);
  const View<const float, 1> in(z);
  const View<float, 1> out(y);
  const auto refuses = [&](std::initializer_list<std::string_view> words,
                           const std::vector<index_t>& begins) {
    check_refused(words, [&] { softmax(in, out, Softmax{}, RaggedRows(begins)); });
    check_refused(words, [&] { log_softmax(in, out, Softmax{}, RaggedRows(begins)); });
    check_refused(words, [&] {
      softmax_backward<float, 1>({.out = in, .dout = in, .dlogits = out}, Softmax{}, RaggedRows(begins));
    });
  };
  refuses({"ssmax::RaggedRows: begins has extent 0, must be at least 1"}, {});
  refuses({"ssmax::RaggedRows: begins begins with 1, must begin with 0"}, {1, 5});
  refuses({"ssmax::RaggedRows: begins falls from 3 to 2 in row 1"}, {0, 3, 2, 5});
  refuses({"ssmax::RaggedRows: begins ends with 4, elements are 5"}, {0, 4});
  const std::vector<index_t> one_row{0, 5};
  check_refused({"ssmax::logsumexp: out has extent 2 in dimension 2, RaggedRows has 1"},
                [&] { logsumexp(in, View<float, 1>(lse), Softmax{}, RaggedRows(one_row)); });
  check_refused({"ssmax::softmax: out has extent 4 in dimension"},
                [&] { softmax(in, View<float, 1>(y.data(), {4}), Softmax{}, RaggedRows(one_row)); });
  CHECK(y == std::vector<float>(5, 7));
}

}  // namespace packed_rows_test
