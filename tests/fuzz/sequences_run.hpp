// Runs cases of sequences. A unit that includes this compiles the calls of its types.
#pragma once

#include <functional>
#include <ssmax/attention.hpp>
#include <ssmax/kv_cache.hpp>
#include <ssmax/paged_keys.hpp>
#include <ssmax/paged_kv_cache.hpp>
#include <ssmax/plan.hpp>

#include "../call.hpp"
#include "sequences.hpp"
#include "targets.hpp"

namespace fuzz {

/// Any source of keys as one type.
template <class K, class V>
class AnySource {
 public:
  using Element = K;
  using ValueElement = V;

  template <class Source>
  AnySource(std::string a_name, const Source& source)
      : name(std::move(a_name)),
        shape_(source.shape()),
        memory_(source.memory()),
        run_([held = std::make_shared<Source>(source)](index_t b, index_t h, index_t key) {
          return held->run(b, h, key);
        }) {
    for (index_t b = 0; b < shape_.batch; ++b) {
      sequences_.push_back({source.length(b), source.stored(b), {}});
      if constexpr (requires { source.forgotten(b); }) sequences_.back().forgotten = source.forgotten(b);
    }
    if constexpr (requires { source.shares_keys(); }) shares_keys_ = source.shares_keys();
  }
  /// A source of sequence b alone.
  AnySource alone(index_t b) const {
    AnySource result = *this;
    result.shape_.batch = 1;
    result.sequences_ = {sequence(b)};
    result.run_ = [run = run_, b](index_t, index_t h, index_t key) { return run(b, h, key); };
    return result;
  }

  ssmax::KeySourceShape shape() const { return shape_; }
  index_t length(index_t b) const { return sequence(b).length; }
  KeyRange stored(index_t b) const { return sequence(b).stored; }
  KeyRange forgotten(index_t b) const { return sequence(b).forgotten; }
  bool shares_keys() const { return shares_keys_; }
  ssmax::KeyRun<K, V> run(index_t b, index_t h, index_t key) const { return run_(b, h, key); }
  std::pair<std::span<const K>, std::span<const V>> memory() const { return memory_; }

  std::string name;

 private:
  struct Sequence {
    index_t length;
    KeyRange stored, forgotten;
  };
  const Sequence& sequence(index_t b) const { return sequences_[static_cast<std::size_t>(b)]; }

  ssmax::KeySourceShape shape_;
  std::pair<std::span<const K>, std::span<const V>> memory_;
  std::function<ssmax::KeyRun<K, V>(index_t, index_t, index_t)> run_;
  std::vector<Sequence> sequences_;
  bool shares_keys_ = false;
};

/// The rope of all sequences and, where these have positions of their own, the rope of each sequence alone.
struct Ropes {
  std::optional<ssmax::Rope<float>> all;
  std::vector<ssmax::Rope<float>> alone;

  explicit Ropes(const SequencesCase& c) {
    if (!c.has_rope) return;
    ssmax::RopeOptions options = c.rope;
    options.frequencies = c.frequencies;
    const index_t tokens = c.rope_positions();
    if (c.positions.empty()) {
      all.emplace(options, tokens);
      return;
    }
    const index_t* const first = c.positions.data();
    all.emplace(options, View<const index_t, 3>(first, {c.sequences(), 2, tokens}), c.axes);
    for (index_t b = 0; b < c.sequences(); ++b)
      alone.emplace_back(options, View<const index_t, 2>(first + b * 2 * tokens, {2, tokens}), c.axes);
  }
  /// `b` below 0: of all sequences.
  const ssmax::Rope<float>* of(index_t b = -1) const {
    if (b >= 0 && !alone.empty()) return &alone[static_cast<std::size_t>(b)];
    return all ? &*all : nullptr;
  }
};

/// n elements whose bytes are NaN.
template <class X>
std::vector<X> nans(index_t n) {
  std::vector<X> result(static_cast<std::size_t>(n));
  std::memset(static_cast<void*>(result.data()), 0xFF, result.size() * sizeof(X));
  return result;
}

/// The same keys in every kind of source. All slots that hold no key of a sequence are NaN.
template <class K, class V>
class Contents {
 public:
  /// `ropes`: rotate the keys before they are stored, or null.
  Contents(const SequencesCase& c, const Families& families, std::uint64_t seed, const Ropes* ropes)
      : cache_({.batch = c.sequences(),
                .kv_heads = c.kv_heads,
                .width = c.d,
                .value_width = c.dv,
                .capacity = c.longest() + extra}),
        pages_of_all_(extra),
        lengths_(c.lengths.begin(), c.lengths.end()) {
    // 1. Draw the numbers: [sequence, key, kv head, channel].
    Random random(seed, 0);
    const index_t most = c.longest() + extra, batch = c.sequences(), kv = c.kv_heads;
    auto k = nans<float>(batch * most * kv * c.d), v = nans<float>(batch * most * kv * c.dv);
    const auto fill = [&](std::vector<float>& all, index_t width) {
      for (index_t b = 0; b < batch; ++b) {
        const auto at = [&](index_t of, index_t key) { return all.begin() + (of * most + key) * kv * width; };
        const auto i = static_cast<std::size_t>(b);
        std::copy(at(families.leaders[i], 0), at(families.leaders[i], families.common[i]), at(b, 0));
        std::generate(at(b, families.common[i]), at(b, c.length(b)),
                      [&] { return static_cast<float>(random.uniform(-2, 2)); });
      }
    };
    fill(k, c.d);
    fill(v, c.dv);
    // 2. Fill a KvCache. Rows of NaN follow the keys of each sequence, and are removed.
    std::vector<index_t> positions;
    for (index_t b = 0; b < batch; ++b) {
      const index_t committed = c.length(b) - c.queries[static_cast<std::size_t>(b)];
      for (index_t key = 0; key < most; ++key) positions.push_back(position(c, committed, key));
    }
    const auto rows = [&](const std::vector<float>& all, index_t width) {
      return View<const float, 4>(all.data(), {batch, kv, most, width},
                                  {most * kv * width, width, kv * width, 1});
    };
    cache_.append(rows(k, c.d), rows(v, c.dv), ropes == nullptr ? nullptr : ropes->of(), {}, positions);
    for (index_t b = 0; b < batch; ++b) cache_.truncate(b, c.length(b));
    // 3. Fill a PagedKvCache whose pages have held NaN. A fork shares the common keys.
    for (index_t b = 0; b < batch; ++b) pages_of_all_ += pages(c, b) + 1;
    paged_.emplace(ssmax::PagedKvCacheOptions{
        .kv_heads = kv, .width = c.d, .value_width = c.dv, .page = c.page, .pages = pages_of_all_});
    const auto append = [&](index_t id, const float* new_k, const float* new_v, index_t n,
                            const std::vector<index_t>& offsets, const ssmax::Rope<float>* rope) {
      const std::vector<index_t> ids(static_cast<std::size_t>(n), id);
      paged_->append(View<const float, 3>(new_k, {n, kv, c.d}), View<const float, 3>(new_v, {n, kv, c.dv}),
                     ids, rope, offsets);
    };
    const index_t places = pages_of_all_ * c.page;
    const index_t id_of_nan = paged_->add();
    append(id_of_nan, nans<float>(places * kv * c.d).data(), nans<float>(places * kv * c.dv).data(), places,
           {}, nullptr);
    paged_->remove(id_of_nan);
    for (index_t b = 0; b < batch; ++b) {
      const auto i = static_cast<std::size_t>(b);
      const index_t common = families.common[i], first = b * most + common;
      ids_.push_back(common > 0 ? paged_->fork(ids_[static_cast<std::size_t>(families.leaders[i])])
                                : paged_->add());
      paged_->truncate(ids_.back(), common);
      std::vector<index_t> offsets(positions.begin() + first, positions.begin() + b * most + c.length(b));
      for (index_t& offset : offsets) offset -= common;
      append(ids_.back(), k.data() + first * kv * c.d, v.data() + first * kv * c.dv, std::ssize(offsets),
             offsets, ropes == nullptr ? nullptr : ropes->of(b));
    }
    // 4. Copy the stored rows to pages in a random order.
    fill_pool(c, families, random);
    if constexpr (ssmax::detail::StoredRows<K, V>::accepts_quantized) {
      append_quantized(c);
      append_quantized_to_cache(c, random);
      const AnySource<K, V> caches[] = {{"PagedKvCache", quantized_->source(quantized_ids_)},
                                        {"KvCache", *quantized_cache_}};
      for (const AnySource<K, V>& cache : caches) check_same_rows(c, cache);
    }
  }
  Contents(const Contents&) = delete;
  Contents& operator=(const Contents&) = delete;

  /// The KvCache as it was before the queries after `prefix` were appended.
  AnySource<K, V> before_the_rest(const SequencesCase& c) const {
    ssmax::KvCache<K, V> cache = cache_;
    for (index_t b = 0; b < c.sequences(); ++b) {
      const auto i = static_cast<std::size_t>(b);
      cache.truncate(b, c.length(b) - c.queries[i] + c.prefix[i]);
    }
    return {"KvCache", cache};
  }

  /// All sources. The first one is a KvCache.
  std::vector<AnySource<K, V>> sources(const SequencesCase& c) const {
    const index_t batch = c.sequences(), kv = c.kv_heads, k_width = c.d / ssmax::detail::group_of<K>,
                  v_width = c.dv / ssmax::detail::group_of<V>;
    std::vector<AnySource<K, V>> result;
    result.emplace_back("KvCache", cache_);
    result.emplace_back("PagedKvCache", paged_->source(ids_));
    const auto scales = [&]<std::size_t rank>(const std::vector<float>& all,
                                              std::array<index_t, rank> extents) {
      return all.empty() ? View<const float, rank>{} : View<const float, rank>(all.data(), extents);
    };
    const auto add_pages = [&](const char* name, const std::vector<int>& table) {
      const std::array<index_t, 3> extents{pages_of_all_, c.page, kv};
      result.emplace_back(
          name, ssmax::PagedKeys(
                    View<const K, 4>(k_.data(), {pages_of_all_, c.page, kv, k_width}),
                    View<const V, 4>(v_.data(), {pages_of_all_, c.page, kv, v_width}),
                    ssmax::PageTable<int>(View<const int, 2>(table.data(), {batch, entries_}), lengths_),
                    {.k = scales(k_scales_, extents), .v = scales(v_scales_, extents)}));
    };
    add_pages("PagedKeys with common pages", common_);
    add_pages("PagedKeys with missing pages", missing_);
    // Each kv head has a list of tokens of its own.
    const index_t places = pages_of_all_ * c.page, most = entries_ * c.page;
    const std::array<index_t, 3> extents{places, 1, kv};
    const View<const int, 3> lists(indices_.data(), {batch, kv, most}, {most, 0, 1});
    result.emplace_back("PagedKeys of single keys",
                        ssmax::PagedKeys(View<const K, 4>(k_.data(), {places, 1, kv, k_width}),
                                         View<const V, 4>(v_.data(), {places, 1, kv, v_width}),
                                         ssmax::PageTable<int>(lists, lengths_),
                                         {.k = scales(k_scales_, extents), .v = scales(v_scales_, extents)}));
    // Each kv head has a table of its own: a page begins at a row of the pool, and its keys are kv rows apart.
    const index_t starts = (places - c.page + 1) * kv;
    const auto begins_at_rows = [&]<class X>(const std::vector<X>& rows, index_t row) {
      return View<const X, 4>(rows.data(), {starts, c.page, kv, row}, {row, kv * row, 0, 1});
    };
    const auto scales_at_rows = [&](const std::vector<float>& all) {
      return all.empty() ? View<const float, 3>{}
                         : View<const float, 3>(all.data(), {starts, c.page, kv}, {1, kv, 0});
    };
    result.emplace_back(
        "PagedKeys with a table per kv head",
        ssmax::PagedKeys(
            begins_at_rows(k_, k_width), begins_at_rows(v_, v_width),
            ssmax::PageTable<int>(View<const int, 3>(per_head_.data(), {batch, kv, entries_}), lengths_),
            {.k = scales_at_rows(k_scales_), .v = scales_at_rows(v_scales_)}));
    if (quantized_) result.emplace_back("PagedKvCache of quantized rows", quantized_->source(quantized_ids_));
    if (quantized_cache_) result.emplace_back("KvCache of quantized rows", *quantized_cache_);
    return result;
  }

 private:
  static constexpr index_t extra = 3;  // rows of NaN after the keys, and unused pages

  static index_t pages(const SequencesCase& c, index_t b) { return (c.length(b) + c.page - 1) / c.page; }
  /// The position to which the rope rotates a key: under a tree, that of its candidate.
  static index_t position(const SequencesCase& c, index_t committed, index_t key) {
    if (c.kind != SequencesCase::Kind::tree || key < committed) return key;
    index_t offset = -1;
    for (index_t i = key - committed; i >= 0; ++offset)
      i = i < std::ssize(c.parents) ? c.parents[static_cast<std::size_t>(i)] : -1;
    return committed + offset;
  }

  void fill_pool(const SequencesCase& c, const Families& families, Random& random) {
    const index_t batch = c.sequences(), kv = c.kv_heads, k_width = c.d / ssmax::detail::group_of<K>,
                  v_width = c.dv / ssmax::detail::group_of<V>, places = pages_of_all_ * c.page;
    entries_ = (c.longest() + c.page - 1) / c.page + 1;
    k_ = nans<K>(places * kv * k_width);
    v_ = nans<V>(places * kv * v_width);
    if constexpr (ssmax::detail::ScaledStorage<K>) k_scales_ = nans<float>(places * kv);
    if constexpr (ssmax::detail::ScaledStorage<V>) v_scales_ = nans<float>(places * kv);
    std::vector<int> order(static_cast<std::size_t>(pages_of_all_));
    std::iota(order.begin(), order.end(), 0);
    if (random.chance(0.8)) {
      for (std::size_t i = order.size(); i > 1; --i)
        std::swap(order[i - 1], order[static_cast<std::size_t>(random.between(0, std::ssize(order) - 1))]);
    }
    // Entries beyond the lengths are never read.
    common_.assign(static_cast<std::size_t>(batch * entries_), 2'000'000'000);
    missing_ = common_;
    per_head_.assign(static_cast<std::size_t>(batch * kv * entries_), 2'000'000'000);
    indices_.assign(static_cast<std::size_t>(batch * entries_ * c.page), -2'000'000'000);
    for (index_t b = 0, next = 0; b < batch; ++b) {
      const auto sequence = static_cast<std::size_t>(b);
      for (index_t i = 0; i < pages(c, b); ++i) {
        const auto entry = static_cast<std::size_t>(b * entries_ + i);
        missing_[entry] = common_[entry] = order[static_cast<std::size_t>(next++)];
        for (index_t h = 0; h < kv; ++h) {
          per_head_[static_cast<std::size_t>((b * kv + h) * entries_ + i)] =
              static_cast<int>(common_[entry] * c.page * kv + h);
        }
        if ((i + 1) * c.page <= families.common[sequence])
          common_[entry] = common_[static_cast<std::size_t>(families.leaders[sequence] * entries_ + i)];
      }
      index_t first_visible = c.length(b);
      for (index_t key = 0; key < c.length(b); ++key) {
        const index_t page = missing_[static_cast<std::size_t>(b * entries_ + key / c.page)],
                      place = page * c.page + key % c.page;
        indices_[static_cast<std::size_t>(b * entries_ * c.page + key)] = static_cast<int>(place);
        for (index_t h = 0; h < kv; ++h) {
          const ssmax::KeyRun<K, V> run = cache_.run(b, h, key);
          const index_t row = place * kv + h;
          std::copy_n(run.k, k_width, k_.begin() + row * k_width);
          std::copy_n(run.v, v_width, v_.begin() + row * v_width);
          if (!k_scales_.empty()) k_scales_[static_cast<std::size_t>(row)] = *run.k_scales;
          if (!v_scales_.empty()) v_scales_[static_cast<std::size_t>(row)] = *run.v_scales;
        }
      }
      Query query{b, 0, 0, {batch, c.heads, c.queries[sequence], c.length(b)}};
      for (; query.index < query.shape.queries; ++query.index)
        first_visible = std::min(first_visible, std::max<index_t>(0, c.mask.mask->keys(query).begin));
      for (index_t i = 0; (i + 1) * c.page <= first_visible; ++i)
        missing_[static_cast<std::size_t>(b * entries_ + i)] = -1;
    }
  }

  /// Appends the rows of the pool, which are quantized, to a cache.
  void append_quantized(const SequencesCase& c) {
    quantized_.emplace(paged_->options());
    const index_t kv = c.kv_heads, k_width = c.d / ssmax::detail::group_of<K>,
                  v_width = c.dv / ssmax::detail::group_of<V>;
    for (index_t b = 0; b < c.sequences(); ++b) {
      quantized_ids_.push_back(quantized_->add());
      for (index_t key = 0; key < c.length(b); key += c.page) {
        const index_t n = std::min(c.page, c.length(b) - key),
                      row = indices_[static_cast<std::size_t>(b * entries_ * c.page + key)] * kv;
        const auto scales = [&](const std::vector<float>& all) {
          return all.empty() ? View<const float, 2>{} : View<const float, 2>(all.data() + row, {n, kv});
        };
        quantized_->append(View<const K, 3>(k_.data() + row * k_width, {n, kv, k_width}),
                           View<const V, 3>(v_.data() + row * v_width, {n, kv, v_width}),
                           std::vector<index_t>(static_cast<std::size_t>(n), quantized_ids_.back()),
                           scales(k_scales_), scales(v_scales_));
      }
    }
  }

  /// Appends the quantized rows of the cache to another KvCache, in two calls with other numbers of each sequence.
  void append_quantized_to_cache(const SequencesCase& c, Random& random) {
    const index_t batch = c.sequences(), kv = c.kv_heads, k_width = c.d / ssmax::detail::group_of<K>,
                  v_width = c.dv / ssmax::detail::group_of<V>, most = c.longest();
    quantized_cache_.emplace(ssmax::KvCacheOptions{
        .batch = batch, .kv_heads = kv, .width = c.d, .value_width = c.dv, .capacity = most + extra});
    std::vector<index_t> begins(c.lengths.size()), counts;
    for (const index_t length : c.lengths) counts.push_back(random.between(0, length));
    for (int call = 0; call < 2; ++call) {
      auto k = nans<K>(batch * kv * most * k_width);
      auto v = nans<V>(batch * kv * most * v_width);
      std::vector<float> k_scales, v_scales;
      if constexpr (ssmax::detail::ScaledStorage<K>) k_scales = nans<float>(batch * kv * most);
      if constexpr (ssmax::detail::ScaledStorage<V>) v_scales = nans<float>(batch * kv * most);
      reference::for_each_index({batch, kv, most}, [&](index_t b, index_t h, index_t i) {
        const auto sequence = static_cast<std::size_t>(b);
        if (i >= counts[sequence]) return;
        const ssmax::KeyRun<K, V> run = cache_.run(b, h, begins[sequence] + i);
        const index_t row = (b * kv + h) * most + i;
        std::copy_n(run.k, k_width, k.begin() + row * k_width);
        std::copy_n(run.v, v_width, v.begin() + row * v_width);
        if (!k_scales.empty()) k_scales[static_cast<std::size_t>(row)] = *run.k_scales;
        if (!v_scales.empty()) v_scales[static_cast<std::size_t>(row)] = *run.v_scales;
      });
      const auto scales = [&](const std::vector<float>& all) {
        return all.empty() ? View<const float, 3>{} : View<const float, 3>(all.data(), {batch, kv, most});
      };
      quantized_cache_->append(View<const K, 4>(k.data(), {batch, kv, most, k_width}),
                               View<const V, 4>(v.data(), {batch, kv, most, v_width}), scales(k_scales),
                               scales(v_scales), counts);
      begins = counts;
      for (std::size_t b = 0; b < counts.size(); ++b) counts[b] = c.lengths[b] - begins[b];
    }
  }

  /// Throws unless a source has the rows and the factors of the cache, which has quantized the floats.
  void check_same_rows(const SequencesCase& c, const AnySource<K, V>& source) const {
    const auto same = [](const auto* first, const auto* second, index_t count) {
      if (first == nullptr || second == nullptr) return first == second;
      return std::memcmp(first, second, static_cast<std::size_t>(count) * sizeof(*first)) == 0;
    };
    for (index_t b = 0; b < c.sequences(); ++b) {
      reference::for_each_index({c.kv_heads, c.length(b)}, [&](index_t h, index_t key) {
        const ssmax::KeyRun<K, V> own = cache_.run(b, h, key), other = source.run(b, h, key);
        if (same(own.k, other.k, c.d / ssmax::detail::group_of<K>) &&
            same(own.v, other.v, c.dv / ssmax::detail::group_of<V>) &&
            same(own.k_scales, other.k_scales, 1) && same(own.v_scales, other.v_scales, 1))
          return;
        throw Finding(source.name + " of quantized rows: another row of sequence " + std::to_string(b) +
                      ", kv head " + std::to_string(h) + ", key " + std::to_string(key));
      });
    }
  }

  ssmax::KvCache<K, V> cache_;
  std::optional<ssmax::PagedKvCache<K, V>> paged_, quantized_;
  std::optional<ssmax::KvCache<K, V>> quantized_cache_;
  std::vector<index_t> ids_, quantized_ids_;
  index_t pages_of_all_, entries_ = 0;  // entries_: of a row of a table
  std::vector<K> k_;
  std::vector<V> v_;
  std::vector<float> k_scales_, v_scales_;
  std::vector<int> lengths_, common_, missing_, indices_, per_head_;
};

struct TreeMask : WithRuns<PositionPredicateMask> {
  static constexpr bool rotated_to_positions = true;
  void check(const QueryShape&) const {}  // a sequence alone may have fewer queries than the tree
};

/// Rows of all sequences. In each head, they lie between rows of NaN, where nothing may be read or written.
template <class X>
struct SequenceRows {
  static constexpr index_t guard = 8;  // rows
  const SequencesCase* c;
  index_t width, head;  // head: elements of a head
  std::vector<X> memory;

  SequenceRows(const SequencesCase& of, index_t a_width)
      : c(&of),
        width(a_width),
        head((of.first_row(of.sequences()) + 2 * guard) * width),
        memory(nans<X>(of.heads * head)) {}
  View<X, 4> view() {
    if (c->packed) return view_of(0, 1, c->first_row(c->sequences()));
    return view_of(0, c->sequences(), c->rows);
  }
  View<X, 4> sequence(index_t b) { return sequence(b, {0, c->queries[static_cast<std::size_t>(b)]}); }
  View<X, 4> sequence(index_t b, KeyRange queries) {
    return view_of(c->first_row(b) + queries.begin, 1, queries.size());
  }
  /// Calls f for each row of a query.
  template <class F>
  void for_each(const F& f) {
    for (index_t b = 0; b < c->sequences(); ++b) {
      const View<X, 4> rows = sequence(b);
      for (index_t h = 0; h < c->heads; ++h) {
        for (index_t i = 0; i < rows.extent(2); ++i)
          f(std::span(&rows(0, h, i, 0), static_cast<std::size_t>(width)));
      }
    }
  }
  bool operator==(const SequenceRows& other) const {
    return std::memcmp(memory.data(), other.memory.data(), memory.size() * sizeof(X)) == 0;
  }

 private:
  View<X, 4> view_of(index_t first, index_t batch, index_t rows) {
    return {memory.data() + (guard + first) * width,
            {batch, c->heads, rows, width},
            {rows * width, head, width, 1}};
  }
};

struct SequencePart {
  index_t sequence;
  KeyRange queries;
};

template <class T, class O>
struct SequencesResult {
  SequenceRows<O> out;
  SequenceRows<float> lse;

  explicit SequencesResult(const SequencesCase& c) : out(c, c.dv), lse(c, 1) {}
  bool operator==(const SequencesResult& other) const { return out == other.out && lse == other.lse; }
  /// `part`: of some queries of a sequence, or null.
  template <class Source>
  ssmax::AttentionArguments<float> arguments(SequenceRows<T>& q, const Source& source,
                                             const SequencePart* part = nullptr) {
    const auto pick = [part](auto& rows) {
      return part == nullptr ? rows.view() : rows.sequence(part->sequence, part->queries);
    };
    const View<float, 4> all = pick(lse);
    const View<float, 3> rows(all.data_handle(), {all.extent(0), all.extent(1), all.extent(2)},
                              {all.stride(0), all.stride(1), all.stride(2)});
    return {
        .q = pick(q), .keys = source, .out = pick(out), .lse = lse.c->wants_lse ? rows : View<float, 3>{}};
  }
};

template <class F>
void with_sequence_mask(const SequencesCase& c, const F& f) {
  const AnyMask* mask = c.mask.mask.get();
  if (c.kind == SequencesCase::Kind::range) return f(RangeMask{mask});
  if (c.kind == SequencesCase::Kind::runs) return f(WithRuns<PredicateMask>{{{mask}}});
  f(TreeMask{{{{{mask}}}}});
}

template <class T, class K, class V, class O>
void run_sequences(const SequencesCase& c) {
  using Source = AnySource<K, V>;
  using Result = SequencesResult<T, O>;
  const Ropes ropes(c);
  Random random(c.seed, 1);
  SequenceRows<T> q(c, c.d);
  q.for_each([&](auto row) {
    for (auto& x : row) x = narrow<T>(random.uniform(-2, 2));
  });
  ssmax::AttentionOptions<T> options{.rope = ropes.of(),
                                     .key_position = c.key_position,
                                     .sinks = c.sinks,
                                     .float_products = c.float_products,
                                     .rounded_rotation = c.rounded_rotation,
                                     .batch_invariant = c.batch_invariant,
                                     .scaled_sinks = c.scaled_sinks,
                                     .rotate_source_keys = c.rotates_source_keys,
                                     .dropout = c.dropout};
  options.dropout.seeds = c.seeds;
  const auto lengths_of = [&](const std::vector<index_t>& numbers) {
    if (!c.gives_lengths) return ssmax::SequenceLengths();
    return c.packed ? ssmax::SequenceLengths::packed_queries(numbers)
                    : ssmax::SequenceLengths::padded_queries(numbers);
  };
  const std::vector<index_t> numbers = c.numbers(c.queries), refilled = c.numbers(c.refilled);
  const ssmax::SSMax<float> scaling(0.3F);
  for_each_target([&](const std::string& target) {
    const Ropes* const of_stored = c.rotates_source_keys ? nullptr : &ropes;
    const Contents<K, V> contents(c, c.families, c.seed, of_stored);
    std::optional<Contents<K, V>> others;
    if (c.has_others) others.emplace(c, c.others, c.seed + 1, of_stored);
    with_sequence_mask(c, [&](const auto& mask) {
      const auto arguments = [&](Result& result, const Source& source, const auto& of_call,
                                 const SequencePart* part = nullptr) {
        auto a = ssmax::with(result.arguments(q, source, part), of_call);
        a.more_queries_than_keys = true;
        if (part == nullptr) return a;
        a.rope = ropes.of(part->sequence);
        if (!c.seeds.empty())
          a.dropout.seeds = std::span(c.seeds).subspan(static_cast<std::size_t>(part->sequence), 1);
        return a;
      };
      const auto check = [&](const std::string& what, const Result& expected, const auto& call) {
        Result got(c);
        try {
          call(got);
        } catch (const std::exception& error) {
          throw Finding(target + ", " + what + ": " + error.what());
        }
        if (!(got == expected)) throw Finding(target + ", " + what + ": other bits than each sequence alone");
      };
      const auto alone = [&](const Source& source) {
        Result result(c);
        for (index_t b = 0; b < c.sequences(); ++b) {
          const SequencePart whole{b, {0, c.queries[static_cast<std::size_t>(b)]}};
          ssmax::attention(arguments(result, source.alone(b), options, &whole), scaling, mask);
        }
        return result;
      };
      /// Computes each sequence alone in two calls, between which keys are appended.
      const auto in_two_calls = [&](const Source& first, const Source& whole, Result& result) {
        for (index_t b = 0; b < c.sequences(); ++b) {
          const auto i = static_cast<std::size_t>(b);
          const SequencePart parts[] = {{b, {0, c.prefix[i]}}, {b, {c.prefix[i], c.queries[i]}}};
          ssmax::attention(arguments(result, first.alone(b), options, &parts[0]), scaling, mask);
          ssmax::attention(arguments(result, whole.alone(b), options, &parts[1]), scaling, mask, c.executor);
        }
      };
      /// Runs a plan of one source, bound to another one. `may_throw`: the plan may refuse the other source.
      const auto check_plan = [&](const Source& planned, const Source& bound, const Result& expected,
                                  bool may_throw) {
        check("plan of " + planned.name + " over " + bound.name, expected, [&](Result& got) {
          std::vector<index_t> own = numbers;
          auto of_plan = options;
          of_plan.lengths = lengths_of(own);
          const ssmax::Plan plan(arguments(got, planned, of_plan), c.executor.threads, mask);
          const std::size_t bytes = plan.bytes();
          std::vector<std::byte> memory(bytes + 128, std::byte{0xFF});
          const auto first = (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
          try {
            const auto call = plan.bind(got.arguments(q, bound), scaling);
            if (!c.refilled.empty()) std::copy(refilled.begin(), refilled.end(), own.begin());
            call.run(std::span(memory).subspan(first, bytes), c.executor);
          } catch (const std::invalid_argument&) {
            if (!may_throw) throw;
            got = expected;
          }
          for (std::size_t i = first + bytes; i < memory.size(); ++i) {
            if (memory[i] != std::byte{0xFF}) throw Finding("a write beyond bytes()");
          }
        });
      };
      const auto check_sources = [&](const std::vector<Source>& sources) {
        const Result expected = alone(sources[0]);
        Result outside = expected;
        outside.out.for_each(
            [](auto row) { std::memset(static_cast<void*>(row.data()), 0xFF, row.size_bytes()); });
        outside.lse.for_each([](auto row) { std::memset(row.data(), 0xFF, row.size_bytes()); });
        if (!(outside == Result(c))) throw Finding(target + ": a write outside the rows of a sequence");
        auto given = options;
        given.lengths = lengths_of(numbers);
        for (const Source& source : sources) {
          check(source.name, expected, [&](Result& got) {
            ssmax::attention(arguments(got, source, given), scaling, mask, c.executor);
          });
          check_plan(source, source, expected, false);
        }
        return expected;
      };
      const auto of_first = contents.sources(c);
      const Result first = check_sources(of_first);
      if (!c.prefix.empty()) {
        check("prompts in two calls", first,
              [&](Result& got) { in_two_calls(contents.before_the_rest(c), of_first[0], got); });
      }
      if (!others) return;
      const auto of_others = others->sources(c);
      const Result second = alone(of_others[0]);
      for (int pair = 0; pair < 2; ++pair) {
        const auto i = random.pick<std::size_t>({0, 1, 2, 2, 3, 4, 5}),
                   j = random.pick<std::size_t>({1, 2, 2, 3});
        check_plan(of_first[i], of_others[j], second, true);
        check_plan(of_others[j], of_first[i], first, true);
      }
    });
  });
}

}  // namespace fuzz
