// Members of the user's policies that have the right name and another signature, and fast paths without their
// members.
//
// case MASK_KEYS_NOT_CONST: the member 'keys' of a mask must be  KeyRange keys.const Query&. const
// case MASK_KEYS_LENGTH: the member 'keys' of a mask must be
// case MASK_SEES_NOT_CONST: the member 'sees' of a mask must be  bool sees.const Query&, index_t key. const
// case MASK_SEES_INT: the member 'sees' of a mask must be
// case MASK_SEES_DATA: the member 'sees' of a mask must be
// case MASK_SEES_STATIC: the member 'sees' of a mask must be
// case MASK_SEES_ONE_ARGUMENT: the member 'sees' of a mask must be
// case MASK_QUERY_POSITION: the member 'query_position' of a mask must be  index_t query_position
// case MASK_KEY_POSITION: the member 'key_position' of a mask must be  index_t key_position
// case MASK_ALIGNED: the member 'aligned' of a mask must be  Query aligned
// case MASK_CHECK: the member 'check' of a mask must be  void check
// case MASK_FLAG: the member 'rotated_to_positions' of a mask must be  static constexpr bool
// case MASK_FAST_PATH: the fast path of a mask is same_keys
// case SCALING_NOT_CONST: of a scaling must be const
// case SCALING_CHECK: the member 'check' of a scaling must be  void check
// case SCALING_FAST_PATH: the fast path of a scaling is by_size
// case SCALING_ACCUMULATE: the member 'accumulate' of a scaling must be  void accumulate.const Row&, double dc. const
// case SCORE_NOT_CONST: of a score must be const and take float and double
// case SCORE_CHECK: the member 'check' of a score must be  void check
// case SCORE_ACCUMULATE: the member 'accumulate' of a score must be
// case SCORE_ACCUMULATE_STATIC: the member 'accumulate' of a score must be
// case SCORE_PARAMETER: a score has both members, 'parameter_derivative' and
// case SCORE_SHARING: the member 'sharing' of a score must be  Sharing sharing
// case SCORE_SHARING_ALONE: the member 'sharing' of a score needs
// case SCORE_LANES: by_lanes needs the members  void apply
// case SCORE_LANES_OF_FLOAT: by_lanes needs the members  void apply
// case SCORE_ROW: by_row needs the member  const X. row
// case SCORE_GRADIENT_ROW: the member 'gradient_row' of a score must be
// case SCORE_SAME_KEYS: same_keys is for masks
// case SCORE_BY_SIZE: by_size is for scalings
#include <functional>
#include <ssmax/mask.hpp>
#include <ssmax/scaling.hpp>
#include <ssmax/score.hpp>

using namespace ssmax;

struct AllKeys {
  KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
};
struct SameLogit {
  double operator()(double z, const Key&) const { return z; }
  double derivative(double, const Key&) const { return 1; }
};
struct One {
  double operator()(const Row&) const { return 1; }
};

#if defined(MASK_KEYS_NOT_CONST)
struct M {
  KeyRange keys(const Query&) { return {}; }
};
#elif defined(MASK_KEYS_LENGTH)
struct M {
  index_t keys(const Query&) const { return 0; }
};
#else
struct M : AllKeys {
#if defined(MASK_SEES_NOT_CONST)
  bool sees(const Query&, index_t) { return true; }
#elif defined(MASK_SEES_INT)
  int sees(const Query&, index_t) const { return 1; }
#elif defined(MASK_SEES_DATA)
  std::function<bool(const Query&, index_t)> sees;
#elif defined(MASK_SEES_STATIC)
  static bool sees(const Query&, index_t) { return true; }
#elif defined(MASK_SEES_ONE_ARGUMENT)
  bool sees(index_t) const { return true; }
#elif defined(MASK_QUERY_POSITION)
  double query_position(const Query&) const { return 0; }
#elif defined(MASK_KEY_POSITION)
  index_t key_position(const Query&, index_t key) { return key; }
#elif defined(MASK_ALIGNED)
  void aligned(const Query&) const {}
#elif defined(MASK_CHECK)
  bool check(const QueryShape&) const { return false; }
#elif defined(MASK_FLAG)
  bool rotated_to_positions = true;
#else
  static constexpr bool rotated_to_positions = true;
  bool sees(const Query&, index_t) const { return true; }
  void check(const QueryShape&) const {}
#endif
};
#endif
#if defined(MASK_FAST_PATH)
template <>
inline constexpr bool ssmax::by_lanes<M> = true;
#endif
static_assert(Mask<M>);

#if defined(SCALING_NOT_CONST)
struct S {
  double operator()(const Row&) { return 1; }
};
#else
struct S : One {
#if defined(SCALING_CHECK)
  bool check(index_t, index_t) const { return false; }
#elif defined(SCALING_ACCUMULATE)
  void accumulate(const Row&, double) {}
#else
  void accumulate(const Row&, double) const {}
#endif
};
#endif
#if defined(SCALING_FAST_PATH)
template <>
inline constexpr bool ssmax::same_keys<S> = true;
#endif
static_assert(Scaling<S>);

#if defined(SCORE_NOT_CONST)
struct C {
  double operator()(double z, const Key&) { return z; }
  double derivative(double, const Key&) const { return 1; }
};
#elif defined(SCORE_WITHOUT_DERIVATIVE)
struct C {
  double operator()(double z, const Key&) const { return z; }
};
#else
struct C : SameLogit {
#if defined(SCORE_CHECK)
  int check(const QueryShape&) const { return 0; }
#elif defined(SCORE_ACCUMULATE)
  void accumulate(const Key&, double) {}
#elif defined(SCORE_ACCUMULATE_STATIC)
  static void accumulate(const Key&, double) {}
#elif defined(SCORE_PARAMETER)
  double parameter_derivative(double z, const Key&) const { return z; }
#elif defined(SCORE_SHARING)
  void accumulate(const Key&, double) const {}
  int sharing(const QueryShape&) const { return 0; }
#elif defined(SCORE_SHARING_ALONE)
  Sharing sharing(const QueryShape&) const { return Sharing::any; }
#elif defined(SCORE_LANES)
  void apply(float*, index_t) const {}
#elif defined(SCORE_LANES_OF_FLOAT)
  void apply(const Lanes<float>&) const {}
  void differentiate(const Lanes<const float>&, float*) const {}
#elif defined(SCORE_ROW)
  int row(const Query&) const { return 0; }
#elif defined(SCORE_GRADIENT_ROW)
  void accumulate(const Key&, double) const {}
  const float* row(const Query&) const { return nullptr; }
  float gradient_row(const Query&) const { return 0; }
#endif
};
#endif
#if defined(SCORE_LANES) || defined(SCORE_LANES_OF_FLOAT)
template <>
inline constexpr bool ssmax::by_lanes<C> = true;
#elif defined(SCORE_ROW) || defined(SCORE_GRADIENT_ROW)
template <>
inline constexpr bool ssmax::by_row<C> = true;
#elif defined(SCORE_SAME_KEYS)
template <>
inline constexpr bool ssmax::same_keys<C> = true;
#elif defined(SCORE_BY_SIZE)
template <>
inline constexpr bool ssmax::by_size<C> = true;
#endif
static_assert(Score<C>);
