// What the kernels share: vectors of which some lanes hold nothing, and reductions. Included once per target.

template <class T>
using Lanes = std::conditional_t<sizeof(T) == sizeof(float), F32, F64>;

/// Queries of a group: tile_vectors vectors of them, one per lane (prefill.inl).
template <class S>
inline constexpr index_t group_width = S::tile_vectors* S::width;

/// True where x is not -inf, that is for NaN as well.
template <class S>
SSMAX_INLINE typename S::M unmasked(typename S::V x) {
  return S::not_less(x, S::set(std::numeric_limits<typename S::Value>::lowest()));
}

/// A vector of the `left` elements from p, as many as it takes; lanes past them hold `fill`.
template <class S>
SSMAX_INLINE typename S::V load_up_to(const typename S::Value* p, index_t left, typename S::Value fill) {
  return left >= S::width ? S::load(p) : S::load_part(p, std::max<index_t>(left, 0), fill);
}

template <class S>
SSMAX_INLINE void store_up_to(typename S::Value* p, typename S::V v, index_t left) {
  if (left >= S::width) {
    S::store(p, v);
  } else {
    S::store_part(p, v, std::max<index_t>(left, 0));
  }
}

/// The sum of `count` vectors, by pairs.
template <class S, int count>
SSMAX_INLINE typename S::V reduce_pairwise(const typename S::V* v) {
  if constexpr (count == 1) {
    return v[0];
  } else {
    return S::add(reduce_pairwise<S, count / 2>(v), reduce_pairwise<S, count / 2>(v + count / 2));
  }
}

struct Maximum {
  template <class S>
  static typename S::V apply(typename S::V a, typename S::V b) {
    return S::max(a, b);
  }
};

struct Sum {
  template <class S>
  static typename S::V apply(typename S::V a, typename S::V b) {
    return S::add(a, b);
  }
};

/// Lane r of the result is the reduction of all lanes of v[r]. Halves the number of vectors at each stage.
template <class S, class Operation, int stage = 0, int count = S::width>
SSMAX_INLINE typename S::V fold(typename S::V* v) {
  if constexpr (count == 1) {
    return v[0];
  } else {
    SSMAX_UNROLL
    for (index_t i = 0; i < count / 2; ++i) {
      typename S::V low, high;
      S::template fold_inputs<stage>(v[2 * i], v[2 * i + 1], low, high);
      v[i] = Operation::template apply<S>(low, high);
    }
    return fold<S, Operation, stage + 1, count / 2>(v);
  }
}
