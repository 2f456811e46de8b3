#include "tensors.hpp"

#include <cstring>
#include <stdexcept>

namespace ssmax_torch {

void fail(const std::string& what) { throw std::invalid_argument("ssmax::attention: " + what); }

std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (index_t i = 0; i < tensor.dim(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(tensor.size(i));
  return text + "]";
}

std::string name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    default:
      return torch::headeronly::toString(type);
  }
}

void check_type(const char* name, const Tensor& tensor, ScalarType type) {
  if (tensor.scalar_type() == type) return;
  fail(std::string(name) + " has dtype " + name_of(tensor.scalar_type()) + ", must be " + name_of(type));
}

void check_rank(const char* name, const Tensor& tensor, index_t rank) {
  if (tensor.dim() == rank) return;
  fail(std::string(name) + " has shape " + shape_of(tensor) + ", must have " + std::to_string(rank) +
       " dimensions");
}

void check_last_stride(const char* name, const Tensor& tensor, bool repeats) {
  const index_t rank = tensor.dim();
  if (rank == 0) return;
  const index_t stride = tensor.stride(rank - 1);
  if (stride == 1 || (repeats && stride == 0)) return;
  if (tensor.size(rank - 1) <= 1 || tensor.numel() == 0) return;
  fail(std::string(name) + " has stride " + std::to_string(stride) +
       " in its last dimension, must be contiguous there");
}

void check_shape(const char* name, const Tensor& tensor, std::span<const index_t> extents) {
  check_rank(name, tensor, std::ssize(extents));
  const auto sizes = tensor.sizes();
  for (std::size_t i = 0; i < extents.size(); ++i) {
    if (sizes[i] == extents[i]) continue;
    fail(std::string(name) + " has shape " + shape_of(tensor) + ", must have extent " +
         std::to_string(extents[i]) + " in dimension " + std::to_string(i));
  }
}

void broadcast_strides(const char* name, const Tensor& tensor, std::span<const index_t> extents,
                       std::span<index_t> strides) {
  const index_t rank = tensor.dim(), wanted = std::ssize(extents);
  bool fits = rank <= wanted;
  for (index_t i = 0; fits && i < rank; ++i) {
    const auto at = static_cast<std::size_t>(wanted - rank + i);
    const index_t extent = tensor.size(i);
    fits = extent == extents[at] || extent == 1;
    strides[at] = extent == 1 ? 0 : tensor.stride(i);
  }
  if (fits) return;
  std::string text;
  for (index_t extent : extents) text += (text.empty() ? "[" : ", ") + std::to_string(extent);
  fail(std::string(name) + " has shape " + shape_of(tensor) + ", must broadcast to " + text + "]");
}

std::span<const index_t> integers(const char* name, const MaybeTensor& tensor) {
  if (!tensor) return {};
  check_rank(name, *tensor, 1);
  check_type(name, *tensor, ScalarType::Long);
  check_last_stride(name, *tensor);
  return {static_cast<const index_t*>(tensor->data_ptr()), static_cast<std::size_t>(tensor->size(0))};
}

namespace {

template <class T>
std::vector<double> widened(const Tensor& tensor, index_t count, index_t stride) {
  std::vector<double> result(static_cast<std::size_t>(count));
  const auto* data = static_cast<const T*>(tensor.data_ptr());
  for (index_t i = 0; i < count; ++i) {
    result[static_cast<std::size_t>(i)] = static_cast<double>(data[i * stride]);
  }
  return result;
}

}  // namespace

std::vector<double> doubles(const char* name, const Tensor& tensor) {
  if (tensor.dim() > 1) {
    fail(std::string(name) + " has shape " + shape_of(tensor) + ", must have one dimension or none");
  }
  const index_t count = tensor.dim() == 0 ? 1 : tensor.size(0);
  const index_t stride = tensor.dim() == 0 ? 1 : tensor.stride(0);
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return widened<float>(tensor, count, stride);
    case ScalarType::Double:
      return widened<double>(tensor, count, stride);
    case ScalarType::Half:
      return widened<ssmax::half>(tensor, count, stride);
    case ScalarType::BFloat16:
      return widened<ssmax::bfloat16>(tensor, count, stride);
    default:
      fail(std::string(name) + " has dtype " + name_of(tensor.scalar_type()) + ", must be a floating type");
  }
}

namespace {

Tensor new_strided(std::span<const index_t> extents, std::span<const index_t> strides, ScalarType type) {
  const auto dtype = torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(std::ssize(extents), extents.data(), strides.data(), dtype,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

}  // namespace

Tensor new_tensor(std::span<const index_t> extents, ScalarType type) {
  std::array<index_t, 4> strides{};
  index_t stride = 1;
  for (std::size_t i = extents.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<index_t>(extents[i], 1);
  }
  return new_strided(extents, {strides.data(), extents.size()}, type);
}

Tensor new_tensor_like(const Tensor& like, const std::array<index_t, 4>& extents) {
  if (like.stride(1) >= like.stride(2)) return new_tensor(extents, like.scalar_type());
  const auto at_least_one = [&](std::size_t i) { return std::max<index_t>(extents[i], 1); };
  const index_t head = at_least_one(3), position = head * at_least_one(1);
  const std::array<index_t, 4> strides{position * at_least_one(2), head, position, 1};
  return new_strided(extents, strides, like.scalar_type());
}

Tensor new_zeros(std::span<const index_t> extents, ScalarType type) {
  Tensor tensor = new_tensor(extents, type);
  const auto bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
  if (bytes > 0) std::memset(tensor.data_ptr(), 0, bytes);
  return tensor;
}

}  // namespace ssmax_torch
