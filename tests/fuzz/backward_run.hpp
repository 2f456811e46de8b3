// Runs cases of attention's backward, on what the forward gave. A unit that includes this compiles the
// kernels it needs.
#pragma once

#include <ssmax/attention_backward.hpp>

#include "../call.hpp"
#include "attention_run.hpp"

namespace fuzz {

/// All that a backward writes, or adds to.
template <class T>
struct GradientTensors {
  std::vector<Tensor<T>> all;  // dq, dk, dv
  std::vector<Compute<T>> dsinks;

  explicit GradientTensors(const AttentionCase& c) : dsinks(c.wants_dsinks ? c.sinks.size() : 0) {
    if (c.packed) {
      all = Tensor<T>::packed({c.q_extents(), c.k_extents(), c.v_extents()}, c.of_dq.gaps[3]);
    } else {
      all.emplace_back(c.q_extents(), c.of_dq);
      all.emplace_back(c.k_extents(), c.of_dk);
      all.emplace_back(c.v_extents(), c.of_dv);
    }
  }
  bool same_bits(const GradientTensors& other) const {
    bool same = dsinks.size() == other.dsinks.size() &&
                (dsinks.empty() ||
                 std::memcmp(dsinks.data(), other.dsinks.data(), dsinks.size() * sizeof(dsinks[0])) == 0);
    for (std::size_t i = 0; i < 3; ++i) same = same && all[i].bytes() == other.all[i].bytes();
    return same;
  }
  void check(const AttentionCase& c, const Backward& expected, const std::string& target) const {
    check_values(target + " dq", all[0].values(), expected.dq, c.element);
    check_values(target + " dk", all[1].values(), expected.dk, c.element);
    check_values(target + " dv", all[2].values(), expected.dv, c.element);
    for (const Tensor<T>& tensor : all) tensor.erase();
    for (const Tensor<T>& tensor : all) tensor.check_erased(target + " dq, dk or dv");
    const auto sums = [&](const char* name, const auto& got, std::vector<Bounded> of, Element element) {
      if (got.empty()) return;
      of.resize(got.size());
      check_values(target + " " + name, std::vector<double>(got.begin(), got.end()), of, element);
    };
    sums("dsinks", dsinks, expected.dsinks, c.computed());
    if (!c.score.learns) return;
    // Sums of what was computed in the element's precision.
    sums("dslopes", c.score.dslopes, expected.dslopes, c.computed());
    sums("dbias", c.score.dbias, expected.dbias, c.computed());
  }
};

template <class T>
void run_backward(const AttentionCase& c) {
  using A = Compute<T>;
  const InputTensors<T> in(c);
  Settings<A> settings(c);
  Layout of_lse = c.of_lse;
  const Tensor<T> dout(c.out_extents(), c.of_dout);
  const Tensor<A> dlse(c.lse_extents(), of_lse);
  dout.fill(c.dout);
  if (!c.dlse.empty()) dlse.fill(c.dlse);
  std::optional<Backward> expected;
  for_each_target([&](const std::string& target) {
    const OutputTensors<T> forward(c);
    const auto options = settings.template options<T>(c);
    const auto clear = [&] {
      for (const ParameterGradient& gradient : c.scaling.gradients) gradient.clear();
      c.score.dslopes.assign(c.score.slopes.size(), 0);
      c.score.dbias.assign(c.score.bias.size(), 0);
    };
    const auto differentiate = [&](const GradientTensors<T>& into, const AnyExecutor& executor) {
      clear();
      std::vector<A>& dsinks = const_cast<std::vector<A>&>(into.dsinks);
      const auto call = [&](const auto& scaling) {
        return [&](const auto& mask, const auto& score) {
          ssmax::attention_backward<Compute<T>>(
              ssmax::backward_with(
                  backward_over_views(in.q(), in.k(), in.v(), forward.out.view(), forward.lse_view()),
                  options),
              {.dout = dout.view(),
               .dlse = c.dlse.empty() ? View<const A, 3>{} : View<const A, 3>(dlse.trailing()),
               .dq = into.all[0].view(),
               .dk = into.all[1].view(),
               .dv = into.all[2].view(),
               .dsinks = dsinks},
              scaling, mask, score, executor);
        };
      };
      constexpr auto breadth = sizeof(T) == 2 ? Breadth::some : Breadth::all;
      const AnyScaling* scaling = c.scaling.scaling.get();
      if (c.scaling.learns()) {
        with_learning(c.scaling, [&](const auto& learning) {
          if (c.score.learns) return with_policies<A, Breadth::some, true>(c.mask, c.score, call(learning));
          with_policies<A, Breadth::some>(c.mask, c.score, call(learning));
        });
      } else if (c.scaling.per_query) {
        const PlacedScaling placed{scaling};
        if (c.score.learns) return with_policies<A, Breadth::some, true>(c.mask, c.score, call(placed));
        with_policies<A, Breadth::some>(c.mask, c.score, call(placed));
      } else {
        const PlainScaling plain{scaling};
        if (c.score.learns) return with_policies<A, breadth, true>(c.mask, c.score, call(plain));
        with_policies<A, breadth>(c.mask, c.score, call(plain));
      }
    };
    attend<T>(c, in, forward, settings, {});
    const auto forward_out = forward.out.bytes();
    const GradientTensors<T> result(c), again(c);
    differentiate(again, {});
    differentiate(result, c.executor);
    in.check_untouched();
    forward.out.check_untouched("out", forward_out);
    if (!result.same_bits(again)) throw Finding(target + ": other bits with Serial");
    // What 16 bits leave of `out` is the target's own.
    if (!expected || sizeof(T) == 2) expected = expect_backward(c, forward.out.values());
    result.check(c, *expected, target);
    check_scaling_gradients(c, expected->dc, target);
  });
}

}  // namespace fuzz
