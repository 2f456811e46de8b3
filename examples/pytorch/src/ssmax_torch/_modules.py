"""Modules that contain the parameters of SSMax."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import scaling
from ._attention import attention


class SSMax(nn.Module):
    """Attention with SSMax, c = s · ln n + b. The parameters are s and, with ``bias``, b: [heads] each.

    ``forward(query, key, value, **options)`` calls ``attention`` with this scaling. s starts at ``start``, b at 0. The
    paper's trained models have a mean s near 0.43. ``scaling()`` is the scaling of other calls, such as KVCache.decode.
    """

    def __init__(self, heads: int, bias: bool = False, start: float = 0.43):
        super().__init__()
        self.start = float(start)
        self.s = nn.Parameter(torch.full((heads,), self.start))
        self.b = nn.Parameter(torch.zeros(heads)) if bias else None

    def scaling(self) -> scaling.SSMax:
        """Returns the scaling with the current parameters."""
        return scaling.SSMax(self.s, 0.0 if self.b is None else self.b)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options):
        return attention(query, key, value, scaling=self.scaling(), **options)

    def extra_repr(self) -> str:
        return f"heads={self.s.shape[0]}, bias={self.b is not None}"
