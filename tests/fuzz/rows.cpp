// Cases of rows: softmax, log_softmax, logsumexp and both backwards, against tests/reference.hpp.
#include <ssmax/ragged_rows.hpp>
#include <ssmax/softmax.hpp>

#include "../reference.hpp"
#include "executor.hpp"
#include "kinds.hpp"
#include "targets.hpp"

namespace fuzz {
namespace {

enum class Function { softmax, log_softmax, logsumexp, softmax_backward, log_softmax_backward };

struct RowsCase {
  Function function;
  Element in, out;
  int rank;
  std::array<index_t, 4> extents;  // those before the rank's are 1
  std::vector<double> logits, y, dout;
  DrawnMask mask;
  DrawnScaling scaling;
  Layout of_logits, of_out, of_lse, of_y, of_dout;
  bool in_place;  // forward: over the logits; backward: over dout
  bool inherits_uniform;
  std::vector<index_t> begins;  // of ragged rows, or empty
  AnyExecutor executor;

  /// Calls f(first element, row for the scaling, keys, elements) for every row.
  template <class F>
  void for_each_row(const F& f) const {
    for (index_t head = 0; head < extents[2] && !begins.empty(); ++head) {
      for (std::size_t row = 0; row + 1 < begins.size(); ++row) {
        const index_t n = begins[row + 1] - begins[row];
        const PlacedRow scaled{{head, std::max<index_t>(n - 1, 0), n}, 0, static_cast<index_t>(row)};
        f(static_cast<std::size_t>(head * extents[3] + begins[row]), scaled, reference::Keys{0, n}, n);
      }
    }
    if (!begins.empty()) return;
    Query q{0, 0, 0, mask.shape};
    std::size_t first = 0;
    for (q.batch = 0; q.batch < extents[0]; ++q.batch) {
      for (q.head = 0; q.head < extents[1]; ++q.head) {
        for (q.index = 0; q.index < extents[2]; ++q.index, first += static_cast<std::size_t>(extents[3])) {
          reference::Keys keys;
          bool any = false;
          for (index_t key = 0; key < extents[3]; ++key) {
            if (inherits_uniform ? key > q.index : !mask.sees(q, key)) continue;
            if (!any) keys.begin = key;
            keys.end = key + 1;
            any = true;
          }
          PlacedRow scaled{{q.head, 0, keys.count()}, q.batch, q.index};
          if (any)
            scaled.position = inherits_uniform ? std::max<index_t>(0, q.position()) : mask.row_position(q);
          f(first, scaled, keys, extents[3]);
        }
      }
    }
  }
  bool is_backward() const { return function >= Function::softmax_backward; }
  std::string words() const {
    double lowest = infinity, highest = -infinity;
    for_each_row([&](std::size_t, const PlacedRow& row, reference::Keys, index_t) {
      if (row.n == 0) return;
      lowest = std::min(lowest, static_cast<double>(scaling.formula(row).value));
      highest = std::max(highest, static_cast<double>(scaling.formula(row).value));
    });
    constexpr const char* names[] = {"softmax", "log_softmax", "logsumexp", "softmax_backward",
                                     "log_softmax_backward"};
    std::string text = std::string(names[static_cast<int>(function)]) + " of " + name_of(in) + " to " +
                       name_of(out) + ", rank " + std::to_string(rank) + " extents";
    for (const index_t extent : extents) text += " " + std::to_string(extent);
    return text + (in_place ? ", in place" : "") + "\n  mask " +
           (!begins.empty()    ? "RaggedRows of " + std::to_string(begins.size() - 1) + " rows"
            : inherits_uniform ? "that inherits from Full"
                               : mask.words) +
           "; scaling " + scaling.words + ", c from " + number(lowest) + " to " + number(highest) +
           "\n  logits " + of_logits.words() + "; out " + of_out.words() + "; y " + of_y.words() + "; dout " +
           of_dout.words() + "; " + executor.words();
  }
};

/// A mask made from Full, with keys of its own: what Full says of itself does not hold for it.
struct InheritsUniform : ssmax::Full {
  KeyRange keys(const Query& q) const { return {0, q.index + 1}; }
};

/// Logits of many kinds: all alike, far apart, huge, with NaN and infinities.
std::vector<double> draw_logits(Random& random, index_t count, Element element) {
  const double size = random.pick({1.0, 1.0, 10.0, 100.0, 1e4});
  const double huge = is_wide(element) ? 1e300 : element == Element::f16 ? 6e4 : 1e38;
  const bool ties = random.chance(0.15), has_huge = random.chance(0.04), has_special = random.chance(0.1);
  const double shift = random.chance(0.1) ? 1000 * random.normal() : 0;
  const double hidden = random.chance(0.2) ? 0.3 : 0;
  std::vector<double> values;
  for (index_t i = 0; i < count; ++i) {
    double value = shift + size * random.normal();
    if (ties) value = static_cast<double>(random.between(-1, 1));
    if (has_huge && random.chance(0.2)) value = huge * random.uniform(-1, 1);
    if (hidden > 0 && random.chance(hidden)) value = -infinity;
    if (has_special && random.chance(0.01)) value = random.pick({nan, infinity, -infinity});
    values.push_back(rounded(element, std::clamp(value, -huge, huge) == value  ? value
                                      : std::isnan(value) || std::isinf(value) ? value
                                                                               : std::copysign(huge, value)));
  }
  return values;
}

/// Roundings of a softmax in float and double. Rows of 10^6 floats promise 5e-7; half an ulp of double is 1.1e-16.
double promised(Element element) { return is_wide(element) ? 2e-15 : 5e-7; }

struct ExpectedRow {
  std::vector<Real> values, bounds;
  Real dc = 0, dc_bound = 0;
};

/// One row by the reference, whose visible keys are [keys.begin, keys.end).
ExpectedRow expect_row(const RowsCase& c, std::size_t first, index_t n, reference::Keys keys,
                       const Bounded& multiplier) {
  const auto size = static_cast<std::size_t>(n);
  const std::span<const double> z(c.logits.data() + first, size);
  const reference::Row<double> row{z, multiplier.value, keys};
  const Real u = static_cast<Real>(unit_of(c.in)), promise = static_cast<Real>(promised(c.in));
  const Real flushed = is_wide(c.in) ? 0x1p-1020L : 0x1p-124L;
  const auto count = static_cast<Real>(std::max<index_t>(keys.count(), 1));
  // What the multiplier's rounding to double moves the logits by; twice that, as a library's log may err by an ulp.
  Real low = 0, high = 0;
  for (index_t key = keys.begin; key < keys.end; ++key) {
    if (!std::isfinite(row.logit(key))) continue;
    low = std::min(low, row.logit(key));
    high = std::max(high, row.logit(key));
  }
  const Real moved = std::max(2 * multiplier.error, 0x1p-53L * std::abs(multiplier.value)) * (high - low);
  ExpectedRow expected;
  const auto take = [&](Real value, Real bound) {
    expected.values.push_back(value);
    expected.bounds.push_back(bound);
  };
  switch (c.function) {
    case Function::softmax:
      for (const Real y : reference::softmax(row)) take(y, (promise + moved) * y + flushed);
      break;
    case Function::log_softmax:
      for (const Real y : reference::log_softmax(row)) {
        take(y, 4 * u * (std::abs(y) + std::log(count)) + promise + moved);
      }
      break;
    case Function::logsumexp: {
      const Real lse = reference::logsumexp(row);
      take(lse, 4 * u * std::abs(lse) + promise + moved);
      break;
    }
    default: {
      // From the y that was given.
      Real inner = 0, sizes = 0;
      for (index_t key = keys.begin; key < keys.end; ++key) {
        const std::size_t at = first + static_cast<std::size_t>(key);
        const Real y = c.y[at], g = c.dout[at];
        const Real term = c.function == Function::softmax_backward ? y * g : g;
        inner += term;
        sizes += std::abs(term);
      }
      const Real rounding = u * (8 + std::sqrt(count));
      for (index_t key = 0; key < n; ++key) {
        const std::size_t at = first + static_cast<std::size_t>(key);
        if (key < keys.begin || key >= keys.end) {
          take(0, 0);
          continue;
        }
        const Real y = c.y[at], g = c.dout[at], logit = c.logits[at];
        const bool logs = c.function == Function::log_softmax_backward;
        const Real p = logs ? std::exp(y) : y;
        const Real of = logs ? g - p * inner : p * (g - inner);
        const Real bound =
            (logs ? std::abs(g) + p * sizes * (1 + std::abs(y)) : p * (std::abs(g) + sizes)) * rounding +
            flushed * sizes;
        take(multiplier.value * of, std::abs(multiplier.value) * bound + multiplier.error * std::abs(of));
        if (p == 0 && std::isinf(logit)) continue;
        expected.dc += of * logit;
        expected.dc_bound += bound * std::abs(logit) * 2;
      }
    }
  }
  return expected;
}

template <int Rank, class T>
View<T, Rank> last(const View<T, 4>& all) {
  std::array<index_t, Rank> extents{}, strides{};
  for (int i = 0; i < Rank; ++i) {
    extents[static_cast<std::size_t>(i)] = all.extent(4 - Rank + i);
    strides[static_cast<std::size_t>(i)] = all.stride(4 - Rank + i);
  }
  return {all.data_handle(), extents, strides};
}

/// The rank makes no difference to a mask: rare ones are compiled for one rank alone.
template <int Rank, class F>
void with_row_mask(const RowsCase& c, const F& f) {
  if constexpr (Rank == 4) {
    if (c.inherits_uniform) return f(InheritsUniform{});
    if (c.mask.full) return f(ssmax::Full{});
    if (c.mask.positions) return f(PositionMask{{c.mask.mask.get()}});
  }
  f(RangeMask{c.mask.mask.get()});
}

template <class X, class Y, int Rank>
void call_forward(const RowsCase& c, const Tensor<X>& logits, const Tensor<Y>& out, const Tensor<Y>& lse) {
  const auto in = last<Rank>(View<const X, 4>(logits.view()));
  View<Y, Rank> to = last<Rank>(out.view());
  if constexpr (std::is_same_v<X, Y>) {
    if (c.in_place) to = last<Rank>(logits.view());
  }
  const auto call = [&]<class M>(const auto& scaling, const M& mask) {
    switch (c.function) {
      case Function::softmax:
        return ssmax::softmax(in, to, scaling, mask, c.executor);
      case Function::log_softmax:
        return ssmax::log_softmax(in, to, scaling, mask, c.executor);
      default:
        if constexpr (std::is_same_v<M, ssmax::RaggedRows>) {
          ssmax::logsumexp(in, last<Rank>(lse.view()), scaling, mask, c.executor);
        } else if constexpr (Rank > 1) {
          const View<Y, 3> all = lse.trailing();
          std::array<index_t, Rank - 1> extents{}, strides{};
          for (int i = 0; i < Rank - 1; ++i) {
            extents[static_cast<std::size_t>(i)] = all.extent(4 - Rank + i);
            strides[static_cast<std::size_t>(i)] = all.stride(4 - Rank + i);
          }
          ssmax::logsumexp(in, View<Y, Rank - 1>(all.data_handle(), extents, strides), scaling, mask,
                           c.executor);
        }
    }
  };
  if constexpr (Rank == 2) {
    if (!c.begins.empty()) return call(PlacedScaling{c.scaling.scaling.get()}, ssmax::RaggedRows(c.begins));
  }
  with_plain(c.scaling, [&](const auto& scaling) {
    with_row_mask<Rank>(c, [&](const auto& mask) { call(scaling, mask); });
  });
}

void compare(const RowsCase& c, const std::string& what, const std::vector<double>& got,
             const std::vector<Real>& expected, const std::vector<Real>& bounds) {
  if (got.size() != expected.size()) throw Finding(what + " has another size");
  for (std::size_t i = 0; i < got.size(); ++i) {
    check_value(what, static_cast<index_t>(i), got[i], static_cast<double>(expected[i]),
                static_cast<double>(bounds[i]), c.out);
  }
}

struct Expected {
  std::vector<Real> values, bounds;
  std::vector<Bounded> dc;
};

Expected expect(const RowsCase& c) {
  Expected expected;
  c.for_each_row([&](std::size_t first, const PlacedRow& scaled, reference::Keys keys, index_t n) {
    const Bounded multiplier = keys.count() == 0 ? Bounded(0) : c.scaling.formula(scaled);
    ExpectedRow one = expect_row(c, first, n, keys, multiplier);
    expected.values.insert(expected.values.end(), one.values.begin(), one.values.end());
    expected.bounds.insert(expected.bounds.end(), one.bounds.begin(), one.bounds.end());
    expected.dc.push_back(Bounded(one.dc, one.dc_bound));
  });
  return expected;
}

template <class X, class Y>
void run_forward(const RowsCase& c) {
  const Expected expected = expect(c);
  for_each_target([&](const std::string& target) {
    const Tensor<X> logits(c.extents, c.of_logits);
    logits.fill(c.logits);
    const auto before = logits.bytes();
    const Tensor<Y> out(c.extents, c.of_out);
    const std::array<index_t, 4> rows{1, c.extents[0], c.extents[1], c.extents[2]};
    const std::array<index_t, 4> ragged_rows{1, 1, c.extents[2], std::ssize(c.begins) - 1};
    const Tensor<Y> lse(c.begins.empty() ? rows : ragged_rows, c.of_lse);
    switch (c.rank) {
      case 1:
        call_forward<X, Y, 1>(c, logits, out, lse);
        break;
      case 2:
        call_forward<X, Y, 2>(c, logits, out, lse);
        break;
      case 3:
        call_forward<X, Y, 3>(c, logits, out, lse);
        break;
      default:
        call_forward<X, Y, 4>(c, logits, out, lse);
    }
    if (!c.in_place) logits.check_untouched("logits", before);
    const auto take = [&](const auto& tensor) {
      compare(c, target + " out", tensor.values(), expected.values, expected.bounds);
      tensor.erase();
      tensor.check_erased(target + " out");
    };
    if (c.function == Function::logsumexp) {
      take(lse);
    } else if (c.in_place) {
      take(logits);
    } else {
      take(out);
    }
  });
}

template <class T>
void run_backward(const RowsCase& c) {
  const Expected expected = expect(c);
  for_each_target([&](const std::string& target) {
    const Tensor<T> logits(c.extents, c.of_logits), y(c.extents, c.of_y), dout(c.extents, c.of_dout),
        out(c.extents, c.of_out);
    logits.fill(c.logits);
    y.fill(c.y);
    dout.fill(c.dout);
    const Tensor<T>& into = c.in_place ? dout : out;
    const auto before = y.bytes();
    const auto call_rank = [&]<int Rank>(std::integral_constant<int, Rank>, const auto& scaling,
                                         const auto& mask) {
      const ssmax::RowsBackward<T, Rank> rows{.out = last<Rank>(View<const T, 4>(y.view())),
                                              .dout = last<Rank>(View<const T, 4>(dout.view())),
                                              .logits = last<Rank>(View<const T, 4>(logits.view())),
                                              .dlogits = last<Rank>(into.view())};
      if (c.function == Function::softmax_backward) {
        ssmax::softmax_backward<T, Rank>(rows, scaling, mask, c.executor);
      } else {
        ssmax::log_softmax_backward<T, Rank>(rows, scaling, mask, c.executor);
      }
    };
    const auto call = [&](const auto& scaling) {
      with_row_mask<4>(c,
                       [&](const auto& mask) { call_rank(std::integral_constant<int, 4>{}, scaling, mask); });
    };
    for (const ParameterGradient& gradient : c.scaling.gradients) gradient.clear();
    if (!c.begins.empty()) {
      const std::integral_constant<int, 2> rank;
      const PlacedScaling placed{c.scaling.scaling.get()};
      const ssmax::RaggedRows ragged(c.begins);
      if (!c.scaling.learns()) call_rank(rank, placed, ragged);
      if (c.scaling.learns()) call_rank(rank, LearningPlacedScaling{placed}, ragged);
    } else if (c.scaling.learns()) {
      with_learning(c.scaling, call);
    } else {
      with_plain(c.scaling, call);
    }
    y.check_untouched("out", before);
    compare(c, target + " dlogits", into.values(), expected.values, expected.bounds);
    into.erase();
    into.check_erased(target + " dlogits");
    for (const ParameterGradient& gradient : c.scaling.gradients) {
      std::vector<Bounded> sums(gradient.size);
      Bounded::unit = static_cast<Real>(std::max(unit_of(c.in), unit_of(gradient.element)));
      auto dc = expected.dc.begin();
      c.for_each_row([&](std::size_t, const PlacedRow& scaled, reference::Keys, index_t) {
        const Bounded of_row = *dc++;
        if (scaled.n > 0) sums[gradient.index(scaled)] += Bounded(gradient.weight(scaled)) * of_row;
      });
      check_values(target + " " + gradient.name, gradient.values(), sums, gradient.element);
    }
  });
}

RowsCase draw_rows(Random& random, const Options& options) {
  RowsCase c{};
  c.function = static_cast<Function>(random.between(0, 4));
  c.in = random.pick({Element::f32, Element::f32, Element::f64, Element::f16, Element::bf16});
  c.out = c.in;
  c.rank = static_cast<int>(random.between(1, 4));
  if (c.function == Function::logsumexp && c.rank == 1) c.rank = 2;
  c.extents = {1, 1, 1, 1};
  for (int i = 0; i < c.rank; ++i) {
    c.extents[static_cast<std::size_t>(4 - c.rank + i)] =
        random.chance(0.02) ? 0 : random.pick<index_t>({1, 2, 3, 5, 7, 16, 17});
  }
  if (random.chance(0.7)) c.extents[2] = std::min<index_t>(c.extents[2], 5);
  index_t& n = c.extents[3];
  if (n > 0) {
    n = random.chance(0.5)
            ? random.between(1, 40)
            : random.pick<index_t>({1, 2, 4, 8, 16, 32, 64, 127, 128, 129, 255, 256, 257, 300, 1023, 1025});
    if (random.chance(0.02)) n = random.pick<index_t>({4095, 4096, 4097, 8192, 9000, 13'000});
  }
  while (c.extents[0] * c.extents[1] * c.extents[2] * n > 40'000) {
    for (std::size_t i = 0; i < 3; ++i) c.extents[i] = (c.extents[i] + 1) / 2;
    if (c.extents[0] * c.extents[1] * c.extents[2] == 1) break;
  }
  const index_t keys = n, count = c.extents[0] * c.extents[1] * c.extents[2] * n;
  const std::vector<index_t> lengths(static_cast<std::size_t>(c.extents[0]), keys);
  QueryShape shape{c.extents[0], c.extents[1], c.extents[2], keys};
  c.mask = draw_mask(random, shape, lengths, {.ranges_only = true});
  c.inherits_uniform = options.odd_names && random.chance(0.01);
  if (c.mask.positions || c.inherits_uniform) c.rank = 4;
  if (c.extents[0] == 1 && c.extents[1] == 1 && !c.inherits_uniform && random.chance(0.4)) {
    c.begins = draw_bounds(random, random.between(1, 30), n);
    c.rank = 2;
    shape = {1, c.extents[2], std::ssize(c.begins) - 1, n};
  }
  c.scaling = draw_scaling(random, shape, c.is_backward() && random.chance(0.4));
  for (Layout* layout : {&c.of_logits, &c.of_out, &c.of_y, &c.of_dout})
    *layout = draw_layout(random, false, c.begins.empty() && random.chance(0.4));
  c.of_lse = draw_layout(random, false);
  c.logits = draw_logits(random, count, c.in);
  if (c.is_backward()) {
    // y need not be softmax's for its backward to be what the formula says. It is finite, as the logits are.
    const bool logs = c.function == Function::log_softmax_backward;
    for (double& z : c.logits) z = std::abs(z) < 1e5 ? z : 0;
    for (index_t i = 0; i < count; ++i) {
      const double y = random.uniform() * random.uniform() / static_cast<double>(std::min<index_t>(n, 20));
      c.y.push_back(rounded(c.in, logs ? std::log(y) : y));
      c.dout.push_back(rounded(c.in, random.normal()));
    }
  } else if (c.in != Element::f64 && random.chance(0.3)) {
    c.out = c.in == Element::f32 ? random.pick({Element::f16, Element::bf16}) : Element::f32;
  }
  // What a mask hides is never read.
  if (random.chance(0.3)) {
    c.for_each_row([&](std::size_t first, const Row&, reference::Keys visible, index_t elements) {
      for (index_t key = 0; key < elements; ++key) {
        if (key >= visible.begin && key < visible.end) continue;
        const std::size_t at = first + static_cast<std::size_t>(key);
        c.logits[at] = nan;
        if (c.is_backward()) c.dout[at] = nan;
      }
    });
  }
  c.in_place = c.in == c.out && c.function != Function::logsumexp && random.chance(0.3);
  c.executor = draw_executor(random);
  return c;
}

}  // namespace

void run_rows(Random& random, const Options& options, std::string& words) {
  const RowsCase c = draw_rows(random, options);
  words = c.words();
  if (c.is_backward()) {
    with_element(c.in, [&](auto zero) { run_backward<decltype(zero)>(c); });
    return;
  }
  with_element(c.in, [&](auto in) {
    using X = decltype(in);
    if (c.in == c.out) return run_forward<X, X>(c);
    if constexpr (std::is_same_v<X, float>) {
      if (c.out == Element::f16) return run_forward<float, ssmax::half>(c);
      run_forward<float, ssmax::bfloat16>(c);
    } else if constexpr (!std::is_same_v<X, double>) {
      run_forward<X, float>(c);
    }
  });
}

}  // namespace fuzz
