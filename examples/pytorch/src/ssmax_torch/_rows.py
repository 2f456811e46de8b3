"""Softmax and its relatives over rows of any dimension, and over ragged rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ._operators import _register_autograd
from ._vmap import _each
from .mask import Integers, _int64

_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def softmax(logits: Tensor, dim: int = -1, *, begins: Integers | None = None) -> Tensor:
    """Returns exp(z_i) / Σ_j exp(z_j) of each row.

    Args:
        logits: float32, float64, bfloat16 or float16, with any strides.
        dim: the dimension of the rows.
        begins: [rows + 1] integers from 0 to the extent of dim, which never decrease: dim has ragged rows, and row r has
            the elements begins[r] … begins[r + 1] - 1. Rows may be empty.

    The result has the layout and the type of the logits. 16-bit types are computed in float32. A logit of -inf has
    probability 0. A row of -inf, and a row with NaN or +inf, is NaN; exception: sparsemax and entmax15 of a row of -inf
    are 0. Logits are copied only if more than three (with begins: one) dimensions beside dim have no common stride.
    Differentiable once with respect to logits.
    """
    return _of_rows("softmax", logits, dim, begins)


def log_softmax(logits: Tensor, dim: int = -1, *, begins: Integers | None = None) -> Tensor:
    """Returns z_i - ln Σ_j exp(z_j) of each row. The arguments are those of ``softmax``."""
    return _of_rows("log_softmax", logits, dim, begins)


def sparsemax(logits: Tensor, dim: int = -1, *, begins: Integers | None = None) -> Tensor:
    """Returns max(0, z_i - τ) of each row, with τ such that the sum is 1 (arXiv:1602.02068). The arguments are those of
    ``softmax``."""
    return _of_rows("sparsemax", logits, dim, begins)


def entmax15(logits: Tensor, dim: int = -1, *, begins: Integers | None = None) -> Tensor:
    """Returns max(0, z_i / 2 - τ)² of each row, with τ such that the sum is 1 (arXiv:1905.05702). The arguments are those
    of ``softmax``."""
    return _of_rows("entmax15", logits, dim, begins)


def _of_rows(name: str, logits: Tensor, dim: int, begins: Integers | None) -> Tensor:
    if not isinstance(logits, Tensor):
        raise TypeError(f"ssmax_torch.{name}: logits is a {type(logits).__name__}, must be a tensor")
    if logits.layout is not torch.strided or logits.is_nested:
        kind = "nested" if logits.is_nested else str(logits.layout)
        raise ValueError(f"ssmax_torch.{name}: logits is {kind}, must be a dense tensor")
    if logits.device.type not in ("cpu", "meta"):
        raise ValueError(f"ssmax_torch.{name}: logits is on {logits.device}, must be on the CPU")
    if logits.dtype not in _TYPES:
        raise ValueError(f"ssmax_torch.{name}: logits has dtype {logits.dtype}, must be float32, float64, float16 or bfloat16")
    if not -logits.dim() <= dim < logits.dim():
        raise ValueError(f"ssmax_torch.{name}: dim is {dim}, logits has shape {list(logits.shape)}")
    if begins is not None:
        begins = _int64(f"ssmax_torch.{name}: begins", begins)
        if begins.dim() != 1 or begins.shape[0] == 0:
            raise ValueError(f"ssmax_torch.{name}: begins has shape {list(begins.shape)}, must be [rows + 1]")
        if begins.device != logits.device:
            raise ValueError(f"ssmax_torch.{name}: begins is on {begins.device}, logits is on {logits.device}")
    rows = logits.movedim(dim, -1)
    out = _OPERATORS[name](_of_rank(rows, 4 if begins is None else 2), begins)
    return out.reshape(rows.shape).movedim(-1, dim)


def _of_rank(rows: Tensor, rank: int) -> Tensor:
    """Returns the rows with `rank` dimensions. Copies them only if no leading dimensions have a common stride."""
    if rows.dim() < rank:
        return rows[(None,) * (rank - rows.dim())]
    while rows.dim() > rank:
        size, stride, pairs = rows.shape, rows.stride(), range(rows.dim() - 2)
        first = next((i for i in pairs if stride[i] == stride[i + 1] * size[i + 1]), 0)
        rows = rows.flatten(first, first + 1)
    return rows


def _register(name: str) -> None:
    """Registers fake tensors, vmap and the derivatives of the operator."""
    forward_operator = getattr(torch.ops.ssmax, name).default
    backward_operator = getattr(torch.ops.ssmax, f"{name}_backward").default

    @torch.library.register_fake(f"ssmax::{name}")
    def _(logits, begins):
        return torch.empty_like(logits)

    @torch.library.register_fake(f"ssmax::{name}_backward")
    def _(grad_out, out, begins):
        return torch.empty_like(out)

    def no_forward_mode(ctx, *tangents):
        raise NotImplementedError(f"ssmax_torch.{name}: forward-mode derivatives are not implemented, use reverse mode")

    class Rows(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs):
            with torch._C._AutoDispatchBelowAutograd():
                return forward_operator(*inputs)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output, inputs[1])

        @staticmethod
        def backward(ctx, grad_out):
            return backward_operator(grad_out, *ctx.saved_tensors), None

        jvp = staticmethod(no_forward_mode)

    class RowsBackward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs):
            with torch._C._AutoDispatchBelowAutograd():
                return backward_operator(*inputs)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            raise NotImplementedError(f"ssmax_torch.{name}: the second derivative is not implemented")

        jvp = staticmethod(no_forward_mode)

    for suffix, operator, function in (("", forward_operator, Rows), ("_backward", backward_operator, RowsBackward)):
        _register_autograd(name + suffix, operator, super(torch.autograd.Function, function).apply)
        _register_vmap(name + suffix, operator)


def _register_vmap(name: str, operator) -> None:
    """Registers a rule by which the mapped dimension and the first one are one dimension of one call."""

    @torch.library.register_vmap(f"ssmax::{name}")
    def _(info, in_dims, *values):
        *tensors, begins = values
        size = info.batch_size
        if in_dims[-1] is not None:
            (out,), dims = _each(lambda *x: (operator(*x),), size, in_dims, values)
            return out, dims[0]
        mapped = (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, in_dims))
        folded = [x.flatten(0, 1) for x in mapped]
        return operator(*folded, begins).unflatten(0, (size, folded[0].shape[0] // size)), 0


_OPERATORS = {name: getattr(torch.ops.ssmax, name).default for name in ("softmax", "log_softmax", "sparsemax", "entmax15")}
for _name in _OPERATORS:
    _register(_name)
