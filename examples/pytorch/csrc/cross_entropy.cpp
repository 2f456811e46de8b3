// Cross-entropy of logits, and its gradient.
#include <ssmax/cross_entropy.hpp>

#include "executor.hpp"
#include "operators.hpp"

namespace ssmax_torch {

namespace {

/// Returns the integers of a contiguous tensor of rank 1 and any integer type.
ssmax::Integers any_integers(const char* name, const Tensor& tensor) {
  check_rank(name, tensor, 1);
  check_last_stride(name, tensor);
  const auto of = [&]<class I>(std::type_identity<I>) {
    return ssmax::Integers(static_cast<const I*>(tensor.data_ptr()),
                           static_cast<std::size_t>(tensor.size(0)));
  };
  switch (tensor.scalar_type()) {
    case ScalarType::Byte:
      return of(std::type_identity<std::uint8_t>{});
    case ScalarType::Char:
      return of(std::type_identity<std::int8_t>{});
    case ScalarType::Short:
      return of(std::type_identity<std::int16_t>{});
    case ScalarType::Int:
      return of(std::type_identity<std::int32_t>{});
    case ScalarType::Long:
      return of(std::type_identity<std::int64_t>{});
    case ScalarType::UInt16:
      return of(std::type_identity<std::uint16_t>{});
    case ScalarType::UInt32:
      return of(std::type_identity<std::uint32_t>{});
    case ScalarType::UInt64:
      return of(std::type_identity<std::uint64_t>{});
    default:
      fail(std::string(name) + " has dtype " + name_of(tensor.scalar_type()) + ", must be an integer type");
  }
}

/// Computes the loss of logits of type T. `options` has the losses of rows, or the gradients of all losses.
template <class T>
double loss_of(const CrossEntropyInputs& in, const ssmax::View<T, 2>& dlogits,
               ssmax::CrossEntropyOptions options) {
  const auto logits = view<const T, 2>("logits", in.logits);
  options.ignored = in.ignore_index;
  options.label_smoothing = in.label_smoothing;
  options.softcap = in.softcap;
  options.z_loss = in.z_loss;
  if (in.weight) {
    check_shape("weight", *in.weight, std::array{logits.extent(1)});
    const auto weight = view<const float, 1>("weight", *in.weight);
    options.weights = {weight.data_handle(), static_cast<std::size_t>(weight.extent(0))};
  }
  return ssmax::cross_entropy<T>(logits, any_integers("target", in.target), dlogits, options, TorchThreads{})
      .loss;
}

}  // namespace

std::pair<Tensor, Tensor> cross_entropy(const CrossEntropyInputs& in) {
  return with_type("logits", in.logits, [&]<class T>(std::type_identity<T>) {
    using A = ssmax::ComputeType<T>;
    check_rank("logits", in.logits, 2);
    const Tensor losses = new_tensor(std::array{in.logits.size(0)}, ScalarType::Double);
    const Tensor loss = new_tensor({}, scalar_type<A>);
    *static_cast<A*>(loss.data_ptr()) =
        static_cast<A>(loss_of<T>(in, {}, {.losses = view<double, 1>("losses", losses)}));
    return std::pair{loss, losses};
  });
}

Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& grad_losses,
                              const CrossEntropyInputs& in) {
  return with_type("logits", in.logits, [&]<class T>(std::type_identity<T>) {
    check_rank("logits", in.logits, 2);
    check_rank("grad_loss", grad_loss, 0);
    const Tensor dlogits = new_tensor(std::array{in.logits.size(0), in.logits.size(1)}, scalar_type<T>);
    loss_of<T>(in, view<T, 2>("dlogits", dlogits),
               {.dloss = doubles("grad_loss", grad_loss).front(),
                .dlosses = view<const double, 1>("grad_losses", grad_losses)});
    return dlogits;
  });
}

}  // namespace ssmax_torch
