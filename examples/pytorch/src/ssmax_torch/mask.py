"""Masks: which keys a query sees. n is their number.

===================================  =====================================================================
mask                                 visible keys of the query at position p in batch entry b
===================================  =====================================================================
``Causal()``                         keys 0 … p; aligned bottom-right: the last query stands at the last key
``CausalTopLeft()``                  keys 0 … i of query i, whose position is i; aligned top-left, as ``is_causal``
``SlidingWindow(left, right)``       keys p - left … p + right
``Chunks(size)``                     keys p - p mod size … p
``PrefixLM(prefix)``                 keys 0 … p and the first prefix[b] keys
``LeftPadding(padding)``             keys padding[b] … p: causal, for padding before the tokens; positions begin after it
``KeyLengths(lengths)``              the first lengths[b] keys; the others are padding
``Documents(cu_seqlens, …)``         keys of its own document; positions and n restart in each
``MatrixMask(tensor)``               bool tensor: true; additive tensor: neither -inf nor its type's lowest number
``a & b``                            keys that are visible in both masks
===================================  =====================================================================

A tensor in place of a mask means ``MatrixMask(tensor)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._numbers import call_text

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalVariant

Integers = Tensor | Sequence[int]


def _int64(name: str, values: Integers) -> Tensor:
    tensor = torch.as_tensor(values)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {tensor.dtype}, must be of integers")
    return tensor.to(torch.int64).contiguous()


def _check_integer(name: str, value: int) -> None:
    if not hasattr(value, "__index__"):
        raise TypeError(f"ssmax_torch.mask: {name} is a {type(value).__name__}, must be an integer")


def additive_as(additive: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the additive mask in `dtype`. The lowest number of its own type becomes -inf."""
    if additive.dtype == dtype:
        return additive
    lowest = torch.finfo(additive.dtype).min
    return additive.masked_fill(additive == lowest, -torch.inf).to(dtype)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return additive_as(a, dtype) + additive_as(b, dtype)


def causal_variant(matrix: Tensor) -> CausalVariant | None:
    """Returns the alignment of a ``torch.nn.attention.bias.CausalBias``, which has no data. Returns None for other tensors."""
    if type(matrix) in (Tensor, torch.nn.Parameter):
        return None
    from torch.nn.attention.bias import CausalBias

    return matrix.variant if isinstance(matrix, CausalBias) else None


def _one(name: str, a, b):
    if a is not None and b is not None:
        raise ValueError(f"two masks joined by & both have {name}")
    return b if a is None else a


class Mask:
    """The ``mask`` of ``attention``: one of the masks below, or several joined by &."""

    def __init__(
        self,
        *,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        chunk: int | None = None,
        top_left: bool = False,
        left_padding: Tensor | None = None,
        prefix: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_queries: Tensor | None = None,
        cu_keys: Tensor | None = None,
        visible: Tensor | None = None,
        additive: Tensor | None = None,
        modulo: bool = False,
    ):
        self.causal = causal
        self.window = window
        self.chunk = chunk
        self.top_left = top_left
        self.left_padding = left_padding
        self.prefix = prefix
        self.lengths = lengths
        self.cu_queries = cu_queries
        self.cu_keys = cu_keys
        self.visible = visible
        self.additive = additive
        self.modulo = modulo

    def __repr__(self) -> str:
        return " & ".join(self._parts()) or "Mask()"

    def _parts(self) -> list[str]:
        """Returns the constructors whose masks & joined."""
        parts = ["Causal()"] if self.causal and self.cu_queries is None else []
        if self.top_left:
            parts.append("CausalTopLeft()")
        if self.window is not None:
            parts.append(call_text(SlidingWindow, dict(zip(("left", "right"), self.window))))
        if self.chunk is not None:
            parts.append(call_text(Chunks, dict(size=self.chunk)))
        if self.left_padding is not None:
            parts.append(call_text(LeftPadding, dict(padding=self.left_padding)))
        if self.prefix is not None:
            parts.append(call_text(PrefixLM, dict(prefix=self.prefix)))
        if self.lengths is not None:
            parts.append(call_text(KeyLengths, dict(lengths=self.lengths)))
        if self.cu_queries is not None:
            keys = {} if self.cu_keys is self.cu_queries else dict(cu_seqlens_keys=self.cu_keys)
            parts.append(call_text(Documents, dict(cu_seqlens=self.cu_queries, **keys, causal=self.causal)))
        for matrix in (self.visible, self.additive):
            if matrix is not None:
                modulo = dict(modulo=True) if self.modulo else {}
                parts.append(call_text(MatrixMask, dict(matrix=matrix, **modulo)))
        return parts

    def __and__(self, other: Mask | Tensor) -> Mask:
        a, b = self, as_mask(other)
        if (a.modulo or b.modulo) and all(x.visible is not None or x.additive is not None for x in (a, b)):
            raise ValueError("mask: a MatrixMask with modulo does not work with another MatrixMask")
        visible = a.visible & b.visible if a.visible is not None and b.visible is not None else None
        additive = _sum(a.additive, b.additive) if a.additive is not None and b.additive is not None else None
        window = a.window and b.window and tuple(min(*sides) for sides in zip(a.window, b.window))
        return Mask(
            causal=a.causal or b.causal,
            window=window or a.window or b.window,
            chunk=_one("chunks", a.chunk, b.chunk),
            top_left=a.top_left or b.top_left,
            left_padding=_one("left padding", a.left_padding, b.left_padding),
            prefix=_one("a prefix", a.prefix, b.prefix),
            lengths=_one("lengths", a.lengths, b.lengths),
            cu_queries=_one("cu_seqlens", a.cu_queries, b.cu_queries),
            cu_keys=_one("cu_seqlens", a.cu_keys, b.cu_keys),
            visible=_one("", a.visible, b.visible) if visible is None else visible,
            additive=_one("", a.additive, b.additive) if additive is None else additive,
            modulo=a.modulo or b.modulo,
        )


class Causal(Mask):
    """Shows the keys up to the query's own position. The last query stands at the last key."""

    def __init__(self):
        super().__init__(causal=True)


class CausalTopLeft(Mask):
    """Shows keys 0 … i to query i of the call. The position of query i is i. This is PyTorch's ``is_causal=True``, for
    any numbers of queries and keys. Limit: you cannot join CausalTopLeft with LeftPadding or Documents."""

    def __init__(self):
        super().__init__(top_left=True)


class SlidingWindow(Mask):
    """Shows the keys p - left … p + right. A model's "window of w tokens" counts the token itself: left = w - 1."""

    def __init__(self, left: int, right: int = 0):
        for name, side in (("left", left), ("right", right)):
            _check_integer(f"SlidingWindow: {name}", side)
        super().__init__(window=(left, right))


class Chunks(Mask):
    """Causal in chunks of `size` keys, as in Llama 4: a query at position p sees the keys p - p mod size … p. Chunks
    begin at multiples of `size` from the first key of the sequence, also with Documents."""

    def __init__(self, size: int):
        _check_integer("Chunks: size", size)
        super().__init__(chunk=size)


class PrefixLM(Mask):
    """Causal. Exception: the first prefix[b] keys of batch entry b are visible to all of its queries. prefix: [batch]."""

    def __init__(self, prefix: Integers):
        super().__init__(prefix=_int64("prefix", prefix))


class LeftPadding(Mask):
    """Causal, for sequences with padding before their tokens: the first padding[b] keys of batch entry b. Positions begin
    after the padding. A query of padding has the position 0 and sees no key. padding: [batch]. Limit: you cannot join
    LeftPadding with CausalTopLeft or Documents."""

    def __init__(self, padding: Integers):
        super().__init__(left_padding=_int64("padding", padding))


class KeyLengths(Mask):
    """Shows the first lengths[b] keys of batch entry b. Other keys are padding. lengths: [batch]."""

    def __init__(self, lengths: Integers):
        if isinstance(lengths, Sequence) and any(length < 0 for length in lengths):
            raise ValueError(f"ssmax_torch.mask.KeyLengths: lengths is {list(lengths)}, must not be negative")
        super().__init__(lengths=_int64("lengths", lengths))


class Documents(Mask):
    """Shows the keys of the query's document, for several documents in one sequence. Document i has the queries
    cu_seqlens[i] … cu_seqlens[i + 1] - 1 of every batch entry. Its keys have the same places, or the places of
    cu_seqlens_keys if given."""

    def __init__(self, cu_seqlens: Integers, *, cu_seqlens_keys: Integers | None = None, causal: bool = True):
        queries = _int64("cu_seqlens", cu_seqlens)
        keys = queries if cu_seqlens_keys is None else _int64("cu_seqlens_keys", cu_seqlens_keys)
        super().__init__(causal=causal, cu_queries=queries, cu_keys=keys)


class MatrixMask(Mask):
    """A tensor that broadcasts to [batch, heads, queries, keys]. A bool tensor shows the keys where it is true. A tensor
    of floating type is added to the logits; it masks a key by -inf or by its type's lowest number,
    ``torch.finfo(dtype).min``. Masked keys are not counted in n. A ``torch.nn.attention.bias.CausalBias`` becomes a
    tensor of bool. With ``modulo``, the tensor has m matrices in place of heads. m divides the number of heads. Head
    h reads matrix h % m, as in ggml."""

    def __init__(self, matrix: Tensor, modulo: bool = False):
        if not isinstance(matrix, Tensor):
            raise TypeError(f"ssmax_torch.mask.MatrixMask: matrix is a {type(matrix).__name__}, must be a tensor")
        variant = causal_variant(matrix)
        if variant is not None:
            queries, keys = matrix.seq_len_q, matrix.seq_len_kv
            last = keys - queries if variant.name == "LOWER_RIGHT" else 0
            matrix = torch.ones(queries, keys, dtype=torch.bool, device=matrix.device).tril(last)
        if matrix.dtype == torch.bool:
            super().__init__(visible=matrix, modulo=modulo)
        elif matrix.is_floating_point():
            super().__init__(additive=matrix, modulo=modulo)
        else:
            raise ValueError(f"ssmax_torch.mask.MatrixMask: mask has dtype {matrix.dtype}, must be bool or of floating type")


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """Returns `mask` as a Mask. A tensor becomes a MatrixMask, None shows every key."""
    if mask is None:
        return Mask()
    if isinstance(mask, Tensor):
        return MatrixMask(mask)
    if isinstance(mask, Mask):
        return mask
    raise TypeError(f"mask is a {type(mask).__name__}, must be a Mask, a tensor or None")
