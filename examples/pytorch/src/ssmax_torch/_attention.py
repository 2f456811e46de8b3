"""attention, and the same with PyTorch's own signature."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import arguments, check_devices
from ._operators import call_attention
from ._rope import Rope
from .mask import Causal, Mask, MaskMatrix
from .scaling import Scaling
from .score import Score


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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out_i = Σ_j softmax_j(c_i · score(scale · (R q_i)·(R k_j))) v_j over the keys j that query i sees.

    Args:
        query: [batch, heads, queries, d], float32, float64, bfloat16 or float16. Strides are free but for the last
            dimension's, which is 1: [batch, sequence, heads, d].transpose(1, 2) needs no copy.
        key: [batch, kv_heads, keys, d]. heads is a multiple of kv_heads; head h reads h // (heads // kv_heads).
        value: [batch, kv_heads, keys, d_value].
        scaling: c, from ``ssmax_torch.scaling``; softmax by default.
        mask: from ``ssmax_torch.mask``, or a tensor that broadcasts to [batch, heads, queries, keys]: bool, true where
            a key is seen, or of floating type, added to the logits. By default every key is seen.
        score: from ``ssmax_torch.score``.
        sinks: [heads]: softmax's denominator has one term more, exp(sink) or, with ``scaled_sinks``,
            as of a key with that logit, exp(c_i · sink).
        rope: turns queries and keys on the way in.
        scale: 1 / √d by default.
        return_lse: also return the logarithm of softmax's denominator.

    Returns:
        out [batch, heads, queries, d_value], laid out in memory as query is, and with ``return_lse`` also lse
        [batch, heads, queries], float32 (float64 for float64). A query that sees nothing gives 0 and -inf.

    Differentiable once: query, key, value, sinks, the tensors of scaling and score, through out and lse. A mask is
    not. 16-bit types are computed in float32; a bias of another type is converted, which copies it.
    """
    check_devices(query, key, value)
    operands = arguments(query, scaling, mask, score, sinks, scaled_sinks, rope, scale)
    out, lse = call_attention(query, key, value, *operands)
    return (out, lse) if return_lse else out


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
    """``torch.nn.functional.scaled_dot_product_attention`` by this library: the same arguments and meaning, is_causal
    aligned top-left among them. query [..., queries, d] of 2 to 4 dimensions. Dropout is an error."""
    if dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p}, must be 0")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal exclude each other")
    rank = query.dim()
    if not 2 <= rank <= 4:
        raise ValueError(f"query has shape {list(query.shape)}, must have 2 to 4 dimensions")
    query, key, value = (tensor[(None,) * (4 - tensor.dim())] for tensor in (query, key, value))
    if not enable_gqa and key.shape[1] != query.shape[1]:
        raise ValueError(f"key has {key.shape[1]} heads, query has {query.shape[1]}: enable_gqa is false")
    mask = None if attn_mask is None else MaskMatrix(attn_mask)
    if is_causal:
        queries, keys = query.shape[2], key.shape[2]
        if queries <= keys:  # top-left: no query sees the keys behind the last query
            key, value, mask = key[:, :, :queries], value[:, :, :queries], Causal()
        else:
            mask = MaskMatrix(torch.ones(queries, keys, dtype=torch.bool).tril())
    out = attention(query, key, value, mask=mask, scale=scale)
    return out[(0,) * (4 - rank)]
