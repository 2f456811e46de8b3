"""Replaces the attention of `transformers` models by this library.

    >>> from ssmax_torch import transformers as adapter
    >>> adapter.register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ssmax_softmax")  # or
    >>> model.set_attn_implementation("ssmax_softmax")

The model then computes softmax as before: its outputs equal those of `eager` up to rounding. `register` with a scaling
makes an implementation with another multiplier. Here each layer has a trained s of SSMax per head:

    >>> for layer in model.model.layers:
    ...     layer.self_attn.s = nn.Parameter(torch.full((model.config.num_attention_heads,), 0.43))
    >>> adapter.register("ssmax", scaling=lambda attention: SSMax(attention.s))
    >>> model.set_attn_implementation("ssmax")

A causal mask, a window, chunks, packed sequences and padding at the end, also of encoders, become this library's masks:
no matrix of queries x keys is stored. Padding elsewhere becomes a mask of keys. The model scales its queries itself
(temperature tuning of Llama 4 and Ministral 3, Inkling's log scaling).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from inspect import getclosurevars

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    eager_mask,
    packed_sequence_mask_function,
    prepare_padding_mask,
    remap_positions_for_packed_sequence,
    sdpa_mask,
    sliding_window_overlay,
)

from . import attention
from .mask import Causal, Documents, KeyLengths, Mask, SlidingWindow, as_mask
from .scaling import Scaling
from .score import Bias, Softcap

# Tensor arguments that do not change attention, because the layer uses them before the call.
_USED_BEFORE = {"position_ids"}
# Types of layers and of models that read the mask, append keys to it or add it to their own logits. They get the
# additive matrix of `eager`.
_READ_MASK = {
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "doge",
    "bigbird_pegasus",
}


def register(
    name: str = "ssmax_softmax", scaling: Scaling | Callable[[nn.Module], Scaling | None] | None = None
) -> None:
    """Registers this library as `attn_implementation=name`.

    Args:
        name: of the implementation.
        scaling: c, from ``ssmax_torch.scaling``, or a function that returns c for a layer's module of attention.
            By default c is 1: plain softmax, as the model was trained.

    Making a model that has attention of its own and would ignore the scaling then throws ValueError.
    """
    scaling_of = scaling if callable(scaling) else lambda module: scaling
    if scaling is None:
        _scaled.discard(name)
    else:
        _scaled.add(name)
        _check_models_when_made()
    AttentionInterface.register(name, partial(_attention, scaling_of))
    AttentionMaskInterface.register(name, _mask)


# Names of the implementations with a scaling.
_scaled: set[str] = set()


@cache
def _check_models_when_made() -> None:
    """Installs a check of models that get an implementation with a scaling. A model that ignores the interface does not
    call this module, so a hook checks the model. PyTorch calls the hook for each module that becomes part of another."""
    nn.modules.module.register_module_module_registration_hook(_check_model)


def _check_model(model: nn.Module, *_: object) -> None:
    if not isinstance(model, PreTrainedModel):
        return
    name = model.config._attn_implementation
    if name in _scaled and not type(model)._can_set_attn_implementation():
        raise ValueError(
            f"ssmax: {type(model).__name__} has attention of its own and ignores the scaling of {name!r}, "
            "attn_implementation must be 'eager'"
        )


class _ModelMask(Mask):
    """A mask for a number of queries and keys. transformers does not change the mask, because its ndim is 4."""

    ndim = 4

    def __init__(self, mask: Mask, queries: int, keys: int):
        super().__init__(**vars(mask))
        self.extents = (queries, keys)

    def contiguous(self) -> _ModelMask:
        return self


def _attention(
    scaling_of: Callable[[nn.Module], Scaling | None],
    module: nn.Module,
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
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cache: object = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Returns out [batch, queries, heads, width], and None as weights: the signature of AttentionInterface."""
    if dropout:
        raise ValueError(f"ssmax: dropout is {dropout}, must be 0: set the model's attention_dropout to 0")
    if cache is not None:
        raise ValueError("ssmax: cache is paged, must be None: continuous batching has attention of its own")
    unknown = [name for name, x in others.items() if isinstance(x, Tensor) and name not in _USED_BEFORE]
    if unknown:
        raise ValueError(
            f"ssmax: {type(module).__name__} passes {', '.join(unknown)}, which this library's attention does not support"
        )
    queries, keys = query.shape[2], key.shape[2]
    mask = _checked(attention_mask, queries, keys)
    if mask is None and is_causal:
        mask = Causal()
    if indices is not None:
        mask = as_mask(mask) & _visible(indices[:, None], keys)
    if block_indices is not None:
        size, heads = module.indexer.block_size, query.shape[1] // block_indices.shape[1]
        blocks = _visible(block_indices, -(-keys // size)).repeat_interleave(heads, dim=1)
        mask = as_mask(mask) & blocks.repeat_interleave(size, dim=-1)[..., :keys]
    score = None if softcap is None else Softcap(softcap)
    if position_bias is not None:
        score = Bias(position_bias) if score is None else score | Bias(position_bias)
    # The last dimension of Inkling's keys and values is the sequence, because a convolution writes them.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out, lse = attention(
        query,
        key,
        value,
        scaling=scaling_of(module),
        mask=mask,
        score=score,
        sinks=s_aux,
        scale=scaling,
        return_lse=True,
    )
    if sinks is not None:  # [batch, heads, queries, 1]: adds exp(sink) to the denominator of each query
        out = out * torch.sigmoid(lse[..., None] - sinks).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def _checked(mask: Mask | Tensor | None, queries: int, keys: int) -> Mask | Tensor | None:
    """Returns the mask; in an additive mask, the lowest numbers become -inf. Throws if its extents are different."""
    if mask is None:
        return None
    extents = mask.extents if isinstance(mask, _ModelMask) else tuple(mask.shape[-2:])
    broadcasts = isinstance(mask, Tensor) and extents[0] == 1
    if extents != (queries, keys) and (extents[1] != keys or not broadcasts):
        raise ValueError(
            f"ssmax: attention_mask has {extents[0]} queries and {extents[1]} keys, "
            f"query has {queries} and key has {keys}: must be equal"
        )
    if isinstance(mask, Tensor) and mask.is_floating_point():
        # Models mask keys by the lowest number of a type of at most 32 bits. A masked key must not count in n.
        lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
        mask = mask.masked_fill(mask <= lowest, float("-inf"))
    return mask


def _visible(indices: Tensor, extent: int) -> Tensor:
    """Returns bool [..., extent]: true at the places of indices [..., n]. Ignores negative indices."""
    shown = torch.zeros(*indices.shape[:-1], extent + 1, dtype=torch.bool)
    return shown.scatter(-1, indices.long().where(indices >= 0, extent), True)[..., :extent]


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Mask | Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **options: object,
) -> Mask | Tensor | None:
    """Returns the mask for AttentionMaskInterface. An unknown mask becomes a tensor [batch, 1, queries, keys]."""
    if isinstance(attention_mask, Mask):  # `generate` calls this function before the model does
        return attention_mask
    config = options.get("config")
    types = {getattr(config, "model_type", None), *(getattr(config, "layer_types", None) or ())}
    if not torch.compiler.is_compiling():  # a compiled model has no values yet
        _check_interface(type(config))
        # A static cache has keys after the last query, at an offset that is a tensor.
        aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
        # transformers allows no skip for packed sequences and for a model that reads the mask.
        if mask_function is bidirectional_mask_function:
            unread = options.get("allow_is_bidirectional_skip", False)
        else:
            unread = aligned and (allow_is_causal_skip or _is_packed(mask_function))
        if unread and not types & _READ_MASK:
            keys = range(kv_offset, kv_offset + kv_length)
            mask = _structure(mask_function, range(keys.stop - q_length, keys.stop), keys)
            if mask is not None:
                padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
                if mask is _EVERY_KEY and (padding is None or padding.all()):
                    return None
                return _ModelMask(_padded(mask, padding, kv_offset, kv_length), q_length, kv_length)
    return (eager_mask if types & _READ_MASK else sdpa_mask)(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        **options,
    )


_EVERY_KEY = Mask()


@cache
def _check_interface(config: type) -> None:
    """Throws if the model of this class of configurations does not call attention through AttentionInterface."""
    model = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    if model is not None and "ALL_ATTENTION_FUNCTIONS" not in vars(model):
        raise ValueError(
            f"ssmax: the model of {config.__name__} has attention of its own, attn_implementation must be 'eager'"
        )


def _structure(mask_function: Callable, queries: range, keys: range) -> Mask | None:
    """Returns the mask of a mask function of transformers. Returns None for other functions."""
    if mask_function is causal_mask_function:
        return Causal()
    if mask_function is bidirectional_mask_function:
        return _EVERY_KEY
    # Every other known function is and_masks of two functions.
    parts = _parts(mask_function)
    if len(parts) != 2:
        return None
    if _is_packed(mask_function):  # transformers 5.23 has the packing first, 5.24 has it last
        packing, rest = parts if _made_by(parts[0])[0] == _PACKING else reversed(parts)
        return _packed(_made_by(packing)[1]["packed_sequence_mask"], rest, queries, keys)
    overlay, rest = parts
    made_by, variables = _made_by(overlay)
    if rest is not causal_mask_function:
        return None
    if made_by == _made_by(sliding_window_overlay(1))[0]:
        return SlidingWindow(variables["sliding_window"] - 1)
    if made_by == _made_by(chunked_overlay(1, None))[0] and not variables["left_padding"].any():
        return _chunks(variables["chunk_size"], queries, keys)
    return None


def _made_by(function: Callable) -> tuple[object, dict]:
    """Returns the code of a mask function, and the variables of the function that made it."""
    return getattr(function, "__code__", None), dict(getclosurevars(function).nonlocals)


_PACKING = _made_by(packed_sequence_mask_function(None))[0]


def _parts(mask_function: Callable) -> tuple[Callable, ...]:
    """Returns the functions that and_masks joined into this function."""
    made_by, variables = _made_by(mask_function)
    return variables["mask_functions"] if made_by == _made_by(and_masks(causal_mask_function))[0] else ()


def _is_packed(mask_function: Callable) -> bool:
    return any(_made_by(part)[0] == _PACKING for part in _parts(mask_function))


def _packed(documents: Tensor, remapped: Callable, queries: range, keys: range) -> Mask | None:
    """Returns the mask within each document, if all batch entries have the same documents. documents is [batch, keys]."""
    made_by, variables = _made_by(remapped)
    if made_by != _made_by(remap_positions_for_packed_sequence(None, None))[0] or (documents != documents[:1]).any():
        return None
    within = _structure(variables["mask_function"], queries, keys)
    begins = 1 + documents[0].diff().nonzero().flatten()
    if within is None or within.cu_queries is not None:  # chunks within documents
        return None
    return within & Documents([0, *begins.tolist(), len(keys)])


def _chunks(size: int, queries: range, keys: range) -> Mask:
    """Returns a mask that is causal within each chunk of `size` positions."""
    begins = range(keys.start - keys.start % size, keys.stop, size)
    if len(begins) == 1:
        return Causal()
    in_queries, in_keys = (
        [min(max(begin - part.start, 0), len(part)) for begin in (*begins, part.stop)] for part in (queries, keys)
    )
    return Documents(in_queries, cu_seqlens_keys=in_keys)


def _padded(mask: Mask, padding: Tensor | None, kv_offset: int, kv_length: int) -> Mask:
    """Returns the mask without padding. A key is padding where padding [batch, keys] is False."""
    if padding is None or (padding := padding[:, kv_offset : kv_offset + kv_length]).all():
        return mask
    lengths = padding.sum(dim=-1)
    at_the_end = torch.arange(kv_length) < lengths[:, None]
    return mask & (KeyLengths(lengths) if torch.equal(padding, at_the_end) else padding[:, None, None, :])
