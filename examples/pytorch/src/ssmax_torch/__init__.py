"""Attention with Scalable-Softmax (SSMax, arXiv:2501.19399) for PyTorch on CPUs: fused and differentiable.

>>> import torch, ssmax_torch
>>> q, k, v = (torch.randn(1, 8, 512, 64, requires_grad=True) for _ in range(3))
>>> s = torch.full((8,), 0.43, requires_grad=True)
>>> out = ssmax_torch.attention(q, k, v, scaling=ssmax_torch.scaling.SSMax(s), mask=ssmax_torch.mask.Causal())
>>> out.sum().backward()  # gradients of q, k, v and s

Tensors are [batch, heads, sequence, width], as in PyTorch's own ``scaled_dot_product_attention``.
"""

from importlib.metadata import version as _version

from . import _vmap as _vmap
from . import mask, scaling, score
from ._attention import RowStatistics, attention, scaled_dot_product_attention
from ._cache import KVCache
from ._cross_entropy import cross_entropy
from ._gap_counts import GapCounts, count_within_gaps
from ._merge import merge
from ._modules import SSMax
from ._multihead import MultiheadAttention
from ._rope import Rope, RopeScaling, yarn_mscale
from ._rows import entmax15, log_softmax, softmax, sparsemax
from ._varlen import attention_varlen

__version__ = _version("ssmax-torch")
__all__ = [
    "GapCounts",
    "KVCache",
    "MultiheadAttention",
    "Rope",
    "RopeScaling",
    "RowStatistics",
    "SSMax",
    "attention",
    "attention_varlen",
    "count_within_gaps",
    "cross_entropy",
    "entmax15",
    "log_softmax",
    "mask",
    "merge",
    "scaled_dot_product_attention",
    "scaling",
    "score",
    "softmax",
    "sparsemax",
    "yarn_mscale",
]
