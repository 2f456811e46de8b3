"""Merges results of attention over two sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ._operators import _empty_like, _register_autograd
from ._vmap import _folded, _last_contiguous

_NAMES = ("first out", "first lse", "second out", "second lse")

_merge = torch.ops.ssmax.merge.default


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of attention over the keys of both results (arXiv:2501.01005).

        lse = ln(exp(lse_1) + exp(lse_2)),  out = exp(lse_1 - lse) · out_1 + exp(lse_2 - lse) · out_2

    Each result is (out, lse) of ``attention`` or ``KVCache.decode``, or of ``attention_varlen``, with ``return_lse``.
    Both are of the same queries and of other keys. A row of out whose lse is -inf counts as 0. If both lse are -inf,
    out is 0 and lse is -inf. An lse of NaN or +inf makes out and lse of its query NaN.

    Limits: sinks must be in one of both results only. c must be that of all keys: pass it to both calls by
    ``scaling.PerQuery`` if it depends on n. Differentiable with respect to out and lse of both results.
    """
    given = (*first, *second)
    for name, tensor in zip(_NAMES, given, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"ssmax_torch.merge: {name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise ValueError(f"ssmax_torch.merge: {name} is sparse or nested, must be a dense tensor")
        if tensor.device != given[0].device or tensor.device.type not in ("cpu", "meta"):
            raise ValueError(f"ssmax_torch.merge: {name} is on {tensor.device}, must be on the CPU")
    packed = given[0].dim() == 3  # out of attention_varlen is [positions, heads, width], and lse [heads, positions]
    if packed:
        given = [x[None] if x.dim() == 2 else x.transpose(0, 1)[None] for x in given]
    out, lse = _merge(*map(_last_contiguous, given))
    return (out.squeeze(0).transpose(0, 1), lse.squeeze(0)) if packed else (out, lse)


@torch.library.register_fake("ssmax::merge")
def _(out, lse, other_out, other_lse):
    return _empty_like(out, tuple(out.shape)), lse.new_empty(lse.shape)


@torch.library.register_vmap("ssmax::merge")
def _(info, in_dims, *values):
    size = info.batch_size
    results = _merge(*(_folded(x, dim, size) for x, dim in zip(values, in_dims, strict=True)))
    return tuple(x.unflatten(0, (size, x.shape[0] // size)) for x in results), (0, 0)


class _Merge(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return _merge(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        *inputs, out, lse = ctx.saved_tensors
        gradients = []
        for part, its_lse in (inputs[:2], inputs[2:]):
            visible = its_lse != -torch.inf
            weight = torch.where(visible, (its_lse - lse).exp(), 0)
            difference = torch.where(visible[..., None], part.to(lse.dtype) - out.to(lse.dtype), 0)
            wide = grad_out.to(lse.dtype)
            gradients.append((weight[..., None] * wide).to(part.dtype))
            gradients.append(weight * ((wide * difference).sum(-1) + grad_lse))
        return tuple(gradients)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("ssmax_torch.merge: forward-mode derivatives are not implemented, use reverse mode")


_register_autograd("merge", _merge, super(torch.autograd.Function, _Merge).apply)
