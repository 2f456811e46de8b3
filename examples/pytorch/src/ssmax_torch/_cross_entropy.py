"""Cross-entropy of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ._numbers import check_no_derivative, number
from ._operators import _register_autograd, compute_type
from ._vmap import _each, _last_contiguous

_NAME = "ssmax_torch.cross_entropy"
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_cross_entropy = torch.ops.ssmax.cross_entropy.default
_cross_entropy_backward = torch.ops.ssmax.cross_entropy_backward.default


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    return_losses: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes ``torch.nn.functional.cross_entropy`` with reduction "mean". Classes are the last dimension of logits.

    Args:
        logits: [..., classes], float32, float64, bfloat16 or float16. Logits whose rows have no common stride, or whose
            last dimension is not contiguous, are copied.
        target: [...], the class of each row, of any integer type.
        weight: [classes], of any floating type, at least 0. It is rounded to float32.
        ignore_index: the target of rows that do not count. Their gradient is 0.
        label_smoothing: from 0 to 1.
        softcap: replaces each logit z by softcap · tanh(z / softcap). 0: logits are not capped.
        z_loss: adds z_loss · lse² to the loss of each row. lse is the logsumexp of the row. weight does not multiply it.
        return_losses: also return the losses of the rows before the mean, [...], as with reduction "none".

    Returns:
        the loss, float32 (float64 for float64), also under autocast. PyTorch rounds the loss of 16-bit logits to 16 bits.
        If no row counts, the loss is 0. PyTorch returns NaN.

    Differentiable once with respect to logits. The backward computes probabilities again: the graph keeps only logits,
    target and weight.
    """
    _check(logits, target, weight)
    names = {"label_smoothing": label_smoothing, "softcap": softcap, "z_loss": z_loss}
    numbers = [number(name, value, "cross_entropy") for name, value in names.items()]
    if weight is not None:
        weight = weight.to(torch.float32).contiguous()
    rows = _last_contiguous(logits.reshape(target.numel(), logits.shape[-1]))
    loss, losses = _cross_entropy(rows, target.reshape(-1).contiguous(), weight, ignore_index, *numbers)
    return (loss, losses.reshape(target.shape).to(loss.dtype)) if return_losses else loss


def _check(logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
    """Throws unless the tensors are dense, on one device, and fit each other."""
    for name, tensor in (("logits", logits), ("target", target), ("weight", weight)):
        if tensor is None and name == "weight":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAME}: {name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise ValueError(f"{_NAME}: {name} is {kind}, must be a dense tensor")
        if tensor.device != logits.device:
            raise ValueError(f"{_NAME}: {name} is on {tensor.device}, logits is on {logits.device}")
    if logits.device.type not in ("cpu", "meta"):
        raise ValueError(f"{_NAME}: logits is on {logits.device}, must be on the CPU")
    if logits.dtype not in _TYPES:
        raise ValueError(f"{_NAME}: logits has dtype {logits.dtype}, must be float32, float64, float16 or bfloat16")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"{_NAME}: target has dtype {target.dtype}, must be an integer type")
    if logits.dim() == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"{_NAME}: target has shape {list(target.shape)}, logits has shape {list(logits.shape)}: must be "
            "target's and a last dimension of classes"
        )
    if weight is None:
        return
    if not weight.is_floating_point():
        raise ValueError(f"{_NAME}: weight has dtype {weight.dtype}, must be a floating type")
    if weight.shape != logits.shape[-1:]:
        raise ValueError(f"{_NAME}: weight has shape {list(weight.shape)}, must be {list(logits.shape[-1:])}")
    check_no_derivative("weight", weight, function="cross_entropy")


@torch.library.register_fake("ssmax::cross_entropy")
def _(logits, target, weight, *numbers):
    loss = logits.new_empty((), dtype=compute_type(logits.dtype))
    return loss, logits.new_empty(logits.shape[:1], dtype=torch.float64)


@torch.library.register_fake("ssmax::cross_entropy_backward")
def _(grad_loss, grad_losses, logits, *inputs):
    return logits.new_empty(logits.shape)


@torch.library.register_vmap("ssmax::cross_entropy")
def _(info, in_dims, *values):
    return _each(_cross_entropy, info.batch_size, in_dims, values)


@torch.library.register_vmap("ssmax::cross_entropy_backward")
def _(info, in_dims, *values):
    (gradient,), dims = _each(lambda *x: (_cross_entropy_backward(*x),), info.batch_size, in_dims, values)
    return gradient, dims[0]


def _no_forward_mode(ctx, *tangents):
    raise NotImplementedError(f"{_NAME}: forward-mode derivatives are not implemented, use reverse mode")


class _CrossEntropy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return _cross_entropy(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])
        ctx.numbers = inputs[3:]

    @staticmethod
    def backward(ctx, grad_loss, grad_losses):
        gradient = _cross_entropy_backward(grad_loss, grad_losses.contiguous(), *ctx.saved_tensors, *ctx.numbers)
        return gradient, *(None,) * 6

    jvp = staticmethod(_no_forward_mode)


class _CrossEntropyBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return _cross_entropy_backward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError(f"{_NAME}: the second derivative is not implemented")

    jvp = staticmethod(_no_forward_mode)


_register_autograd("cross_entropy", _cross_entropy, super(torch.autograd.Function, _CrossEntropy).apply)
_register_autograd(
    "cross_entropy_backward", _cross_entropy_backward, super(torch.autograd.Function, _CrossEntropyBackward).apply
)
