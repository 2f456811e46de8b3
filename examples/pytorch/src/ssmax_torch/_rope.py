"""Rotary position embedding (arXiv:2104.09864) of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Rope:
    """A rotation of `width` channels in pairs, from first_channel on. half_split pairs channel i with i + width/2
    (transformers' Llama), interleaved pairs 2i with 2i + 1 (Llama's original weights). Key j has the position
    key_position + j. attention_factor multiplies the rotated queries and keys; it is above 0. frequencies are width/2
    numbers of your own, in place of those by theta and scaling. A pair with frequency 0 is neither rotated nor
    multiplied."""

    width: int
    theta: float = 10_000.0
    pairing: str = "half_split"
    scaling: RopeScaling = field(default_factory=RopeScaling)
    key_position: int = 0
    first_channel: int = 0
    attention_factor: float = 1.0
    frequencies: Sequence[float] = ()

    def numbers(self) -> list[float]:
        """Returns the numbers in the order of csrc/rope.hpp."""
        if self.pairing not in _PAIRINGS:
            raise ValueError(f"rope: pairing is {self.pairing!r}, must be one of {_PAIRINGS}")
        scaling = self.scaling
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
