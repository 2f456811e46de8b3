"""Attention of sequences that are packed one after the other."""

from __future__ import annotations

from torch import Tensor

from ._attention import RowStatistics, attention, results
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
    dropout_seed: int | Tensor | None = None,
    dropout_offset: int = 0,
    return_lse: bool = False,
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor | RowStatistics, ...]:
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

    The other arguments are those of ``attention``. n and positions begin anew in each sequence. The rope has no
    positions of its own. For dropout, all sequences are one batch entry.

    Returns:
        out [queries of all sequences, heads, d_value]. With ``return_lse`` also lse [heads, queries of all sequences].
        With ``return_statistics`` also a ``RowStatistics`` of tensors of this shape.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAME}: {name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.is_nested or tensor.dim() != 3:
            shape = "nested" if tensor.is_nested else f"of shape {list(tensor.shape)}"
            raise ValueError(f"{_NAME}: {name} is {shape}, must be [positions of all sequences, heads, width]")
    other = as_mask(mask)
    if other.top_left or not other.left_padding is other.prefix is other.lengths is other.cu_queries is None:
        raise ValueError(f"{_NAME}: mask is {other}, must be of Causal, SlidingWindow, Chunks and MatrixMask")
    sequences = Documents(cu_seqlens, cu_seqlens_keys=cu_seqlens_keys, causal=causal)
    out, lse, *statistics = attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)),
        scaling=scaling,
        mask=sequences & other,
        score=score,
        sinks=sinks,
        scaled_sinks=scaled_sinks,
        rope=rope,
        scale=scale,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        dropout_offset=dropout_offset,
        return_lse=True,
        return_statistics=return_statistics,
    )
    statistics = [x.squeeze(0) for each in statistics for x in each]
    return results(out.squeeze(0).transpose(0, 1), lse.squeeze(0) if return_lse else None, statistics)
