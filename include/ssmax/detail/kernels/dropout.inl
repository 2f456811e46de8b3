// Implements dropout: one counter of Philox per lane and eight keys. Included once per target.

/// The random words of one vector of queries: word j of a lane belongs to keys 2j and 2j + 1 of the eight.
template <class S>
struct RandomWords {
  std::uint32_t word[4][S::width];

  SSMAX_INLINE void draw(const DropLanes& lanes, std::uint32_t eight) {
    if constexpr (requires { typename S::U; }) {
      using U = typename S::U;
      U c0 = S::set_u(eight), c1 = S::load_u(lanes.query), c2 = S::load_u(lanes.head), c3 = S::set_u(0);
      std::uint32_t k0 = lanes.key[0], k1 = lanes.key[1];
      SSMAX_UNROLL
      for (int round = 0; round < 10; ++round) {
        U low0, high0, low2, high2;
        S::multiply_u(c0, 0xD2511F53, low0, high0);
        S::multiply_u(c2, 0xCD9E8D57, low2, high2);
        c0 = S::xor_u(S::xor_u(high2, c1), S::set_u(k0));
        c1 = low2;
        c2 = S::xor_u(S::xor_u(high0, c3), S::set_u(k1));
        c3 = low0;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
      }
      S::store_u(word[0], c0);
      S::store_u(word[1], c1);
      S::store_u(word[2], c2);
      S::store_u(word[3], c3);
    } else {
      for (index_t lane = 0; lane < S::width; ++lane) {
        const auto words =
            philox({eight, lanes.query[lane], lanes.head[lane], 0}, {lanes.key[0], lanes.key[1]});
        for (std::size_t j = 0; j < 4; ++j) word[j][lane] = words[j];
      }
    }
  }
  std::uint32_t bits(index_t key, index_t lane) const {
    return word[key / 2][lane] >> (key % 2 * 16) & 0xFFFF;
  }
};

/// Calls f(words, key, end, i) for keys [key, end) of eight neighbours. Key `key` is number i of the keys, counted from
/// `first`.
template <class S, class F>
SSMAX_INLINE void for_each_eight(const DropLanes& lanes, index_t first, index_t keys, const F& f) {
  for (index_t key = first; key < first + keys;) {
    const index_t eight = key / dropped_keys, end = std::min((eight + 1) * dropped_keys, first + keys);
    RandomWords<S> words;
    words.draw(lanes, static_cast<std::uint32_t>(eight));
    f(words, key % dropped_keys, end - eight * dropped_keys, key - first);
    key = end;
  }
}

template <class S>
void drop_weights(typename S::Value* x, index_t group, index_t first, index_t keys, const DropLanes& lanes,
                  typename S::Value factor) {
  for_each_eight<S>(
      lanes, first, keys, [&](const RandomWords<S>& words, index_t key, index_t end, index_t i) {
        for (; key < end; ++key, ++i) {
          typename S::Value* const row = x + i * group;
          if constexpr (requires { typename S::U; }) {
            const typename S::U word = S::load_u(words.word[key / 2]);
            const auto dropped =
                S::below_u(key % 2 == 0 ? S::shift_left_16(word) : word, S::set_u(lanes.threshold << 16));
            S::store(row, S::select(dropped, S::set(0), S::mul(S::load(row), S::set(factor))));
          } else {
            for (index_t lane = 0; lane < S::width; ++lane)
              row[lane] = words.bits(key, lane) < lanes.threshold ? 0 : row[lane] * factor;
          }
        }
      });
}

template <class S>
void clear_pairs(bfloat16* x, index_t group, index_t first, index_t keys, const DropLanes& lanes) {
  for_each_eight<S>(
      lanes, first, keys, [&](const RandomWords<S>& words, index_t key, index_t end, index_t i) {
        while (key < end) {
          bfloat16* const row = x + i / 2 * 2 * group + i % 2;
          if constexpr (requires { typename S::U; }) {
            if (key % 2 == 0 && i % 2 == 0 && key + 1 < end) {
              // The low half of a word belongs to the first key.
              auto* const pair = reinterpret_cast<std::uint32_t*>(row);
              const typename S::U word = S::load_u(words.word[key / 2]),
                                  threshold = S::set_u(lanes.threshold << 16);
              const auto low = S::below_u(S::shift_left_16(word), threshold),
                         high = S::below_u(word, threshold);
              S::store_u(pair, S::clear_u(S::clear_u(S::load_u(pair), low, 0xFFFF), high, 0xFFFF0000));
              key += 2, i += 2;
              continue;
            }
          }
          for (index_t lane = 0; lane < S::width; ++lane) {
            if (words.bits(key, lane) < lanes.threshold) row[2 * lane] = bfloat16{};
          }
          ++key, ++i;
        }
      });
}

template <class T>
struct KernelTable<DropoutKernels<T>> {
  using S = Simd<T>;
  static constexpr DropoutKernels<T> value{.drop = drop_weights<S>};
};

template <>
struct KernelTable<PairDropoutKernels> {
  static constexpr PairDropoutKernels value{.clear = clear_pairs<Simd<float>>};
};
