"""Checks shapes and types as csrc does, for tensors without data."""

import torch
from torch import Tensor

_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DIMENSIONS = ("batch", "heads", "positions", "width")


def _check(condition: bool, name: str, tensor: Tensor, expected: object) -> None:
    torch._check_value(
        condition, lambda: f"ssmax_torch.attention: {name} has shape {list(tensor.shape)}, must have {expected}"
    )


def _check_type(name: str, tensor: Tensor, *types: torch.dtype) -> None:
    if tensor.dtype not in types:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in types)
        raise ValueError(f"ssmax_torch.attention: {name} has dtype {tensor.dtype}, must be {allowed}")


def check_inputs(query: Tensor, key: Tensor, value: Tensor, *, storage: tuple[torch.dtype, ...] = ()) -> None:
    """Throws unless query, key and value fit each other. Key and value must have query's type, or a type of `storage`."""
    given = (("query", query), ("key", key), ("value", value))
    _check_type("query", query, *_TYPES)
    for name, tensor in given:
        _check(tensor.dim() == 4, name, tensor, "4 dimensions")
        _check_type(name, tensor, *(storage or (query.dtype,)))
        _check(tensor.shape[3] <= 1 or tensor.stride(3) == 1, name, tensor, "a contiguous last dimension")
    for i in (0, 3):
        _check(key.shape[i] == query.shape[i], "key", key, f"query's {_DIMENSIONS[i]}, {query.shape[i]}")
    for i in (0, 1, 2):
        _check(value.shape[i] == key.shape[i], "value", value, f"key's {_DIMENSIONS[i]}, {key.shape[i]}")
    heads, kv_heads = query.shape[1], key.shape[1]
    fits = heads == 0 if kv_heads == 0 else heads % kv_heads == 0
    _check(fits, "query", query, f"a multiple of key's {kv_heads} heads")


def check_parameters(query: Tensor, s, b, slopes, sinks) -> None:
    """Throws unless each tensor has one number per head. Exception: s, b and slopes may also be a single number."""
    heads = query.shape[1]
    for name, tensor in (("s", s), ("b", b), ("slopes", slopes), ("sinks", sinks)):
        if tensor is None or (tensor.dim() == 0 and name != "sinks"):
            continue
        _check_type(name, tensor, *_TYPES)
        _check(tensor.dim() == 1, name, tensor, "one dimension")
        _check(tensor.shape[0] == heads, name, tensor, f"one number for each of {heads} heads")


def check_broadcast(name: str, tensor: Tensor | None, *extents: int) -> None:
    """Throws unless the tensor is left out or broadcasts to the extents."""
    if tensor is None:
        return
    expected = f"a shape that broadcasts to {list(extents)}"
    _check(tensor.dim() <= len(extents), name, tensor, expected)
    for own, wanted in zip(reversed(tensor.shape), reversed(extents)):
        if own != 1:
            _check(own == wanted, name, tensor, expected)


def matrices(name: str, tensor: Tensor | None, heads: int) -> int:
    """Returns the number of a tensor's matrices, where head h reads matrix h % matrices."""
    if tensor is None or not 3 <= tensor.dim() <= 4:
        return heads
    number = tensor.shape[-3]
    fits = number == heads or (number > 0 and heads % number == 0)
    _check(fits, name, tensor, f"a number of matrices that divides {heads} heads")
    return number


def check_entries(name: str, tensor: Tensor | None, batch: int) -> None:
    """Throws unless the tensor is left out or has one number for each batch entry."""
    if tensor is not None:
        _check(tensor.dim() == 1, name, tensor, "one dimension")
        _check(tensor.shape[0] == batch, name, tensor, f"one number for each of {batch} batch entries")
