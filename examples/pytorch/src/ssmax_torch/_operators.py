"""The operators of the compiled library: what they return for the compiler, and their derivatives."""

from pathlib import Path

import torch

torch.ops.load_library(Path(__file__).with_name("operators.so"))

# Which arguments of ssmax::attention are learnt besides query, key and value: their places, from 0.
_LEARNT = {"s": 4, "b": 5, "p": 6, "slopes": 16, "bias": 17, "sinks": 19}
_ARGUMENTS = 22


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """What tensors of `dtype` are computed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _empty_like(like: torch.Tensor, shape: tuple) -> torch.Tensor:
    """As new_tensor_like in csrc/tensors.cpp: heads lie closer than positions where they do in `like`."""
    batch, heads, positions, width = shape
    if like.stride(1) >= like.stride(2):
        return like.new_empty(shape)
    return like.new_empty((batch, positions, heads, width)).transpose(1, 2)


@torch.library.register_fake("ssmax::attention")
def _(query, key, value, *arguments):
    out = _empty_like(query, (*query.shape[:3], value.shape[3]))
    return out, query.new_empty(query.shape[:3], dtype=compute_type(query.dtype))


@torch.library.register_fake("ssmax::attention_backward")
def _(grad_out, grad_lse, query, key, value, out, lse, learn, *arguments):
    s, b, p, slopes, bias, sinks = learn
    heads, compute = query.shape[1], compute_type(query.dtype)
    table, given_slopes, given_bias, given_sinks = (arguments[_LEARNT[name] - 3] for name in ("p", "slopes", "bias", "sinks"))

    def sums(wanted, extent, dtype=torch.float64):
        return query.new_empty(extent if wanted else 0, dtype=dtype)

    return (
        *(_empty_like(tensor, tensor.shape) for tensor in (query, key, value)),
        sums(s, heads),
        sums(b, heads),
        sums(p, 0 if table is None else table.shape[0]),
        sums(slopes and given_slopes is not None, heads),
        sums(bias and given_bias is not None, 0 if given_bias is None else given_bias.shape, compute),
        sums(sinks and given_sinks is not None, heads, compute),
    )


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    query, key, value, *arguments = inputs
    ctx.tensor_at = [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)]
    ctx.arguments = [None if isinstance(x, torch.Tensor) else x for x in arguments]
    ctx.save_for_backward(query, key, value, *output, *(arguments[i] for i in ctx.tensor_at))


def _backward(ctx, grad_out, grad_lse):
    query, key, value, out, lse, *tensors = ctx.saved_tensors
    arguments = list(ctx.arguments)
    for i, tensor in zip(ctx.tensor_at, tensors, strict=True):
        arguments[i] = tensor
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    elif grad_out.stride(3) != 1:  # as of a sum, which is expanded from one number
        grad_out = grad_out.contiguous()
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    learn = [ctx.needs_input_grad[i] for i in _LEARNT.values()]
    gradients = torch.ops.ssmax.attention_backward(
        grad_out, grad_lse, query, key, value, out, lse, learn, *arguments
    )
    result = [None] * _ARGUMENTS
    result[:3] = gradients[:3]
    for i, wanted, gradient in zip(_LEARNT.values(), learn, gradients[3:], strict=True):
        if wanted:
            parameter = arguments[i - 3]
            whole = gradient.sum() if parameter.dim() == 0 else gradient.reshape(parameter.shape)
            result[i] = whole.to(parameter.dtype)
    return tuple(result)


torch.library.register_autograd("ssmax::attention", _backward, setup_context=_setup_context)
