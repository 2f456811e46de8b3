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

using ssmax::Row;

class AnyScaling {
 public:
  virtual ~AnyScaling() = default;
  virtual double multiplier(const Row& row) const = 0;
  virtual void check(index_t heads, index_t largest_n) const = 0;
  virtual void accumulate(const Row& row, double dc) const = 0;
};

/// As the library takes it, without and with parameters to learn. It is a reference: the library takes no
/// scaling apart.
struct PlainScaling {
  const AnyScaling* scaling;
  double operator()(const Row& row) const { return scaling->multiplier(row); }
  void check(index_t heads, index_t largest_n) const { scaling->check(heads, largest_n); }
};
struct LearningScaling : PlainScaling {
  void accumulate(const Row& row, double dc) const { scaling->accumulate(row, dc); }
};

/// The gradient of one array of parameters: element index(row) gets weight(row)·dc.
struct ParameterGradient {
  std::string name;
  std::function<std::size_t(const Row&)> index;
  std::function<Real(const Row&)> weight;
  std::function<std::vector<double>()> values;  // what has been added up
  std::function<void()> clear;
  std::size_t size;
  Element element;
};

struct DrawnScaling {
  std::string words;
  std::shared_ptr<const AnyScaling> scaling;
  std::function<Bounded(const Row&)> formula;  // with the rounding of a double
  std::vector<ParameterGradient> gradients;    // none where nothing is learnt
};

DrawnScaling draw_scaling(Random& random, index_t heads, index_t most_keys, bool learn);

}  // namespace fuzz
