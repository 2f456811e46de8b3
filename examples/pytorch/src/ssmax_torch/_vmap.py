"""torch.func.vmap of the operators: the mapped dimension and the batch become one dimension of one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import _readable
from ._operators import _DEFAULTS, _attention, _attention_backward, _attention_statistics, _count_within_gaps

_INPUTS = ("query", "key", "value")
_OF_BACKWARD = ("grad_out", "grad_lse", *_INPUTS, "out", "lse", "learn")
_BROADCAST = {"c": 3, "visible": 4, "bias": 4, "rope_positions": 3}  # numbers of dimensions after broadcasting
_PER_ENTRY = ("left_padding", "prefix", "lengths")


def _folded(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Returns [size · batch, ...] of a tensor [batch, ...] with the mapped dimension `dim`, or with none."""
    tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    tensor = tensor.flatten(0, 1)
    return _last_contiguous(tensor)


def _folded_broadcast(tensor: Tensor, dim: int | None, size: int, batch: int, rank: int) -> Tensor | None:
    """Returns the tensor for a batch of size · batch entries. `rank` is its number of dimensions after broadcasting."""
    if dim is None:
        if tensor.dim() < rank or tensor.shape[0] == 1:
            return tensor
        tensor = tensor.expand(size, *tensor.shape)
    else:
        tensor = tensor.movedim(dim, 0)
        tensor = tensor[(slice(None), *(None,) * (rank + 1 - tensor.dim()))]
        tensor = tensor.expand(-1, batch, *tensor.shape[2:])
    return _readable(tensor.flatten(0, 1))


def _each(operator, size: int, dims: list, values: tuple) -> tuple:
    """Calls the operator once for each element."""
    calls = []
    for i in range(size):
        one = (x if dim is None else _last_contiguous(x.select(dim, i)) for x, dim in zip(values, dims, strict=True))
        calls.append(operator(*one))
    results = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
    return results, (0,) * len(results)


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 else tensor.contiguous()


def _register(name: str, operator, names: tuple[str, ...]) -> None:
    names = (*names, *_DEFAULTS)

    def rule(info, in_dims, *values):
        dims = [dim if isinstance(dim, int) else None for dim in in_dims]
        given = dict(zip(names, values))
        mapped = {n for n, dim in zip(names, dims) if dim is not None}
        foldable = {*_OF_BACKWARD, *_BROADCAST, *_PER_ENTRY}
        # Dropout depends on the batch entry: one call would drop other weights for each element.
        if not mapped <= foldable or any(given.get("learn", ())) or given.get("dropout_p"):
            return _each(operator, info.batch_size, dims, values)
        size = info.batch_size
        query = given["query"]
        batch = query.shape[0] if dims[names.index("query")] != 0 else query.shape[1]
        folded = []
        for n, value, dim in zip(names, values, dims):
            if isinstance(value, Tensor) and n in _BROADCAST:
                value = _folded_broadcast(value, dim, size, batch, _BROADCAST[n])
            elif isinstance(value, Tensor) and (n in _OF_BACKWARD or n in _PER_ENTRY):
                value = _folded(value, dim, size)
            folded.append(value)
        results = operator(*folded)
        # A gradient that is not wanted has no elements.
        shared = [i >= 3 for i in range(len(results))] if name == "attention_backward" else [False] * len(results)
        return (
            tuple(x if whole else x.unflatten(0, (size, batch)) for x, whole in zip(results, shared)),
            tuple(None if whole else 0 for whole in shared),
        )

    torch.library.register_vmap(f"ssmax::{name}", rule)


_register("attention", lambda *x: _attention(*x), _INPUTS)
_register("attention_statistics", lambda *x: _attention_statistics(*x), _INPUTS)
_register("attention_backward", lambda *x: _attention_backward(*x), _OF_BACKWARD)


@torch.library.register_vmap("ssmax::count_within_gaps")
def _(info, in_dims, *values):
    dims = [dim if isinstance(dim, int) else None for dim in in_dims]
    return _each(_count_within_gaps, info.batch_size, dims, values)
