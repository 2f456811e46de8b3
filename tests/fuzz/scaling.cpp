#include "scaling.hpp"

#include <algorithm>

#include "finding.hpp"

namespace fuzz {
namespace {

template <class S>
class Held final : public AnyScaling {
 public:
  Held(S scaling, std::shared_ptr<const void> memory)
      : scaling_(std::move(scaling)), memory_(std::move(memory)) {}

  double multiplier(const PlacedRow& row) const override { return static_cast<double>(scaling_(row)); }
  void check(const QueryShape& shape) const override {
    ssmax::detail::check_scaling("fuzz", scaling_, shape);
  }
  void accumulate(const PlacedRow& row, double dc) const override {
    if constexpr (ssmax::LearnableScaling<S>) scaling_.accumulate(row, dc);
  }

 private:
  S scaling_;
  std::shared_ptr<const void> memory_;
};

template <class S>
void hold(DrawnScaling& drawn, const S& scaling, std::shared_ptr<const void> memory = nullptr) {
  drawn.scaling = std::make_shared<Held<S>>(scaling, std::move(memory));
  drawn.by_size = ssmax::detail::depends_on_size_only<S>;
}

/// A multiplier, as it is once the library has rounded it to double.
Bounded in_double(Real multiplier) { return {multiplier, 0x1p-52L * (1 + std::abs(multiplier))}; }

/// Arrays that a scaling points to, and where their gradients go.
template <class P>
struct Arrays {
  std::vector<P> s, b, p, ds, db, dp;
};

std::size_t by_head(const Row& row) { return static_cast<std::size_t>(row.head); }
std::size_t by_size(const Row& row) { return static_cast<std::size_t>(row.n - 1); }
Real ln(const Row& row) { return std::log(static_cast<Real>(row.n)); }

/// SSMax or SizeTable, with numbers or arrays of P.
template <class P>
DrawnScaling parametric(Random& random, index_t heads, index_t most_keys, bool learn) {
  DrawnScaling drawn;
  auto a = std::make_shared<Arrays<P>>();
  const auto values = [&](index_t count, double size) {
    std::vector<P> result;
    for (index_t i = 0; i < count; ++i) {
      result.push_back(random.chance(0.1) ? P(0) : static_cast<P>(size * random.normal()));
    }
    return result;
  };
  const bool table = random.chance(0.25), single = random.chance(0.3), has_b = random.chance(0.5);
  a->s = values(single ? 1 : heads, 1);
  if (has_b) a->b = values(single ? 1 : heads, 0.5);
  const bool adjusts = random.chance(0.3);
  const index_t offset = adjusts ? random.between(-1, 2) : 0, floor = adjusts ? random.between(1, 5) : 1;
  const auto sized = [=](PlacedRow row) {
    row.n = std::max(floor, row.n + offset);
    return row;
  };
  if (table) a->p = values(sized({{.n = most_keys}}).n, 1);
  const auto hold_sized = [&](const auto& scaling) {
    if (!adjusts) return hold(drawn, scaling, a);
    hold(drawn, ssmax::AdjustedSize{scaling, offset, floor}, a);
    drawn.words += " of max(" + std::to_string(floor) + ", n + " + std::to_string(offset) + ")";
  };
  const std::span<const P> s(a->s), b(a->b), p(a->p);
  const auto scaling_of = [&] {
    if (single) return ssmax::SSMax<P>(a->s[0], has_b ? a->b[0] : P(0));
    return ssmax::SSMax<P>(s, b);
  };
  const auto table_of = [&] {
    if (single) return ssmax::SizeTable<P>(p, a->s[0], has_b ? a->b[0] : P(0));
    return ssmax::SizeTable<P>(p, s, b);
  };
  drawn.words = std::string(table ? "SizeTable<" : "SSMax<") + (sizeof(P) == 4 ? "float" : "double") + ">" +
                (single ? " of numbers" : "") + (has_b ? " with b" : "");
  const auto at = [single](const std::vector<P>& array, const Row& row) {
    return array.empty() ? Real(0) : static_cast<Real>(array[single ? 0 : by_head(row)]);
  };
  drawn.formula = [=](const PlacedRow& of_row) {
    const PlacedRow row = sized(of_row);
    const Real size = table ? static_cast<Real>(a->p[by_size(row)]) : ln(row);
    const Real product = at(a->s, row) * size, added = at(a->b, row);
    return Bounded(product + added, 0x1p-52L * (std::abs(product) + std::abs(added)));
  };
  if (!learn) {
    if (table) {
      hold_sized(table_of());
    } else {
      hold_sized(scaling_of());
    }
    return drawn;
  }
  a->ds.resize(static_cast<std::size_t>(heads));
  if (has_b || random.chance(0.3)) a->db.resize(static_cast<std::size_t>(heads));
  if (table) a->dp.resize(a->p.size());
  const auto learns = [&](const char* name, std::vector<P>& array, auto index, auto weight) {
    if (array.empty()) return;
    drawn.gradients.push_back({name, index, weight,
                               [a, &array] { return std::vector<double>(array.begin(), array.end()); },
                               [a, &array] { std::ranges::fill(array, P(0)); }, array.size(),
                               sizeof(P) == 4 ? Element::f32 : Element::f64});
  };
  learns("ds", a->ds, by_head, [=](const Row& row) {
    return table ? static_cast<Real>(a->p[by_size(sized({row}))]) : ln(sized({row}));
  });
  learns("db", a->db, by_head, [](const Row&) { return Real(1); });
  learns(
      "dp", a->dp, [=](const Row& row) { return by_size(sized({row})); },
      [=](const Row& row) { return at(a->s, row); });
  if (table) {
    hold_sized(table_of().gradient(a->dp, a->ds, a->db));
  } else {
    hold_sized(scaling_of().gradient(a->ds, a->db));
  }
  drawn.words += ", learnt";
  return drawn;
}

/// A multiplier of 1 + factor · log(position, length).
template <class S, class Log>
DrawnScaling temperature(Random& random, const std::string& name, const Log& log) {
  DrawnScaling drawn;
  const double factor = random.normal();
  const index_t length = random.between(1, 9);
  drawn.words = name + "(" + number(factor) + ", " + std::to_string(length) + ")";
  hold(drawn, S{factor, length});
  drawn.formula = [=](const Row& row) { return in_double(1 + Real(factor) * log(row.position, length)); };
  return drawn;
}

/// A multiplier for every query, of any strides, some of which may be 0.
template <class P>
DrawnScaling per_query(Random& random, const QueryShape& shape, bool learn) {
  DrawnScaling drawn;
  drawn.per_query = true;
  const std::array<index_t, 3> extents{shape.batch, shape.heads, shape.queries};
  std::array<index_t, 3> strides{};
  index_t size = 1;
  for (const std::size_t i : {std::size_t{1}, std::size_t{2}, std::size_t{0}}) {
    if (random.chance(0.15)) continue;  // shared
    strides[i] = size;
    size *= extents[i];
  }
  auto a = std::make_shared<Arrays<P>>();
  for (index_t i = 0; i < size; ++i) {
    a->p.push_back(random.chance(0.1) ? P(0) : static_cast<P>(0.5 + random.normal()));
  }
  const auto at = [=](const PlacedRow& row) {
    return static_cast<std::size_t>(row.batch * strides[0] + row.head * strides[1] + row.query * strides[2]);
  };
  drawn.words = std::string("PerQuery<") + (sizeof(P) == 4 ? "float>" : "double>");
  drawn.formula = [=](const PlacedRow& row) { return Bounded(a->p[at(row)]); };
  const ssmax::PerQuery scaling(ssmax::View<const P, 3>(a->p.data(), extents, strides));
  if (!learn) {
    hold(drawn, scaling, a);
    return drawn;
  }
  a->dp.resize(a->p.size());
  drawn.gradients.push_back({"dc", at, [](const PlacedRow&) { return Real(1); },
                             [a] { return std::vector<double>(a->dp.begin(), a->dp.end()); },
                             [a] { std::ranges::fill(a->dp, P(0)); }, a->dp.size(),
                             sizeof(P) == 4 ? Element::f32 : Element::f64});
  hold(drawn, scaling.gradient(ssmax::View<P, 3>(a->dp.data(), extents, strides)), a);
  drawn.words += ", learnt";
  return drawn;
}

}  // namespace

DrawnScaling draw_scaling(Random& random, const QueryShape& shape, bool learn) {
  const auto kind = learn ? random.between(0, 3) : random.between(0, 12);
  DrawnScaling drawn;
  switch (kind) {
    case 0:
      return parametric<float>(random, shape.heads, shape.keys, learn);
    case 1:
      return parametric<double>(random, shape.heads, shape.keys, learn);
    case 2:
      return per_query<float>(random, shape, learn);
    case 3:
      return per_query<double>(random, shape, learn);
    case 4:
      drawn.words = "LogN";
      hold(drawn, ssmax::LogN{});
      drawn.formula = [](const Row& row) { return in_double(ln(row)); };
      break;
    case 5: {
      const index_t length = random.between(2, 40);
      drawn.words = "QwenLogN(" + std::to_string(length) + ")";
      hold(drawn, ssmax::QwenLogN{length});
      drawn.formula = [length](const Row& row) {
        if (row.position < length) return in_double(1);
        return in_double(std::log(static_cast<Real>(row.position + 1)) / std::log(static_cast<Real>(length)));
      };
      break;
    }
    case 6:
      return temperature<ssmax::Llama4Temperature>(
          random, "Llama4Temperature",
          [](index_t at, index_t length) { return std::log1p(static_cast<Real>((at + 1) / length)); });
    case 7:
      return temperature<ssmax::MinistralTemperature>(
          random, "MinistralTemperature",
          [](index_t at, index_t length) { return std::log1p(static_cast<Real>(at / length)); });
    case 8: {
      const double c = random.pick({0.0, -1.0, 1e-3, 0.5, 3.0, -0.7, random.normal()});
      drawn.words = "Constant(" + number(c) + ")";
      hold(drawn, ssmax::Constant{c});
      drawn.formula = [c](const Row&) { return Bounded(c); };
      break;
    }
    case 9: {
      const auto own = [](const Row& row) {
        return 0.5f + 0.25f * static_cast<float>((row.head + row.position + 2 * row.n) % 7);
      };
      drawn.words = "a lambda";
      hold(drawn, own);
      drawn.formula = [own](const Row& row) { return Bounded(own(row)); };
      break;
    }
    case 10:
      return temperature<ssmax::InklingTemperature>(
          random, "InklingTemperature", [](index_t at, index_t length) {
            return std::log(std::max(static_cast<Real>(at + 1) / static_cast<Real>(length), Real(1)));
          });
    default:
      drawn.words = "Softmax";
      hold(drawn, ssmax::Softmax{});
      drawn.formula = [](const Row&) { return Bounded(1); };
  }
  return drawn;
}

}  // namespace fuzz
