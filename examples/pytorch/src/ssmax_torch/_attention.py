"""attention, and the same function with PyTorch's own signature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._arguments import arguments, check_tensors
from ._numbers import number
from ._operators import call_attention, call_attention_statistics
from ._rope import Rope
from .mask import Causal, CausalTopLeft, Mask, MatrixMask, causal_variant
from .scaling import Scaling
from .score import Score

_NAME = "ssmax_torch.scaled_dot_product_attention"


class RowStatistics(NamedTuple):
    """Statistics of each query over its visible keys, [batch, heads, queries]. z is a logit after the score and before
    the multiplier c. p is a weight. A sink is in the denominator of p, but not a term of the sums."""

    largest: Tensor
    """max z; -inf if no key is visible."""
    smallest: Tensor
    """min z; +inf if no key is visible."""
    sum_of_squares: Tensor
    """Σ p²: 1 / Σ p² is an effective number of keys. 0 if no key is visible."""
    entropy: Tensor
    """-Σ p·ln p, in nats. 0 if no key is visible."""


def results(out: Tensor, lse: Tensor | None, statistics: Sequence[Tensor]) -> Tensor | tuple[Tensor | RowStatistics, ...]:
    """Returns out, or a tuple of out and the results that are given."""
    given = (out,) if lse is None else (out, lse)
    if statistics:
        given = (*given, RowStatistics(*statistics))
    return given if len(given) > 1 else out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: Scaling | None = None,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scaled_sinks: bool = False,
    rope: Rope | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    dropout_offset: int = 0,
    return_lse: bool = False,
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor | RowStatistics, ...]:
    """out_i = Σ_j softmax_j(c_i · score(scale · (R q_i)·(R k_j))) v_j over the keys j that query i sees.

    Args:
        query: [batch, heads, queries, d], float32, float64, bfloat16 or float16. The last stride must be 1, other
            strides are free: [batch, sequence, heads, d].transpose(1, 2) needs no copy.
        key: [batch, kv_heads, keys, d]. heads is a multiple of kv_heads; head h reads h // (heads // kv_heads).
        value: [batch, kv_heads, keys, d_value].
        scaling: c, from ``ssmax_torch.scaling``; softmax by default.
        mask: from ``ssmax_torch.mask``, or a tensor that broadcasts to [batch, heads, queries, keys]: bool, true where
            a key is visible, or of floating type, added to the logits. By default every key is visible.
        score: from ``ssmax_torch.score``.
        sinks: [heads]: adds exp(sink) to softmax's denominator. With ``scaled_sinks``, adds exp(c_i · sink), as a key
            with the sink as its logit does.
        rope: rotates queries and keys before their product.
        scale: 1 / √d by default.
        dropout_p: the probability, from 0 to 1, that a weight becomes 0. Other weights are multiplied by
            1 / (1 - dropout_p). lse is without dropout. dropout_p is rounded to a multiple of 1/65536. The weights that
            become 0 differ from those of PyTorch's own attention.
        dropout_seed: chooses the weights that become 0. An integer in [0, 2^64): the weights also depend on the index of
            the batch entry. Integers [batch], at least 0: a seed for each batch entry, whose weights do not depend on
            the index. By default each call draws a seed from PyTorch's default CPU generator, so ``torch.manual_seed``
            makes the call reproducible. Whether a weight becomes 0 depends on the seed, the offset, the head, and the
            positions of the query and the key. So a prompt that is cut into calls drops the weights of one call.
        dropout_offset: an integer in [0, 2^64) that also chooses the weights, for instance the step and the layer.
        return_lse: also return the logarithm of softmax's denominator.
        return_statistics: also return a ``RowStatistics``, the last element of the result. Statistics have no gradient
            and do not depend on dropout.

    Returns:
        out [batch, heads, queries, d_value], with the memory layout of query. With ``return_lse`` also lse
        [batch, heads, queries], float32 (float64 for float64). If no key is visible to a query, out is 0 and lse is -inf.
        Exception: with sinks, lse is the sink. Exception: with scaled sinks, lse is -inf.

    Differentiable once with respect to query, key, value, sinks and the tensors of scaling and score, through out and
    lse. A mask has no gradient. 16-bit types are computed in float32. A bias of another type is converted and so
    copied. Under autocast, query, key and value are cast as for PyTorch's own attention.
    """
    check_tensors(query, key, value)
    if dropout_p:
        dropout_p = number("dropout_p", dropout_p)
        if not 0 <= dropout_p <= 1:
            raise ValueError(f"ssmax_torch.attention: dropout_p is {dropout_p}, must be within 0 and 1")
    drops_all = dropout_p == 1  # outside of the range of the operators
    dropout = (0.0 if drops_all else dropout_p, dropout_seed, dropout_offset)
    given = arguments(query, scaling, mask, score, sinks, scaled_sinks, rope, scale, *dropout)
    if return_statistics:
        out, lse, *statistics = call_attention_statistics(query, key, value, *given)
        result = results(out, lse if return_lse else None, statistics)
    else:
        result = call_attention(bool(return_lse), query, key, value, *given)
    if drops_all:
        return (0 * result[0], *result[1:]) if isinstance(result, tuple) else 0 * result
    return result


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes ``torch.nn.functional.scaled_dot_product_attention`` by this library: the same arguments and meaning.

    is_causal is aligned top-left. query is [..., queries, d]; leading dimensions broadcast. Strides are free: a tensor
    whose last dimension is not contiguous is copied. Dropout is as in ``attention``.
    Exception: if the mask has its type's lowest number for every key of a query, out is 0. PyTorch returns the mean of
    the values.
    """
    check_tensors(query, key, value)
    plain = attn_mask is None and dropout_p == 0 and not isinstance(scale, Tensor)
    if plain and _same_shape(query, key, value):
        given = (scale, True) if is_causal else (scale,)
        return call_attention(False, query, key, value, *given)
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            raise TypeError(f"{_NAME}: attn_mask is a {type(attn_mask).__name__}, must be a tensor or None")
        if is_causal:
            raise ValueError(f"{_NAME}: attn_mask and is_causal exclude each other")
    least = 3 if enable_gqa else 2
    ranks = query.dim(), key.dim(), value.dim()
    if min(ranks) < least:
        raise ValueError(
            f"{_NAME}: {_shapes(query, key, value)}, must have at least {least} dimensions where enable_gqa is {enable_gqa}"
        )
    leading = query.shape[:-2]
    if ranks != (4, 4, 4) or not leading == key.shape[:2] == value.shape[:2]:
        query, key, value = _with_heads(query, key, value) if enable_gqa else _broadcast(query, key, value)
        leading = query.shape[:-2]
    queries, keys, values = query.shape[-2], key.shape[-2], value.shape[-2]
    if keys != values:
        raise ValueError(f"{_NAME}: value has {values} positions, key has {keys}: must be equal")
    query, key, value = _four_dimensional(query), _four_dimensional(key), _four_dimensional(value)

    mask = None
    variant = None if attn_mask is None else causal_variant(attn_mask)
    if variant is not None:
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (queries, keys):
            extents = [attn_mask.seq_len_q, attn_mask.seq_len_kv]
            raise ValueError(f"{_NAME}: attn_mask is for {extents} queries and keys, must be for {[queries, keys]}")
        is_causal = variant.name == "UPPER_LEFT"
        mask = None if is_causal else Causal()
    elif attn_mask is not None:
        mask = MatrixMask(_mask_of(attn_mask, leading))
    if is_causal:
        if queries <= keys:  # top-left: the number of keys that the last query sees is the number of queries
            mask = Causal()
            if queries < keys:
                key, value = key[:, :, :queries], value[:, :, :queries]
        else:
            mask = CausalTopLeft()
    out = attention(query, key, value, mask=mask, scale=scale, dropout_p=dropout_p)
    return out if len(leading) == 2 else out.reshape(*leading, queries, out.shape[-1])


def _same_shape(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Returns true if the tensors have one shape of four dimensions and the layout that the operators require."""
    shape = query.shape
    if len(shape) != 4 or key.shape != shape or value.shape != shape:
        return False
    if query.is_contiguous() and key.is_contiguous() and value.is_contiguous():
        return True
    return query.stride(3) == key.stride(3) == value.stride(3) == 1


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query has shape {list(query.shape)}, key has shape {list(key.shape)}, value has shape {list(value.shape)}"


def _broadcast_shapes(shapes: Iterable, query: Tensor, key: Tensor, value: Tensor, requirement: str) -> tuple:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise ValueError(f"{_NAME}: {_shapes(query, key, value)}: {requirement}") from None


def _broadcast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views whose leading dimensions are equal. Exception: a single head of keys and values is not expanded."""
    shapes = query.shape[:-2], key.shape[:-2], value.shape[:-2]
    if shapes[0] == shapes[1] == shapes[2]:
        return query, key, value
    leading = _broadcast_shapes(shapes, query, key, value, "leading dimensions must broadcast, or enable_gqa be true")
    one_head = all(shape[-1:] in ((), (1,)) for shape in shapes[1:])
    shared = (*leading[:-1], 1) if one_head and leading else leading
    return _expanded(query, leading), _expanded(key, shared), _expanded(value, shared)


def _with_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tensors with equal leading dimensions before the heads, and equal numbers of key and value heads."""
    heads = query.shape[-3]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[-3] == 0 or heads % tensor.shape[-3] != 0:
            raise ValueError(
                f"{_NAME}: {name} has {tensor.shape[-3]} heads, query has {heads}: query's must be a multiple of {name}'s"
            )
    if key.shape[-3] != value.shape[-3]:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[-3], -3) for tensor in (key, value))
    batches = [tensor.shape[:-3] for tensor in (query, key, value)]
    if batches[0] == batches[1] == batches[2]:
        return query, key, value
    batch = _broadcast_shapes(batches, query, key, value, "dimensions before the heads must broadcast")
    return tuple(_expanded(tensor, (*batch, tensor.shape[-3])) for tensor in (query, key, value))


def _expanded(tensor: Tensor, leading: tuple) -> Tensor:
    return tensor.expand(*leading, *tensor.shape[-2:])


def _four_dimensional(tensor: Tensor) -> Tensor:
    """Returns [batch, heads, positions, width] with a contiguous last dimension."""
    rank = tensor.dim()
    if rank > 4:
        tensor = tensor.flatten(0, -4)
    elif rank < 4:
        tensor = tensor[(None,) * (4 - rank)]
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def _mask_of(attn_mask: Tensor, leading: tuple) -> Tensor:
    """Returns the mask with at most 4 dimensions, in the way of _four_dimensional."""
    if not 2 <= attn_mask.dim() <= len(leading) + 2:
        raise ValueError(
            f"{_NAME}: attn_mask has shape {list(attn_mask.shape)}, must have 2 to {len(leading) + 2} dimensions"
        )
    if len(leading) <= 2 or attn_mask.dim() <= 3:
        return attn_mask
    return attn_mask.expand(*leading[:-1], *attn_mask.shape[-3:]).flatten(0, -4)
