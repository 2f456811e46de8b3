"""Replaces the attention of TabPFN by this library.

    >>> import ssmax_torch.tabpfn
    >>> ssmax_torch.tabpfn.register()  # every model of tabpfn, on the CPU
    >>> ssmax_torch.tabpfn.unregister()

TabPFN scales its queries before the call. Attention is softmax over all keys, with and without a KV cache.
"""

from __future__ import annotations

import torch
from tabpfn.architectures.shared.attention_backends import (
    AttentionSpec,
    register_attention_backend,
    unregister_attention_backend,
)
from torch import Tensor

from . import attention

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _Backend:
    name = "ssmax"

    def is_preferred(self, spec: AttentionSpec) -> bool:
        return spec.device.type == "cpu" and spec.dtype in _TYPES

    def run(self, query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        """Returns out [batch, queries, heads, width], with the memory layout of query."""
        return attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


_BACKEND = _Backend()


def register() -> None:
    """Makes tabpfn call this library for every attention on the CPU."""
    register_attention_backend(_BACKEND)


def unregister() -> None:
    """Makes tabpfn call its own attention again."""
    unregister_attention_backend(_BACKEND.name)
