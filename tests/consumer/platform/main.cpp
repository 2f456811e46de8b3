// Rows, attention, its gradients and decoding on a platform that the tests do not run on, held against loops
// in double. For every target that is there; the exit status says whether all were right.
// Nothing but the library and the standard one: no exceptions, no threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <ssmax/ssmax.hpp>
#include <utility>
#include <vector>

namespace {

using namespace ssmax;

// heads share kv_heads; neither the positions nor the width fill whole vectors.
constexpr index_t heads = 4, kv_heads = 2, length = 83, width = 22;
constexpr float s = 0.43f, b = 0.1f, cap = 5;

bool all_right = true;

void report(const char* what, double error, double allowed) {
  const bool right = error <= allowed;  // false for NaN
  all_right = all_right && right;
  std::printf("  %-22s %.2g%s\n", what, error, right ? "" : "  WRONG");
}

/// Uniform in [-1, 1), the same on every platform.
template <class T>
std::vector<T> numbers(index_t count, std::uint32_t seed) {
  std::vector<T> x;
  std::uint32_t state = seed;
  for (index_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    x.push_back(static_cast<T>(static_cast<double>(state >> 8) / (1 << 23) - 1));
  }
  return x;
}

template <class T>
View<T, 4> tensor(std::vector<T>& x, index_t head_count) {
  return {x.data(), {1, head_count, length, width}};
}

template <class T>
View<const T, 4> tensor(const std::vector<T>& x, index_t head_count) {
  return {x.data(), {1, head_count, length, width}};
}

/// The largest difference, NaN if there is one.
template <class T>
double difference(const std::vector<T>& computed, const std::vector<double>& exact) {
  double worst = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double error = std::abs(static_cast<double>(computed[i]) - exact[i]);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

// ---- Rows. -----------------------------------------------------------------------------------------------

/// The exponential alone: exp(x - 0) of floats from 0 down, in units of the last place.
void check_exp() {
  const auto& kernels = detail::kernels<detail::RowKernels<float>>();
  detail::OverlappedWork<float> nothing;
  std::vector<float> x;
  for (std::uint32_t bits = 0x80000000u; bits < 0xC2ADF000u; bits += 4001) {  // to -86.97
    x.push_back(__builtin_bit_cast(float, bits));
  }
  std::vector<float> y(x.size());
  kernels.exp_store(x.data(), static_cast<index_t>(x.size()), detail::split_scale<float>(1.0), 0.0f, y.data(),
                    nothing);
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    const double error =
        std::abs(static_cast<double>(y[i]) - exact) / std::ldexp(1.0, std::max(std::ilogb(exact), -126) - 23);
    if (!(error <= worst)) worst = error;
  }
  report("exp, ulps", worst, 1);
}

template <class T>
void check_rows(const char* what, double allowed) {
  double worst = 0;
  for (const index_t n : {1, 2, 3, 4, 7, 16, 33, 200, 5000}) {
    const index_t rows = 9;
    std::vector<T> logits = numbers<T>(rows * n, 7), out(logits.size());
    for (T& z : logits) z *= 8;
    softmax(View<const T, 2>(logits.data(), {rows, n}), View<T, 2>(out.data(), {rows, n}),
            SSMax<double>{0.43});
    for (index_t r = 0; r < rows; ++r) {
      const T* z = logits.data() + r * n;
      const double c = n == 1 ? 0 : 0.43 * std::log(static_cast<double>(n));
      const double top = c * static_cast<double>(*std::max_element(z, z + n));
      double sum = 0;
      for (index_t i = 0; i < n; ++i) sum += std::exp(c * static_cast<double>(z[i]) - top);
      for (index_t i = 0; i < n; ++i) {
        const double exact = std::exp(c * static_cast<double>(z[i]) - top) / sum;
        const double error =
            std::abs(static_cast<double>(out[static_cast<std::size_t>(r * n + i)]) / exact - 1);
        if (!(error <= worst)) worst = error;
      }
    }
  }
  report(what, worst, allowed);
}

// ---- Attention. ------------------------------------------------------------------------------------------

struct Exact {
  std::vector<double> out, dq, dk, dv;
  double ds = 0, db = 0;
};

std::size_t at(index_t head, index_t position, index_t channel) {
  return static_cast<std::size_t>((head * length + position) * width + channel);
}

template <class T>
Exact exact_attention(const std::vector<T>& q, const std::vector<T>& k, const std::vector<T>& v,
                      const std::vector<T>& dout) {
  Exact x;
  x.out.assign(q.size(), 0);
  x.dq = x.out;
  x.dk.assign(k.size(), 0);
  x.dv = x.dk;
  const double scale = 1 / std::sqrt(static_cast<double>(width)), c_cap = static_cast<double>(cap);
  for (index_t h = 0; h < heads; ++h) {
    const index_t g = h / (heads / kv_heads);
    for (index_t i = 0; i < length; ++i) {
      const double ln_n = std::log(static_cast<double>(i + 1));
      const double c = static_cast<double>(s) * ln_n + static_cast<double>(b);
      std::vector<double> z, p;
      double sum = 0;
      for (index_t j = 0; j <= i; ++j) {
        double dot = 0;
        for (index_t d = 0; d < width; ++d) {
          dot += static_cast<double>(q[at(h, i, d)]) * static_cast<double>(k[at(g, j, d)]);
        }
        z.push_back(c_cap * std::tanh(dot * scale / c_cap));
        p.push_back(std::exp(c * z.back()));
        sum += p.back();
      }
      double delta = 0;
      for (index_t d = 0; d < width; ++d) {
        double& out = x.out[at(h, i, d)];
        for (index_t j = 0; j <= i; ++j) {
          out += p[static_cast<std::size_t>(j)] / sum * static_cast<double>(v[at(g, j, d)]);
        }
        delta += out * static_cast<double>(dout[at(h, i, d)]);
      }
      for (index_t j = 0; j <= i; ++j) {
        const double weight = p[static_cast<std::size_t>(j)] / sum, logit = z[static_cast<std::size_t>(j)];
        double dp = 0;
        for (index_t d = 0; d < width; ++d) {
          dp += static_cast<double>(dout[at(h, i, d)]) * static_cast<double>(v[at(g, j, d)]);
          x.dv[at(g, j, d)] += weight * static_cast<double>(dout[at(h, i, d)]);
        }
        const double u = weight * (dp - delta);
        const double dz = c * u * (1 - logit * logit / (c_cap * c_cap)) * scale;
        x.ds += u * logit * ln_n;
        x.db += u * logit;
        for (index_t d = 0; d < width; ++d) {
          x.dq[at(h, i, d)] += dz * static_cast<double>(k[at(g, j, d)]);
          x.dk[at(g, j, d)] += dz * static_cast<double>(q[at(h, i, d)]);
        }
      }
    }
  }
  return x;
}

template <class T>
void check_attention(double allowed) {
  std::vector<T> q = numbers<T>(heads * length * width, 1), k = numbers<T>(kv_heads * length * width, 2),
                 v = numbers<T>(kv_heads * length * width, 3), dout = numbers<T>(heads * length * width, 4);
  for (T& x : q) x *= 4;
  const Exact exact = exact_attention(q, k, v, dout);

  std::vector<T> out(q.size()), dq(q.size()), dk(k.size()), dv(v.size()), lse(heads * length), ds(1), db(1);
  const SSMax<T> scaling{static_cast<T>(s), static_cast<T>(b)};
  const View<T, 3> lse_view(lse.data(), {1, heads, length});
  attention<ssmax::ComputeType<T>>({.q = tensor(q, heads),
                                    .k = tensor(k, kv_heads),
                                    .v = tensor(v, kv_heads),
                                    .out = tensor(out, heads),
                                    .lse = lse_view},
                                   scaling, Causal{}, Softcap{cap});
  report("attention", difference(out, exact.out), allowed);

  attention_backward<ssmax::ComputeType<T>>({.q = tensor(q, heads),
                                             .k = tensor(k, kv_heads),
                                             .v = tensor(v, kv_heads),
                                             .out = tensor(out, heads),
                                             .lse = lse_view},
                                            {.dout = tensor(dout, heads),
                                             .dq = tensor(dq, heads),
                                             .dk = tensor(dk, kv_heads),
                                             .dv = tensor(dv, kv_heads)},
                                            scaling.gradient(ds, db), Causal{}, Softcap{cap});
  report("dq", difference(dq, exact.dq), 10 * allowed);
  report("dk", difference(dk, exact.dk), 10 * allowed);
  report("dv", difference(dv, exact.dv), 10 * allowed);
  report("ds", std::abs(static_cast<double>(ds[0]) - exact.ds), 100 * allowed);
  report("db", std::abs(static_cast<double>(db[0]) - exact.db), 100 * allowed);
}

/// The last position alone, against a cache of what came before.
template <class Storage>
void check_decode(const char* what, double allowed) {
  std::vector<float> q = numbers<float>(heads * length * width, 1),
                     k = numbers<float>(kv_heads * length * width, 2),
                     v = numbers<float>(kv_heads * length * width, 3);
  KvCache<Storage> cache({.kv_heads = kv_heads, .width = width, .capacity = length});
  cache.append(tensor(std::as_const(k), kv_heads), tensor(std::as_const(v), kv_heads));
  std::vector<float> out(heads * width);
  attention({.q = View<const float, 4>(q.data() + (length - 1) * width, {1, heads, 1, width},
                                       {heads * length * width, length * width, width, 1}),
             .keys = cache,
             .out = View<float, 4>(out.data(), {1, heads, 1, width})},
            SSMax<float>{s, b}, Causal{}, Softcap{cap});

  for (float& x : k) x = static_cast<float>(Storage(x));
  for (float& x : v) x = static_cast<float>(Storage(x));
  const Exact exact = exact_attention(q, k, v, q);
  std::vector<double> last;
  for (index_t h = 0; h < heads; ++h) {
    for (index_t d = 0; d < width; ++d) last.push_back(exact.out[at(h, length - 1, d)]);
  }
  report(what, difference(out, last), allowed);
}

}  // namespace

int main() {
  for (const Target target : available_targets()) {
    set_active_target(target);
    std::printf("%s\n", target_name(target));
    check_exp();
    check_rows<float>("rows of float", 1.5e-6);
    check_rows<double>("rows of double", 2e-14);
    check_attention<float>(1e-6);
    check_attention<double>(1e-14);
    check_decode<float>("decode, float", 1e-6);
    check_decode<half>("decode, half", 1e-6);
    check_decode<bfloat16>("decode, bfloat16", 1e-6);
  }
  return all_right ? 0 : 1;
}
