/// @defgroup attention_arguments Arguments of attention (attention_arguments.hpp)
/// @ingroup attention
/// The tensors and options of attention and attention_backward. attention.hpp has formulas and shapes.
///
/// A tensor is made from a View, or from a pointer, extents and, optionally, strides:
///
///     attention({.q = {q.data(), {batch, heads, queries, d}}, .k = k_view, .v = v_view, .out = out_view});
///
/// Each tensor has any storage type (storage.hpp) that is computed in A: float, half, bfloat16 or a type of your own
/// for float, double for double. A tensor does not own its elements. The last stride is 1. You choose the other
/// strides.

/// @defgroup keys Keys of a call (attention_arguments.hpp)
/// @ingroup attention
/// The member `keys` of AttentionArguments: any source of keys (key_source.hpp).
///
///     attention({.q = q, .keys = cache, .out = out}, Causal{});                          // an owner: a variable
///     attention({.q = q, .keys = PagedKeys(k, v, table), .out = out}, Causal{});         // refers to your memory
///
/// | source | Keys |
/// |---|---|
/// | PagedKeys, PagedKvCache::source | holds it by value. The pool must outlive the arguments |
/// | another variable, such as a KvCache | refers to it: it must outlive the arguments |
/// | a temporary of your own type that refers to your memory | holds it by value |
/// | a temporary that owns its keys (KvCache) | does not compile |
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "attention_state.hpp"
#include "detail/attention/desk/driver.hpp"
#include "detail/attention/desk/tensor.hpp"
#include "detail/attention/terms/dropout.hpp"
#include "detail/attention/terms/keys.hpp"
#include "detail/attention/terms/statistics.hpp"
#include "explain.hpp"
#include "key_source.hpp"
#include "rope.hpp"
#include "sequence_lengths.hpp"
#include "view.hpp"
#include "workspace.hpp"

SSMAX_BEGIN_DETAIL

/// The bytes of a source that Keys can hold.
inline constexpr std::size_t largest_kept_source = 512;

/// The functions of the type of a source that Keys refers to, or holds.
template <class A>
struct KeysFunctions {
  AnyKeys<A> (*refer)(const void* source);
  decltype(ForwardCall<A>::open_source) open;
  void (*copy)(const void* from, void* to);
  void (*destroy)(void* source);
};
template <class A, class S>
inline constexpr KeysFunctions<A> keys_functions{
    [](const void* source) { return AnyKeys<A>(*static_cast<const S*>(source)); },
    compiled::open_source_call<A>,
    [](const void* from, void* to) {
      if constexpr (std::copy_constructible<S>)
        std::construct_at(static_cast<S*>(to), *static_cast<const S*>(from));
    },
    [](void* source) { std::destroy_at(static_cast<S*>(source)); }};

SSMAX_END

/// @addtogroup keys
/// @{
SSMAX_BEGIN_CODE

/// @cond
namespace mistake {
template <class S>
struct a_temporary_owns_its_keys_give_the_cache_a_name;
template <class S, class A>
struct the_source_is_not_computed_in_A_write_attention_double;
}  // namespace mistake
/// @endcond

/// A source of keys of any type, for calls that compute in A.
template <class A>
class Keys {
  template <class S>
  static constexpr bool fits = std::same_as<ComputeType<detail::SourceKey<S>>, A>&&
      std::same_as<ComputeType<detail::SourceValue<S>>, A>;
  template <class S>
  static constexpr bool is_owner = detail::owns_keys<S> || sizeof(S) > detail::largest_kept_source ||
                                   alignof(S) > alignof(std::max_align_t) || !std::copy_constructible<S>;

 public:
  /// No source.
  Keys() = default;
  /// Refers to a source. Exception: holds a source with `owns_keys = false`.
  template <KeySource S>
  requires(fits<S>) Keys(const S& source) : functions_(&detail::keys_functions<A, S>) {
    if constexpr (detail::refers_to_keys<S>) {
      static_assert(!is_owner<S>, "ssmax: a source with  owns_keys = false  has at most 512 bytes");
      std::construct_at(reinterpret_cast<S*>(memory_), source);
    } else {
      source_ = &source;
    }
  }
  /// Holds a source that refers to other memory.
  template <class S, class X = std::remove_cv_t<S>>
  requires(!std::is_lvalue_reference_v<S> && KeySource<X> && !is_owner<X> && fits<X>) Keys(S&& source)
      : functions_(&detail::keys_functions<A, X>) {
    std::construct_at(reinterpret_cast<X*>(memory_), std::forward<S>(source));
  }
  /// @cond
  template <class S, class Mistake = mistake::a_temporary_owns_its_keys_give_the_cache_a_name<S>>
  requires(!std::is_lvalue_reference_v<S> && KeySource<std::remove_cv_t<S>> && is_owner<std::remove_cv_t<S>>)
      Keys(S&&)
  SSMAX_REFUSE_BRACES("ssmax: the temporary owns its keys: give the cache a name");
  template <KeySource S,
            class Mistake = mistake::the_source_is_not_computed_in_A_write_attention_double<S, A>>
  requires(!fits<S>) Keys(const S&)
  SSMAX_REFUSE_BRACES("ssmax: write attention<double> for a source of double, attention for others");
  Keys(const Keys& other) : functions_(other.functions_), source_(other.source_) { take(other); }
  Keys& operator=(const Keys& other) {
    if (this == &other) return *this;
    release();
    functions_ = nullptr;  // if the copy throws, there is no source
    take(other);
    source_ = other.source_;
    functions_ = other.functions_;
    return *this;
  }
  ~Keys() { release(); }
  /// @endcond

  /// Returns true if a source is given.
  [[nodiscard]] bool is_given() const { return functions_ != nullptr; }
  /// @cond
  /// Requires a source.
  [[nodiscard]] shared::AnyKeys<A> refer() const {
    return functions_->refer(source_ != nullptr ? source_ : memory_);
  }
  /// Returns what opens a call over the source. Requires a source.
  [[nodiscard]] auto open() const { return functions_->open; }
  /// @endcond

 private:
  bool holds() const { return functions_ != nullptr && source_ == nullptr; }
  void take(const Keys& other) {
    if (other.holds()) other.functions_->copy(other.memory_, memory_);
  }
  void release() {
    if (holds()) functions_->destroy(memory_);
  }

  const detail::KeysFunctions<A>* functions_ = nullptr;
  const void* source_ = nullptr;  // null: memory_ holds the source
  alignas(std::max_align_t) std::byte memory_[detail::largest_kept_source];
};

SSMAX_END
/// @}

/// @addtogroup attention_arguments
/// @{
SSMAX_BEGIN_CODE

/// The arguments of attention, which computes in A. Keys are k and v, or a source.
template <class A>
struct AttentionArguments {
  detail::QueryTensor<A> q{};           ///< [batch, heads, queries, d].
  detail::StoredTensor<A> k{};          ///< [batch, kv_heads, keys, d].
  detail::StoredTensor<A> v{};          ///< [batch, kv_heads, keys, dv].
  Keys<A> keys{};                       ///< A source of keys, in place of k and v.
  detail::OutputTensor<A> out{};        ///< [batch, heads, queries, dv].
  View<A, 3> lse{};                     ///< [batch, heads, queries], or left out.
  std::optional<double> scale{};        ///< Factor of q·k; 1/√d by default.
  const Rope<A>* rope = nullptr;        ///< Rotates q, and the keys that are not in a source.
  index_t key_position = 0;             ///< Position of the first key, for the rope.
  KeptSpan<const A> sinks{};            ///< One number per head. (Not with a state.)
  Workspace* workspace = nullptr;       ///< Memory that calls reuse.
  bool float_products = false;          ///< If true, bfloat16 is multiplied in float on every target.
  bool rounded_rotation = false;        ///< If true, the bf16 path rounds rotated q and k to bfloat16.
  bool batch_invariant = false;         ///< If true, results are bit-identical for any number of queries.
  bool scaled_sinks = false;            ///< If true, a sink is a logit: c·sink.
  bool rotate_source_keys = false;      ///< If true, the rope rotates the keys of a source in the call.
  bool more_queries_than_keys = false;  ///< If true, a sequence of a source may have fewer keys than queries.
  detail::DropoutOption<A> dropout{};   ///< Dropout of weights: a Dropout (query.hpp).
  /// Optional outputs: RowStatistics (attention_state.hpp). (Not with a state.)
  detail::StatisticsOption<A> statistics{};
  SequenceLengths lengths{};           ///< Numbers of queries and keys of each sequence. (Not with a state.)
  Explanation* explanation = nullptr;  ///< Optional output: how the call is computed.
  /// Output in place of out and lse: the state of every query, to be merged with states over other keys. The views k
  /// and v hold keys [first_key, first_key + k.extent(2)) of all_keys. The view q holds queries [first_query,
  /// first_query + q.extent(2)) of all_queries.
  detail::StateOption<A> state{};
  /// If true, the call continues from `state`, which holds the result for the keys before first_key. If every
  /// first_key is a multiple of 1024, a chain of such calls is bit-identical to one call over all keys.
  bool continues = false;
  index_t first_key = 0,  ///< Index of the first key in k. (With a state.)
      all_keys = 0,       ///< Number of all keys: required with a state. (With a state.)
      first_query = 0,    ///< Index of the first query in q. (With a state.)
      all_queries = 0;    ///< Number of all queries; 0: q holds the last queries. (With a state.)
};

/// The arguments of attention_backward. The members are those of AttentionArguments. out and lse are the results of
/// attention.
template <class A>
struct BackwardArguments {
  detail::InputTensor<A> q{};          ///< [batch, heads, queries, d].
  detail::StoredTensor<A> k{};         ///< [batch, kv_heads, keys, d].
  detail::StoredTensor<A> v{};         ///< [batch, kv_heads, keys, dv].
  detail::InputTensor<A> out{};        ///< [batch, heads, queries, dv].
  View<const A, 3> lse{};              ///< [batch, heads, queries].
  std::optional<double> scale{};       ///< As in AttentionArguments, like all members up to `explanation`.
  const Rope<A>* rope = nullptr;       ///< Rotates q and k.
  index_t key_position = 0;            ///< Position of the first key, for the rope.
  KeptSpan<const A> sinks{};           ///< One number per head.
  Workspace* workspace = nullptr;      ///< Memory that calls reuse.
  bool float_products = false;         ///< If true, bfloat16 is multiplied in float on every target.
  bool rounded_rotation = false;       ///< If true, the bf16 path rounds rotated q and k to bfloat16.
  bool batch_invariant = false;        ///< Has no effect.
  bool scaled_sinks = false;           ///< If true, a sink is a logit: c·sink.
  detail::DropoutOption<A> dropout{};  ///< The same as in attention.
  SequenceLengths lengths{};           ///< Numbers of queries and keys of each sequence. (Not with a part.)
  Explanation* explanation = nullptr;  ///< Optional output: how the call is computed.
  index_t first_key = 0,               ///< Index of the first key in k.
      all_keys = 0,                    ///< Number of all keys; 0: k holds the last keys.
      first_query = 0,                 ///< Index of the first query in q.
      all_queries = 0;                 ///< Number of all queries; 0: q holds the last queries.
};

/// The gradients of attention_backward.
template <class A>
struct AttentionGradients {
  detail::OutGradientTensor<A> dout{};  ///< Input: the gradient of out.
  View<const A, 3> dlse{};              ///< Input: the gradient of lse; optional.
  detail::OutputTensor<A> dq{};         ///< Output: the gradient of q.
  detail::OutputTensor<A> dk{};         ///< Output: the gradient of k.
  detail::OutputTensor<A> dv{};         ///< Output: the gradient of v.
  std::span<A> dsinks{};                ///< Added to; optional.
  /// If true, the call adds the gradients to dq, dk and dv, which must hold numbers before the call. If false, the
  /// call overwrites dq, dk and dv. The call always adds to dsinks and to the gradients of parameters.
  bool accumulate = false;
};

SSMAX_END
/// @}
