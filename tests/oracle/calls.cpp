// Makes the calls of cases by the interface of this commit. Compiled twice: with the older headers and with today's.
#include <memory>
#include <oracle/case.hpp>
#include <ssmax/ssmax.hpp>

#include "../call.hpp"

namespace oracle {
namespace {

using namespace ssmax;
using Case = oracle::Case;

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Numbers from -2 to 2, some of them special.
template <class T>
void fill(const Case& c, std::vector<T>& memory, std::uint64_t tensor) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float special[] = {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(),
                               1e30F,    1e-41F,    -0.0F};
  Random random(c.seed + tensor);
  for (T& element : memory) {
    const std::uint64_t bits = random.next();
    const bool is_special = static_cast<int>(bits % 1024) < c.special;
    const auto number = static_cast<float>(static_cast<std::int64_t>(bits >> 40) - (1 << 23)) * 0x1p-22F;
    element = T(is_special ? special[bits / 1024 % 6] : number);
  }
}

template <class T>
struct Tensor {
  std::vector<T> memory;
  View<T, 4> view;

  Tensor(const Tensor&) = delete;
  Tensor(const Case& c, index_t batch, index_t heads, index_t rows, index_t width, std::uint64_t seed = 0) {
    const index_t pitch = width + c.gap;
    memory.resize(static_cast<std::size_t>(batch * heads * rows * pitch));
    if (seed != 0) fill(c, memory, seed);
    view = {memory.data(), {batch, heads, rows, width}, {heads * rows * pitch, rows * pitch, pitch, 1}};
    if (c.by_position)
      view = {memory.data(), {batch, heads, rows, width}, {heads * rows * pitch, pitch, heads * pitch, 1}};
  }
  // The last three dimensions.
  View<T, 3> states() const {
    return {view.data_handle(),
            {view.extent(1), view.extent(2), view.extent(3)},
            {view.stride(1), view.stride(2), 1}};
  }
  // Rows [begin, begin + count).
  View<const T, 4> rows(index_t begin, index_t count) const {
    return {view.data_handle() + begin * view.stride(2),
            {view.extent(0), view.extent(1), count, view.extent(3)},
            {view.stride(0), view.stride(1), view.stride(2), 1}};
  }
  operator View<T, 4>() const { return view; }
  operator View<const T, 4>() const { return view; }
};

// A mask and a score that the library does not know.
struct OwnMask {
  KeyRange keys(const Query& q) const { return {q.index % 5, q.position() + 1}; }
  bool sees(const Query& q, index_t key) const { return (key + q.index + q.head) % 7 != 0; }
};
struct OwnScore {
  template <std::floating_point T>
  T operator()(T z, const Key& key) const {
    return z * T(0.75) + static_cast<T>(key.index % 3);
  }
  template <std::floating_point T>
  T derivative(T, const Key&) const {
    return T(0.75);
  }
};

// The tensors and the options of a case.
template <class T>
struct Problem {
  using A = Compute<T>;
  Case c;
  Tensor<T> q, k, v, out, dout, dq, dk, dv;
  Tensor<A> lse, dlse;
  std::vector<A> sinks, dsinks;
  std::vector<float> s, b, ds, db;
  std::vector<double> slopes, dslopes;
  std::optional<Rope<A>> rope;
  std::vector<index_t> cumulative_queries{0}, cumulative_keys{0};
  Workspace workspace;

  explicit Problem(const Case& given)
      : c(given),
        q(c, c.batch, c.heads, c.queries, c.d, 1),
        k(c, c.batch, c.kv_heads, c.keys, c.d, 2),
        v(c, c.batch, c.kv_heads, c.keys, c.dv, 3),
        out(c, c.batch, c.heads, c.queries, c.dv),
        dout(c, c.batch, c.heads, c.queries, c.dv, 4),
        dq(c, c.batch, c.heads, c.queries, c.d, 5),
        dk(c, c.batch, c.kv_heads, c.keys, c.d, 6),
        dv(c, c.batch, c.kv_heads, c.keys, c.dv, 7),
        lse(c, 1, c.batch, c.heads, c.queries),
        dlse(c, 1, c.batch, c.heads, c.queries, 8) {
    const auto heads = static_cast<std::size_t>(c.heads);
    s.resize(heads), b.resize(heads), ds.resize(heads), db.resize(heads), slopes.resize(heads),
        dslopes.resize(heads);
    if (c.sinks) sinks.resize(heads), dsinks.resize(heads);
    fill(c, s, 9), fill(c, b, 10), fill(c, slopes, 11), fill(c, sinks, 12);
    if (c.rope) rope.emplace(RopeOptions{.width = c.d / 2 * 2}, c.keys + c.queries);
    for (const index_t n : c.queries_of) cumulative_queries.push_back(cumulative_queries.back() + n);
    for (const index_t n : c.keys_of) cumulative_keys.push_back(cumulative_keys.back() + n);
  }
  AttentionArguments<Compute<T>> arguments() const {
    return {.q = q.view, .k = k.view, .v = v.view, .out = out.view, .lse = lse.states()};
  }
  AttentionArguments<Compute<T>> new_queries() const {
    return {.q = q.view, .out = out.view, .lse = lse.states()};
  }
  AttentionOptions<T> options(bool of_source = false) {
    AttentionOptions<T> o{.rope = rope ? &*rope : nullptr,
                          .sinks = sinks,
                          .workspace = c.workspace ? &workspace : nullptr,
                          .float_products = c.float_products,
                          .rounded_rotation = c.rounded_rotation,
                          .batch_invariant = c.batch_invariant,
                          .scaled_sinks = c.scaled_sinks};
    if (c.lengths == Lengths::padded)
      o.lengths = of_source ? SequenceLengths::padded_queries(c.queries_of)
                            : SequenceLengths::padded(c.queries_of, c.keys_of);
    if (c.lengths == Lengths::packed)
      o.lengths = of_source ? SequenceLengths::packed_queries(cumulative_queries)
                            : SequenceLengths::packed(cumulative_queries, cumulative_keys);
    return o;
  }
  // Calls f(scaling, mask, score).
  template <class F>
  void with_policy(const F& f) const {
    const Alibi alibi(slopes);
    if (c.policy == 0) return f(Softmax{}, Causal{}, Identity{});
    if (c.policy == 1) return f(SSMax<float>(s, b), Full{}, Softcap(3));
    if (c.policy == 2) return f(Softmax{}, Full{}, alibi);
    if (c.policy == 3) return f(SSMax<float>(s), OwnMask{}, OwnScore{});
    with_policy_of_source(f);
  }
  // The same for a call over a source: fewer policies, because there are many types of sources.
  template <class F>
  void with_policy_of_source(const F& f) const {
    if (c.policy % 2 == 0) return f(SSMax<float>(0.4F), SlidingWindow(c.window), Identity{});
    f(QwenLogN(40), Causal{}, Softcap(2) | Alibi(slopes));
  }
};

ThreadPool& pool(const Case& c) {
  static ThreadPool one(1), three(3);
  return c.threads == 1 ? one : three;
}

template <class X>
Output output(const char* name, const std::vector<X>& v) {
  return {name, v.data(), v.size() * sizeof(X), sizeof(X)};
}

template <class T>
std::vector<Output> results(const Problem<T>& p) {
  return {output("out", p.out.memory), output("lse", p.lse.memory)};
}

template <class T>
Call forward(const std::shared_ptr<Problem<T>>& p) {
  return {[p] {
            p->with_policy([&](const auto& scaling, const auto& mask, const auto& score) {
              attention<Compute<T>>(with(p->arguments(), p->options()), scaling, mask, score, pool(p->c));
            });
          },
          results(*p)};
}

template <class T>
Call planned(const std::shared_ptr<Problem<T>>& p) {
  return {[p] {
            const Case& c = p->c;
            p->with_policy([&]<class M>(const auto& scaling, const M& mask, const auto& score) {
              const Plan plan(with(p->arguments(), p->options()), c.threads, mask);
              plan.bind(p->arguments(), scaling, score)
                  .run({p->workspace.reserve(plan.bytes()), plan.bytes()}, pool(c));
            });
          },
          results(*p)};
}

// States of the keys before and after the cut, continued (`accumulate`) or merged.
template <class T>
Call partial(const std::shared_ptr<Problem<T>>& p) {
  using A = Compute<T>;
  const Case& c = p->c;
  struct State {
    Tensor<A> shift, sum, o;
    explicit State(const Case& c)
        : shift(c, 1, c.batch, c.heads, c.queries),
          sum(c, 1, c.batch, c.heads, c.queries),
          o(c, c.batch, c.heads, c.queries, c.dv) {}
    AttentionState<A> view() const { return {.shift = shift.states(), .sum = sum.states(), .o = o}; }
  };
  const auto first = std::make_shared<State>(c), second = std::make_shared<State>(c);
  const auto result = std::make_shared<Tensor<A>>(c, c.batch, c.heads, c.queries, c.dv);
  const auto run = [=] {
    p->with_policy([&](const auto& scaling, const auto& mask, const auto& score) {
      auto options = p->options();
      options.sinks = {};
      const auto part = [&](index_t begin, index_t end, const State& state, bool continues) {
        attention<Compute<T>>(with({.q = p->q.view,
                                    .k = p->k.rows(begin, end - begin),
                                    .v = p->v.rows(begin, end - begin),
                                    .state = state.view(),
                                    .continues = continues,
                                    .first_key = begin,
                                    .all_keys = p->c.keys},
                                   options),
                              scaling, mask, score, pool(p->c));
      };
      part(0, p->c.cut, *first, false);
      part(p->c.cut, p->c.keys, p->c.accumulate ? *first : *second, p->c.accumulate);
      if (!p->c.accumulate) merge(first->view(), second->view());
      finish(first->view(), View<A, 4>(*result), p->lse.states(), p->sinks);
    });
  };
  return {run,
          {output("out", result->memory), output("lse", p->lse.memory), output("sum", first->sum.memory),
           output("shift", first->shift.memory)}};
}

template <class T>
SSMaxGradient<float> learnt(Problem<T>& p, const SSMax<float>& scaling) {
  return scaling.gradient(p.ds, p.db);
}
template <class T>
auto learnt(Problem<T>& p, const Alibi& score) {
  return score.gradient(p.dslopes);
}
template <class T, class P>
P learnt(Problem<T>&, const P& policy) {
  return policy;
}

template <class T>
Call backward(const std::shared_ptr<Problem<T>>& p) {
  forward(p).run();
  const auto run = [p] {
    p->with_policy([&](const auto& scaling, const auto& mask, const auto& score) {
      attention_backward<Compute<T>>(
          backward_with(
              {.q = p->q.view, .k = p->k.view, .v = p->v.view, .out = p->out.view, .lse = p->lse.states()},
              p->options()),
          {.dout = p->dout.view,
           .dlse = p->dlse.states(),
           .dq = p->dq.view,
           .dk = p->dk.view,
           .dv = p->dv.view,
           .dsinks = p->dsinks,
           .accumulate = p->c.accumulate},
          learnt(*p, scaling), mask, learnt(*p, score), pool(p->c));
    });
  };
  return {
      run,
      {output("dq", p->dq.memory), output("dk", p->dk.memory), output("dv", p->dv.memory),
       output("ds", p->ds), output("db", p->db), output("dslopes", p->dslopes), output("dsinks", p->dsinks)}};
}

// Attention over a source, which `owner` keeps alive.
template <class T, class K>
Call decoded(const std::shared_ptr<Problem<T>>& p, const std::shared_ptr<const void>& owner,
             const K& source) {
  const auto run = [p, owner, source = &source] {
    p->with_policy_of_source([&](const auto& scaling, const auto& mask, const auto& score) {
      attention<Compute<T>>(with(over(p->new_queries(), *source), p->options(true)), scaling, mask, score,
                            pool(p->c));
    });
  };
  return {run, results(*p)};
}

// The same by a plan.
template <class T, class K>
Call planned(const std::shared_ptr<Problem<T>>& p, const std::shared_ptr<const KvCache<K>>& cache) {
  const auto run = [p, cache] {
    const Case& c = p->c;
    p->with_policy_of_source([&]<class M>(const auto& scaling, const M& mask, const auto& score) {
      const Plan plan(with(over(p->new_queries(), *cache), p->options(true)), c.threads, mask);
      plan.bind(over(p->new_queries(), *cache), scaling, score)
          .run({p->workspace.reserve(plan.bytes()), plan.bytes()}, pool(c));
    });
  };
  return {run, results(*p)};
}

// A cache that is filled 64 positions at a time; a ring under a window.
template <class T, class K>
Call cached(const std::shared_ptr<Problem<T>>& p, const Case& c) {
  using A = Compute<T>;
  const auto keys = static_cast<index_t>(c.keys_of.size());
  const bool ring = c.policy % 2 == 0;  // under a window
  const auto cache =
      std::make_shared<KvCache<K>>(KvCacheOptions{.batch = keys,
                                                  .kv_heads = c.kv_heads,
                                                  .width = c.d,
                                                  .value_width = c.dv,
                                                  .capacity = ring ? c.window + c.queries + 64 : c.keys,
                                                  .ring = ring});
  const Tensor<A> k(c, keys, c.kv_heads, c.keys, c.d, 2), v(c, keys, c.kv_heads, c.keys, c.dv, 3);
  for (index_t begin = 0; begin < c.keys; begin += 64) {
    const index_t count = std::min<index_t>(64, c.keys - begin);
    std::vector<index_t> counts;
    for (const index_t n : c.keys_of) counts.push_back(std::clamp<index_t>(n - begin, 0, count));
    cache->append(k.rows(begin, count), v.rows(begin, count), p->rope ? &*p->rope : nullptr, counts);
  }
  Call call = c.accumulate ? planned<T, K>(p, cache) : decoded<T>(p, cache, *cache);
  const auto [stored_keys, stored_values] = cache->memory();
  call.outputs.push_back({"stored keys", stored_keys.data(), stored_keys.size_bytes(), sizeof(K)});
  call.outputs.push_back({"stored values", stored_values.data(), stored_values.size_bytes(), sizeof(K)});
  return call;
}

// Sequences that share the pages of their common keys.
template <class T, class K>
Call paged(const std::shared_ptr<Problem<T>>& p, const Case& c) {
  using A = Compute<T>;
  struct Pages {
    PagedKvCache<K> cache;
    std::vector<index_t> ids;
    std::optional<decltype(cache.source(ids))> source;
  };
  const auto count = static_cast<index_t>(c.keys_of.size());
  const auto pages = std::make_shared<Pages>(PagedKvCache<K>({.kv_heads = c.kv_heads,
                                                              .width = c.d,
                                                              .value_width = c.dv,
                                                              .page = c.page,
                                                              .pages = count * (c.keys / c.page + 2)}));
  std::vector<A> k(static_cast<std::size_t>(c.keys * c.kv_heads * c.d)),
      v(static_cast<std::size_t>(c.keys * c.kv_heads * c.dv));
  const auto append = [&](index_t id, index_t tokens) {
    fill(c, k, 2 + static_cast<std::uint64_t>(id)), fill(c, v, 30 + static_cast<std::uint64_t>(id));
    pages->cache.append({k.data(), {tokens, c.kv_heads, c.d}}, {v.data(), {tokens, c.kv_heads, c.dv}},
                        std::vector(static_cast<std::size_t>(tokens), id), p->rope ? &*p->rope : nullptr);
  };
  const index_t common = *std::min_element(c.keys_of.begin(), c.keys_of.end());
  pages->ids.push_back(pages->cache.add());
  append(pages->ids[0], common);
  while (std::ssize(pages->ids) < count) pages->ids.push_back(pages->cache.fork(pages->ids[0]));
  for (std::size_t i = 0; i < pages->ids.size(); ++i) append(pages->ids[i], c.keys_of[i] - common);
  pages->source.emplace(pages->cache.source(pages->ids));
  return decoded<T>(p, pages, *pages->source);
}

// The keys of the batch in memory of the user: pages or lists of tokens in the order 5·i modulo their number.
template <class T, class K>
Call pool_of_user(const std::shared_ptr<Problem<T>>& p, const Case& c) {
  struct Pool {
    std::vector<K> k, v;
    std::vector<float> scales;
    std::vector<int> order;
    using Rows = View<const K, 4>;
    std::optional<decltype(PagedKeys(Rows(), Rows(), std::declval<PageTable<int, index_t>>()))> pages;
  };
  const auto pool = std::make_shared<Pool>();
  const index_t page = c.kind == "pages" ? c.page : 1, entries = (c.keys - 1) / page + 1,
                batch = std::ssize(c.keys_of);
  const index_t count = 5 * (batch * entries / 5) + 6;  // no multiple of 5
  const index_t rows = count * page * c.kv_heads;
  pool->k.resize(static_cast<std::size_t>(rows * c.d)), pool->v.resize(static_cast<std::size_t>(rows * c.dv));
  pool->scales.resize(static_cast<std::size_t>(rows));
  fill(c, pool->k, 2), fill(c, pool->v, 3), fill(c, pool->scales, 4);
  for (index_t i = 0; i < batch * entries; ++i) pool->order.push_back(static_cast<int>(5 * i % count));
  const View<const float, 3> scales(pool->scales.data(), {count, page, c.kv_heads});
  const KeyScales factors = sizeof(K) == 1 ? KeyScales{scales, scales} : KeyScales{};
  pool->pages.emplace(
      View<const K, 4>(pool->k.data(), {count, page, c.kv_heads, c.d}),
      View<const K, 4>(pool->v.data(), {count, page, c.kv_heads, c.dv}),
      PageTable<int, index_t>(View<const int, 2>(pool->order.data(), {batch, entries}), p->c.keys_of),
      factors);
  return decoded<T>(p, pool, *pool->pages);
}

// The functions of rows, over logits [batch, heads, queries, keys] of type X with results of type Y.
template <class X, class Y>
Call rows(const Case& given) {
  struct Rows {
    Case c;
    Tensor<X> logits, dlogits;
    Tensor<Y> out;
    Tensor<X> y, dy;
    std::vector<double> loss;
    std::vector<float> s, b, ds, db;
    std::vector<index_t> targets;
    explicit Rows(const Case& given_case)
        : c(given_case),
          logits(c, c.batch, c.heads, c.queries, c.keys, 1),
          dlogits(c, c.batch, c.heads, c.queries, c.keys),
          out(c, c.batch, c.heads, c.queries, c.keys),
          y(c, c.batch, c.heads, c.queries, c.keys),
          dy(c, c.batch, c.heads, c.queries, c.keys, 3),
          loss(1),
          s(static_cast<std::size_t>(c.heads)),
          b(s),
          ds(s),
          db(s) {
      fill(c, s, 9), fill(c, b, 10);
      for (index_t i = 0; i < c.queries; ++i) targets.push_back(i % 9 == 8 ? -100 : i % c.keys);
    }
  };
  const auto r = std::make_shared<Rows>(given);
  const auto with_policy = [r](const auto& f) {
    if (r->c.policy < 3) return f(SSMax<float>(r->s, r->b), Full{});
    f(SSMax<float>(0.4F), SlidingWindow(r->c.window));
  };
  const std::string& kind = given.kind;
  std::function<void()> run;
  const View<const X, 4> logits = r->logits;
  const View<Y, 4> out = r->out;
  const RowsBackward<X, 4> gradients{.out = r->y, .dout = r->dy, .logits = logits, .dlogits = r->dlogits};
  const auto with = [&](const auto& call) {
    run = [=] {
      with_policy([&](const auto& scaling, const auto& mask) { call(scaling, mask, pool(r->c)); });
    };
  };
  const auto learn = [r](const auto& scaling) {
    if constexpr (requires { scaling.gradient(r->ds, r->db); })
      return scaling.gradient(r->ds, r->db);
    else
      return scaling;
  };
  if (kind == "softmax") with([=](const auto& s, const auto& m, auto& e) { softmax(logits, out, s, m, e); });
  if (kind == "log_softmax")
    with([=](const auto& s, const auto& m, auto& e) { log_softmax(logits, out, s, m, e); });
  if (kind == "logsumexp")
    with([=](const auto& s, const auto& m, auto& e) {
      logsumexp(logits, View<Y, 3>(r->out.memory.data(), {r->c.batch, r->c.heads, r->c.queries}), s, m, e);
    });
  if (kind == "entmax")
    with([=](const auto& s, const auto& m, auto& e) {
      r->c.sinks ? entmax15(logits, out, s, m, e) : sparsemax(logits, out, s, m, e);
    });
  if (kind == "functor")
    run = [=] { SSMax<float>(0.4F)(std::span<const X>(r->logits.memory), std::span<Y>(r->out.memory)); };
  if (kind == "cross_entropy")
    run = [=] {
      r->loss[0] =
          cross_entropy<X>({logits.data_handle(), {r->c.queries, r->c.keys}, {logits.stride(2), 1}},
                           r->targets, {r->dlogits.memory.data(), {r->c.queries, r->c.keys}}, {}, pool(r->c))
              .loss;
    };
  if (kind == "softmax_backward") {
    with_policy([&](const auto& s, const auto& m) { softmax(logits, r->y.view, s, m); });
    with([=](const auto& s, const auto& m, auto& e) { softmax_backward(gradients, learn(s), m, e); });
  }
  if (kind == "log_softmax_backward") {
    with_policy([&](const auto& s, const auto& m) { log_softmax(logits, r->y.view, s, m); });
    with([=](const auto& s, const auto& m, auto& e) { log_softmax_backward(gradients, learn(s), m, e); });
  }
  return {run,
          {output("out", r->out.memory), output("dlogits", r->dlogits.memory), output("loss", r->loss),
           output("ds", r->ds), output("db", r->db)}};
}

template <class T>
Call of_type(const Case& c) {
  const bool is_source =
      c.kind == "decode" || c.kind == "paged_cache" || c.kind == "pages" || c.kind == "indexed";
  const auto p = std::make_shared<Problem<T>>(c);
  if (c.kind == "attention") return forward(p);
  if (c.kind == "partial") return partial(p);
  if (c.kind == "plan") return planned(p);
  if (c.kind == "backward") return backward(p);
  if (is_source) {
    const auto stored = [&]<class K>(K) {
      if (c.kind == "decode") return cached<T, K>(p, c);
      if constexpr (!std::is_same_v<K, Q8_0>)
        if (c.kind == "pages" || c.kind == "indexed") return pool_of_user<T, K>(p, c);
      return paged<T, K>(p, c);
    };
    if constexpr (std::is_same_v<T, float>) {
      if (c.stored == 1) return stored(Int8{});
      if (c.stored == 2) return stored(half{});
    }
    if constexpr (std::is_same_v<T, half>) {
      if (c.stored == 1) return stored(Fp8E5M2{});
    }
    if constexpr (std::is_same_v<T, bfloat16>) {
      if (c.stored == 1) return stored(Int8{});
      if (c.stored == 2) return stored(Fp8E4M3{});
    }
    if constexpr (sizeof(Compute<T>) == 4) {
      if (c.stored == 3) return stored(Q8_0{});
    }
    return stored(T{});
  }
  if constexpr (!std::is_same_v<T, double>)
    if (c.stored >= 3) return rows<T, float>(c);
  return rows<T, T>(c);
}

}  // namespace

const Side ORACLE_SIDE = {.targets =
                              [] {
                                std::vector<std::string> names;
                                for (const Target target : available_targets())
                                  names.emplace_back(target_name(target));
                                return names;
                              },
                          .set_target =
                              [](const std::string& name) {
                                for (const Target target : available_targets())
                                  if (target_name(target) == name) set_active_target(target);
                              },
                          .prepare =
                              [](const Case& c) {
                                if (c.type == 1) return of_type<double>(c);
                                if (c.type == 2) return of_type<half>(c);
                                if (c.type == 3) return of_type<bfloat16>(c);
                                return of_type<float>(c);
                              }};

}  // namespace oracle
