"""Scores: functions of a logit z, applied before the scaling: out = softmax(c · score(scale · q · k)) v.

====================  ============================================  =================
score                 z' of query i and key j
====================  ============================================  =================
``Softcap(cap)``      cap · tanh(z / cap)                           Gemma 2
``Alibi(slopes)``     z + slopes[head] · (position_j - position_i)  arXiv:2108.12409
``Bias(bias)``        z + bias[batch, head, i, j]
``ScaleInvariant()``  a · z + 1 - a², a² = 1 + 2 ln(1 + t/τ)        arXiv:2505.17083
``a | b``             b(a(z)), in the order of this table
====================  ============================================  =================
"""

from __future__ import annotations

from torch import Tensor

from ._numbers import call_text, number


class Score:
    """The ``score`` of ``attention``: one of the scores below, or several joined by |."""

    def __init__(
        self,
        *,
        softcap: float | None = None,
        scale_invariant: float | None = None,
        slopes: Tensor | None = None,
        bias: Tensor | None = None,
    ):
        self.softcap = softcap
        self.scale_invariant = scale_invariant
        self.slopes = slopes
        self.bias = bias

    def __repr__(self) -> str:
        names = ("softcap", "slopes", "bias", "scale_invariant")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        parts = [call_text(_KINDS[name], {_KINDS[name].argument: value}) for name, value in given.items()]
        return " | ".join(parts) or "Score()"

    def __or__(self, other: Score) -> Score:
        if self.scale_invariant or other.scale_invariant:
            raise ValueError("score: ScaleInvariant stands alone")
        if other.softcap and (self.softcap or self.slopes is not None or self.bias is not None):
            raise ValueError("score: Softcap stands first, before Alibi and Bias")
        if self.slopes is not None and other.slopes is not None:
            raise ValueError("score: two Alibi have one slope, their sum")
        bias = other.bias if self.bias is None else self.bias if other.bias is None else self.bias + other.bias
        return Score(
            softcap=self.softcap or other.softcap,
            slopes=other.slopes if self.slopes is None else self.slopes,
            bias=bias,
        )


class Softcap(Score):
    """cap · tanh(z / cap), within ±cap. cap is above 0."""

    argument = "cap"

    def __init__(self, cap: float):
        if not cap > 0:
            raise ValueError(f"Softcap: cap is {cap}, must be above 0")
        super().__init__(softcap=number("cap", cap))


class Alibi(Score):
    """z + slopes[head] · (key position - query position). slopes: [heads], differentiable."""

    argument = "slopes"

    def __init__(self, slopes: Tensor):
        super().__init__(slopes=slopes)


class Bias(Score):
    """z + bias. bias broadcasts to [batch, heads, queries, keys] and is differentiable; its gradient is summed over the
    broadcast dimensions. A key with a bias of -inf has weight 0 and counts in n. A masked key does not count in n."""

    argument = "bias"

    def __init__(self, bias: Tensor):
        super().__init__(bias=bias)


class ScaleInvariant(Score):
    """a · z + 1 - a² with a² = 1 + 2 ln(1 + t / tau). t is the distance of query and key. tau must be above 0. Limit: you
    cannot join ScaleInvariant with another score or an additive mask."""

    argument = "tau"

    def __init__(self, tau: float = 10.0):
        if not tau > 0:
            raise ValueError(f"ScaleInvariant: tau is {tau}, must be above 0")
        super().__init__(scale_invariant=number("tau", tau))


_KINDS = {"softcap": Softcap, "slopes": Alibi, "bias": Bias, "scale_invariant": ScaleInvariant}
