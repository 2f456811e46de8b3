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

#include "config.hpp"
#include "detail/checks/score.hpp"
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

/// A type that makes a new logit of one, and says its derivative: the top of key.hpp.
template <class C>
concept Score = detail::is_score<C>();

SSMAX_END
/// @}
