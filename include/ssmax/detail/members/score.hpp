// Detects the members that make a type a score function. The public score.hpp documents the members.
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

#include "../../fast_path.hpp"
#include "optional_member.hpp"

SSMAX_BEGIN_DATA

struct QueryShape;
struct Query;
struct Key;
enum class Sharing;
template <class T>
class Lanes;
template <class T>
class PlacedLanes;

SSMAX_END

SSMAX_BEGIN_DETAIL

SSMAX_OPTIONAL_MEMBER(has_score_check, "score", check, std::same_as<void>,
                      "void check(const QueryShape&) const", std::declval<const QueryShape&>())
SSMAX_OPTIONAL_MEMBER(has_sharing, "score", sharing, std::same_as<Sharing>,
                      "Sharing sharing(const QueryShape&) const", std::declval<const QueryShape&>())
SSMAX_OPTIONAL_MEMBER(has_parameter, "score", parameter_derivative, std::convertible_to<double>,
                      "parameter_derivative(z, const Key&) const, giving a number", float{},
                      std::declval<const Key&>())

/// True if `accumulate` takes ∂loss/∂θ of a query (On = Query) or ∂loss/∂z' of a key (On = Key).
template <class C, class On>
constexpr bool accumulates = requires(const C& score, const On& on, double gradient) {
  { score.accumulate(on, gradient) } -> std::same_as<void>;
};

/// A score function that has a trainable parameter and takes its gradient once per query.
template <class C>
concept HasParameterGradient = has_parameter<C> && accumulates<C, Query>;

/// A score function that takes the gradient of every logit.
template <class C>
concept HasLogitGradients = accumulates<C, Key>;

/// True if the score function has a member `accumulate` of any signature.
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
consteval void check_gradient_members() {
  constexpr bool is_named = names_accumulate<C> || calls_accumulate<C, Query> || calls_accumulate<C, Key>;
  constexpr bool fits = accumulates<C, Query> || accumulates<C, Key>;
  static_assert(
      !is_named || (fits && !accumulate_is_no_function<C>),
      "ssmax: the member 'accumulate' of a score must be  void accumulate(const Query&, double) const  "
      "or  void accumulate(const Key&, double) const");
  static_assert(has_parameter<C> == accumulates<C, Query>,
                "ssmax: a score has both members, 'parameter_derivative' and  void accumulate(const Query&, "
                "double) const,  or neither");
  static_assert(!has_sharing<C> || accumulates<C, Key>,
                "ssmax: the member 'sharing' of a score needs  void accumulate(const Key&, double) const");
}

/// True if the score function has the members that by_lanes needs. L is Lanes or PlacedLanes.
template <class C, template <class> class L, class T>
constexpr bool takes_lanes = requires(const C& score, const L<T>& lanes, const L<const T>& made, T* d) {
  { score.apply(lanes) } -> std::same_as<void>;
  { score.differentiate(made, d) } -> std::same_as<void>;
};
/// True if the score function needs PlacedLanes, because it reads the distance or the query.
template <class C>
constexpr bool reads_place = !takes_lanes<C, Lanes, float>;
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

/// A score function by rows that takes the gradients of a query's logits as a row, too.
template <class C>
concept HasRowGradient = by_row<C> && HasLogitGradients<C> && !HasParameterGradient<C> && has_gradient_row<C>;

/// True if the score function has a member `gradient_row` of any signature.
template <class C>
constexpr bool names_gradient_row = requires {
  &C::gradient_row;
};

template <class C>
consteval void check_fast_path() {
  if constexpr (by_lanes<C>) {
    static_assert(
        (takes_lanes<C, Lanes, float> && takes_lanes<C, Lanes, double>) ||
            (takes_lanes<C, PlacedLanes, float> && takes_lanes<C, PlacedLanes, double>),
        "ssmax: by_lanes needs the members  void apply(const Lanes<T>&) const  and  void differentiate(const "
        "Lanes<const T>&, T* d) const,  or both with PlacedLanes, for T = float and double");
  }
  if constexpr (by_row<C>) {
    static_assert(has_row<C>,
                  "ssmax: by_row needs the member  const X* row(const Query&) const,  X a type of number");
  }
  static_assert(
      !names_gradient_row<C> || HasRowGradient<C>,
      "ssmax: the member 'gradient_row' of a score must be  G* gradient_row(const Query&) const,  G a "
      "type of number,  and needs by_row and  void accumulate(const Key&, double) const");
  static_assert(!same_keys<C>, "ssmax: same_keys is for masks");
  static_assert(!by_size<C>, "ssmax: by_size is for scalings");
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
  constexpr bool has_values = has_value<const C, float> && has_value<const C, double>;
  static_assert(has_values || !has_value<C, float>,
                "ssmax: the operator()(z, const Key&) of a score must be const and take float and double");
  constexpr bool fits = has_values && has_derivative<const C, float> && has_derivative<const C, double>;
  if constexpr (fits) {
    // Each trait reports a member of its name that has a wrong signature.
    (void)has_score_check<C>, (void)has_sharing<C>;
    check_gradient_members<C>();
    check_fast_path<C>();
  }
  return fits;
}

SSMAX_END
