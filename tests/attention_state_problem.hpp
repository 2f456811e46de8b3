// States of attention over a range of keys, and their memory.
#pragma once

#include "attention_problem.hpp"

namespace attention_problem::state_problem {

/// A state and its memory.
template <class A>
struct State {
  Shape shape;
  std::vector<A> shift, sum, o;

  explicit State(const Shape& s)
      : shape(s),
        shift(static_cast<std::size_t>(s.batch * s.heads * s.queries), A{-77}),
        sum(shift),
        o(shift.size() * static_cast<std::size_t>(s.dv), A{-77}) {}
  AttentionState<A> view() {
    const std::array<index_t, 3> rows{shape.batch, shape.heads, shape.queries};
    return {{shift.data(), rows}, {sum.data(), rows}, {o.data(), {rows[0], rows[1], rows[2], shape.dv}}};
  }
  bool operator==(const State& other) const {
    return same_bits(shift, other.shift) && same_bits(sum, other.sum) && same_bits(o, other.o);
  }
};

/// Runs attention_partial over keys [begin, end) of the problem, without the sinks of the options: finish takes these.
template <class T, class S, class M, class C = Identity>
State<Compute<T>> partial(const Problem<T>& problem, index_t begin, index_t end, const S& scaling,
                          const M& mask, const C& score = {}, AttentionOptions<T> options = {}) {
  options.sinks = {};
  const Shape& s = problem.shape;
  State<Compute<T>> result(s);
  ssmax::attention<Compute<T>>(with({.q = problem.q_view(),
                                     .k = {problem.k.data() + begin * s.d,
                                           {s.batch, s.kv_heads, end - begin, s.d},
                                           {s.kv_heads * s.keys * s.d, s.keys * s.d, s.d, 1}},
                                     .v = {problem.v.data() + begin * s.dv,
                                           {s.batch, s.kv_heads, end - begin, s.dv},
                                           {s.kv_heads * s.keys * s.dv, s.keys * s.dv, s.dv, 1}},
                                     .state = result.view(),
                                     .first_key = begin,
                                     .all_keys = s.keys},
                                    options),
                               scaling, mask, score);
  return result;
}

template <class A>
Output<A> finished(State<A> state, const std::vector<A>& sinks = {}) {
  const Shape& s = state.shape;
  Output<A> output(s);
  ssmax::finish<A>(state.view(), {output.out.data(), {s.batch, s.heads, s.queries, s.dv}},
                   {output.lse.data(), {s.batch, s.heads, s.queries}}, sinks);
  return output;
}

template <class A>
State<A> merged(State<A> a, State<A> b) {
  ssmax::merge<A>(a.view(), b.view());
  return a;
}

inline constexpr std::array<Shape, 6> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 61, 300, 9, 24},
    {1, 2, 1, 70, 33, 8, 9},
    {1, 2, 2, 3, 2100, 6, 3},
    {1, 1, 1, 20, 2100, 6, 3},
    {1, 1, 1, 2, 3, 5, 4},
}};

}  // namespace attention_problem::state_problem
