/// @defgroup keys Keys of a call (keys.hpp)
/// @ingroup attention
/// The member `keys` of AttentionArguments: any source of keys (key_source.hpp).
///
///     attention({.q = q, .keys = cache, .out = out}, Causal{});                          // an owner: a variable
///     attention({.q = q, .keys = PagedKeys(k, v, table), .out = out}, Causal{});         // a view-like source
///
/// | source | Keys |
/// |---|---|
/// | a variable | refers to it: it must outlive the arguments |
/// | a temporary that refers to your memory (PagedKeys, PagedKvCache::source) | holds it by value |
/// | a temporary that owns its keys (KvCache) | does not compile |
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

#include "detail/attention/terms/keys.hpp"
#include "key_source.hpp"

SSMAX_BEGIN_DETAIL

/// The bytes of a temporary source that Keys can hold.
inline constexpr std::size_t largest_kept_source = 512;

/// The functions of the type of a source that Keys refers to, or holds.
template <class A>
struct KeysFunctions {
  AnyKeys<A> (*refer)(const void* source);
  void (*copy)(const void* from, void* to);
  void (*destroy)(void* source);
};
template <class A, class S>
inline constexpr KeysFunctions<A> keys_functions{
    [](const void* source) { return AnyKeys<A>(*static_cast<const S*>(source)); },
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
  static constexpr bool fits = std::same_as<detail::ComputeType<detail::SourceKey<S>>, A>&&
      std::same_as<detail::ComputeType<detail::SourceValue<S>>, A>;
  template <class S>
  static constexpr bool is_owner = detail::owns_keys<S> || sizeof(S) > detail::largest_kept_source ||
                                   alignof(S) > alignof(std::max_align_t) || !std::copy_constructible<S>;

 public:
  /// No source.
  Keys() = default;
  /// Refers to a source.
  template <KeySource S>
  requires(fits<S>) Keys(const S& source) : functions_(&detail::keys_functions<A, S>), source_(&source) {}
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
