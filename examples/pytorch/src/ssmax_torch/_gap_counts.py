"""Counts of keys whose logits are close to the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._arguments import arguments, check_tensors
from ._operators import call_count_within_gaps
from ._rope import Rope
from .mask import Mask
from .score import Score


class GapCounts(NamedTuple):
    """Counts of keys within gaps of each query's largest logit."""

    largest: Tensor
    """max z, [batch, heads, queries]; -inf if no key is visible."""
    counts: Tensor
    """[gaps, batch, heads, queries]: the number of visible keys with z >= largest - gap. 0 if no key is visible."""


def count_within_gaps(
    query: Tensor,
    key: Tensor,
    gaps: Sequence[float],
    *,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    rope: Rope | None = None,
    scale: float | None = None,
) -> GapCounts:
    """Counts the visible keys within gaps of each query's largest logit (arXiv:2605.12697). z is a logit after the
    score and before the multiplier c. Other arguments are those of ``attention``.

    Args:
        gaps: numbers of at least 0. A gap of 0 counts the keys whose logits equal the largest.

    The results are float32, or float64 for float64, and gaps are rounded to this type. Float32 rounds counts of at
    least 2^23. The results have no gradient. If a visible logit is NaN or above the range, the query's results are NaN.
    The logits are computed once for the largest and once per gap.
    """
    check_tensors(query, key, key, "count_within_gaps")
    gaps = [float(gap) for gap in gaps]
    for i, gap in enumerate(gaps):
        if not gap >= 0:
            raise ValueError(f"ssmax_torch.count_within_gaps: gaps[{i}] is {gap}, must be at least 0")
    with torch.no_grad():
        given = arguments(query, None, mask, score, None, False, rope, scale)
        return GapCounts(*call_count_within_gaps(query, key, gaps, *given))
