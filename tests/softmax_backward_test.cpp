// Backward of both forms against finite differences of forward, for every kind of mask and scaling.

#include "gradcheck.hpp"
#include "reference.hpp"
#include "test.hpp"

namespace softmax_backward_test {

using reference::relative_difference;
using namespace ssmax;

constexpr index_t heads = 2, queries = 4, keys = 9;
constexpr std::array<index_t, 3> shape{heads, queries, keys};
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// Two keys before a query's own and its own: rows that do not begin at key 0.
struct Window {
  KeyRange keys(const Query& query) const {
    const index_t own = query.index + query.shape.keys - query.shape.queries;
    return {own - 2, own + 1};
  }
};

enum class Form { softmax, log_softmax };

struct Rows {
  std::vector<double> z = reference::normals<double>(heads * queries * keys, 11, 1.5);
  std::vector<double> g = reference::normals<double>(heads * queries * keys, 12);
  std::vector<double> y = std::vector<double>(z.size());
  std::vector<double> dz = std::vector<double>(z.size(), nan);

  template <class Scaling, class Mask>
  void forward(Form form, const Scaling& scaling, const Mask& mask) {
    const View<const double, 3> logits(z.data(), shape);
    const View<double, 3> out(y.data(), shape);
    if (form == Form::softmax) {
      ssmax::softmax(logits, out, scaling, mask);
    } else {
      ssmax::log_softmax(logits, out, scaling, mask);
    }
  }

  template <class Gradient, class Mask>
  void backward(Form form, const Gradient& gradient, const Mask& mask, double* dlogits) {
    const ssmax::RowsBackward<double, 3> arguments{.out = View<const double, 3>(y.data(), shape),
                                                   .dout = View<const double, 3>(g.data(), shape),
                                                   .logits = View<const double, 3>(z.data(), shape),
                                                   .dlogits = View<double, 3>(dlogits, shape)};
    if (form == Form::softmax) {
      ssmax::softmax_backward<double, 3>(arguments, gradient, mask);
    } else {
      ssmax::log_softmax_backward<double, 3>(arguments, gradient, mask);
    }
  }

  /// <g, y> over the visible keys: hidden ones are 0, or -inf in the log form.
  template <class Scaling, class Mask>
  double loss(Form form, const Scaling& scaling, const Mask& mask) {
    forward(form, scaling, mask);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      if (std::isfinite(y[i])) sum += g[i] * y[i];
    }
    return sum;
  }
};

/// make_scaling() builds the scaling from parameters that the caller owns, once per evaluation.
template <class MakeScaling, class Mask>
std::vector<double> numeric(Form form, std::span<double> parameters, Rows& rows, MakeScaling make_scaling,
                            const Mask& mask) {
  return gradcheck::finite_differences(parameters, [&] { return rows.loss(form, make_scaling(), mask); });
}

constexpr double tolerance = 1e-7;

template <class Scaling, class Mask>
void check_fixed(const Scaling& scaling, const Mask& mask) {
  for (const Form form : {Form::softmax, Form::log_softmax}) {
    Rows rows;
    rows.forward(form, scaling, mask);
    rows.backward(form, scaling, mask, rows.dz.data());
    const std::vector<double> expected = numeric(
        form, rows.z, rows, [&] { return scaling; }, mask);
    CHECK(gradcheck::relative_error(rows.dz, expected) <= tolerance);
  }
}

template <class Mask>
void check_ssmax(std::vector<double> s, std::vector<double> b, const Mask& mask) {
  for (const Form form : {Form::softmax, Form::log_softmax}) {
    Rows rows;
    const auto scaling = [&] { return SSMax<double>{s, b}; };
    std::vector<double> ds(heads), db(heads);
    rows.forward(form, scaling(), mask);
    rows.backward(form, scaling().gradient(ds, db), mask, rows.dz.data());
    CHECK(gradcheck::relative_error(rows.dz, numeric(form, rows.z, rows, scaling, mask)) <= tolerance);
    CHECK(gradcheck::relative_error(ds, numeric(form, s, rows, scaling, mask)) <= tolerance);
    CHECK(gradcheck::relative_error(db, numeric(form, b, rows, scaling, mask)) <= tolerance);
  }
}

template <class Mask>
void check_size_table(const Mask& mask) {
  for (const Form form : {Form::softmax, Form::log_softmax}) {
    Rows rows;
    std::vector<double> p = reference::normals<double>(keys, 13, 0.5, 1), s{0.75, -0.5}, b{0.25, 0.125};
    const auto scaling = [&] { return SizeTable<double>{p, s, b}; };
    std::vector<double> dp(keys), ds(heads), db(heads);
    rows.forward(form, scaling(), mask);
    rows.backward(form, scaling().gradient(dp, ds, db), mask, rows.dz.data());
    CHECK(gradcheck::relative_error(rows.dz, numeric(form, rows.z, rows, scaling, mask)) <= tolerance);
    CHECK(gradcheck::relative_error(dp, numeric(form, p, rows, scaling, mask)) <= tolerance);
    CHECK(gradcheck::relative_error(ds, numeric(form, s, rows, scaling, mask)) <= tolerance);
    CHECK(gradcheck::relative_error(db, numeric(form, b, rows, scaling, mask)) <= tolerance);
  }
}

template <class Mask>
void check_scalings(const Mask& mask) {
  SECTION("Softmax") { check_fixed(Softmax{}, mask); }
  SECTION("LogN") { check_fixed(LogN{}, mask); }
  SECTION("negative constant") { check_fixed(Constant{-0.75}, mask); }
  SECTION("SSMax") { check_ssmax({0.5, 1.25}, {0.25, -0.5}, mask); }
  SECTION("SSMax, negative") { check_ssmax({-0.5, -1}, {-0.25, 0.5}, mask); }
  SECTION("SSMax at c = 0") { check_ssmax({0, 0}, {0, 0}, mask); }
  SECTION("size table") { check_size_table(mask); }
}

const std::vector<index_t> ragged{9, 3, 0, 1, 2, 8, 5, 9};

TEST_CASE("gradients under Full", "[softmax_backward]") { check_scalings(Full{}); }
TEST_CASE("gradients under Causal", "[softmax_backward]") { check_scalings(Causal{}); }
TEST_CASE("gradients under Lengths", "[softmax_backward]") { check_scalings(Lengths{ragged}); }
TEST_CASE("gradients under a window of the user's own", "[softmax_backward]") { check_scalings(Window{}); }

TEST_CASE("the backward does not read masked keys and writes 0 for them", "[softmax_backward]") {
  const SSMax<double> scaling{0.5, 0.25};
  const auto hidden = [](std::size_t i, const auto& mask) {
    const auto at = static_cast<index_t>(i);
    const Query query{.head = at / keys / queries,
                      .index = at / keys % queries,
                      .shape = {.batch = 1, .heads = heads, .queries = queries, .keys = keys}};
    const KeyRange seen = mask.keys(query);
    return at % keys < seen.begin || at % keys >= seen.end;
  };
  const auto check = [&](const auto& mask) {
    for (const Form form : {Form::softmax, Form::log_softmax}) {
      Rows clean, poisoned;
      std::vector<double> ds(heads), db(heads), ds_poisoned(heads), db_poisoned(heads);
      clean.forward(form, scaling, mask);
      clean.backward(form, scaling.gradient(ds, db), mask, clean.dz.data());
      poisoned.y = clean.y;
      bool zero = true;
      for (std::size_t i = 0; i < clean.z.size(); ++i) {
        if (!hidden(i, mask)) continue;
        zero = zero && clean.dz[i] == 0;
        poisoned.z[i] = poisoned.g[i] = poisoned.y[i] = nan;
      }
      CHECK(zero);
      poisoned.backward(form, scaling.gradient(ds_poisoned, db_poisoned), mask, poisoned.dz.data());
      CHECK(poisoned.dz == clean.dz);
      CHECK(ds_poisoned == ds);
      CHECK(db_poisoned == db);
      CHECK(std::abs(db[0]) > 1e-3);
    }
  };
  check(Causal{});
  check(Lengths{ragged});
  check(Window{});
}

TEST_CASE("a logit of -inf has the gradient 0 and adds 0 to ds and db", "[softmax_backward]") {
  for (const Form form : {Form::softmax, Form::log_softmax}) {
    for (const double c : {1.5, 0.0, -1.5}) {
      Rows rows;
      for (std::size_t i = 0; i < rows.z.size(); i += 2) rows.z[i] = -std::numeric_limits<double>::infinity();
      for (std::size_t i = 0; i < keys; ++i)
        rows.z[i] = -std::numeric_limits<double>::infinity();  // a whole row
      std::vector<double> ds(heads), db(heads);
      const SSMax<double> scaling{0, c};
      rows.forward(form, scaling, Full{});
      rows.backward(form, scaling.gradient(ds, db), Full{}, rows.dz.data());
      reference::Real worst = 0;
      double dc = 0;
      for (std::size_t row = 0; row < heads * queries; ++row) {
        const reference::Row<double> expected_row =
            reference::whole_row(std::span<const double>(rows.z).subspan(row * keys, keys), c);
        const auto g = std::span<const double>(rows.g).subspan(row * keys, keys);
        const reference::RowGradient expected = form == Form::softmax
                                                    ? reference::softmax_backward(expected_row, g)
                                                    : reference::log_softmax_backward(expected_row, g);
        for (std::size_t i = 0; i < keys; ++i) {
          worst = reference::worse(worst, std::abs(rows.dz[row * keys + i] - expected.dz[i]));
        }
        dc += static_cast<double>(expected.dc);
      }
      CAPTURE(c);
      CHECK(worst <= 1e-14L);
      CHECK(relative_difference(db[0] + db[1], dc) <= 1e-12);
    }
  }
}

TEST_CASE("dlogits may be the memory of dout or of out", "[softmax_backward]") {
  const SSMax<double> scaling{0.5, 0.25};
  for (const Form form : {Form::softmax, Form::log_softmax}) {
    Rows apart, over_dout, over_out;
    std::vector<double> ds(heads), db(heads), ds_dout(heads), db_dout(heads), ds_out(heads), db_out(heads);
    apart.forward(form, scaling, Causal{});
    over_dout.forward(form, scaling, Causal{});
    over_out.forward(form, scaling, Causal{});
    apart.backward(form, scaling.gradient(ds, db), Causal{}, apart.dz.data());
    over_dout.backward(form, scaling.gradient(ds_dout, db_dout), Causal{}, over_dout.g.data());
    over_out.backward(form, scaling.gradient(ds_out, db_out), Causal{}, over_out.y.data());
    CHECK(over_dout.g == apart.dz);
    CHECK(over_out.y == apart.dz);
    CHECK((ds_dout == ds && ds_out == ds));
    CHECK((db_dout == db && db_out == db));
  }
}

TEST_CASE("logits are not needed if no parameter has a gradient", "[softmax_backward]") {
  Rows rows;
  rows.forward(Form::softmax, Constant{0.5}, Full{});
  rows.backward(Form::softmax, Constant{0.5}, Full{}, rows.dz.data());
  std::vector<double> without(rows.dz.size());
  ssmax::softmax_backward<double, 3>({.out = View<const double, 3>(rows.y.data(), shape),
                                      .dout = View<const double, 3>(rows.g.data(), shape),
                                      .dlogits = View<double, 3>(without.data(), shape)},
                                     Constant{0.5}, Full{});
  CHECK(without == rows.dz);
}

TEST_CASE("a single key has gradient 0 under any scaling", "[softmax_backward]") {
  for (const double z : {0.0, 3.5, -1e30}) {
    for (const double s : {0.43, -2.0, 1e6}) {
      std::vector<double> logits{z}, y(1), g{1.75}, dz{nan}, ds(1), db(1);
      const SSMax<double> scaling{s, s};
      const View<const double, 1> in(logits), out(y), dout(g);
      const ssmax::RowsBackward<double, 1> arguments{.out = out, .dout = dout, .logits = in, .dlogits = dz};
      ssmax::softmax(in, View<double, 1>(y), scaling);
      ssmax::softmax_backward(arguments, scaling.gradient(ds, db));
      CHECK((dz[0] == 0 && ds[0] == 0 && db[0] == 0));
      ssmax::log_softmax(in, View<double, 1>(y), scaling);
      ssmax::log_softmax_backward(arguments, scaling.gradient(ds, db));
      CHECK((dz[0] == 0 && ds[0] == 0 && db[0] == 0));
    }
  }
}

}  // namespace softmax_backward_test
