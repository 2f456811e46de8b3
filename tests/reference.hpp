// What the library should compute, in long double and in loops that are short enough to be checked by eye.
//
//   y_i = exp(c z_i) / sum_j exp(c z_j)   over the visible keys; a logit of -inf is a hidden key, whatever c
//   is log y_i = c z_i - lse,  lse = ln sum_j exp(c z_j)
//
// Hidden keys have y = 0 and log y = -inf and are never read. Nothing visible: y = 0, lse = -inf, gradients 0. A
// visible NaN makes the whole row NaN. Storage types (float, double, half, bfloat16) are widened exactly.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "ssmax/half.hpp"
#include "ssmax/query.hpp"
#include "ssmax/view.hpp"

namespace reference {

using ssmax::index_t;
using Real = long double;

inline constexpr Real infinity = std::numeric_limits<Real>::infinity();
inline constexpr Real not_a_number = std::numeric_limits<Real>::quiet_NaN();

/// Half an ulp of one.
template <class T>
constexpr Real rounding = std::numeric_limits<T>::epsilon() / Real(2);

template <class T>
Real widen(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<Real>(value);
  } else {
    return static_cast<Real>(static_cast<float>(value));
  }
}

template <class T>
T narrow(Real value) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value);
  } else {
    return T(static_cast<float>(value));
  }
}

/// The larger of two errors, where NaN is the largest of all and stays.
inline Real worse(Real worst, Real error) {
  return std::isnan(error) ? infinity : error > worst ? error : worst;
}

/// |value - expected| / |expected|; 0 where both are 0.
inline double relative_difference(double value, double expected) {
  return value == expected ? 0 : std::abs(value - expected) / std::abs(expected);
}

/// The largest absolute difference of two arrays; infinite where one has a NaN, and for different sizes.
template <class V>
double largest_difference(const V& a, const V& b) {
  constexpr double most = std::numeric_limits<double>::infinity();
  double worst = a.size() == b.size() ? 0 : most;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i] == b[i]) continue;
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    worst = std::isnan(difference) ? most : std::max(worst, difference);
  }
  return worst;
}

/// Calls f(i, j, ...) for every index of the extents, the last of them in the inner loop.
template <class F, std::size_t rank, class... Index>
void for_each_index(const std::array<index_t, rank>& extents, const F& f, Index... outer) {
  if constexpr (sizeof...(outer) == rank) {
    f(outer...);
  } else {
    for (index_t i = 0; i < extents[sizeof...(outer)]; ++i) for_each_index(extents, f, outer..., i);
  }
}
template <class F, std::size_t rank>
void for_each_index(const index_t (&extents)[rank], const F& f) {
  for_each_index(std::to_array(extents), f);
}

/// Normally distributed values, the same on every platform for a seed (std::normal_distribution is not).
template <class T>
std::vector<T> normals(std::size_t count, unsigned seed, double deviation = 1, double mean = 0) {
  std::mt19937_64 generator(seed);
  const auto uniform = [&] { return (static_cast<double>(generator() >> 12) + 0.5) * 0x1p-52; };
  std::vector<T> values;
  values.reserve(count);
  while (values.size() < count) {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    values.push_back(narrow<T>(mean + deviation * radius * std::cos(2 * std::numbers::pi * uniform())));
  }
  return values;
}

/// Visible keys [begin, end) of a row.
struct Keys {
  index_t begin = 0;
  index_t end = 0;
  index_t count() const { return end - begin; }
};

template <class T>
struct Row {
  std::span<const T> logits;
  Real multiplier;
  Keys visible;

  index_t size() const { return static_cast<index_t>(logits.size()); }
  bool sees(index_t key) const {
    return key >= visible.begin && key < visible.end && logit(key) != -infinity;
  }
  Real logit(index_t key) const { return widen(logits[static_cast<std::size_t>(key)]); }
};

template <class T>
Row<T> whole_row(std::span<const T> logits, Real multiplier) {
  return {logits, multiplier, {0, static_cast<index_t>(logits.size())}};
}

template <class T>
Real logsumexp(const Row<T>& row) {
  bool any = false;
  Real largest = -infinity;
  for (index_t key = 0; key < row.size(); ++key) {
    if (!row.sees(key)) continue;
    const Real scaled = row.multiplier * row.logit(key);
    if (std::isnan(scaled)) return not_a_number;
    if (!any || scaled > largest) largest = scaled;
    any = true;
  }
  if (!any || largest == -infinity) return -infinity;
  Real sum = 0;
  for (index_t key = 0; key < row.size(); ++key) {
    if (row.sees(key)) sum += std::exp(row.multiplier * row.logit(key) - largest);
  }
  return largest + std::log(sum);
}

template <class T>
std::vector<Real> softmax(const Row<T>& row) {
  // Relative to the largest logit rather than through lse: exact also where lse absorbs the logits' differences.
  std::vector<Real> y(row.logits.size(), 0);
  const Real lse = logsumexp(row);
  if (std::isnan(lse)) {
    for (index_t key = row.visible.begin; key < row.visible.end; ++key) {
      y[static_cast<std::size_t>(key)] = not_a_number;
    }
    return y;
  }
  if (lse == -infinity) return y;  // every c·z is -inf, if there is any
  Real reference_logit = 0;
  bool any = false;
  for (index_t key = 0; key < row.size(); ++key) {
    if (!row.sees(key)) continue;
    const Real z = row.logit(key);
    if (!any || row.multiplier * z > row.multiplier * reference_logit) reference_logit = z;
    any = true;
  }
  Real sum = 0;
  for (index_t key = 0; key < row.size(); ++key) {
    if (!row.sees(key)) continue;
    const Real e = std::exp(row.multiplier * (row.logit(key) - reference_logit));
    y[static_cast<std::size_t>(key)] = e;
    sum += e;
  }
  if (any) {
    for (Real& value : y) value /= sum;
  }
  return y;
}

template <class T>
std::vector<Real> log_softmax(const Row<T>& row) {
  std::vector<Real> log_y(row.logits.size(), -infinity);
  const Real lse = logsumexp(row);
  for (index_t key = row.visible.begin; key < row.visible.end; ++key) {
    if (std::isnan(lse)) {
      log_y[static_cast<std::size_t>(key)] = not_a_number;
    } else if (row.sees(key) && lse != -infinity) {
      log_y[static_cast<std::size_t>(key)] = row.multiplier * row.logit(key) - lse;
    }
  }
  return log_y;
}

struct RowGradient {
  std::vector<Real> dz;
  Real dc = 0;
};

/// Of <g, y>:  u_i = y_i (g_i - <g, y>),  dz = c u,  dc = <u, z>.
template <class T>
RowGradient softmax_backward(const Row<T>& row, std::span<const T> g) {
  const std::vector<Real> y = softmax(row);
  Real inner = 0;
  for (index_t key = 0; key < row.size(); ++key) {
    const auto i = static_cast<std::size_t>(key);
    if (row.sees(key)) inner += widen(g[i]) * y[i];
  }
  RowGradient gradient{std::vector<Real>(row.logits.size(), 0)};
  for (index_t key = 0; key < row.size(); ++key) {
    const auto i = static_cast<std::size_t>(key);
    if (!row.sees(key)) continue;
    const Real u = y[i] * (widen(g[i]) - inner);
    gradient.dz[i] = row.multiplier * u;
    gradient.dc += u * row.logit(key);
  }
  return gradient;
}

/// Of <g, log y>:  u_i = g_i - y_i sum_j g_j,  dz = c u,  dc = <u, z>.
template <class T>
RowGradient log_softmax_backward(const Row<T>& row, std::span<const T> g) {
  const std::vector<Real> y = softmax(row);
  Real sum = 0;
  for (index_t key = 0; key < row.size(); ++key) {
    if (row.sees(key)) sum += widen(g[static_cast<std::size_t>(key)]);
  }
  RowGradient gradient{std::vector<Real>(row.logits.size(), 0)};
  for (index_t key = 0; key < row.size(); ++key) {
    const auto i = static_cast<std::size_t>(key);
    if (!row.sees(key)) continue;
    const Real u = widen(g[i]) - y[i] * sum;
    gradient.dz[i] = row.multiplier * u;
    gradient.dc += u * row.logit(key);
  }
  return gradient;
}

/// How the channels of a head pair up: i with i + width/2, or 2i with 2i + 1.
enum class Pairs { half_split, interleaved };

/// theta^(-2i/width), one per pair.
inline std::vector<Real> rope_frequencies(index_t width, Real theta) {
  std::vector<Real> frequencies;
  for (index_t i = 0; i < width / 2; ++i) {
    frequencies.push_back(std::pow(theta, -2 * static_cast<Real>(i) / static_cast<Real>(width)));
  }
  return frequencies;
}

/// Turns one row of channels by position * frequency per pair; channels past the pairs stay as they are.
/// The transpose (direction = -1) turns back.
template <class T>
std::vector<Real> rope(std::span<const T> row, Real position, const std::vector<Real>& frequencies,
                       Pairs pairs, int direction = +1) {
  std::vector<Real> out;
  for (const T value : row) out.push_back(widen(value));
  const std::size_t half = frequencies.size();
  for (std::size_t i = 0; i < half; ++i) {
    const std::size_t first = pairs == Pairs::half_split ? i : 2 * i;
    const std::size_t second = pairs == Pairs::half_split ? i + half : 2 * i + 1;
    const Real angle = position * frequencies[i];
    const Real cosine = std::cos(angle);
    const Real sine = static_cast<Real>(direction) * std::sin(angle);
    const Real a = widen(row[first]);
    const Real b = widen(row[second]);
    out[first] = a * cosine - b * sine;
    out[second] = b * cosine + a * sine;
  }
  return out;
}

/// The transpose of rope: from the gradient of its output to that of its input.
template <class T>
std::vector<Real> rope_backward(std::span<const T> dout, Real position, const std::vector<Real>& frequencies,
                                Pairs pairs) {
  return rope(dout, position, frequencies, pairs, -1);
}

struct AttentionResult {
  std::vector<Real> out;  // [batch, head, query, channel], contiguous
  std::vector<Real> lse;  // [batch, head, query]
};

/// out = softmax(c * scale * q k^T) v over views [batch, head, position, channel] with any strides.
/// visible(batch, query) -> Keys, multiplier(head, query, n) -> c. The kv head of a q head is head / (Hq / Hkv).
template <class T, class Visible, class Multiplier>
AttentionResult attention(ssmax::View<const T, 4> q, ssmax::View<const T, 4> k, ssmax::View<const T, 4> v,
                          Real scale, Visible visible, Multiplier multiplier) {
  const index_t group = q.extent(1) / k.extent(1);
  AttentionResult result;
  for (index_t batch = 0; batch < q.extent(0); ++batch) {
    for (index_t head = 0; head < q.extent(1); ++head) {
      for (index_t query = 0; query < q.extent(2); ++query) {
        const Keys seen = visible(batch, query);
        std::vector<Real> logits(static_cast<std::size_t>(k.extent(2)), 0);
        for (index_t key = seen.begin; key < seen.end; ++key) {
          Real dot = 0;
          for (index_t channel = 0; channel < q.extent(3); ++channel) {
            dot += widen(q(batch, head, query, channel)) * widen(k(batch, head / group, key, channel));
          }
          logits[static_cast<std::size_t>(key)] = scale * dot;
        }
        const Row<Real> row{logits, multiplier(head, query, seen.count()), seen};
        const std::vector<Real> y = softmax(row);
        for (index_t channel = 0; channel < v.extent(3); ++channel) {
          Real sum = 0;
          for (index_t key = seen.begin; key < seen.end; ++key) {
            sum += y[static_cast<std::size_t>(key)] * widen(v(batch, head / group, key, channel));
          }
          result.out.push_back(sum);
        }
        result.lse.push_back(logsumexp(row));
      }
    }
  }
  return result;
}

}  // namespace reference
