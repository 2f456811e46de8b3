"""Rotary position embedding (arXiv:2104.09864) of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .mask import _int64

_METHODS = ("none", "linear", "ntk", "yarn", "llama3")
_PAIRINGS = ("half_split", "interleaved")


@dataclass(frozen=True)
class RopeScaling:
    """A change of the frequencies for contexts beyond the trained length. method is none, linear, ntk, yarn or llama3.
    low and high are numbers of rotations within original_positions (yarn 1 and 32, llama3 1 and 4). truncate (yarn)
    rounds the ends of the ramp to whole pairs; gpt-oss has False."""

    method: str = "none"
    factor: float = 1.0
    original_positions: float = 0.0
    low: float = 1.0
    high: float = 32.0
    truncate: bool = True

    @staticmethod
    def dynamic_ntk(factor: float, original_positions: float, positions: float) -> RopeScaling:
        """Returns the scaling `dynamic` of transformers for a sequence of `positions` positions: ntk with the factor
        factor · max(positions / original_positions, 1) - (factor - 1). All keys of a call must have the same
        frequencies, so a KVCache needs one number of positions from its first key on."""
        if not original_positions > 0:
            raise ValueError(f"rope: original_positions is {original_positions}, must be above 0")
        return RopeScaling("ntk", factor * max(positions / original_positions, 1.0) - (factor - 1))


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor g(mscale) = 0.1 · mscale · ln(factor) + 1, or 1 for a factor of at most 1. The
    attention_factor of a YaRN model is g(mscale) / g(mscale_all_dim) if the model configures both, else g(1)."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


_NO_SCALING = RopeScaling()


@dataclass(frozen=True)
class Rope:
    """A rotation of `width` channels in pairs, from first_channel on. half_split pairs channel i with i + width/2
    (transformers' Llama), interleaved pairs 2i with 2i + 1 (Llama's original weights). Key j has the position
    key_position + j. attention_factor multiplies the rotated queries and keys; it is above 0. frequencies are width/2
    numbers of your own, in place of those by theta and scaling. A pair with frequency 0 is neither rotated nor
    multiplied.

    positions are whole numbers [1 or batch, tokens], as position_ids in transformers: key j is token key_position + j,
    and tokens have any positions. The last query is the token of the last key. With axes (MRoPE), positions are
    [axes, 1 or batch, tokens], and pair i has the position on axis axes[i]. The axes of Qwen2.5-VL are
    [0] * 16 + [1] * 24 + [2] * 24. Masks, scores and scalings do not read these positions.

    >>> positions = (padding.cumsum(-1) - 1).clamp(min=0)  # a left-padded batch: padding is 0 or 1, [batch, tokens]
    >>> rope = Rope(64, positions=positions)
    """

    width: int
    theta: float = 10_000.0
    pairing: str = "half_split"
    scaling: RopeScaling | None = None
    key_position: int = 0
    first_channel: int = 0
    attention_factor: float = 1.0
    frequencies: Sequence[float] = ()
    positions: Tensor | Sequence[Sequence[int]] | None = None
    axes: Sequence[int] = ()

    def positions_of(self, batch: int) -> Tensor | None:
        """Returns the positions [1 or batch, axes, tokens] in int64. Throws unless they fit `batch` entries."""
        axes = len(self.axes) > 0
        if self.positions is None:
            if axes:
                raise ValueError("rope: axes is given without positions")
            return None
        positions = _int64("rope: positions", self.positions)
        if positions.dim() != (3 if axes else 2) or positions.shape[-2] not in (1, batch):
            expected = f"{'[axes, ' if axes else '['}1 or {batch}, tokens]"
            raise ValueError(f"rope: positions has shape {list(positions.shape)}, must be {expected}")
        return positions.movedim(0, 1) if axes else positions.unsqueeze(1)

    def axes_of_pairs(self) -> list[int] | None:
        """Returns the axes as the operators take them."""
        return [int(axis) for axis in self.axes] or None

    def numbers(self) -> list[float]:
        """Returns the numbers in the order of csrc/rope.hpp."""
        if self.pairing not in _PAIRINGS:
            raise ValueError(f"rope: pairing is {self.pairing!r}, must be one of {_PAIRINGS}")
        scaling = _NO_SCALING if self.scaling is None else self.scaling
        if scaling.method not in _METHODS:
            raise ValueError(f"rope: method is {scaling.method!r}, must be one of {_METHODS}")
        return [
            float(self.key_position),
            float(self.width),
            float(self.theta),
            float(_PAIRINGS.index(self.pairing)),
            float(_METHODS.index(scaling.method)),
            float(scaling.factor),
            float(scaling.original_positions),
            float(scaling.low),
            float(scaling.high),
            float(scaling.truncate),
            float(self.first_channel),
            float(self.attention_factor),
            *map(float, self.frequencies),
        ]
