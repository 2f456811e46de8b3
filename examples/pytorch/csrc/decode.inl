// Attention of new queries over a cache, for queries of type T: the text of decode_float.cpp and
// decode_double.cpp.
#include <ssmax/attention.hpp>
#include <ssmax/kv_cache.hpp>
#include <stdexcept>

#include "call.hpp"
#include "executor.hpp"
#include "operators.hpp"

namespace ssmax_torch {

namespace {

/// A cache of tensors as a source of keys: sequence b has had lengths[b] keys, key i lies in row i or, in a ring
/// of that many rows, i modulo capacity.
template <class X>
struct TensorKeys {
  using Element = X;

  ssmax::View<const X, 4> k, v;  // [batch, kv_heads, capacity, width]
  std::span<const index_t> lengths;
  bool ring;

  index_t capacity() const { return k.extent(2); }
  ssmax::KeySourceShape shape() const { return {k.extent(0), k.extent(1), k.extent(3), v.extent(3)}; }
  index_t length(index_t b) const { return lengths[static_cast<std::size_t>(b)]; }
  ssmax::KeyRange stored(index_t b) const {
    return {ring ? std::max<index_t>(0, length(b) - capacity()) : 0, length(b)};
  }
  ssmax::KeyRun<X> run(index_t b, index_t head, index_t key) const {
    const index_t row = key % capacity();
    return {.k = &k(b, head, row, 0),
            .k_stride = k.stride(2),
            .v = &v(b, head, row, 0),
            .v_stride = v.stride(2),
            .count = std::min(capacity() - row, length(b) - key)};
  }
};

template <class X>
TensorKeys<X> make_keys(const CacheInputs& in) {
  const TensorKeys<X> keys{.k = view<const X, 4>("keys", in.keys),
                           .v = view<const X, 4>("values", in.values),
                           .lengths = integers("lengths", in.lengths),
                           .ring = in.ring};
  if (std::ssize(keys.lengths) != keys.k.extent(0)) {
    fail("lengths has shape " + shape_of(in.lengths) + ", sequences are " + std::to_string(keys.k.extent(0)));
  }
  const index_t most = in.ring ? ssmax::detail::max_counted : keys.capacity();
  for (index_t length : keys.lengths) {
    if (length < 0 || length > most || (length > 0 && keys.capacity() == 0)) {
      fail("lengths has " + std::to_string(length) + ", the capacity is " + std::to_string(keys.capacity()));
    }
  }
  return keys;
}

}  // namespace

template <class T, class X>
Results decode_of(const CacheInputs& in, const Arguments& a, Wanted wanted) {
  using A = Compute<T>;
  const TensorKeys<X> keys = make_keys<X>(in);
  const Extents shared = check_inputs(in.query, in.keys, in.values);
  const auto [batch, heads, queries, capacity] = shared;
  const index_t longest = batch == 0 ? 0 : std::ranges::max(keys.lengths);
  const Extents extents{batch, heads, queries, longest};
  for (index_t length :
       keys.lengths) {  // the message of the library names an option that the package does not have
    if (queries > length) {
      throw std::invalid_argument("ssmax::attention: q has positions " + std::to_string(queries) +
                                  ", a sequence of the cache has " + std::to_string(length));
    }
  }
  const Parameters parameters(a, heads);
  // A cache holds rotated keys.
  const Options<A> options(a, extents, batch == 0 ? 0 : std::ranges::min(keys.lengths) - queries);

  ssmax::AttentionArguments<A> arguments{.q = view<const T, 4>("query", in.query), .keys = keys};
  options.write_to(arguments);
  Results results = make_results<T>(in.query, in.values.size(3), wanted, arguments);
  with_policies<A>(a, parameters, extents, [&](const auto& scaling, const auto& mask, const auto& score) {
    ssmax::attention<A>(arguments, scaling, mask, score, TorchThreads{});
  });
  return results;
}

}  // namespace ssmax_torch
