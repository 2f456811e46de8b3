// Defines Tensor, which hides the storage type of a tensor of a call, with the functions that a unit compiles for the
// type.
#pragma once

#include <array>
#include <cstddef>

#include "../../../view.hpp"
#include "../backward/driver.hpp"
#include "../terms/keys.hpp"
#include "../work/driver.hpp"

SSMAX_BEGIN_CODE

/// @cond
namespace mistake {

template <class X, class A>
struct the_tensor_is_not_computed_in_A_write_attention_double_for_tensors_of_double;
template <class X>
struct views_do_not_take_this_storage_type_store_it_in_a_source_of_keys;
template <class X>
struct an_output_must_not_be_const;
struct a_tensor_has_rank_4_batch_heads_positions_channels;
template <class Range>
struct a_vector_has_no_extents_write_data_and_extents;

}  // namespace mistake
/// @endcond

SSMAX_END

SSMAX_BEGIN_DETAIL

/// The drivers of the forward pass of a call whose queries have the operand type Operand.
template <class A>
struct ForwardFunctions {
  decltype(&compiled::run_attention<A, A>) run;
  decltype(&compiled::make_list<A, A>) make_list;
};
template <class A, class Operand>
inline constexpr ForwardFunctions<A> forward_functions{compiled::run_attention<Operand, A>,
                                                       compiled::make_list<Operand, A>};

/// The drivers of the backward pass of a call whose dout has the operand type Operand.
template <class A>
struct BackwardFunctions {
  decltype(&compiled::run_backward<A, A>) run;
  decltype(&compiled::make_backward_list<A, A>) make_list;
  decltype(&compiled::run_backward_list<A, A>) run_list;
};
template <class A, class Operand>
inline constexpr BackwardFunctions<A> backward_functions{compiled::run_backward<Operand, A>,
                                                         compiled::make_backward_list<Operand, A>,
                                                         compiled::run_backward_list<Operand, A>};

/// The storage type of keys or values that are left out. They have no rows.
template <class A>
inline constexpr StoredType<A> no_stored_type{ElementKind::other, sizeof(A)};

/// The operand type that rows of X may have: bfloat16, or the compute type.
template <class X, class A>
using OperandOf = std::conditional_t<std::same_as<X, bfloat16>, bfloat16, A>;

// Uses of a tensor. The constructor of a tensor keeps the functions of the storage type X for the use. The unit that
// makes a tensor compiles these functions. So drivers of bfloat16 come with queries, and with dout, of bfloat16. A
// tensor that is left out has the functions `none`.

template <class A>
struct InputUse {
  using Base = InputRows<A>;
  struct Functions {};
  static constexpr Functions none{};
  template <class X>
  static constexpr Functions functions{};
};
template <class A>
struct OutputUse {
  using Base = OutputRows<A>;
  struct Functions {};
  static constexpr Functions none{};
  template <class X>
  static constexpr Functions functions{};
};
template <class A>
struct QueryUse {
  using Base = InputRows<A>;
  using Functions = const ForwardFunctions<A>*;
  static constexpr Functions none = &forward_functions<A, A>;
  template <class X>
  static constexpr Functions functions = &forward_functions<A, OperandOf<X, A>>;
};
template <class A>
struct StoredUse {
  using Base = InputRows<A>;
  using Functions = const StoredType<A>*;
  static constexpr Functions none = &no_stored_type<A>;
  template <class X>
  static constexpr Functions functions = &stored_type<A, X, false>;
};
template <class A>
struct OutGradientUse {
  using Base = InputRows<A>;
  using Functions = const BackwardFunctions<A>*;
  static constexpr Functions none = &backward_functions<A, A>;
  template <class X>
  static constexpr Functions functions = &backward_functions<A, OperandOf<X, A>>;
};

template <class A>
constexpr bool is_written(const InputRows<A>*) {
  return false;
}
template <class A>
constexpr bool is_written(const OutputRows<A>*) {
  return true;
}

/// The mistake of a tensor of X in a call that computes in A.
template <class A, class X, bool writes>
consteval auto mistake_of_tensor() {
  using Y = std::remove_const_t<X>;
  if constexpr (!Storage<Y>) {
    return std::type_identity<mistake::views_do_not_take_this_storage_type_store_it_in_a_source_of_keys<Y>>();
  } else if constexpr (!std::same_as<ComputeType<Y>, A>) {
    return std::type_identity<
        mistake::the_tensor_is_not_computed_in_A_write_attention_double_for_tensors_of_double<Y, A>>();
  } else {
    return std::type_identity<mistake::an_output_must_not_be_const<X>>();
  }
}
template <class A, class X, bool writes>
using MistakeOfTensor = typename decltype(mistake_of_tensor<A, X, writes>())::type;

#define SSMAX_TENSOR_TYPE                                                                             \
  "ssmax: the tensor has no storage type of this call: write attention<double> for double; a source " \
  "of keys has types with factors; an output is not const"

/// A tensor [batch, heads, positions, channels] of a call that computes in A. Use is the library's.
template <class A, class Use>
class Tensor : public Use::Base {
  static constexpr bool writes = is_written(static_cast<const typename Use::Base*>(nullptr));
  template <class X>
  static constexpr bool fits =
      detail::StoredFor<std::remove_const_t<X>, A> && !(writes && std::is_const_v<X>);
  template <class X>
  using Element = std::conditional_t<writes, X, const X>;

 public:
  /// Extents or strides.
  using Extents = std::array<index_t, 4>;

  /// Makes a tensor that is left out.
  Tensor() = default;
  /// Refers to the elements of a view.
  template <class X>
  requires(fits<X>) Tensor(const View<X, 4>& view)
      : Use::Base(View<Element<X>, 4>(view)), functions_(Use::template functions<std::remove_const_t<X>>) {}
  /// A null tensor, for an error or without elements.
  Tensor(std::nullptr_t, const Extents& extents) : Tensor(View<A, 4>(nullptr, extents)) {}
  /// Refers to contiguous elements.
  template <class X>
  requires(fits<X>) Tensor(X* data, const Extents& extents) : Tensor(View<X, 4>(data, extents)) {}
  /// Refers to elements with any strides.
  template <class X>
  requires(fits<X>) Tensor(X* data, const Extents& extents, const Extents& strides)
      : Tensor(View<X, 4>(data, extents, strides)) {}

  // Constructors for arguments that cannot be a tensor.
  template <class X, class Mistake = MistakeOfTensor<A, X, writes>>
  requires(!fits<X>) Tensor(const View<X, 4>&)
  SSMAX_REFUSE_BRACES(SSMAX_TENSOR_TYPE);
  template <class X, class Mistake = MistakeOfTensor<A, X, writes>>
  requires(!fits<X>) Tensor(X*, const Extents&, const Extents& = {})
  SSMAX_REFUSE_BRACES(SSMAX_TENSOR_TYPE);
  template <class X, int rank, class Mistake = mistake::a_tensor_has_rank_4_batch_heads_positions_channels>
  requires(rank != 4) Tensor(const View<X, rank>&)
  SSMAX_REFUSE_BRACES(
      "ssmax: a tensor of attention is [batch, heads, positions, channels], lse is [batch, heads, "
      "positions]");
  template <class Range, class Mistake = mistake::a_vector_has_no_extents_write_data_and_extents<Range>>
  requires(requires(Range& range) { std::span(range); }) Tensor(const Range&)
  SSMAX_REFUSE_BRACES("ssmax: a vector has no extents: write {data, {batch, heads, positions, channels}}");

  [[nodiscard]] const typename Use::Functions& functions() const { return functions_; }

 private:
  typename Use::Functions functions_ = Use::none;
};

#undef SSMAX_TENSOR_TYPE

template <class A>
using QueryTensor = Tensor<A, QueryUse<A>>;
template <class A>
using StoredTensor = Tensor<A, StoredUse<A>>;
template <class A>
using InputTensor = Tensor<A, InputUse<A>>;
template <class A>
using OutputTensor = Tensor<A, OutputUse<A>>;
template <class A>
using OutGradientTensor = Tensor<A, OutGradientUse<A>>;

SSMAX_END
