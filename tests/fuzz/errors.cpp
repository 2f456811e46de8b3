// Invalid calls: each must throw std::invalid_argument and write nothing. One argument of a valid call is made wrong.
#include <functional>
#include <limits>
#include <ssmax/attention.hpp>
#include <ssmax/attention_backward.hpp>
#include <ssmax/cross_entropy.hpp>
#include <ssmax/kv_cache.hpp>
#include <ssmax/softmax.hpp>
#include <utility>

#include "../call.hpp"
#include "kinds.hpp"

namespace fuzz {
namespace {

using ssmax::AttentionGradients;
using ssmax::BackwardArguments;

/// Memory that no refused call may change.
struct Memory {
  std::vector<float> values;
  std::vector<float> before;
  explicit Memory(index_t count) : values(static_cast<std::size_t>(count), 0.5f), before(values) {}
  float* data() { return values.data(); }
};

template <int Rank>
View<float, Rank> changed(const View<float, Rank>& view, int dimension, index_t extent, index_t stride) {
  std::array<index_t, Rank> extents{}, strides{};
  for (int i = 0; i < Rank; ++i) {
    extents[static_cast<std::size_t>(i)] = i == dimension ? extent : view.extent(i);
    strides[static_cast<std::size_t>(i)] = i == dimension ? stride : view.stride(i);
  }
  return {view.data_handle(), extents, strides};
}

/// Makes a view wrong, whatever it is of; says how. With `any_stride`, only a last stride beyond memory is wrong.
template <int Rank>
std::string spoil(Random& random, View<float, Rank>& view, bool is_output, bool any_stride = false) {
  const auto any = static_cast<int>(random.between(0, Rank - 1));
  switch (random.between(0, is_output ? 4 : 3)) {
    case 0:
      view = changed(view, any, view.extent(any) + 1, view.stride(any));
      return "extent " + std::to_string(any) + " one more";
    case 1:
      view = changed(view, any, -view.extent(any), view.stride(any));
      return "extent " + std::to_string(any) + " negative";
    case 2:
      view = changed(view, Rank - 1, view.extent(Rank - 1),
                     any_stride ? std::numeric_limits<index_t>::max() : random.pick<index_t>({2, -1, 0}));
      return "last stride";
    case 3: {
      std::array<index_t, Rank> extents{};
      for (int i = 0; i < Rank; ++i) extents[static_cast<std::size_t>(i)] = view.extent(i);
      view = View<float, Rank>(nullptr, extents);
      return "null";
    }
    default:
      view = changed(view, 0, view.extent(0), 0);
      return "elements shared";
  }
}

/// Makes a list one shorter or longer; says which.
template <class T>
std::string resized(Random& random, std::vector<T>& list, const char* name) {
  random.chance(0.5) ? list.pop_back() : list.push_back(1);
  return name;
}

/// Makes an argument wrong; says how.
using Mistake = std::function<std::string()>;

struct Refusals {
  Random& random;
  std::string& words;
  std::vector<Memory*> memory;

  void expect(const std::function<void()>& call) const {
    try {
      call();
    } catch (const std::invalid_argument&) {
      for (const Memory* m : memory) {
        if (m->values != m->before) throw Finding("refused, but something was written");
      }
      return;
    }
    throw Finding("accepted, should throw std::invalid_argument");
  }
};

void refuse_attention(Random& random, std::string& words, bool backward) {
  // Every extent is at least 2, so that each stride counts.
  const index_t batch = random.between(2, 3), kv_heads = random.between(2, 3),
                heads = kv_heads * random.between(1, 3);
  const index_t queries = random.between(2, 20), keys = random.between(2, 20), d = random.between(2, 9),
                dv = random.between(2, 9);
  const index_t room = 4 * 10 * 22 * 20;
  std::array<Memory, 10> m{Memory(room), Memory(room), Memory(room), Memory(room), Memory(room),
                           Memory(room), Memory(room), Memory(room), Memory(room), Memory(room)};
  const Refusals refusals{random, words, {&m[3], &m[4], &m[6], &m[7], &m[8]}};
  using View4 = View<float, 4>;
  View4 q(m[0].data(), {batch, heads, queries, d}), k(m[1].data(), {batch, kv_heads, keys, d}),
      v(m[2].data(), {batch, kv_heads, keys, dv}), out(m[3].data(), {batch, heads, queries, dv});
  View<float, 3> lse(m[4].data(), {batch, heads, queries});
  View4 dout(m[5].data(), {batch, heads, queries, dv}), dq(m[6].data(), {batch, heads, queries, d}),
      dk(m[7].data(), {batch, kv_heads, keys, d}), dv_view(m[8].data(), {batch, kv_heads, keys, dv});
  std::vector<float> sinks, s(static_cast<std::size_t>(heads), 1.f);
  std::vector<double> slopes(static_cast<std::size_t>(heads), 0.5);
  std::vector<index_t> prefix(static_cast<std::size_t>(batch), 1);
  std::optional<ssmax::Rope<float>> rope;
  index_t key_position = 0;
  const auto call = std::string(backward ? "attention_backward" : "attention") + " refuses ";
  const auto spoil_rope = [&] {
    const bool wide = random.chance(0.3);
    rope.emplace(ssmax::RopeOptions{.width = (wide ? d + 2 : d) / 2 * 2}, std::max(queries, keys) + 1);
    key_position =
        wide ? 0 : random.pick<index_t>({-keys - 1, 2 * keys + queries, std::numeric_limits<index_t>::max()});
    if (keys < queries) key_position = 2 * (keys + queries);
    return wide ? "a rope wider than a row" : "positions beyond the rope";
  };
  const auto spoil_sinks = [&] {
    sinks.assign(static_cast<std::size_t>(heads + random.pick<index_t>({-1, 1})), 1.f);
    return "the number of sinks";
  };
  const std::array<Mistake, 14> mistakes{
      [&] { return "q: " + spoil(random, q, false); },
      [&] { return "k: " + spoil(random, k, false); },
      [&] { return "v: " + spoil(random, v, false); },
      [&] { return "out: " + spoil(random, out, !backward); },
      [&] { return "lse: " + spoil(random, lse, !backward); },
      spoil_sinks,
      [&] { return resized(random, s, "the number of s"); },
      [&] { return resized(random, slopes, "slopes"); },
      [&] { return resized(random, prefix, "prefixes"); },
      spoil_rope,
      [&] { return "dout: " + spoil(random, dout, false); },
      [&] { return "dq: " + spoil(random, dq, true); },
      [&] { return "dk: " + spoil(random, dk, true); },
      [&] { return "dv: " + spoil(random, dv_view, true); },
  };
  words = call + mistakes[static_cast<std::size_t>(random.between(0, backward ? 13 : 9))]();
  // Outputs over inputs, now and then instead.
  if (random.chance(0.15)) {
    words = call + "an overlap";
    View4& output = backward ? random.chance(0.5) ? dq : dk : out;
    const View4& input = random.chance(0.5) ? k : q;
    const auto shift = random.between(0, 3);
    std::array<index_t, 4> extents{};
    for (int i = 0; i < 4; ++i) extents[static_cast<std::size_t>(i)] = output.extent(i);
    bool usable = input.data_handle() != nullptr && shift + 1 < input.size();
    for (const index_t extent : extents) usable = usable && extent > 0;
    if (usable && output.data_handle() != nullptr)
      output = View4(const_cast<float*>(input.data_handle()) + shift, extents);
  }
  const ssmax::AttentionOptions<float> options{
      .rope = rope ? &*rope : nullptr, .key_position = key_position, .sinks = sinks};
  const ssmax::SSMax<float> scaling{std::span<const float>(s)};
  const ssmax::PrefixLM mask(prefix);
  const ssmax::Alibi score(slopes);
  refusals.expect([&] {
    if (backward) {
      ssmax::attention_backward(
          ssmax::backward_with({.q = q, .k = k, .v = v, .out = out, .lse = lse}, options),
          {.dout = dout, .dq = dq, .dk = dk, .dv = dv_view}, scaling, mask, score);
    } else {
      ssmax::attention(ssmax::with({.q = q, .k = k, .v = v, .out = out, .lse = lse}, options), scaling, mask,
                       score);
    }
  });
}

void refuse_rows(Random& random, std::string& words) {
  const index_t rows = random.between(2, 9), n = random.between(2, 300);
  Memory in(4000), to(4000);
  const Refusals refusals{random, words, {&in, &to}};
  View<float, 2> logits(in.data(), {rows, n}), out(to.data(), {rows, n});
  std::vector<index_t> lengths(static_cast<std::size_t>(rows), 1);
  const std::initializer_list<Mistake> mistakes{
      [&] { return "logits: " + spoil(random, logits, false, true); },
      [&] { return "out: " + spoil(random, out, true, true); },
      [&] { return resized(random, lengths, "lengths"); },
      [&] {
        out = View<float, 2>(in.data() + random.between(1, rows * n - 1), {rows, n});
        return "an overlap";
      },
  };
  words = "rows refuse " + random.pick(mistakes)();
  const bool logs = random.chance(0.5);
  refusals.expect([&] {
    if (logs) {
      ssmax::log_softmax(logits, out, ssmax::Softmax{}, ssmax::Lengths(lengths));
    } else {
      ssmax::softmax(logits, out, ssmax::Softmax{}, ssmax::Lengths(lengths));
    }
  });
}

void refuse_cross_entropy(Random& random, std::string& words) {
  const index_t rows = random.between(2, 9), n = random.between(2, 300);
  Memory in(4000), to(4000);
  const Refusals refusals{random, words, {&in, &to}};
  View<float, 2> logits(in.data(), {rows, n}), out(to.data(), {rows, n});
  std::vector<index_t> targets(static_cast<std::size_t>(rows), 1);
  const std::initializer_list<Mistake> mistakes{
      [&] { return "logits: " + spoil(random, logits, false); },
      [&] { return "dlogits: " + spoil(random, out, true); },
      [&] { return resized(random, targets, "targets"); },
      [&] {
        targets[static_cast<std::size_t>(random.between(0, rows - 1))] = random.pick<index_t>({-1, n, n + 7});
        return "a class";
      },
  };
  words = "cross_entropy refuses " + random.pick(mistakes)();
  // A null gradient says that none is wanted only where it has no extents.
  refusals.expect([&] { ssmax::cross_entropy<float>(logits, targets, out); });
}

void refuse_cache(Random& random, std::string& words) {
  const index_t batch = random.between(2, 3), kv_heads = random.between(2, 3), held = random.between(2, 6);
  const index_t width = random.between(2, 9), capacity = held + random.between(0, 2);
  const index_t room = 4 * 10 * 22 * 20;
  Memory keys(room), values(room), queries(room), to(room), sums(room);
  const Refusals refusals{random, words, {&to, &sums}};
  ssmax::KvCache<float> cache({.batch = batch, .kv_heads = kv_heads, .width = width, .capacity = capacity});
  View<float, 4> k(keys.data(), {batch, kv_heads, held, width}),
      v(values.data(), {batch, kv_heads, held, width});
  cache.append(k, v);
  std::vector<index_t> counts(static_cast<std::size_t>(batch), 0);
  const auto append = [&] {
    cache.append(View<const float, 4>(k), View<const float, 4>(v), nullptr, counts);
  };
  const auto kind = random.between(0, 7);
  if (kind <= 3) {
    if (kind == 0) words = "append refuses k: " + spoil(random, k, false);
    if (kind == 1) words = "append refuses v: " + spoil(random, v, false);
    if (kind == 2) {
      counts[0] = random.pick<index_t>({-1, held + 1, capacity - held + 1});
      words = "append refuses counts";
      if (counts[0] <= held && counts[0] <= capacity - held) counts[0] = -1;
    }
    if (kind == 3) {
      counts.push_back(0);
      words = "append refuses the number of counts";
    }
    refusals.expect(append);
    for (index_t b = 0; b < batch; ++b) {
      if (cache.length(b) != held) throw Finding("append refused, but the cache has changed");
    }
    return;
  }
  View<float, 4> q(queries.data(), {batch, 2 * kv_heads, 2, width}),
      out(to.data(), {batch, 2 * kv_heads, 2, width});
  View<float, 3> lse(sums.data(), {batch, 2 * kv_heads, 2});
  ssmax::AttentionOptions<float> options;
  if (kind == 4) words = "decode refuses q: " + spoil(random, q, false);
  if (kind == 5) words = "decode refuses out: " + spoil(random, out, true);
  if (kind == 6) words = "decode refuses lse: " + spoil(random, lse, true);
  if (kind == 7) {
    options.key_position = random.pick<index_t>({1, -1});
    words = "decode refuses a key_position";
  }
  refusals.expect([&] {
    ssmax::attention(ssmax::with({.q = q, .keys = cache, .out = out, .lse = lse}, options), ssmax::Causal{});
  });
}

}  // namespace

void run_errors(Random& random, const Options&, std::string& words) {
  switch (random.between(0, 4)) {
    case 0:
      return refuse_attention(random, words, false);
    case 1:
      return refuse_attention(random, words, true);
    case 2:
      return refuse_rows(random, words);
    case 3:
      return refuse_cross_entropy(random, words);
    default:
      refuse_cache(random, words);
  }
}

}  // namespace fuzz
