"""Models of `transformers` by one line.

    >>> from ssmax_torch import transformers as adapter
    >>> adapter.register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ssmax")  # or
    >>> model.set_attn_implementation("ssmax")

Their attention is then `ssmax_torch.attention`, forward and backward, with and without a cache. A causal mask, a
window, chunks, packed sequences and padding at the end stay what they are: no mask of queries x keys is stored.
Padding elsewhere is a mask of keys. What the model does with its queries (temperature tuning of Llama 4 and
Ministral 3, Inkling's log scaling) it goes on doing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    prepare_padding_mask,
    remap_positions_for_packed_sequence,
    sdpa_mask,
    sliding_window_overlay,
)

from . import attention
from .mask import Causal, Documents, KeyLengths, Mask, SlidingWindow
from .score import Bias, Softcap


def register(name: str = "ssmax") -> None:
    """Makes `attn_implementation=name` mean this library."""
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    cache: object = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What AttentionInterface asks for: out [batch, queries, heads, width], and no weights."""
    if dropout:
        raise ValueError(f"ssmax: dropout is {dropout}, must be 0: set the model's attention_dropout to 0")
    if cache is not None:
        raise ValueError("ssmax: cache is paged, must be None: continuous batching has attention of its own")
    if attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        attention_mask = Causal()
    score = None if softcap is None else Softcap(softcap)
    if position_bias is not None:
        score = Bias(position_bias) if score is None else score | Bias(position_bias)
    # Inkling's keys and values come out of a convolution, whose last dimension is the sequence.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out = attention(query, key, value, mask=attention_mask, score=score, sinks=s_aux, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: object,
) -> Mask | Tensor | None:
    """What AttentionMaskInterface asks for. A mask that is not known is a tensor of [batch, 1, queries, keys]."""
    # A static cache has keys behind the last query, at an offset that is a tensor; a compiled model has no values
    # to look at.
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if aligned and not torch.compiler.is_compiling():
        mask = _structure(mask_function, range(q_offset, q_offset + q_length), range(kv_offset, kv_offset + kv_length))
        if mask is not None:
            return _padded(mask, prepare_padding_mask(attention_mask, kv_length, kv_offset), kv_offset, kv_length)
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        **options | {"allow_is_causal_skip": False},
    )


def _structure(mask_function: Callable, queries: range, keys: range) -> Mask | None:
    """The mask that the function means where it is one of transformers' own, else None."""
    if mask_function is causal_mask_function:
        return Causal()
    # Every other known function is and_masks of two functions.
    made_by, variables = _made_by(mask_function)
    if made_by != _made_by(and_masks(causal_mask_function))[0] or len(variables["mask_functions"]) != 2:
        return None
    first, second = variables["mask_functions"]
    for overlay, rest in ((first, second), (second, first)):  # transformers 5.23 joins them in the other order
        made_by, variables = _made_by(overlay)
        if made_by == _made_by(packed_sequence_mask_function(None))[0]:
            return _packed(variables["packed_sequence_mask"], rest, queries, keys)
    overlay, rest = first, second
    made_by, variables = _made_by(overlay)
    if rest is not causal_mask_function:
        return None
    if made_by == _made_by(sliding_window_overlay(1))[0]:
        return SlidingWindow(variables["sliding_window"] - 1)
    if made_by == _made_by(chunked_overlay(1, None))[0] and not variables["left_padding"].any():
        return _chunks(variables["chunk_size"], queries, keys)
    return None


def _made_by(function: Callable) -> tuple[object, dict]:
    """Which lines of code a mask function is, and the variables that it has from the function that made it."""
    return getattr(function, "__code__", None), dict(getclosurevars(function).nonlocals)


def _packed(documents: Tensor, remapped: Callable, queries: range, keys: range) -> Mask | None:
    """The mask within each document, if all batch entries have the same; documents [batch, keys] are numbered."""
    made_by, variables = _made_by(remapped)
    if made_by != _made_by(remap_positions_for_packed_sequence(None, None))[0] or (documents != documents[:1]).any():
        return None
    within = _structure(variables["mask_function"], queries, keys)
    begins = 1 + documents[0].diff().nonzero().flatten()
    if within is None or within.cu_queries is not None:  # chunks within documents
        return None
    return within & Documents([0, *begins.tolist(), len(keys)])


def _chunks(size: int, queries: range, keys: range) -> Mask:
    """Causal within each chunk of `size` positions."""
    begins = range(keys.start - keys.start % size, keys.stop, size)
    if len(begins) == 1:
        return Causal()
    in_queries, in_keys = (
        [min(max(begin - part.start, 0), len(part)) for begin in (*begins, part.stop)] for part in (queries, keys)
    )
    return Documents(in_queries, cu_seqlens_keys=in_keys)


def _padded(mask: Mask, padding: Tensor | None, kv_offset: int, kv_length: int) -> Mask:
    """The mask without the keys that are padding, where padding [batch, keys] is False."""
    if padding is None or (padding := padding[:, kv_offset : kv_offset + kv_length]).all():
        return mask
    lengths = padding.sum(dim=-1)
    at_the_end = torch.arange(kv_length) < lengths[:, None]
    return mask & (KeyLengths(lengths) if torch.equal(padding, at_the_end) else padding[:, None, None, :])
