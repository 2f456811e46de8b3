// Runs cases of attention: forward, in parts, from a cache. A unit that includes this compiles the kernels it needs.
#pragma once

#include <ssmax/attention.hpp>
#include <ssmax/kv_cache.hpp>

#include "../call.hpp"
#include "attention.hpp"
#include "targets.hpp"

namespace fuzz {

/// The tables, for the type that is computed in. `sequence` below 0: of all sequences.
template <class A>
std::optional<ssmax::Rope<A>> rope_of(const AttentionCase& c, index_t sequence = -1) {
  if (!c.rope) return std::nullopt;
  ssmax::RopeOptions options = *c.rope;
  options.frequencies = c.frequencies;
  if (c.axes.empty()) return ssmax::Rope<A>(options, c.rope_positions);
  const index_t axes = c.rope_axes();
  const index_t* const first = c.axis_positions.data();
  if (sequence < 0 && c.rope_sequences > 1) {
    const std::array<index_t, 3> extents{c.rope_sequences, axes, c.rope_positions};
    return ssmax::Rope<A>(options, View<const index_t, 3>(first, extents), c.axes);
  }
  const index_t of = std::max<index_t>(sequence, 0) % c.rope_sequences;
  return ssmax::Rope<A>(
      options, View<const index_t, 2>(first + of * axes * c.rope_positions, {axes, c.rope_positions}),
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

/// out, lse and statistics.
template <class T>
struct OutputTensors {
  Tensor<T> out;
  Tensor<Compute<T>> lse;
  bool wants_lse;
  std::vector<Tensor<Compute<T>>> statistics;  // in the order of RowStatistics
  std::array<bool, 4> wanted;                  // of the statistics
  std::unique_ptr<ssmax::Explanation> explanation = std::make_unique<ssmax::Explanation>();

  explicit OutputTensors(const AttentionCase& c)
      : out(c.out_extents(), c.of_out),
        lse(c.lse_extents(), c.of_lse),
        wants_lse(c.wants_lse),
        wanted(c.statistics) {
    for (int i = 0; i < 4; ++i) statistics.emplace_back(c.lse_extents(), c.of_lse);
  }
  View<Compute<T>, 3> lse_view() const { return wants_lse ? lse.trailing() : View<Compute<T>, 3>{}; }
  ssmax::RowStatistics<Compute<T>> row_statistics() const {
    const auto view = [&](std::size_t i) {
      return wanted[i] ? statistics[i].trailing() : View<Compute<T>, 3>{};
    };
    return {view(0), view(1), view(2), view(3)};
  }
  bool same_results(const OutputTensors& other) const {
    return out.bytes() == other.out.bytes() && lse.bytes() == other.lse.bytes();
  }
  bool same_bits(const OutputTensors& other) const {
    bool same = same_results(other);
    for (std::size_t i = 0; i < 4; ++i) same = same && statistics[i].bytes() == other.statistics[i].bytes();
    return same;
  }
  void check(const AttentionCase& c, const Forward& expected, const std::string& where) const {
    const auto check_rows = [&](const std::string& name, const Tensor<Compute<T>>& rows,
                                const std::vector<Bounded>& of, bool is_wanted) {
      if (is_wanted) check_values(where + name, rows.values(), of, c.computed());
      if (is_wanted) rows.erase();
      rows.check_erased(where + name);
    };
    check_values(where + " out", out.values(), expected.out, c.element);
    out.erase();
    out.check_erased(where + " out");
    check_rows(" lse", lse, expected.lse, wants_lse);
    constexpr const char* names[] = {" largest", " smallest", " sum_of_squares", " entropy"};
    for (std::size_t i = 0; i < 4; ++i)
      check_rows(names[i], statistics[i], expected.statistics[i], wanted[i]);
  }
};

/// Throws unless the call without statistics is bit-identical, on the same path. call(into) computes it.
template <class T, class F>
void check_without_statistics(const AttentionCase& c, const OutputTensors<T>& result,
                              const std::string& target, const F& call) {
  if (!c.wants_statistics()) return;
  OutputTensors<T> without(c);
  without.wanted = {};
  call(without);
  if (without.explanation->path == result.explanation->path && !without.same_results(result))
    throw Finding(target + ": other bits without statistics");
}

template <class A>
struct Settings {
  std::optional<ssmax::Rope<A>> rope;
  std::vector<A> sinks;
  ssmax::Workspace workspace;

  explicit Settings(const AttentionCase& c) : rope(rope_of<A>(c)) {
    for (const double sink : c.sinks) sinks.push_back(static_cast<A>(sink));
  }
  /// The options of a call that writes `result`.
  template <class T, class O>
  ssmax::AttentionOptions<T> options_of(const AttentionCase& c, const OutputTensors<O>& result) {
    auto all = options<T>(c);
    all.statistics = result.row_statistics();
    all.explanation = result.explanation.get();
    return all;
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

template <class T, class O>
void attend(const AttentionCase& c, const InputTensors<T>& in, const OutputTensors<O>& result,
            Settings<Compute<T>>& settings, const AnyExecutor& executor) {
  constexpr auto breadth = sizeof(T) == 2 ? Breadth::some : Breadth::all;
  const auto call = [&](const auto& scaling) {
    return [&](const auto& mask, const auto& score) {
      ssmax::attention<Compute<T>>(
          ssmax::with(
              {.q = in.q(), .k = in.k(), .v = in.v(), .out = result.out.view(), .lse = result.lse_view()},
              settings.template options_of<T>(c, result)),
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
    check_without_statistics(c, result, target,
                             [&](const OutputTensors<T>& into) { attend<T>(c, in, into, settings, {}); });
    result.check(c, expected, target);
  });
}

/// Positions of [batch, head, position, ...].
template <class T, int Rank>
View<T, Rank> part_of(const View<T, Rank>& all, KeyRange positions) {
  std::array<index_t, Rank> extents{}, strides{};
  for (int i = 0; i < Rank; ++i) {
    extents[static_cast<std::size_t>(i)] = i == 2 ? positions.size() : all.extent(i);
    strides[static_cast<std::size_t>(i)] = all.stride(i);
  }
  T* const data = all.data_handle();
  return {data == nullptr ? data : data + positions.begin * all.stride(2), extents, strides};
}

/// A state of all queries, with statistics if the case wants some.
template <class A>
struct StateTensors {
  Tensor<A> shift, sum, o;
  std::vector<Tensor<A>> statistics;  // in the order of AttentionState, or none

  explicit StateTensors(const AttentionCase& c)
      : shift(c.lse_extents(), c.of_lse),
        sum(c.lse_extents(), c.of_dout.broadcast[0] ? c.of_lse : c.of_dq),
        o(c.out_extents(), c.of_out) {
    for (int i = 0; i < (c.wants_statistics() ? 4 : 0); ++i)
      statistics.emplace_back(c.lse_extents(), i % 2 == 0 ? c.of_lse : c.of_dk);
  }
  /// The state of queries [queries.begin, queries.end).
  ssmax::AttentionState<A> state(KeyRange queries) const {
    ssmax::AttentionState<A> result{.shift = part_of(shift.trailing(), queries),
                                    .sum = part_of(sum.trailing(), queries),
                                    .o = part_of(o.view(), queries)};
    if (statistics.empty()) return result;
    result.largest = part_of(statistics[0].trailing(), queries);
    result.smallest = part_of(statistics[1].trailing(), queries);
    result.distances = part_of(statistics[2].trailing(), queries);
    result.squares = part_of(statistics[3].trailing(), queries);
    return result;
  }
  void check_beside(const std::string& target) const {
    std::vector<const Tensor<A>*> all{&shift, &sum, &o};
    for (const Tensor<A>& tensor : statistics) all.push_back(&tensor);
    for (const Tensor<A>* tensor : all) {
      tensor->erase();
      tensor->check_erased(target + " state");
    }
  }
};

/// Computes the state of some queries over some keys.
template <class T>
void attend_part(const AttentionCase& c, const InputTensors<T>& in, Settings<Compute<T>>& settings,
                 KeyRange keys, KeyRange queries, const StateTensors<Compute<T>>& into) {
  using A = Compute<T>;
  auto options = settings.template options<T>(c);
  options.sinks = {};
  with_plain(c.scaling, [&](const auto& scaling) {
    with_policies<A, Breadth::some>(c.mask, c.score, [&](const auto& mask, const auto& score) {
      ssmax::attention<A>(ssmax::with({.q = part_of(in.q(), queries),
                                       .k = part_of(in.k(), keys),
                                       .v = part_of(in.v(), keys),
                                       .state = into.state(queries),
                                       .continues = c.continues && keys.begin > 0,
                                       .first_key = keys.begin,
                                       .all_keys = c.keys,
                                       .first_query = queries.begin,
                                       .all_queries = c.queries},
                                      options),
                          scaling, mask, score, c.executor);
    });
  });
}

/// Throws unless finished states agree with the whole call: in all bits, or in the bounds of the logits.
template <class A>
void check_whole(const OutputTensors<A>& result, const OutputTensors<A>& whole, bool all_bits,
                 const std::string& target) {
  if (all_bits && !result.same_bits(whole)) throw Finding(target + ": other bits than the whole call");
  for (std::size_t i = 0; i < 2; ++i) {
    const std::vector<double> got = result.statistics[i].values(), expected = whole.statistics[i].values();
    for (std::size_t row = 0; row < got.size(); ++row) {
      if (got[row] == expected[row] || (std::isnan(got[row]) && std::isnan(expected[row]))) continue;
      throw Finding(target + (i == 0 ? " largest[" : " smallest[") + std::to_string(row) + "] is " +
                    number(got[row]) + ", that of the whole call is " + number(expected[row]));
    }
  }
}

/// Calls f for each range between two cuts.
template <class F>
void for_each_part(const std::vector<index_t>& cuts, index_t end, const F& f) {
  KeyRange part{0, 0};
  for (const index_t cut : cuts) {
    part.end = cut;
    f(part);
    part.begin = cut;
  }
  part.end = end;
  f(part);
}

/// The states of parts of the keys: each continues the one before, or all are merged in their order.
template <class T>
void run_partial(const AttentionCase& c, const Forward& expected) {
  using A = Compute<T>;
  const InputTensors<T> in(c);
  Settings<A> settings(c);
  AttentionCase wide = c;
  wide.element = c.computed();
  // Other numbers of queries may take another path, except with these options.
  const bool same_path = c.query_cuts.empty() || c.dropout.p > 0 || c.batch_invariant;
  const KeyRange all{0, c.queries};
  for_each_target([&](const std::string& target) {
    std::vector<StateTensors<A>> parts;
    for_each_part(c.cuts, c.keys, [&](KeyRange keys) {
      if (parts.empty() || !c.continues) parts.emplace_back(c);
      for_each_part(c.query_cuts, c.queries,
                    [&](KeyRange queries) { attend_part<T>(c, in, settings, keys, queries, parts.back()); });
    });
    in.check_untouched();
    for (std::size_t i = 1; i < parts.size(); ++i) ssmax::merge<A>(parts[0].state(all), parts[i].state(all));
    const OutputTensors<A> result(c), whole(c);
    ssmax::finish<A>(parts[0].state(all), result.out.view(), result.lse_view(), settings.sinks,
                     result.row_statistics());
    attend<T>(c, in, whole, settings, {});
    if (same_path) check_whole(result, whole, parts.size() == 1, target);
    result.check(wide, expected, target);
    for (const StateTensors<A>& part : parts) part.check_beside(target);
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
      const std::optional<ssmax::Rope<A>> own_rope = rope_of<A>(c, b);
      for (index_t h = 0; h < c.kv_heads; ++h) {
        for (index_t key = 0; key < c.keys; ++key) {
          const auto row = (b * c.kv_heads + h) * c.keys + key;
          const bool there = key >= range.begin && key < range.end;
          const auto held = there ? cache.run(b, h, key) : ssmax::KeyRun<X>{};
          std::vector<A> turned;
          for (index_t i = 0; i < c.d; ++i)
            turned.push_back(static_cast<A>(k[static_cast<std::size_t>(row * c.d + i)]));
          if (there && own_rope)
            ssmax::rope(ssmax::View<const A, 2>(turned.data(), {1, c.d}),
                        ssmax::View<A, 2>(turned.data(), {1, c.d}), *own_rope, key);
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
                          settings.template options_of<T>(c, into)),
              scaling, mask, score, executor);
        });
      });
    };
    decode(result, c.executor);
    decode(again, {});
    if (!result.same_bits(again)) throw Finding(target + ": other bits with Serial");
    check_without_statistics(c, result, target, [&](const OutputTensors<T>& into) { decode(into, {}); });
    result.check(c, expected, target);
  });
}

}  // namespace fuzz
