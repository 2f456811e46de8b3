// Implements dropout: two counters of Philox per lane and sixteen keys. Included once per target.

/// The random words of one vector of queries and of sixteen neighbouring keys: word j belongs to keys 2j and 2j + 1.
template <class S>
class RandomWords {
 public:
  static constexpr index_t keys = 2 * dropped_keys;

  explicit RandomWords(const DropLanes& lanes) : lanes_(lanes) {}

  /// Draws the words of keys [first, first + 16). Requires a multiple of 16.
  void draw(index_t first) {
    for (index_t lane = 0; lane < S::width; ++lane) {
      for (index_t i = 0; i < 2; ++i) {
        const auto words = philox(
            {static_cast<std::uint32_t>(first / dropped_keys + i), lanes_.query[lane], lanes_.head[lane], 0},
            {lanes_.key[0], lanes_.key[1]});
        std::copy_n(words.begin(), 4, word_[lane] + 4 * i);
      }
    }
  }

  /// Computes row[·] = dropped ? 0 : row[·] · factor for key `key` of the sixteen.
  void drop(typename S::Value* row, index_t key, typename S::Value factor) const {
    for (index_t lane = 0; lane < S::width; ++lane)
      row[lane] = is_dropped(key, lane) ? 0 : row[lane] * factor;
  }
  /// Sets dropped numbers of key `key` to 0. The number of lane l is row[2·l].
  void clear(bfloat16* row, index_t key) const {
    for (index_t lane = 0; lane < S::width; ++lane) {
      if (is_dropped(key, lane)) row[2 * lane] = bfloat16{};
    }
  }
  /// Sets dropped numbers of keys `key` and key + 1 to 0: row[2·l] and row[2·l + 1]. Requires an even key.
  void clear_pair(bfloat16* row, index_t key) const {
    clear(row, key);
    clear(row + 1, key + 1);
  }

 private:
  bool is_dropped(index_t key, index_t lane) const {
    return (word_[lane][key / 2] >> (key % 2 * 16) & 0xFFFF) < lanes_.threshold;
  }

  const DropLanes& lanes_;
  std::uint32_t word_[S::width][keys / 2];
};

/// The rounds of one counter wait for each other, so those of two counters take turns. The first two rounds multiply
/// numbers that all keys or all lanes share.
template <class S>
requires requires { typename S::U; }
class RandomWords<S> {
  using U = typename S::U;

 public:
  static constexpr index_t keys = 2 * dropped_keys;

  SSMAX_INLINE explicit RandomWords(const DropLanes& lanes) : threshold_(S::set_u(lanes.threshold << 16)) {
    for (std::uint32_t round = 0; round < 10; ++round) {
      for (int i = 0; i < 2; ++i) key_[round][i] = lanes.key[i] + round * philox_step[i];
    }
    U low, high;
    S::multiply_u(S::load_u(lanes.head), philox_factor[1], low, high);
    lane_[0] = S::xor_u(low, S::set_u(key_[1][0]));
    S::multiply_u(S::xor_u(high, S::load_u(lanes.query), S::set_u(key_[0][0])), philox_factor[0], lane_[2],
                  high);
    lane_[1] = S::xor_u(high, S::set_u(key_[1][1]));
  }

  SSMAX_INLINE void draw(index_t first) {
    U c[2][4];
    SSMAX_UNROLL
    for (index_t i = 0; i < 2; ++i) {
      const auto eight = static_cast<std::uint32_t>(first / dropped_keys + i);
      const std::uint64_t a = std::uint64_t{philox_factor[0]} * eight,
                          b = philox_factor[1] * (a >> 32 ^ key_[0][1]);
      c[i][0] = S::xor_u(lane_[0], S::set_u(static_cast<std::uint32_t>(b >> 32)));
      c[i][1] = S::set_u(static_cast<std::uint32_t>(b));
      c[i][2] = S::xor_u(lane_[1], S::set_u(static_cast<std::uint32_t>(a)));
      c[i][3] = lane_[2];
    }
    SSMAX_UNROLL
    for (int round = 2; round < 10; ++round) {
      SSMAX_UNROLL
      for (index_t i = 0; i < 2; ++i) {
        U low0, high0, low2, high2;
        S::multiply_u(c[i][0], philox_factor[0], low0, high0);
        S::multiply_u(c[i][2], philox_factor[1], low2, high2);
        c[i][0] = S::xor_u(high2, c[i][1], S::set_u(key_[round][0]));
        c[i][1] = low2;
        c[i][2] = S::xor_u(high0, c[i][3], S::set_u(key_[round][1]));
        c[i][3] = low0;
      }
    }
    SSMAX_UNROLL
    for (index_t j = 0; j < keys / 2; ++j) word_[j] = c[j / 4][j % 4];
  }

  SSMAX_INLINE void drop(typename S::Value* row, index_t key, typename S::Value factor) const {
    const U word = word_[key / 2];
    const auto dropped = S::below_u(key % 2 == 0 ? S::shift_left_16(word) : word, threshold_);
    S::store(row, S::select(dropped, S::set(0), S::mul(S::load(row), S::set(factor))));
  }
  SSMAX_INLINE void clear(bfloat16* row, index_t key) const {
    std::uint32_t word[S::width], threshold[S::width];
    S::store_u(word, word_[key / 2]);
    S::store_u(threshold, threshold_);
    for (index_t lane = 0; lane < S::width; ++lane) {
      if ((key % 2 == 0 ? word[lane] << 16 : word[lane]) < threshold[lane]) row[2 * lane] = bfloat16{};
    }
  }
  SSMAX_INLINE void clear_pair(bfloat16* row, index_t key) const {
    auto* const pair = reinterpret_cast<std::uint32_t*>(row);
    const U word = word_[key / 2];
    // The low half of a word belongs to the first key.
    const auto low = S::below_u(S::shift_left_16(word), threshold_), high = S::below_u(word, threshold_);
    S::store_u(pair, S::clear_u(S::clear_u(S::load_u(pair), low, 0xFFFF), high, 0xFFFF0000));
  }

 private:
  std::uint32_t key_[10][2];  // of each round
  U threshold_;
  U lane_[3];  // the words 0, 2 and 3 after two rounds, without the counter
  U word_[keys / 2];
};

/// Calls f(words, i, key, count) for parts of the keys [first, first + keys): keys [key, key + count) of sixteen
/// neighbours, the first of which is number i of the keys.
template <class S, class F>
SSMAX_INLINE void for_each_sixteen(const DropLanes& lanes, index_t first, index_t keys, const F& f) {
  RandomWords<S> words(lanes);
  for (index_t i = 0; i < keys;) {
    const index_t key = (first + i) % words.keys, count = std::min(words.keys - key, keys - i);
    words.draw(first + i - key);
    f(words, i, key, count);
    i += count;
  }
}

template <class S>
void drop_weights(typename S::Value* x, index_t group, index_t first, index_t keys, const DropLanes& lanes,
                  typename S::Value factor) {
  using Words = RandomWords<S>;
  for_each_sixteen<S>(lanes, first, keys, [&](const Words& words, index_t i, index_t key, index_t count) {
    typename S::Value* const row = x + i * group;
    if (count == words.keys) {
      SSMAX_UNROLL
      for (index_t j = 0; j < words.keys; ++j) words.drop(row + j * group, j, factor);
    } else {
      for (index_t j = 0; j < count; ++j) words.drop(row + j * group, key + j, factor);
    }
  });
}

template <class S>
void clear_pairs(bfloat16* x, index_t group, index_t first, index_t keys, const DropLanes& lanes) {
  using Words = RandomWords<S>;
  for_each_sixteen<S>(lanes, first, keys, [&](const Words& words, index_t i, index_t key, index_t count) {
    const auto row = [&](index_t j) { return x + (i + j) / 2 * 2 * group + (i + j) % 2; };
    if (count == words.keys && i % 2 == 0) {
      SSMAX_UNROLL
      for (index_t j = 0; j < words.keys; j += 2) words.clear_pair(row(j), j);
    } else {
      for (index_t j = 0; j < count;) {
        const bool is_pair = (i + j) % 2 == 0 && (key + j) % 2 == 0 && j + 1 < count;
        if (is_pair)
          words.clear_pair(row(j), key + j);
        else
          words.clear(row(j), key + j);
        j += is_pair ? 2 : 1;
      }
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
