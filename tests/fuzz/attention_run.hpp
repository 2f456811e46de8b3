// Runs cases of attention: forward, in parts, from a cache. A unit that includes this compiles the kernels it needs.
#pragma once

#include <ssmax/attention.hpp>
#include <ssmax/kv_cache.hpp>

#include "../call.hpp"
#include "attention.hpp"
#include "targets.hpp"

namespace fuzz {

/// The tables, for the type that is computed in.
template <class A>
std::optional<ssmax::Rope<A>> rope_of(const AttentionCase& c) {
  if (!c.rope) return std::nullopt;
  ssmax::RopeOptions options = *c.rope;
  options.frequencies = c.frequencies;
  if (c.axes.empty()) return ssmax::Rope<A>(options, c.rope_positions);
  const index_t axes = std::ssize(c.axis_positions) / c.rope_positions;
  return ssmax::Rope<A>(options, View<const index_t, 2>(c.axis_positions.data(), {axes, c.rope_positions}),
                        c.axes);
}

/// q, k and v where the case says that they lie.
template <class T>
struct InputTensors {
  std::vector<Tensor<T>> all;

  explicit InputTensors(const AttentionCase& c) {
    if (c.packed) {
      all = Tensor<T>::packed({c.q_extents(), c.k_extents(), c.v_extents()}, c.of_out.gaps[3]);
    } else {
      all.emplace_back(c.q_extents(), c.of_q);
      all.emplace_back(c.k_extents(), c.of_k);
      all.emplace_back(c.v_extents(), c.of_v);
    }
    all[0].fill(c.q);
    all[1].fill(c.k);
    all[2].fill(c.v);
    for (const Tensor<T>& tensor : all) before_.push_back(tensor.bytes());
  }
  View<const T, 4> q() const { return all[0].view(); }
  View<const T, 4> k() const { return all[1].view(); }
  View<const T, 4> v() const { return all[2].view(); }
  void check_untouched() const {
    constexpr const char* names[] = {"q", "k", "v"};
    for (std::size_t i = 0; i < 3; ++i) all[i].check_untouched(names[i], before_[i]);
  }

 private:
  std::vector<std::vector<unsigned char>> before_;
};

/// out and lse.
template <class T>
struct OutputTensors {
  Tensor<T> out;
  Tensor<Compute<T>> lse;
  bool wants_lse;

  explicit OutputTensors(const AttentionCase& c)
      : out(c.out_extents(), c.of_out), lse(c.lse_extents(), c.of_lse), wants_lse(c.wants_lse) {}
  View<Compute<T>, 3> lse_view() const { return wants_lse ? lse.trailing() : View<Compute<T>, 3>{}; }
  bool same_bits(const OutputTensors& other) const {
    return out.bytes() == other.out.bytes() && lse.bytes() == other.lse.bytes();
  }
  void check(const AttentionCase& c, const Forward& expected, const std::string& where) const {
    check_values(where + " out", out.values(), expected.out, c.element);
    if (wants_lse) check_values(where + " lse", lse.values(), expected.lse, c.computed());
    out.erase();
    if (wants_lse) lse.erase();
    out.check_erased(where + " out");
    lse.check_erased(where + " lse");
  }
};

template <class A>
struct Settings {
  std::optional<ssmax::Rope<A>> rope;
  std::vector<A> sinks;
  ssmax::Workspace workspace;

  explicit Settings(const AttentionCase& c) : rope(rope_of<A>(c)) {
    for (const double sink : c.sinks) sinks.push_back(static_cast<A>(sink));
  }
  template <class T>
  ssmax::AttentionOptions<T> options(const AttentionCase& c) {
    return {.scale = c.scale,
            .rope = rope ? &*rope : nullptr,
            .key_position = c.key_position,
            .sinks = sinks,
            .workspace = c.keeps_workspace ? &workspace : nullptr,
            .float_products = c.float_products,
            .batch_invariant = c.batch_invariant,
            .scaled_sinks = c.scaled_sinks,
            .dropout = c.dropout};
  }
};

template <class T>
void attend(const AttentionCase& c, const InputTensors<T>& in, const OutputTensors<T>& result,
            Settings<Compute<T>>& settings, const AnyExecutor& executor) {
  constexpr auto breadth = sizeof(T) == 2 ? Breadth::some : Breadth::all;
  const auto call = [&](const auto& scaling) {
    return [&](const auto& mask, const auto& score) {
      ssmax::attention<Compute<T>>(
          ssmax::with(
              {.q = in.q(), .k = in.k(), .v = in.v(), .out = result.out.view(), .lse = result.lse_view()},
              settings.template options<T>(c)),
          scaling, mask, score, executor);
    };
  };
  const AnyScaling* scaling = c.scaling.scaling.get();
  if (c.scaling.per_query) {
    with_policies<Compute<T>, Breadth::some>(c.mask, c.score, call(PlacedScaling{scaling}));
  } else {
    with_policies<Compute<T>, breadth>(c.mask, c.score, call(PlainScaling{scaling}));
  }
}

template <class T>
void run_attention(const AttentionCase& c, const Forward& expected) {
  const InputTensors<T> in(c);
  Settings<Compute<T>> settings(c);
  for_each_target([&](const std::string& target) {
    const OutputTensors<T> result(c), again(c);
    attend<T>(c, in, result, settings, c.executor);
    in.check_untouched();
    attend<T>(c, in, again, settings, {});
    if (!result.same_bits(again)) throw Finding(target + ": other bits with Serial");
    result.check(c, expected, target);
  });
}

/// The states of parts of the keys, merged in their order.
template <class T>
void run_partial(const AttentionCase& c, const Forward& expected) {
  using A = Compute<T>;
  const InputTensors<T> in(c);
  Settings<A> settings(c);
  auto cuts = c.cuts;
  cuts.insert(cuts.begin(), 0);
  cuts.push_back(c.keys);
  for_each_target([&](const std::string& target) {
    struct State {
      Tensor<A> shift, sum, o;
      ssmax::AttentionState<A> state() const {
        return {.shift = shift.trailing(), .sum = sum.trailing(), .o = o.view()};
      }
    };
    std::vector<State> parts;
    auto options = settings.template options<T>(c);
    options.sinks = {};
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      parts.push_back({Tensor<A>(c.lse_extents(), c.of_lse),
                       Tensor<A>(c.lse_extents(), c.of_dout.broadcast[0] ? c.of_lse : c.of_dq),
                       Tensor<A>(c.out_extents(), c.of_out)});
      const auto part = [&](const View<const T, 4>& all) {
        const std::array<index_t, 4> strides{all.stride(0), all.stride(1), all.stride(2), 1};
        const std::array<index_t, 4> extents{all.extent(0), all.extent(1), cuts[i + 1] - cuts[i],
                                             all.extent(3)};
        const T* first = all.data_handle();
        return View<const T, 4>(first == nullptr ? first : first + cuts[i] * strides[2], extents, strides);
      };
      with_plain(c.scaling, [&](const auto& scaling) {
        with_policies<A, Breadth::some>(c.mask, c.score, [&](const auto& mask, const auto& score) {
          ssmax::attention<Compute<T>>(ssmax::with({.q = in.q(),
                                                    .k = part(in.k()),
                                                    .v = part(in.v()),
                                                    .state = parts.back().state(),
                                                    .first_key = cuts[i],
                                                    .all_keys = c.keys},
                                                   options),
                                       scaling, mask, score, c.executor);
        });
      });
    }
    in.check_untouched();
    for (std::size_t i = 1; i < parts.size(); ++i) ssmax::merge<A>(parts[0].state(), parts[i].state());
    OutputTensors<A> result(c);
    ssmax::finish<A>(parts[0].state(), result.out.view(), result.lse_view(), settings.sinks);
    AttentionCase wide = c;
    wide.element = c.computed();
    result.check(wide, expected, target);
    for (const State& part : parts) {
      for (const Tensor<A>* tensor : {&part.shift, &part.sum, &part.o}) {
        tensor->erase();
        tensor->check_erased(target + " state");
      }
    }
  });
}

/// Fills a cache in pieces, looks at what it holds, and asks it. What should come out is worked out from what
/// it holds: that differs by target, where rotated keys are rounded.
template <class T, class X>
void run_decode(AttentionCase c) {
  using A = Compute<T>;
  Settings<A> settings(c);
  const ssmax::Rope<A>* rope = settings.rope ? &*settings.rope : nullptr;
  const std::vector<double> k = c.k, v = c.v;
  for_each_target([&](const std::string& target) {
    ssmax::KvCache<X> cache({.batch = c.batch,
                             .kv_heads = c.kv_heads,
                             .width = c.d,
                             .value_width = c.dv,
                             .capacity = c.capacity,
                             .ring = c.ring});
    std::vector<index_t> at(static_cast<std::size_t>(c.batch));
    for (const std::vector<index_t>& counts : c.appends) {
      const index_t most = *std::ranges::max_element(counts);
      const auto piece = [&](const std::vector<double>& all, index_t width, const Layout& layout) {
        Tensor<T> tensor({c.batch, c.kv_heads, most, width}, layout);
        std::vector<double> values;
        reference::for_each_index({c.batch, c.kv_heads, most * width}, [&](index_t b, index_t h, index_t i) {
          const index_t position = at[static_cast<std::size_t>(b)] + i / width;
          const bool real = i / width < counts[static_cast<std::size_t>(b)];
          const index_t from = ((b * c.kv_heads + h) * c.keys + position) * width + i % width;
          values.push_back(real ? all[static_cast<std::size_t>(from)] : nan);
        });
        tensor.fill(values);
        return tensor;
      };
      Layout of_k = c.of_k, of_v = c.of_v;
      of_k.broadcast = of_v.broadcast = {};
      const Tensor<T> new_k = piece(k, c.d, of_k), new_v = piece(v, c.dv, of_v);
      cache.append(View<const T, 4>(new_k.view()), View<const T, 4>(new_v.view()), rope, counts);
      for (std::size_t b = 0; b < at.size(); ++b) at[b] += counts[b];
    }
    for (index_t b = 0; b < c.batch; ++b) {
      if (cache.length(b) != c.mask.keys[static_cast<std::size_t>(b)])
        throw Finding(target + ": length of the cache");
    }
    // What it holds: within half an ulp of the keys, once rotated.
    for (index_t b = 0; b < c.batch; ++b) {
      const KeyRange range = cache.stored(b);
      for (index_t h = 0; h < c.kv_heads; ++h) {
        for (index_t key = 0; key < c.keys; ++key) {
          const auto row = (b * c.kv_heads + h) * c.keys + key;
          const bool there = key >= range.begin && key < range.end;
          const auto held = there ? cache.run(b, h, key) : ssmax::KeyRun<X>{};
          std::vector<A> turned;
          for (index_t i = 0; i < c.d; ++i)
            turned.push_back(static_cast<A>(k[static_cast<std::size_t>(row * c.d + i)]));
          if (there && rope != nullptr)
            ssmax::rope(ssmax::View<const A, 2>(turned.data(), {1, c.d}),
                        ssmax::View<A, 2>(turned.data(), {1, c.d}), *rope, key);
          for (index_t i = 0; i < c.d; ++i) {
            double& value = c.k[static_cast<std::size_t>(row * c.d + i)];
            value = there ? widen(held.k[i]) : nan;
            const double right = static_cast<double>(turned[static_cast<std::size_t>(i)]);
            if (there)
              check_value(target + " stored k", row * c.d + i, value, rounded(c.stored, right), 0, c.stored);
          }
          for (index_t i = 0; i < c.dv; ++i) {
            double& value = c.v[static_cast<std::size_t>(row * c.dv + i)];
            value = there ? widen(held.v[i]) : nan;
            const double right = rounded(c.stored, v[static_cast<std::size_t>(row * c.dv + i)]);
            if (there) check_value(target + " stored v", row * c.dv + i, value, right, 0, c.stored);
          }
        }
      }
    }
    const Forward expected = expect_forward(c);
    Tensor<T> q(c.q_extents(), c.of_q);
    q.fill(c.q);
    const OutputTensors<T> result(c), again(c);
    const auto decode = [&](const OutputTensors<T>& into, const AnyExecutor& executor) {
      with_plain(c.scaling, [&](const auto& scaling) {
        with_policies<A, Breadth::some>(c.mask, c.score, [&](const auto& mask, const auto& score) {
          ssmax::attention<Compute<T>>(
              ssmax::with({.q = q.view(), .keys = cache, .out = into.out.view(), .lse = into.lse_view()},
                          settings.template options<T>(c)),
              scaling, mask, score, executor);
        });
      });
    };
    decode(result, c.executor);
    decode(again, {});
    if (!result.same_bits(again)) throw Finding(target + ": other bits with Serial");
    result.check(c, expected, target);
  });
}

}  // namespace fuzz
