// PyTorch's tensors as the library's views, checked. Messages name the arguments as Python does.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <span>
#include <ssmax/half.hpp>
#include <ssmax/view.hpp>
#include <string>
#include <type_traits>
#include <vector>

namespace ssmax_torch {

using ssmax::index_t;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

/// Throws std::invalid_argument: "ssmax::attention: <what>". The operator puts its own name into the message.
[[noreturn]] void fail(const std::string& what);

/// As in "[2, 8, 64, 32]".
std::string shape_of(const Tensor& tensor);
std::string name_of(ScalarType type);

template <class T>
constexpr ScalarType scalar_type = ScalarType::Undefined;
template <>
inline constexpr ScalarType scalar_type<float> = ScalarType::Float;
template <>
inline constexpr ScalarType scalar_type<double> = ScalarType::Double;
template <>
inline constexpr ScalarType scalar_type<ssmax::half> = ScalarType::Half;
template <>
inline constexpr ScalarType scalar_type<ssmax::bfloat16> = ScalarType::BFloat16;
template <>
inline constexpr ScalarType scalar_type<bool> = ScalarType::Bool;
template <>
inline constexpr ScalarType scalar_type<std::int64_t> = ScalarType::Long;

/// Calls f(std::type_identity<T>{}) with the C++ type of the tensor's elements.
template <class F>
auto with_type(const char* name, const Tensor& tensor, const F& f) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return f(std::type_identity<float>{});
    case ScalarType::Double:
      return f(std::type_identity<double>{});
    case ScalarType::Half:
      return f(std::type_identity<ssmax::half>{});
    case ScalarType::BFloat16:
      return f(std::type_identity<ssmax::bfloat16>{});
    default:
      fail(std::string(name) + " has dtype " + name_of(tensor.scalar_type()) +
           ", must be float32, float64, float16 or bfloat16");
  }
}

void check_type(const char* name, const Tensor& tensor, ScalarType type);
void check_rank(const char* name, const Tensor& tensor, index_t rank);
/// The last dimension has stride 1 or at most one element or, where `repeats`, stride 0.
void check_last_stride(const char* name, const Tensor& tensor, bool repeats = false);
/// The tensor has these extents.
void check_shape(const char* name, const Tensor& tensor, std::span<const index_t> extents);

/// The strides of a tensor that broadcasts to these extents.
void broadcast_strides(const char* name, const Tensor& tensor, std::span<const index_t> extents,
                       std::span<index_t> strides);

/// A view of a tensor of T and of this rank.
template <class T, int Rank>
ssmax::View<T, Rank> strided_view(const char* name, const Tensor& tensor) {
  check_rank(name, tensor, Rank);
  check_type(name, tensor, scalar_type<std::remove_const_t<T>>);
  typename ssmax::View<T, Rank>::Extents extents{}, strides{};
  std::ranges::copy_n(tensor.sizes().data(), Rank, extents.begin());
  std::ranges::copy_n(tensor.strides().data(), Rank, strides.begin());
  return {static_cast<T*>(tensor.data_ptr()), extents, strides};
}

/// The same, whose last dimension has stride 1.
template <class T, int Rank>
ssmax::View<T, Rank> view(const char* name, const Tensor& tensor) {
  const ssmax::View<T, Rank> strided = strided_view<T, Rank>(name, tensor);
  check_last_stride(name, tensor);
  auto strides = strided.strides();
  strides[Rank - 1] = 1;
  return {strided.data_handle(), strided.extents(), strides};
}

/// A view of these extents of a tensor that broadcasts to them as PyTorch does: extents of 1, and those that are
/// left out at the front, get stride 0. Of keys, the last dimension of four, the stride is 1 or 0.
template <class T, std::size_t Rank>
ssmax::View<T, static_cast<int>(Rank)> broadcast_view(const char* name, const Tensor& tensor,
                                                      const std::array<index_t, Rank>& extents) {
  check_type(name, tensor, scalar_type<std::remove_const_t<T>>);
  if (Rank == 4) check_last_stride(name, tensor, true);
  std::array<index_t, Rank> strides{};
  broadcast_strides(name, tensor, extents, strides);
  return {static_cast<T*>(tensor.data_ptr()), extents, strides};
}

/// The whole numbers of a contiguous tensor of int64 and rank 1; null if it is left out.
std::span<const index_t> integers(const char* name, const MaybeTensor& tensor);
/// The numbers of a tensor of any floating type, of rank 0 or 1.
std::vector<double> doubles(const char* name, const Tensor& tensor);

/// A new tensor, not filled.
Tensor new_tensor(std::span<const index_t> extents, ScalarType type);
/// The same of rank 4, laid out as `like`: [batch, position, head, channel] where like's heads lie closer than
/// its positions.
Tensor new_tensor_like(const Tensor& like, const std::array<index_t, 4>& extents);
/// A new contiguous tensor of zeros.
Tensor new_zeros(std::span<const index_t> extents, ScalarType type);

}  // namespace ssmax_torch
