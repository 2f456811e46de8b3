"""Scores: functions of a logit z, applied before the scaling: out = softmax(c · score(scale · q · k)) v.

====================  ============================================  =================
score                 z' of query i and key j
====================  ============================================  =================
``Softcap(cap)``      cap · tanh(z / cap)                           Gemma 2
``Alibi(slopes)``     z + slopes[head] · (position_j - position_i)  arXiv:2108.12409
``Bias(bias)``        z + bias[batch, head, i, j]
``SlopedBias(…)``     z + slopes[head] · bias[batch, head, i, j]    ggml
``ScaleInvariant()``  a · z + 1 - a², a² = 1 + 2 ln(1 + t/τ)        arXiv:2505.17083
``a | b``             b(a(z)), in the order of this table
====================  ============================================  =================

``Alibi(slopes, absolute=True)`` has the distance -abs(position_j - position_i).
"""

from __future__ import annotations

from torch import Tensor

from ._numbers import call_text, check_no_derivative, number

# Factors of the slopes, as in csrc/arguments.hpp: key position - query position, its negative absolute value, bias.
DISTANCE, ABSOLUTE_DISTANCE, BIAS = range(3)


class Score:
    """The ``score`` of ``attention``: one of the scores below, or several joined by |."""

    def __init__(
        self,
        *,
        softcap: float | None = None,
        scale_invariant: float | None = None,
        slopes: Tensor | None = None,
        slopes_multiply: int = DISTANCE,
        bias: Tensor | None = None,
        modulo: bool = False,
    ):
        self.softcap = softcap
        self.scale_invariant = scale_invariant
        self.slopes = slopes
        self.slopes_multiply = slopes_multiply
        self.bias = bias
        self.modulo = modulo

    def __repr__(self) -> str:
        modulo = dict(modulo=True) if self.modulo else {}
        parts = [] if self.softcap is None else [call_text(Softcap, dict(cap=self.softcap))]
        if self.slopes_multiply == BIAS:
            parts.append(call_text(SlopedBias, dict(bias=self.bias, slopes=self.slopes, **modulo)))
        elif self.slopes is not None:
            absolute = dict(absolute=True) if self.slopes_multiply == ABSOLUTE_DISTANCE else {}
            parts.append(call_text(Alibi, dict(slopes=self.slopes, **absolute)))
        if self.bias is not None and self.slopes_multiply != BIAS:
            parts.append(call_text(Bias, dict(bias=self.bias, **modulo)))
        if self.scale_invariant is not None:
            parts.append(call_text(ScaleInvariant, dict(tau=self.scale_invariant)))
        return " | ".join(parts) or "Score()"

    def __or__(self, other: Score) -> Score:
        if self.scale_invariant or other.scale_invariant:
            raise ValueError("score: ScaleInvariant stands alone")
        if other.softcap and (self.softcap or self.slopes is not None or self.bias is not None):
            raise ValueError("score: Softcap stands first, before Alibi and Bias")
        both = all(x.slopes is not None or x.bias is not None for x in (self, other))
        if both and BIAS in (self.slopes_multiply, other.slopes_multiply):
            raise ValueError("score: SlopedBias does not work with Alibi or Bias")
        if self.slopes is not None and other.slopes is not None:
            raise ValueError("score: two Alibi have one slope, their sum")
        if self.modulo != other.modulo and self.bias is not None and other.bias is not None:
            raise ValueError("score: a Bias with modulo does not work with a Bias without modulo")
        if self.modulo and other.modulo:
            counts = {x.bias.shape[-3] for x in (self, other) if x.bias.dim() > 2} - {1}
            if len(counts) > 1:
                raise ValueError(f"score: two Bias with modulo have {sorted(counts)} matrices, must be as many or 1")
        bias = other.bias if self.bias is None else self.bias if other.bias is None else self.bias + other.bias
        return Score(
            softcap=self.softcap or other.softcap,
            slopes=other.slopes if self.slopes is None else self.slopes,
            slopes_multiply=self.slopes_multiply or other.slopes_multiply,
            bias=bias,
            modulo=self.modulo or other.modulo,
        )


class Softcap(Score):
    """cap · tanh(z / cap), within ±cap. cap is above 0."""

    def __init__(self, cap: float):
        if not cap > 0:
            raise ValueError(f"Softcap: cap is {cap}, must be above 0")
        super().__init__(softcap=number("cap", cap))


class Alibi(Score):
    """z + slopes[head] · (key position - query position). slopes: [heads], differentiable. With ``absolute``, the
    distance is -abs(key position - query position), for attention without a causal mask."""

    def __init__(self, slopes: Tensor, absolute: bool = False):
        super().__init__(slopes=slopes, slopes_multiply=ABSOLUTE_DISTANCE if absolute else DISTANCE)


class Bias(Score):
    """z + bias. bias broadcasts to [batch, heads, queries, keys] and is differentiable; its gradient is summed over the
    broadcast dimensions. A key with a bias of -inf has weight 0 and counts in n. A masked key does not count in n. With
    ``modulo``, bias has m matrices in place of heads. m divides the number of heads. Head h reads matrix h % m."""

    def __init__(self, bias: Tensor, modulo: bool = False):
        super().__init__(bias=bias, modulo=modulo)


class SlopedBias(Score):
    """z + slopes[head] · bias. slopes: [heads]. bias broadcasts to [batch, heads, queries, keys]; one matrix for all
    heads needs no copy per head. ``modulo`` is that of Bias. Both have no gradient. Limit: you cannot join SlopedBias
    with Alibi, Bias or an additive mask."""

    def __init__(self, bias: Tensor, slopes: Tensor, modulo: bool = False):
        for name, tensor in (("bias", bias), ("slopes", slopes)):
            check_no_derivative(f"SlopedBias: {name}", tensor)
        super().__init__(bias=bias, slopes=slopes, slopes_multiply=BIAS, modulo=modulo)


class ScaleInvariant(Score):
    """a · z + 1 - a² with a² = 1 + 2 ln(1 + t / tau). t is the distance of query and key. tau must be above 0. Limit: you
    cannot join ScaleInvariant with another score or an additive mask."""

    def __init__(self, tau: float = 10.0):
        if not tau > 0:
            raise ValueError(f"ScaleInvariant: tau is {tau}, must be above 0")
        super().__init__(scale_invariant=number("tau", tau))
