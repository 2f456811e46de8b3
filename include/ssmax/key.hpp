/// @defgroup key Keys, and scores of your own (key.hpp)
/// @ingroup score
/// Keys as a query sees them, and what it takes to be a score. score.hpp has the scores.
///
/// A score is a type with `score(z, key)` and `score.derivative(z, key)` = dz'/dz at z, both const, for z
/// float and double (a template, to keep the precision of z; else what it returns is rounded), and,
/// optionally,
///
///     void check(const QueryShape&) const  called before any write; throws if the score does not fit
///
/// It is asked of visible keys only.
///
/// A score learns in one of two ways (it holds views of where the gradients go). Where each query has one
/// parameter θ, such as its head's slope, as `Alibi{…}.gradient(…)`:
///
///     parameter_derivative(z, key) const           dz'/dθ at z
///     void accumulate(const Query&, double) const  gets ∂loss/∂θ of every query, one after the other
///
/// Or for every logit, as `Bias(…).gradient(…)`:
///
///     void accumulate(const Key&, double) const    gets ∂loss/∂z' of every visible key that has one.
///                                                  Then the whole backward runs on one thread, unless
///     Sharing sharing(const QueryShape&) const     says what may be added at once (Sharing, below)
///
/// A member of these names with another signature is an error of the compiler.
///
/// Attention asks a score key by key, in plain code, unless its type asks for a fast path (fast_path.hpp), as
/// Softcap, Alibi and Bias do.
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

#include "config.hpp"
#include "detail/checks/optional_member.hpp"
#include "fast_path.hpp"
#include "query.hpp"

/// @addtogroup key
/// @{
SSMAX_BEGIN_DATA

/// A key as one query sees it. Positions are the mask's: they restart where it says so.
struct Key {
  Query query{};               ///< Who sees it.
  index_t index = 0;           ///< Its place among the keys of its sequence.
  index_t query_position = 0,  ///< Where the query stands.
      key_position = 0;        ///< Where the key stands.
};

/// Which logits add into one element of a score's gradient. It limits what may be computed at once.
enum class Sharing {
  one_head,  ///< Those of one query or one key, in one head of one batch entry.
  heads,     ///< Those of one key, in any heads and batch entries: kv heads take turns.
  any        ///< Any: one thread does it all.
};

SSMAX_END

SSMAX_BEGIN_DETAIL

SSMAX_OPTIONAL_MEMBER(has_score_check, "score", check, std::same_as<void>,
                      "void check(const QueryShape&) const", std::declval<const QueryShape&>())
SSMAX_OPTIONAL_MEMBER(has_sharing, "score", sharing, std::same_as<Sharing>,
                      "Sharing sharing(const QueryShape&) const", std::declval<const QueryShape&>())
SSMAX_OPTIONAL_MEMBER(has_parameter, "score", parameter_derivative, std::convertible_to<double>,
                      "parameter_derivative(z, const Key&) const, giving a number", float{},
                      std::declval<const Key&>())

/// The score takes ∂loss/∂θ of a query (On = Query), or ∂loss/∂z' of a key (On = Key).
template <class C, class On>
constexpr bool accumulates = requires(const C& score, const On& on, double gradient) {
  { score.accumulate(on, gradient) } -> std::same_as<void>;
};

/// The score has a parameter for each query, and learns it.
template <class C>
concept LearnsParameter = has_parameter<C> && accumulates<C, Query>;

/// The score wants the gradient of every logit.
template <class C>
concept LearnsLogits = accumulates<C, Key>;

/// A member `accumulate` of any form.
template <class C>
constexpr bool names_accumulate = requires {
  &C::accumulate;
};
template <class C, class On>
constexpr bool calls_accumulate = requires(C& score, const On& on) {
  score.accumulate(on, double{});
};
template <class C>
constexpr bool accumulate_is_no_function = requires {
  requires !std::is_member_function_pointer_v<decltype(&C::accumulate)>;
};

template <class C>
consteval void check_learning() {
  constexpr bool is_named = names_accumulate<C> || calls_accumulate<C, Query> || calls_accumulate<C, Key>;
  constexpr bool fits = accumulates<C, Query> || accumulates<C, Key>;
  static_assert(
      !is_named || (fits && !accumulate_is_no_function<C>),
      "ssmax: the member 'accumulate' of a score must be  void accumulate(const Query&, double) const  "
      "or  void accumulate(const Key&, double) const");
  static_assert(has_parameter<C> == accumulates<C, Query>,
                "ssmax: a score has both members, 'parameter_derivative' and  void accumulate(const Query&, "
                "double) const,  or neither");
  static_assert(
      !has_sharing<C> || accumulates<C, Key>,
      "ssmax: the member 'sharing' of a score goes with  void accumulate(const Key&, double) const");
}

/// The members that fast paths need.
template <class C, class T>
constexpr bool goes_elementwise = requires(const C& score, T* z, const T* scored, index_t n) {
  { score.apply(z, n) } -> std::same_as<void>;
  { score.differentiate(scored, n, z) } -> std::same_as<void>;
};
template <class C>
constexpr bool has_slope = requires(const C& score, index_t head) {
  { score.slope(head) } -> std::floating_point;
};
template <class C>
constexpr bool has_factors = requires(const C& score, index_t from, index_t count) {
  { score.template factors<float>(from, count) } -> std::same_as<const float*>;
  { score.template factors<double>(from, count) } -> std::same_as<const double*>;
};
template <class C>
constexpr bool has_row = requires(const C& score, const Query& query) {
  requires std::is_pointer_v<decltype(score.row(query))>;
  { *score.row(query) } -> std::convertible_to<double>;
};

template <class C>
constexpr bool has_gradient_row = requires(const C& score, const Query& query) {
  requires std::is_pointer_v<decltype(score.gradient_row(query))>;
  *score.gradient_row(query) += 0;
};

/// What FastPath::row's score learns of a query is a row as well.
template <class C>
concept LearnsRow = (fast_path<C> == FastPath::row) && LearnsLogits<C> &&
                    !LearnsParameter<C> && has_gradient_row<C>;

/// A member `gradient_row` of any form.
template <class C>
constexpr bool names_gradient_row = requires {
  &C::gradient_row;
};

template <class C>
consteval void check_fast_path() {
  if constexpr (fast_path<C> == FastPath::elementwise) {
    static_assert(goes_elementwise<C, float> && goes_elementwise<C, double>,
                  "ssmax: FastPath::elementwise needs the members  void apply(T* z, index_t n) const  and  "
                  "void differentiate(const T* z, index_t n, T* d) const  for T = float and double");
  }
  if constexpr (fast_path<C> == FastPath::distance) {
    static_assert(has_slope<C>,
                  "ssmax: FastPath::distance needs the member  double slope(index_t head) const");
  }
  if constexpr (fast_path<C> == FastPath::distance_factor) {
    static_assert(
        has_factors<C>,
        "ssmax: FastPath::distance_factor needs the member  const T* factors<T>(index_t from, index_t "
        "count) const  for T = float and double");
  }
  if constexpr (fast_path<C> == FastPath::row) {
    static_assert(
        has_row<C>,
        "ssmax: FastPath::row needs the member  const X* row(const Query&) const,  X a type of number");
  }
  static_assert(
      !names_gradient_row<C> || LearnsRow<C>,
      "ssmax: the member 'gradient_row' of a score must be  G* gradient_row(const Query&) const,  G a "
      "type of number,  and goes with FastPath::row and  void accumulate(const Key&, double) const");
  static_assert(fast_path<C> != FastPath::same_keys, "ssmax: FastPath::same_keys is for masks");
  static_assert(fast_path<C> != FastPath::by_size, "ssmax: FastPath::by_size is for scalings");
}

template <class C, class Z>
constexpr bool has_value = requires(C& score, Z z, const Key& key) {
  { score(z, key) } -> std::convertible_to<double>;
};
template <class C, class Z>
constexpr bool has_derivative = requires(C& score, Z z, const Key& key) {
  { score.derivative(z, key) } -> std::convertible_to<double>;
};

template <class C>
consteval bool is_score() {
  constexpr bool fits = has_value<const C, float> && has_value<const C, double>;
  static_assert(fits || !has_value<C, float>,
                "ssmax: the operator()(z, const Key&) of a score must be const and take float and double");
  if constexpr (fits) {
    static_assert(has_derivative<const C, float> && has_derivative<const C, double>,
                  "ssmax: a score needs the member  derivative(z, const Key&) const, giving dz'/dz at z");
    // Each of them refuses a member of its name that does not fit.
    (void)has_score_check<C>, (void)has_sharing<C>;
    check_learning<C>();
    check_fast_path<C>();
  }
  return fits;
}

SSMAX_END

SSMAX_BEGIN_DATA

/// A type that makes a new logit of one, and says its derivative: the top of key.hpp.
template <class C>
concept Score = detail::is_score<C>();

SSMAX_END
/// @}
