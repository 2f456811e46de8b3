/// @defgroup key Keys, and scores of your own (key.hpp)
/// @ingroup score
/// The key that a score function is called with, and the members of a score function of your own. score.hpp has the
/// library's score functions.
///
/// A score function is a type with two const members:
///
///     score(z, key)                        returns z', the new logit
///     score.derivative(z, key)             returns dz'/dz at z
///
/// z is float or double. Make both members templates: otherwise their result is rounded. The library calls them for
/// visible keys only. Optional member:
///
///     void check(const QueryShape&) const  called before any write; throws if the score does not fit
///
/// A score function with learnable parameters holds views of the gradients. If each query has one parameter θ,
/// such as the slope of its head (`Alibi{…}.gradient(…)`):
///
///     parameter_derivative(z, key) const           returns dz'/dθ at z
///     void accumulate(const Query&, double) const  receives ∂loss/∂θ of each query, one query after the other
///
/// If each logit has a gradient (`Bias(…).gradient(…)`):
///
///     void accumulate(const Key&, double) const    receives ∂loss/∂z' of each visible key
///     Sharing sharing(const QueryShape&) const     returns which logits share an element of the gradient (Sharing).
///                                                  Without it, the backward runs on one thread
///
/// A member of these names with another signature is a compile error.
///
/// The library calls the formula for each logit. Exception: a score whose type specialises by_lanes or by_row
/// (fast_path.hpp) is vectorized, as Softcap and Bias are.
#pragma once

#include "config.hpp"
#include "detail/members/score.hpp"
#include "query.hpp"

/// @addtogroup key
/// @{
SSMAX_BEGIN_DATA

/// A key and the query that attends to it. Positions are those of the mask: Documents restarts them.
struct Key {
  Query query{};               ///< The query.
  index_t index = 0;           ///< The index of the key in its sequence.
  index_t query_position = 0,  ///< The position of the query.
      key_position = 0;        ///< The position of the key.
};

/// The logits that add to one element of a score's gradient. They determine which tasks run at the same time.
enum class Sharing {
  one_head,  ///< Logits of one query or one key, in one head of one batch entry. No limit.
  heads,     ///< Logits of one key, in any heads and batch entries. One kv head after the other.
  any        ///< Any logits. One thread.
};

/// A type that replaces logits and returns the derivative: the top of key.hpp.
template <class C>
concept Score = detail::is_score<C>();

SSMAX_END
/// @}
