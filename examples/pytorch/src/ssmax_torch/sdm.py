"""Replaces the attention of `structured-data-models` by this library.

    >>> import ssmax_torch.sdm
    >>> ssmax_torch.sdm.patch(model)  # any torch module with sdm.nn.Attention in it

Key lengths become `KeyLengths`; other masks remain a matrix. The model scales its queries itself, before the call.
"""

from __future__ import annotations

import torch
from sdm.nn import SDPA
from torch import Tensor, nn

from . import attention
from .mask import KeyLengths, MatrixMask


def patch(model: nn.Module) -> nn.Module:
    """Replaces every attention of `model`, in place, by this library. Returns the model."""
    if not any(isinstance(module, SDPA) for module in model.modules()):
        raise ValueError(f"model is a {type(model).__name__} and has no attention of structured-data-models")
    for module in model.modules():
        if type(module) is SDPA:
            module.__class__ = Attention
    return model


class Attention(SDPA):
    """The attention of structured-data-models by this library, with the same members and arguments."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seqused_key_value: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        batches = [x.shape[:-3] for x in (query, key, value)]
        both = seqused_key_value is not None and attn_mask is not None
        if both or not all(x.numel() for x in (query, key, value)):  # an error, or an empty result
            return super().forward(query, key, value, seqused_key_value, attn_mask)
        keys, mask = key.shape[-3], None
        if seqused_key_value is not None:
            batches.append(seqused_key_value.shape)
            keys = seqused_key_value.unsqueeze(-1)
        elif attn_mask is not None:
            batches.append(attn_mask.shape[:-2])
            keys = attn_mask.sum(dim=-1) if attn_mask.shape[-1] > 1 else keys
        batch = torch.broadcast_shapes(*batches)
        if self.query_scaling is not None:
            query = self.query_scaling(query, key_len=keys)
        if seqused_key_value is not None:
            mask = KeyLengths(seqused_key_value.expand(batch).reshape(-1))
        elif attn_mask is not None:
            mask = MatrixMask(attn_mask.expand(*batch, *attn_mask.shape[-2:]).reshape(-1, 1, *attn_mask.shape[-2:]))
        heads = (x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:]).transpose(1, 2) for x in (query, key, value))
        out = attention(*heads, mask=mask, scale=self.scale).transpose(1, 2)
        return out.reshape(*batch, *out.shape[-3:])
