// Sources of keys whose members have the right name and another signature, and storage types of the user's own.
//
// case STRETCH_NOT_CONST: the member 'run' of a source of keys must be  KeyRun<Element> run.* const
// case STRETCH_OF_FLOAT: the member 'run' of a source of keys must be
// case LENGTH_NOT_CONST: the member 'length' of a source of keys must be  index_t length.index_t batch. const
// case LENGTH_DOUBLE: the member 'length' of a source of keys must be
// case STORED_NOT_CONST: the member 'stored' of a source of keys must be  KeyRange stored.index_t batch. const
// case SHAPE_NOT_CONST: the member 'shape' of a source of keys must be  KeySourceShape shape.. const
// case DECODE: the member 'run' of a source of keys must be
// case ROWS_OF_OWN_STORAGE: a storage type of your own needs a unit without SSMAX_COMPILED
// case CROSS_ENTROPY_OF_OWN_STORAGE: a storage type of your own needs a unit without SSMAX_COMPILED
#include <array>
#include <cstdint>
#include <ssmax/ssmax.hpp>

using namespace ssmax;

struct Sixteenths {
  std::int8_t value;
};
template <>
struct ssmax::StorageTraits<Sixteenths> {
  using Compute = float;
  static void load(const Sixteenths*, index_t, float*) {}
  static void store(const float*, index_t, Sixteenths*) {}
};

struct Source {
  using Element = half;
#if defined(SHAPE_NOT_CONST)
  KeySourceShape shape() { return {}; }
#else
  KeySourceShape shape() const { return {}; }
#endif
#if defined(LENGTH_NOT_CONST)
  index_t length(index_t) { return 0; }
#elif defined(LENGTH_DOUBLE)
  double length(index_t) const { return 0; }
#else
  std::int32_t length(index_t) const { return 0; }
#endif
#if defined(STORED_NOT_CONST)
  KeyRange stored(index_t) { return {}; }
#else
  KeyRange stored(index_t) const { return {}; }
#endif
#if defined(STRETCH_NOT_CONST) || defined(DECODE)
  KeyRun<half> run(index_t, index_t, index_t) { return {}; }
#elif defined(STRETCH_OF_FLOAT)
  KeyRun<float> run(index_t, index_t, index_t) const { return {}; }
#else
  KeyRun<half> run(index_t, index_t, index_t) const { return {}; }
#endif
};
#if !defined(DECODE)
static_assert(KeySource<Source>);
#endif
static_assert(!KeySource<Softmax> && KeySource<KvCache<Sixteenths>>);

int main() {
  const View<float, 4> x;
  const View<Sixteenths, 4> own;
  attention({.q = x, .keys = Source{}, .out = x}, Causal{});
  attention({.q = own, .k = own, .v = own, .out = own});
#if defined(ROWS_OF_OWN_STORAGE)
  softmax(View<const Sixteenths, 4>{}, own);
#elif defined(CROSS_ENTROPY_OF_OWN_STORAGE)
  cross_entropy<Sixteenths>({}, {});
#endif
}
