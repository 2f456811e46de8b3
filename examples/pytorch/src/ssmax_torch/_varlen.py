"""Attention of sequences that are packed one after the other."""

from __future__ import annotations

from torch import Tensor

from ._attention import attention
from ._rope import Rope
from .mask import Documents, Integers, Mask, as_mask
from .scaling import Scaling
from .score import Score

_NAME = "ssmax_torch.attention_varlen"


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Integers,
    cu_seqlens_keys: Integers | None = None,
    *,
    causal: bool = False,
    scaling: Scaling | None = None,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scaled_sinks: bool = False,
    rope: Rope | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes ``attention`` of packed sequences, as flash-attn's ``flash_attn_varlen_func`` does.

    Args:
        query: [queries of all sequences, heads, d].
        key: [keys of all sequences, kv_heads, d]. heads is a multiple of kv_heads.
        value: [keys of all sequences, kv_heads, d_value].
        cu_seqlens: [sequences + 1] integers from 0 to the number of queries. Sequence i has the queries
            cu_seqlens[i] … cu_seqlens[i + 1] - 1. A sequence may be empty.
        cu_seqlens_keys: the places of the keys; those of the queries by default.
        causal: masks later keys. The last query of a sequence stands at its last key.
        mask: another mask, such as ``SlidingWindow``, which must hold too. A tensor broadcasts to [heads, all queries,
            all keys].

    The other arguments are those of ``attention``. n and positions begin anew in each sequence.

    Returns:
        out [queries of all sequences, heads, d_value]. With ``return_lse`` also lse [heads, queries of all sequences].
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAME}: {name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.is_nested or tensor.dim() != 3:
            shape = "nested" if tensor.is_nested else f"of shape {list(tensor.shape)}"
            raise ValueError(f"{_NAME}: {name} is {shape}, must be [positions of all sequences, heads, width]")
    other = as_mask(mask)
    if other.top_left or not other.prefix is other.lengths is other.cu_queries is None:
        raise ValueError(f"{_NAME}: mask is {other}, must be of Causal, SlidingWindow, Chunks and MatrixMask")
    sequences = Documents(cu_seqlens, cu_seqlens_keys=cu_seqlens_keys, causal=causal)
    out, lse = attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)),
        scaling=scaling,
        mask=sequences & other,
        score=score,
        sinks=sinks,
        scaled_sinks=scaled_sinks,
        rope=rope,
        scale=scale,
        dropout_p=dropout_p,
        return_lse=True,
    )
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out
