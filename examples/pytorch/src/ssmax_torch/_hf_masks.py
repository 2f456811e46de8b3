"""The masks that `transformers` asks AttentionMaskInterface for: this library's masks in place of matrices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from inspect import getclosurevars

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
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

from .mask import Causal, Documents, KeyLengths, Mask, SlidingWindow

# Types of layers and of models that read the mask, append keys to it or add it to their own logits. They get the
# additive matrix of `eager`.
_READ_MASK = {
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "doge",
    "bigbird_pegasus",
    "gemma4_audio",
}


class ModelMask(Tensor):
    """A mask that a model may use as the tensor bool [batch, 1, queries, keys] which `sdpa` gets. It has that tensor's
    shape and type, but no memory. Every operation on it makes the matrix first. `mask` is the same mask without a matrix.
    """

    mask: Mask
    matrix: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], mask: Mask, matrix: Callable[[], Tensor]) -> ModelMask:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device="cpu")
        made.mask, made.matrix = mask, cache(matrix)
        return made

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), options=None):
        dense = partial(tree_map, lambda x: x.matrix() if isinstance(x, ModelMask) else x)
        return operation(*dense(arguments), **dense(options or {}))


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **options: object,
) -> Tensor | None:
    """Returns the mask for AttentionMaskInterface. An unknown mask becomes a tensor [batch, 1, queries, keys]."""
    config = options.get("config")
    types = {getattr(config, "model_type", None), *(getattr(config, "layer_types", None) or ())}
    matrix = partial(
        eager_mask if types & _READ_MASK else sdpa_mask,
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        **options | {"allow_is_bidirectional_skip": False},
    )
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
                mask = _padded(mask, padding, kv_offset, kv_length)
                return ModelMask((batch_size, 1, q_length, kv_length), mask, matrix)
    return matrix()


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
