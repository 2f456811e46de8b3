"""Rotary position embedding (arXiv:2104.09864) of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, field

_METHODS = ("none", "linear", "ntk", "yarn", "llama3")
_PAIRINGS = ("half_split", "interleaved")


@dataclass(frozen=True)
class RopeScaling:
    """A change of the frequencies for contexts beyond the trained length. method is none, linear, ntk, yarn or llama3.
    low and high are numbers of rotations within original_positions (yarn 1 and 32, llama3 1 and 4)."""

    method: str = "none"
    factor: float = 1.0
    original_positions: float = 0.0
    low: float = 1.0
    high: float = 32.0


@dataclass(frozen=True)
class Rope:
    """A rotation of the first `width` channels in pairs. half_split pairs channel i with i + width/2 (transformers'
    Llama), interleaved pairs 2i with 2i + 1 (Llama's original weights). Key j has the position key_position + j."""

    width: int
    theta: float = 10_000.0
    pairing: str = "half_split"
    scaling: RopeScaling = field(default_factory=RopeScaling)
    key_position: int = 0

    def numbers(self) -> list[float]:
        """Returns the numbers in the order of csrc/rope.hpp."""
        if self.pairing not in _PAIRINGS:
            raise ValueError(f"rope: pairing is {self.pairing!r}, must be one of {_PAIRINGS}")
        scaling = self.scaling
        if scaling.method not in _METHODS:
            raise ValueError(f"rope: method is {scaling.method!r}, must be one of {_METHODS}")
        return [
            float(self.width),
            float(self.theta),
            float(_PAIRINGS.index(self.pairing)),
            float(_METHODS.index(scaling.method)),
            float(scaling.factor),
            float(scaling.original_positions),
            float(scaling.low),
            float(scaling.high),
            float(self.key_position),
        ]
