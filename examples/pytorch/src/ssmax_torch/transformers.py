"""Replaces the attention of `transformers` models by this library.

    >>> from ssmax_torch import transformers as adapter
    >>> adapter.register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ssmax_softmax")  # or
    >>> model.set_attn_implementation("ssmax_softmax")

The model then computes softmax as before: its outputs equal those of `eager` up to rounding. `register` with a scaling
makes an implementation with another multiplier. `add_ssmax` gives each layer a trained s of SSMax per head, which
`save_pretrained` stores. After `register_ssmax`, `from_pretrained` loads it:

    >>> adapter.add_ssmax(model, start=0.17)  # ... train, then
    >>> model.save_pretrained(folder)
    >>> adapter.register_ssmax()
    >>> model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="ssmax")

A causal mask, a window, chunks, packed sequences and padding at the end, also of encoders, become this library's masks:
no matrix of queries x keys is stored. Padding elsewhere becomes a mask of keys. The model scales its queries itself
(temperature tuning of Llama 4 and Ministral 3, Inkling's log scaling).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils import TransformersKwargs, logging

from . import _hf_ssmax, attention
from ._hf_masks import ModelMask, make_mask
from .mask import Causal, Mask, as_mask
from .scaling import Scaling
from .score import Bias, Softcap

# Arguments that do not change attention, because the layer or the mask uses them before the call.
_USED_BEFORE = {"position_ids", "sliding_window", "output_attentions"}


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
    _hf_ssmax.forget(name)
    scaling_of = scaling if callable(scaling) else lambda module: scaling
    if scaling is None:
        _scaled.discard(name)
    else:
        _scaled.add(name)
    _registered.add(name)
    _check_models_when_made()
    AttentionInterface.register(name, partial(_attention, scaling_of))
    AttentionMaskInterface.register(name, make_mask)


def register_ssmax(name: str = "ssmax", bias: bool = False, start: float = 0.43) -> None:
    """Registers SSMax with trained parameters as `attn_implementation=name`.

    Each layer that a model makes with this implementation has a module ``ssmax`` with the parameters s and, with ``bias``,
    b, one per head. `from_pretrained` and `load_state_dict` load them. A checkpoint without them, or a new model, starts
    with s = ``start`` and b = 0. A model trained with softmax starts with ``start`` = 1 / mean of ln n over its lengths.
    """
    register(name, scaling=_own_scaling)
    _hf_ssmax.train(name, bias=bias, start=start)


def add_ssmax(model: PreTrainedModel, name: str = "ssmax", bias: bool = False, start: float = 0.43) -> PreTrainedModel:
    """Switches a model to SSMax with trained parameters: calls `register_ssmax`, gives the parameters to each layer that
    has none, and sets the model's implementation. Parameters that the model has stay as they are. Returns the model."""
    register_ssmax(name, bias, start)
    _hf_ssmax.add(model, name)
    model.set_attn_implementation(name)
    return model


def _own_scaling(module: nn.Module) -> Scaling:
    if not hasattr(module, "ssmax"):
        raise ValueError(f"ssmax: {type(module).__name__} has no parameters of SSMax: call add_ssmax(model)")
    return module.ssmax.scaling()


_log = logging.get_logger(__name__)
# Names of the implementations, and of those with a scaling.
_registered: set[str] = set()
_scaled: set[str] = set()


@cache
def _check_models_when_made() -> None:
    """Installs a check of every model that is made with an implementation of this module."""
    theirs = PreTrainedModel._check_and_adjust_attn_implementation

    def checked(model: PreTrainedModel, implementation: str | None, *arguments: object, **options: object) -> str:
        if implementation in _registered:
            _check_model(type(model), implementation)
        return theirs(model, implementation, *arguments, **options)

    PreTrainedModel._check_and_adjust_attn_implementation = checked


def _check_model(model: type[PreTrainedModel], name: str) -> None:
    if name in _scaled and not model._can_set_attn_implementation():
        raise ValueError(
            f"ssmax: {model.__name__} has attention of its own and ignores the scaling of {name!r}, "
            "attn_implementation must be 'eager'"
        )
    # Some models choose a class of attention by attn_implementation. The class for this name raises an error.
    for variable, classes in vars(sys.modules[model.__module__]).items():
        if variable.endswith("ATTENTION_CLASSES") and isinstance(classes, dict):
            known = [each for each in classes if each not in _registered]
            classes[name] = partial(_refuse, model.__name__, name, known)


def _refuse(model: str, name: str, known: list[str], *_: object, **__: object) -> None:
    raise ValueError(
        f"ssmax: {model} chooses a class of attention by attn_implementation and has none for {name!r}, "
        f"attn_implementation must be one of {known}"
    )


def _attention(
    scaling_of: Callable[[nn.Module], Scaling | None],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
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
    if cache is not None:
        raise ValueError("ssmax: cache is paged, must be None: continuous batching has attention of its own")
    if others.get("output_attentions"):
        _log.warning_once("ssmax: output_attentions is True, the returned weights are None: only `eager` returns weights")
    files = tuple(each.__module__ for each in type(module).__mro__)
    others = {name: isinstance(x, Tensor) for name, x in others.items() if x is not None}
    unknown = [name for name, is_tensor in others.items() if _changes_attention(files, name, is_tensor)]
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
        dropout_p=dropout,
        return_lse=True,
    )
    if sinks is not None:  # [batch, heads, queries, 1]: adds exp(sink) to the denominator of each query
        out = out * torch.sigmoid(lse[..., None] - sinks).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.assume_constant_result
def _changes_attention(files: tuple[str, ...], name: str, is_tensor: bool) -> bool:
    """Tells if eager attention in the Python modules of a class of layers reads an argument. A class of layers without
    eager attention may read every tensor, except those that transformers hands through all models."""
    if name in _USED_BEFORE:
        return False
    read = _read_by_eager(files)
    return name in read if read else is_tensor and name not in TransformersKwargs.__annotations__


@cache
def _read_by_eager(files: tuple[str, ...]) -> frozenset[str]:
    """Returns the parameters of eager attention in these Python modules, and the strings in its text."""
    variables = (variable for file in files if file in sys.modules for variable in vars(sys.modules[file]).items())
    codes = [f.__code__ for name, f in variables if name.endswith("eager_attention_forward")]
    parameters = {name for code in codes for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    return frozenset(parameters | {x for code in codes for x in code.co_consts if isinstance(x, str)})


def _checked(mask: Tensor | None, queries: int, keys: int) -> Mask | Tensor | None:
    """Returns the mask; in an additive mask, the lowest numbers become -inf. Throws if its extents are different."""
    if mask is None:
        return None
    extents = tuple(mask.shape[-2:])
    if extents != (queries, keys) and extents != (1, keys):
        raise ValueError(
            f"ssmax: attention_mask has {extents[0]} queries and {extents[1]} keys, "
            f"query has {queries} and key has {keys}: must be equal"
        )
    if isinstance(mask, ModelMask):
        return mask.mask if extents[0] == queries else mask.matrix()
    if mask.is_floating_point():
        # Models mask keys by the lowest number of a type of at most 32 bits. A masked key must not count in n.
        lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
        mask = mask.masked_fill(mask <= lowest, float("-inf"))
    return mask


def _visible(indices: Tensor, extent: int) -> Tensor:
    """Returns bool [..., extent]: true at the places of indices [..., n]. Ignores negative indices."""
    shown = torch.zeros(*indices.shape[:-1], extent + 1, dtype=torch.bool)
    return shown.scatter(-1, indices.long().where(indices >= 0, extent), True)[..., :extent]
