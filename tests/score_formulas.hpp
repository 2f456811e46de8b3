// Scores as formulas that share nothing with the library: what attention's backward is held against.
#pragma once

#include "attention_backward_problem.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem {

/// A formula has a value, a derivative, and collect, which adds the gradients of its parameters for the
/// gradient dz of its value, and `size`, what the roundings of dz are in proportion to.
struct Capped {
  double cap;

  template <class Z>
  Z operator()(Z z, const Query&, index_t) const {
    const Z limit = static_cast<Z>(cap);
    return z == -std::numeric_limits<Z>::infinity() ? z : limit * std::tanh(z / limit);
  }
  template <class Z>
  Z derivative(Z z, const Query&, index_t) const {
    const Z t = std::tanh(z / static_cast<Z>(cap));
    return (1 - t) * (1 + t);
  }
  template <class Z>
  void collect(Z, Z, Z, const Query&, index_t, Gradients<Z>&) const {}
};

/// ALiBi's.
struct Sloped {
  std::vector<double> slopes;
  Positions positions{};
  bool is_absolute = false;

  template <class Z>
  Z distance(const Query& query, index_t key) const {
    const index_t distance = positions.of_key(query, key) - positions.of_query(query);
    return static_cast<Z>(is_absolute ? -std::abs(distance) : distance);
  }
  template <class Z>
  Z operator()(Z z, const Query& query, index_t key) const {
    return z + static_cast<Z>(slopes[static_cast<std::size_t>(query.head)]) * distance<Z>(query, key);
  }
  template <class Z>
  Z derivative(Z, const Query&, index_t) const {
    return 1;
  }
  template <class Z>
  void collect(Z, Z dz, Z size, const Query& query, index_t key, Gradients<Z>& into) const {
    into.dslopes.add(static_cast<std::size_t>(query.head), dz * distance<Z>(query, key),
                     size * std::abs(distance<Z>(query, key)));
  }
};

/// The scale-invariant score's.
struct Stretched {
  double tau;
  Positions positions{};

  template <class Z>
  Z square(const Query& query, index_t key) const {
    const index_t distance = positions.of_key(query, key) - positions.of_query(query);
    return 1 + 2 * std::log(1 + static_cast<Z>(std::abs(distance)) / static_cast<Z>(tau));
  }
  template <class Z>
  Z operator()(Z z, const Query& query, index_t key) const {
    return std::sqrt(square<Z>(query, key)) * z + 1 - square<Z>(query, key);
  }
  template <class Z>
  Z derivative(Z, const Query& query, index_t key) const {
    return std::sqrt(square<Z>(query, key));
  }
  template <class Z>
  void collect(Z, Z, Z, const Query&, index_t, Gradients<Z>&) const {}
};

/// A bias, whose gradient lies as `strides` say.
template <class B>
struct Added {
  View<const B, 4> bias;
  std::array<index_t, 4> strides{};

  template <class Z>
  Z operator()(Z z, const Query& query, index_t key) const {
    return z + static_cast<Z>(bias(query.batch, query.head, query.index, key));
  }
  template <class Z>
  Z derivative(Z, const Query&, index_t) const {
    return 1;
  }
  template <class Z>
  void collect(Z, Z dz, Z size, const Query& query, index_t key, Gradients<Z>& into) const {
    const index_t at =
        query.batch * strides[0] + query.head * strides[1] + query.index * strides[2] + key * strides[3];
    into.dbias.add(static_cast<std::size_t>(at), dz, size);
  }
};

/// First A, then B.
template <class A, class B>
struct Then {
  A first;
  B second;

  template <class Z>
  Z operator()(Z z, const Query& query, index_t key) const {
    return second(first(z, query, key), query, key);
  }
  template <class Z>
  Z derivative(Z z, const Query& query, index_t key) const {
    return second.derivative(first(z, query, key), query, key) * first.derivative(z, query, key);
  }
  template <class Z>
  void collect(Z z, Z dz, Z size, const Query& query, index_t key, Gradients<Z>& into) const {
    const Z between = first(z, query, key);
    second.collect(between, dz, size, query, key, into);
    const Z by = second.derivative(between, query, key);
    first.collect(z, dz * by, size * std::abs(by), query, key, into);
  }
};

}  // namespace attention_problem::backward_problem
