"""The multiplier c of a query's logits, out = softmax(c · z) v.

n is the number of keys that the query sees under the mask, p is the query's 0-based position. c is computed in float64
for all types: neither s · ln n nor a term of the gradient of s is rounded to 16 bits.

========================  =============================  ==================================================
scaling                   c                              source
========================  =============================  ==================================================
``Softmax()``             1
``SSMax(s, b)``           s · ln n + b                   arXiv:2501.19399; with b its configuration (d)
``LogN()``                ln n                           configuration (c); arXiv:2202.12172
``SizeTable(p, s, b)``    s · p[n - 1] + b               the form that the paper's Figure 2 was trained with
``QwenLogN(length)``      max(1, ln(p + 1) / ln length)  Qwen, ``use_logn_attn``
``Llama4Temperature``     1 + a·ln(1 + ⌊(p + 1) / F⌋)    Llama 4, ``attn_temperature_tuning``
``MinistralTemperature``  1 + β·ln(1 + ⌊p / L⌋)          Ministral 3, ``llama_4_scaling_beta``
``InklingTemperature``    1 + α·ln max(1, (p + 1) / F)   Inkling, ``log_scaling_alpha``, ``log_scaling_n_floor``
``Constant(c)``           c
``PerQuery(c)``           c[batch, head, query]          you compute c: arXiv:2411.12892, 2506.16640, 2602.11139
``AdjustedSize(scaling)`` c at max(floor, n + offset)    s · ln(n + 1), s · ln max(2, n)
========================  =============================  ==================================================
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor

from ._numbers import call_text, number


def _number(value: float | Tensor) -> float:
    return 0.0 if isinstance(value, Tensor) else float(value)


def _tensor(value: float | Tensor) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


class Scaling:
    """The ``scaling`` of ``attention``."""

    kind: int
    size: tuple[int, int] | None = None

    def operands(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, list[float]]:
        """Returns s, b, p and c if they are tensors, else None, and the numbers."""
        return None, None, None, None, self.numbers()

    def numbers(self) -> list[float]:
        """Returns the numbers in the order of csrc/scalings.hpp."""
        return []

    def __repr__(self) -> str:
        names = [field.name for field in fields(self)] if is_dataclass(self) else []
        return call_text(type(self), {name: getattr(self, name) for name in names})


@dataclass(frozen=True, eq=False, repr=False)
class Softmax(Scaling):
    """c = 1."""

    kind = 0


@dataclass(frozen=True, eq=False, repr=False)
class LogN(Scaling):
    """c = ln n."""

    kind = 1


@dataclass(frozen=True, eq=False, repr=False)
class SSMax(Scaling):
    """c = s · ln n + b. s and b are numbers or tensors, [heads] or without dimensions, of any floating type. Tensors are
    differentiable."""

    s: float | Tensor = 1.0
    b: float | Tensor = 0.0
    kind = 2

    def operands(self):
        return _tensor(self.s), _tensor(self.b), None, None, [_number(self.s), _number(self.b)]


@dataclass(frozen=True, eq=False, repr=False)
class SizeTable(Scaling):
    """c = s · p[n - 1] + b. p is [at least the largest n] and shared by all heads. s, b and p are differentiable."""

    p: Tensor
    s: float | Tensor = 1.0
    b: float | Tensor = 0.0
    kind = 3

    def operands(self):
        return _tensor(self.s), _tensor(self.b), self.p, None, [_number(self.s), _number(self.b)]


@dataclass(frozen=True, eq=False, repr=False)
class QwenLogN(Scaling):
    """c = max(1, ln(p + 1) / ln trained_length)."""

    trained_length: int
    kind = 4

    def numbers(self):
        return [float(self.trained_length)]


@dataclass(frozen=True, eq=False, repr=False)
class Llama4Temperature(Scaling):
    """c = 1 + scale · ln(1 + ⌊(p + 1) / floor_length⌋)."""

    scale: float = 0.1
    floor_length: int = 8192
    kind = 5

    def numbers(self):
        return [number("scale", self.scale), float(self.floor_length)]


@dataclass(frozen=True, eq=False, repr=False)
class MinistralTemperature(Scaling):
    """c = 1 + scale · ln(1 + ⌊p / trained_length⌋)."""

    scale: float = 0.1
    trained_length: int = 16384
    kind = 6

    def numbers(self):
        return [number("scale", self.scale), float(self.trained_length)]


@dataclass(frozen=True, eq=False, repr=False)
class Constant(Scaling):
    """c = multiplier."""

    multiplier: float
    kind = 7

    def numbers(self):
        return [number("multiplier", self.multiplier)]


@dataclass(frozen=True, eq=False, repr=False)
class PerQuery(Scaling):
    """c = c[batch, head, query]: a differentiable tensor that broadcasts to [batch, heads, queries]. A tensor of another
    type than the attention is computed in is converted."""

    c: Tensor
    kind = 8

    def operands(self):
        return None, None, None, self.c, []


@dataclass(frozen=True, eq=False, repr=False)
class InklingTemperature(Scaling):
    """c = 1 + alpha · ln max(1, (p + 1) / floor_length). Inkling's position bias is the score, ``Bias``: c multiplies it."""

    alpha: float = 0.1
    floor_length: int = 128_000
    kind = 9

    def numbers(self):
        return [number("alpha", self.alpha), float(self.floor_length)]


class AdjustedSize(Scaling):
    """Calls another scaling with max(floor, n + offset) in place of n."""

    def __init__(self, scaling: Scaling, offset: int = 0, floor: int = 1):
        if scaling.size:
            raise ValueError("scaling is adjusted twice")
        self.scaling = scaling
        self.kind = scaling.kind
        self.size = (offset, floor)

    def operands(self):
        return self.scaling.operands()

    def __repr__(self) -> str:
        return call_text(type(self), dict(scaling=self.scaling, offset=self.size[0], floor=self.size[1]))
