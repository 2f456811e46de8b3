"""The arguments of the operators: scaling, mask, score and options, in the order of csrc/arguments.hpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ._numbers import number
from ._operators import compute_type
from ._rope import Rope
from .mask import Causal, Mask, _int64, additive_as, as_mask
from .scaling import Scaling, Softmax
from .score import BIAS, Score

_SOFTMAX = Softmax()
_NO_SCORE = Score()
_EVERY_KEY = Mask()
_STRIDED = torch.strided


def check_tensors(query: Tensor, key: Tensor, value: Tensor, function: str = "attention") -> None:
    """Throws unless all three are dense tensors on the CPU, or all three are on the meta device."""
    for tensor in (query, key, value):
        if not isinstance(tensor, Tensor) or not tensor.is_cpu or tensor.layout is not _STRIDED or tensor.is_nested:
            break
    else:
        return
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"ssmax_torch.{function}: {name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.layout is not _STRIDED or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise ValueError(f"ssmax_torch.{function}: {name} is {kind}, must be a dense tensor")
    if query.device.type not in ("cpu", "meta"):
        raise ValueError(f"query is on {query.device}, must be on the CPU")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query is on {query.device}")


def _check_devices(query: Tensor, tensors: tuple[tuple[str, Tensor | None], ...]) -> None:
    for name, tensor in tensors:
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query is on {query.device}")


def _readable(tensor: Tensor | None) -> Tensor | None:
    """Returns a mask or bias whose last stride is 1 or 0: the tensor itself, or a copy if it has another layout."""
    if tensor is None or tensor.dim() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) in (0, 1):
        return tensor
    return tensor.contiguous()


def _signed(name: str, value: int) -> int:
    """Returns the number of 64 bits as int64: numbers from 2^63 on are negative."""
    value = value.__index__()
    if not 0 <= value < 2**64:
        raise ValueError(f"ssmax_torch.attention: {name} is {value}, must be at least 0 and below 2^64")
    return value - 2**64 if value >= 2**63 else value


def _seed(query: Tensor, seed: int | Tensor | None) -> Tensor:
    """Returns the seeds of dropout: [1], or [batch] if the seed is such a tensor."""
    if seed is None:
        return torch.randint(2**63 - 1, (1,), device=query.device)
    if not isinstance(seed, Tensor):
        return torch.full((1,), _signed("dropout_seed", seed), dtype=torch.int64, device=query.device)
    batch = query.shape[0]
    if seed.dim() > 1 or (seed.dim() == 1 and seed.shape[0] not in (1, batch)):
        raise ValueError(f"dropout_seed has shape {list(seed.shape)}, must be one number or [{batch}]")
    return _int64("dropout_seed", seed).reshape(-1)


def arguments(
    query: Tensor,
    scaling: Scaling | None,
    mask: Mask | Tensor | None,
    score: Score | None,
    sinks: Tensor | None,
    scaled_sinks: bool,
    rope: Rope | None,
    scale: float | None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    dropout_offset: int = 0,
) -> tuple:
    """Returns the operators' arguments after query, key and value. The common arguments come first, so that a simple
    call leaves out the others. With dropout and without a seed, draws the seed from PyTorch's default generator."""
    if isinstance(scale, Tensor):
        scale = number("scale", scale)
    if scaling is None and mask is None and score is None and sinks is None and rope is None and not dropout_p:
        return (scale,)
    scaling = _SOFTMAX if scaling is None else scaling
    score = _NO_SCORE if score is None else score
    for name, value, kind in (("scaling", scaling, Scaling), ("score", score, Score)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}, must be a {kind.__name__} or None")
    mask = _EVERY_KEY if mask is None else as_mask(mask)
    s, b, p, c, numbers = scaling.operands()
    _check_devices(query, (("s", s), ("b", b)))
    common = (scale, mask.causal, scaling.kind, s, b, numbers if any(numbers) else None, scaling.size)
    simple = p is None and c is None and (mask is _EVERY_KEY or type(mask) is Causal)
    if simple and score is _NO_SCORE and sinks is None and rope is None and not dropout_p:
        return common
    if c is not None:
        c = c.to(compute_type(query.dtype))
    bias, hides, visible = score.bias, mask.additive is not None, mask.visible
    bias_modulo = score.modulo if bias is not None else mask.modulo
    if bias is not None:
        bias = bias.to(compute_type(query.dtype))
    if hides:
        if score.slopes_multiply == BIAS:
            raise ValueError("score: SlopedBias does not work with an additive mask")
        if bias is not None and (score.modulo or mask.modulo):
            raise ValueError("score: Bias does not work with an additive mask where one of them has modulo")
        additive = additive_as(mask.additive, compute_type(query.dtype))
        if bias is None:
            bias = additive
        else:  # the mask alone decides which keys count in n: a bias of -inf counts
            hides, shown = False, ~(additive <= torch.finfo(additive.dtype).min)
            visible = shown if visible is None else visible & shown
            bias = bias + additive
    bias, visible = _readable(bias), _readable(visible)
    positions = None if rope is None else rope.positions_of(query.shape[0])
    if positions is not None and not mask.cu_queries is mask.left_padding is None:
        raise ValueError("rope has positions, which do not work with the masks Documents and LeftPadding")
    seed = _seed(query, dropout_seed) if dropout_p else None
    tensors = (
        ("p", p),
        ("c", c),
        ("padding", mask.left_padding),
        ("prefix", mask.prefix),
        ("lengths", mask.lengths),
        ("cu_seqlens", mask.cu_queries),
        ("cu_seqlens_keys", mask.cu_keys),
        ("mask", visible),
        ("slopes", score.slopes),
        ("bias", bias),
        ("sinks", sinks),
        ("rope: positions", positions),
        ("dropout_seed", seed),
    )
    _check_devices(query, tensors)
    return (
        *common,
        p,
        c,
        mask.window,
        mask.chunk,
        mask.top_left,
        mask.left_padding,
        mask.prefix,
        mask.lengths,
        mask.cu_queries,
        mask.cu_keys,
        visible,
        mask.modulo and visible is not None,
        score.softcap,
        score.scale_invariant,
        score.slopes,
        score.slopes_multiply,
        bias,
        bias_modulo and bias is not None,
        hides,
        sinks,
        scaled_sinks,
        None if rope is None else rope.numbers(),
        positions,
        None if rope is None else rope.axes_of_pairs(),
        dropout_p or None,
        seed,
        _signed("dropout_offset", dropout_offset) if dropout_p else 0,
    )
