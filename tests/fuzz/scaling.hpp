// Scalings drawn at random: the library's own behind one interface, and beside it their formula.
#pragma once

#include <functional>
#include <memory>
#include <ssmax/scaling.hpp>
#include <string>
#include <vector>

#include "bounded.hpp"
#include "element.hpp"

namespace fuzz {

using ssmax::PlacedRow;
using ssmax::QueryShape;
using ssmax::Row;

class AnyScaling {
 public:
  virtual ~AnyScaling() = default;
  virtual double multiplier(const PlacedRow& row) const = 0;
  virtual void check(const QueryShape& shape) const = 0;
  virtual void accumulate(const PlacedRow& row, double dc) const = 0;
};

/// As the library takes it, without and with parameters to learn. It is a reference: the library takes no
/// scaling apart.
struct PlainScaling {
  const AnyScaling* scaling;
  double operator()(const Row& row) const { return scaling->multiplier({row}); }
  void check_shape(const QueryShape& shape) const { scaling->check(shape); }
};
struct LearningScaling : PlainScaling {
  void accumulate(const Row& row, double dc) const { scaling->accumulate({row}, dc); }
};
/// The same for one that asks for by_size.
struct SizedScaling : PlainScaling {};
struct LearningSizedScaling : LearningScaling {};
/// The same for one that reads which query it is asked about.
struct PlacedScaling {
  const AnyScaling* scaling;
  double operator()(const PlacedRow& row) const { return scaling->multiplier(row); }
  void check_shape(const QueryShape& shape) const { scaling->check(shape); }
};
struct LearningPlacedScaling : PlacedScaling {
  void accumulate(const PlacedRow& row, double dc) const { scaling->accumulate(row, dc); }
};

/// The gradient of one array of parameters: element index(row) gets weight(row)·dc.
struct ParameterGradient {
  std::string name;
  std::function<std::size_t(const PlacedRow&)> index;
  std::function<Real(const PlacedRow&)> weight;
  std::function<std::vector<double>()> values;  // what has been added up
  std::function<void()> clear;
  std::size_t size;
  Element element;
};

struct DrawnScaling {
  std::string words;
  std::shared_ptr<const AnyScaling> scaling;
  std::function<Bounded(const PlacedRow&)> formula;  // with the rounding of a double
  std::vector<ParameterGradient> gradients;          // none where nothing is learnt
  bool per_query = false, by_size = false;

  bool learns() const { return !gradients.empty(); }
};

}  // namespace fuzz

template <>
inline constexpr bool ssmax::by_size<fuzz::SizedScaling> = true;
template <>
inline constexpr bool ssmax::by_size<fuzz::LearningSizedScaling> = true;

namespace fuzz {

DrawnScaling draw_scaling(Random& random, const QueryShape& shape, bool learn);

/// Calls f(scaling) without parameters to learn.
template <class F>
void with_plain(const DrawnScaling& drawn, const F& f) {
  if (drawn.per_query) return f(PlacedScaling{drawn.scaling.get()});
  if (drawn.by_size) return f(SizedScaling{{drawn.scaling.get()}});
  f(PlainScaling{drawn.scaling.get()});
}
/// Calls f(scaling) with parameters to learn.
template <class F>
void with_learning(const DrawnScaling& drawn, const F& f) {
  if (drawn.per_query) return f(LearningPlacedScaling{{drawn.scaling.get()}});
  if (drawn.by_size) return f(LearningSizedScaling{{{drawn.scaling.get()}}});
  f(LearningScaling{{drawn.scaling.get()}});
}

}  // namespace fuzz
